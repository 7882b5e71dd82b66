// Kernels that triton has compiled, started by one call of the driver: its own way, in Python, takes longer than a small product.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <variant>
#include <vector>

#include "gpu.h"

namespace pymesh3d {

// A matrix of bfloat16 of which a kernel copies blocks by the tensor memory accelerator: [rows, cols], its rows `stride` elements apart.
struct Matrix {
  std::uintptr_t address;  // 0: it comes with each start
  std::uint64_t rows, cols, stride;
  std::uint32_t block_rows, block_cols;  // at most 64 columns: 128 bytes, over which shared memory is swizzled
};

using Argument = std::variant<std::int64_t, Matrix>;  // a number or an address, or a matrix

// A kernel and its arguments.
class Kernel {
 public:
  // `function` is a CUfunction. Throws GpuError where it does not take what these `arguments` are, and two null pointers that triton adds;
  // LibraryError where the driver is older than CUDA 12.4, and cannot tell.
  Kernel(std::shared_ptr<const Gpu> gpu, std::uintptr_t function, unsigned programs, unsigned threads, unsigned shared_bytes,
         const std::vector<Argument>& arguments);
  Kernel(const Kernel&) = delete;
  Kernel& operator=(const Kernel&) = delete;

  // On the current context, or, on a thread that has none, on the one that was current when this was made. `addresses`: of the matrices
  // that have none, in order. Throws GpuError.
  void start(Stream stream, const std::vector<std::uintptr_t>& addresses);

 private:
  using Launch = Gpu::Status(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**, void**);
  using Encode = Gpu::Status(void*, int, std::uint32_t, void*, const std::uint64_t*, const std::uint64_t*, const std::uint32_t*,
                             const std::uint32_t*, int, int, int, int);
  struct alignas(64) Map {  // a CUtensorMap
    unsigned char bytes[128];
  };
  struct Open {  // a matrix whose address comes with each start
    Matrix matrix;  // as it was last encoded
    Map* map;
  };
  void encode(Map* map, const Matrix& matrix) const;

  std::shared_ptr<const Gpu> gpu_;
  Launch* launch_;
  Encode* encode_;
  Context context_;
  void* function_;
  unsigned programs_, threads_, shared_bytes_;
  std::mutex mutex_;       // of what follows
  std::vector<Map> maps_;  // neither this nor the next may grow later: the parameters point into them
  std::vector<std::int64_t> numbers_;
  std::vector<Open> open_;
  std::vector<void*> parameters_;
};

}  // namespace pymesh3d
