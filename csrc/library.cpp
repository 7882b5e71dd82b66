#include "library.h"

#include <dlfcn.h>

namespace pymesh3d {
namespace {

[[noreturn]] void fail() {
  const char* text = dlerror();
  throw LibraryError(text ? text : "the dynamic loader gave no reason");
}

}  // namespace

void Library::Close::operator()(void* handle) const noexcept { dlclose(handle); }

Library::Library(const std::string& name) {
  constexpr int mode = RTLD_NOW | RTLD_LOCAL;
  handle_.reset(dlopen(name.c_str(), mode | RTLD_NOLOAD));
  was_loaded_ = handle_ != nullptr;
  if (!handle_) handle_.reset(dlopen(name.c_str(), mode));
  if (!handle_) fail();
}

void* Library::find(const char* symbol) const {
  void* address = dlsym(handle_.get(), symbol);
  if (!address) fail();
  return address;
}

std::string Library::path_of(const char* symbol) const {
  Dl_info info{};
  return dladdr(find(symbol), &info) && info.dli_fname ? info.dli_fname : "";
}

}  // namespace pymesh3d
