#include "probe.h"

#include <stdexcept>

#include "library.h"

namespace pymesh3d {
namespace {

// NCCL 2.9 and later: major * 10000 + minor * 100 + patch; before that: major * 1000 + minor * 100 + patch.
std::vector<int> nccl_version(int code) {
  const int major = code < 10000 ? 1000 : 10000;
  return {code / major, code % major / 100, code % 100};
}

// CUDA: major * 1000 + minor * 10.
std::vector<int> cuda_version(int code) { return {code / 1000, code % 1000 / 10}; }

// Both libraries hand out their version as `int f(int*)`, where 0 is success.
struct Known {
  const char* name;
  const char* soname;
  const char* symbol;
  std::vector<int> (*decode)(int code);
};

constexpr Known known[] = {
    {"nccl", "libnccl.so.2", "ncclGetVersion", nccl_version},
    {"cuda", "libcuda.so.1", "cuDriverGetVersion", cuda_version},
};

const Known& look_up(const std::string& name) {
  for (const Known& library : known)
    if (name == library.name) return library;
  throw std::invalid_argument("unknown library \"" + name + "\": it must be \"nccl\" or \"cuda\"");
}

}  // namespace

Probe probe(const std::string& name, const std::string& path) {
  const Known& wanted = look_up(name);
  Probe answer;
  try {
    const Library library(path.empty() ? wanted.soname : path);
    auto* get_version = library.function<int(int*)>(wanted.symbol);
    answer.path = library.path_of(wanted.symbol);
    answer.was_loaded = library.was_loaded();
    int code = 0;
    if (const int status = get_version(&code); status == 0)
      answer.version = wanted.decode(code);
    else
      answer.error = std::string(wanted.symbol) + " failed with status " + std::to_string(status);
  } catch (const LibraryError& missing) {
    answer.error = missing.what();
  }
  return answer;
}

}  // namespace pymesh3d
