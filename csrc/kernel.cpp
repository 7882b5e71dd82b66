#include "kernel.h"

#include <algorithm>
#include <limits>
#include <string>
#include <utility>

namespace pymesh3d {
namespace {

constexpr int bfloat16 = 9;         // CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
constexpr int swizzle_128 = 3;      // CU_TENSOR_MAP_SWIZZLE_128B
constexpr int promotion_128 = 2;    // CU_TENSOR_MAP_L2_PROMOTION_L2_128B
constexpr std::size_t scratch = 2;  // pointers that triton adds

using Sizes = std::vector<std::size_t>;

// The bytes of each parameter of a function.
Sizes parameters_of(const Gpu& gpu, void* function) {
  auto* ask = gpu.driver_function<Gpu::Status(void*, std::size_t, std::size_t*, std::size_t*)>("cuFuncGetParamInfo", 12040);
  Sizes sizes;
  std::size_t offset = 0, size = 0;
  while (ask(function, sizes.size(), &offset, &size) == 0) sizes.push_back(size);
  return sizes;
}

// For each parameter that these arguments are passed in, the bytes that it may have.
std::vector<Sizes> wanted_by(const std::vector<Argument>& arguments, std::size_t map_bytes) {
  std::vector<Sizes> wanted;
  for (const Argument& argument : arguments) {
    if (std::holds_alternative<Matrix>(argument))
      wanted.insert(wanted.end(), {{map_bytes}, {4}, {4}, {8}, {8}});  // then the shape and the strides
    else
      wanted.push_back({4, 8});
  }
  wanted.insert(wanted.end(), scratch, {8});
  return wanted;
}

bool fits(std::int64_t number, std::size_t bytes) {
  using Small = std::numeric_limits<std::int32_t>;
  return bytes == 8 || (number >= Small::min() && number <= Small::max());
}

}  // namespace

Kernel::Kernel(std::shared_ptr<const Gpu> gpu, std::uintptr_t function, unsigned programs, unsigned threads, unsigned shared_bytes,
               const std::vector<Argument>& arguments)
    : gpu_(std::move(gpu)),
      launch_(gpu_->driver_function<Launch>("cuLaunchKernel")),
      encode_(gpu_->driver_function<Encode>("cuTensorMapEncodeTiled")),
      context_(gpu_->context()),
      function_(reinterpret_cast<void*>(function)),
      programs_(programs),
      threads_(threads),
      shared_bytes_(shared_bytes) {
  const std::vector<Sizes> wanted = wanted_by(arguments, sizeof(Map));
  const Sizes sizes = parameters_of(*gpu_, function_);
  if (sizes.size() != wanted.size())
    throw GpuError("the kernel has " + std::to_string(sizes.size()) + " parameters, not " + std::to_string(wanted.size()));
  for (std::size_t index = 0; index < sizes.size(); ++index)
    if (std::find(wanted[index].begin(), wanted[index].end(), sizes[index]) == wanted[index].end())
      throw GpuError("parameter " + std::to_string(index) + " of the kernel has " + std::to_string(sizes[index]) + " bytes");
  maps_.reserve(arguments.size());
  numbers_.reserve(sizes.size());
  const auto add = [&](std::int64_t number) {
    if (!fits(number, sizes[parameters_.size()]))
      throw GpuError(std::to_string(number) + " is too large for parameter " + std::to_string(parameters_.size()) + " of the kernel");
    parameters_.push_back(&numbers_.emplace_back(number));
  };
  for (const Argument& argument : arguments) {
    if (const auto* number = std::get_if<std::int64_t>(&argument)) {
      add(*number);
      continue;
    }
    const Matrix& matrix = std::get<Matrix>(argument);
    Map* map = &maps_.emplace_back();
    if (matrix.address)
      encode(map, matrix);
    else
      open_.push_back({matrix, map});
    parameters_.push_back(map);
    add(static_cast<std::int64_t>(matrix.rows));
    add(static_cast<std::int64_t>(matrix.cols));
    add(static_cast<std::int64_t>(matrix.stride));
    add(1);
  }
  for (std::size_t pointer = 0; pointer < scratch; ++pointer) add(0);
}

void Kernel::encode(Map* map, const Matrix& matrix) const {
  const std::uint64_t sizes[] = {matrix.cols, matrix.rows}, strides[] = {matrix.stride * 2};
  const std::uint32_t block[] = {matrix.block_cols, matrix.block_rows}, steps[] = {1, 1};
  auto* const address = reinterpret_cast<void*>(matrix.address);
  gpu_->check(encode_(map, bfloat16, 2, address, sizes, strides, block, steps, 0, swizzle_128, promotion_128, 0), "cuTensorMapEncodeTiled");
}

void Kernel::start(Stream stream, const std::vector<std::uintptr_t>& addresses) {
  if (addresses.size() != open_.size())
    throw GpuError("the kernel takes " + std::to_string(open_.size()) + " addresses, not " + std::to_string(addresses.size()));
  if (std::find(addresses.begin(), addresses.end(), 0) != addresses.end()) throw GpuError("a matrix of the kernel has no address");
  gpu_->use_if_none(context_);
  const std::lock_guard<std::mutex> locked(mutex_);
  for (std::size_t index = 0; index < open_.size(); ++index) {
    Open& open = open_[index];
    if (open.matrix.address == addresses[index]) continue;
    Matrix matrix = open.matrix;
    matrix.address = addresses[index];
    open.matrix.address = 0;  // in case that this fails
    encode(open.map, matrix);
    open.matrix = matrix;
  }
  auto* const on = reinterpret_cast<void*>(stream);
  gpu_->check(launch_(function_, programs_, 1, 1, threads_, 1, 1, shared_bytes_, on, parameters_.data(), nullptr), "cuLaunchKernel");
}

}  // namespace pymesh3d
