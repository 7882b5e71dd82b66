// A shared library opened while the program runs. Neither its headers nor its presence is needed to build or import us.
#pragma once

#include <memory>
#include <stdexcept>
#include <string>

namespace pymesh3d {

// The library or a symbol of it is not there; what() is the loader's own text.
struct LibraryError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class Library {
 public:
  // `name` is a soname or a path. A copy that the process already holds is taken before another is loaded: two copies of one
  // communication library in a process would each keep their own state.
  explicit Library(const std::string& name);

  // Whether the process held the library before we asked for it.
  bool was_loaded() const noexcept { return was_loaded_; }

  // A function of the library. `Signature` is a function type, such as `int(int*)`; it must be what the library really has.
  template <typename Signature>
  Signature* function(const char* symbol) const {
    return reinterpret_cast<Signature*>(find(symbol));
  }

  // The file that `symbol` really comes from.
  std::string path_of(const char* symbol) const;

 private:
  void* find(const char* symbol) const;

  struct Close {
    void operator()(void* handle) const noexcept;
  };
  std::unique_ptr<void, Close> handle_;
  bool was_loaded_ = false;
};

}  // namespace pymesh3d
