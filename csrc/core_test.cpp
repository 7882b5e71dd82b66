// Tests of the core without Python, built with the sanitizers. Its argument is a library that stands for NCCL 2.28.9
// (tests/test_native.py builds both). Prints the first expectation that does not hold.
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "expect.h"
#include "library.h"
#include "probe.h"

using pymesh3d::Library;
using pymesh3d::LibraryError;
using pymesh3d::Probe;

namespace {

void missing_library_says_so() {
  const std::string text = text_of<LibraryError>([] { Library("libof_nobody.so.7"); });
  EXPECT(text.find("libof_nobody.so.7") != std::string::npos);
}

void library_is_found_loaded_only_while_somebody_holds_it(const std::string& path) {
  Library first(path);
  EXPECT(!first.was_loaded());
  {
    Library second(path);
    EXPECT(second.was_loaded());
  }
  Library moved = std::move(first);
  EXPECT(Library(path).was_loaded());
  EXPECT(moved.path_of("ncclGetVersion") == path);
  EXPECT(!text_of<LibraryError>([&] { moved.function<void()>("no_such_function"); }).empty());
}

void probe_reads_the_version_and_closes_the_library(const std::string& path) {
  const Probe found = pymesh3d::probe("nccl", path);
  EXPECT(found.error.empty());
  EXPECT(found.path == path);
  EXPECT((found.version == std::vector<int>{2, 28, 9}));
  EXPECT(!found.was_loaded);
  EXPECT(!Library(path).was_loaded());
}

void probe_explains_what_is_wrong(const std::string& path) {
  const Probe without_symbol = pymesh3d::probe("cuda", path);
  EXPECT(without_symbol.error.find("cuDriverGetVersion") != std::string::npos);
  EXPECT(without_symbol.version.empty());
  EXPECT(!text_of<std::invalid_argument>([] { pymesh3d::probe("nvml"); }).empty());
}

}  // namespace

int main(int count, char** arguments) {
  EXPECT(count == 2);
  const std::string path = arguments[1];
  missing_library_says_so();
  library_is_found_loaded_only_while_somebody_holds_it(path);
  probe_reads_the_version_and_closes_the_library(path);
  probe_explains_what_is_wrong(path);
}
