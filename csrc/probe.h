// Which NVIDIA libraries can be opened here, from which file, in which version.
#pragma once

#include <string>
#include <vector>

namespace pymesh3d {

struct Probe {
  std::string path;          // the file that answered; empty if none did
  std::vector<int> version;  // such as {2, 28, 9}; empty if unknown
  bool was_loaded = false;   // the process held it already (torch brings its own NCCL)
  std::string error;         // why there is no answer; empty if there is one
};

// Asks the library `name` ("nccl" or "cuda") for its version. `path` replaces the soname that is looked for by default.
// A missing library is an answer; an unknown name throws std::invalid_argument.
Probe probe(const std::string& name, const std::string& path = "");

}  // namespace pymesh3d
