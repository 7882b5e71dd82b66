// Tests of what kernels are started with, without Python and without a GPU. Built with the sanitizers (tests/test_native.py builds and runs
// them). Argument: a library that stands for libcuda and libnccl. Each case runs in a process of its own.
#include "kernel.h"

#include <cstring>
#include <thread>
#include <vector>

#include "../tests/stub/stub.h"
#include "link_test.h"

using namespace pymesh3d;
using stub::Encoded;

namespace {

using Sizes = std::vector<std::size_t>;

// The bytes of parameters.
const Sizes small{4}, large{8}, of_matrix{128, 4, 4, 8, 8}, added_by_triton{8, 8};

struct Start {
  Stream stream;
  unsigned programs, threads, shared_bytes;
  std::vector<std::string> parameters;  // their bytes

  template <typename Value>
  Value parameter(std::size_t index) const {
    EXPECT(index < parameters.size() && parameters[index].size() >= sizeof(Value));
    Value value;
    std::memcpy(&value, parameters[index].data(), sizeof value);
    return value;
  }
  std::uintptr_t address_at(std::size_t index) const { return reinterpret_cast<std::uintptr_t>(parameter<Encoded>(index).address); }
  std::uint64_t count_at(std::size_t index) const { return parameter<Encoded>(index).count; }
};

// A kernel of such parameters, and the two that triton adds, that keeps what it is started with.
struct Recorder : stub::Function {
  Sizes all_sizes;
  mutable std::vector<Start> starts;  // by one thread at a time: a Kernel's starts wait for each other

  template <typename... Parts>
  explicit Recorder(const Parts&... parts) : Function{nullptr, keep} {
    for (const Sizes& part : {parts..., added_by_triton, Sizes{0}}) all_sizes.insert(all_sizes.end(), part.begin(), part.end());
    sizes = all_sizes.data();
  }
  Recorder(const Recorder&) = delete;
  Recorder& operator=(const Recorder&) = delete;

  std::uintptr_t handle() const { return reinterpret_cast<std::uintptr_t>(static_cast<const stub::Function*>(this)); }

  static void keep(const stub::Function* function, void* stream, unsigned programs, unsigned threads, unsigned shared_bytes,
                   void** parameters) {
    std::vector<std::string> bytes;
    for (std::size_t index = 0; function->sizes[index]; ++index)
      bytes.emplace_back(static_cast<const char*>(parameters[index]), function->sizes[index]);
    static_cast<const Recorder*>(function)->starts.push_back({reinterpret_cast<Stream>(stream), programs, threads, shared_bytes, bytes});
  }
};

Kernel kernel_of(const Machine& machine, const Recorder& recorder, const std::vector<Argument>& arguments) {
  return {machine.gpu, recorder.handle(), 132, 384, 200000, arguments};
}

std::string refusal(const Machine& machine, const Recorder& recorder, const std::vector<Argument>& arguments) {
  return text_of<GpuError>([&] { kernel_of(machine, recorder, arguments); });
}

constexpr std::uintptr_t here = 0x1000, there = 0x2000, elsewhere = 0x3000;

Matrix matrix_at(std::uintptr_t address) { return {address, 300, 200, 256, 128, 64}; }

// Numbers.

void numbers_are_passed_in_the_sizes_of_the_parameters() {
  const Machine machine;
  const Computing computing(machine);
  const Recorder recorder(Sizes{4, 8, 4, 8, 4});
  Kernel kernel = kernel_of(machine, recorder, {7, std::int64_t{1} << 40, -3, -(std::int64_t{1} << 40), -(std::int64_t{1} << 31)});
  EXPECT(recorder.starts.empty());
  kernel.start(computing.stream, {});
  EXPECT(recorder.starts.size() == 1);
  const Start& start = recorder.starts[0];
  EXPECT(start.stream == computing.stream && start.programs == 132 && start.threads == 384 && start.shared_bytes == 200000);
  EXPECT(start.parameters.size() == 7);
  EXPECT(start.parameter<std::int32_t>(0) == 7);
  EXPECT(start.parameter<std::int64_t>(1) == std::int64_t{1} << 40);
  EXPECT(start.parameter<std::int32_t>(2) == -3);
  EXPECT(start.parameter<std::int64_t>(3) == -(std::int64_t{1} << 40));
  EXPECT(start.parameter<std::int32_t>(4) == INT32_MIN);
  EXPECT(start.parameter<std::int64_t>(5) == 0 && start.parameter<std::int64_t>(6) == 0);
}

void number_that_is_too_large_is_refused() {
  const Machine machine;
  const Recorder recorder(large, small), with_matrix(of_matrix);
  EXPECT(refusal(machine, recorder, {1, INT32_MAX}).empty());
  EXPECT(refusal(machine, recorder, {1, std::int64_t{1} << 31}) == "2147483648 is too large for parameter 1 of the kernel");
  EXPECT(refusal(machine, recorder, {1, -(std::int64_t{1} << 31) - 1}) == "-2147483649 is too large for parameter 1 of the kernel");
  EXPECT(refusal(machine, with_matrix, {Matrix{0, 1ULL << 32, 8, 8, 1, 8}}) == "4294967296 is too large for parameter 1 of the kernel");
}

// Parameters.

void other_number_of_parameters_is_refused() {
  const Machine machine;
  const Recorder recorder(large, small);
  EXPECT(refusal(machine, recorder, {1}) == "the kernel has 4 parameters, not 3");
  EXPECT(refusal(machine, recorder, {1, 2, 3}) == "the kernel has 4 parameters, not 5");
  EXPECT(refusal(machine, recorder, {matrix_at(here)}) == "the kernel has 4 parameters, not 7");
  machine.fail("cuFuncGetParamInfo", 1);
  EXPECT(refusal(machine, recorder, {1, 2}) == "the kernel has 0 parameters, not 4");
}

void parameter_of_another_size_is_refused() {
  const Machine machine;
  const std::string one = "parameter ", has = " of the kernel has ";
  EXPECT(refusal(machine, Recorder(small, Sizes{2}), {1, 2}) == one + "1" + has + "2 bytes");
  EXPECT(refusal(machine, Recorder(small, Sizes{128}), {1, 2}) == one + "1" + has + "128 bytes");
  for (std::size_t index = 0; index < of_matrix.size(); ++index)
    for (const std::size_t wrong : {2, 4, 8, 64}) {
      if (wrong == of_matrix[index]) continue;
      Sizes sizes = of_matrix;
      sizes[index] = wrong;
      const std::string text = refusal(machine, Recorder(large, sizes), {1, matrix_at(here)});
      EXPECT(text == one + std::to_string(1 + index) + has + std::to_string(wrong) + " bytes");
    }
  Recorder recorder(large);
  recorder.all_sizes[2] = 4;  // of those that triton adds
  EXPECT(refusal(machine, recorder, {1}) == one + "2" + has + "4 bytes");
}

// Matrices.

void matrix_becomes_a_map_its_shape_and_its_strides() {
  const Machine machine;
  const Recorder recorder(small, of_matrix, large);
  kernel_of(machine, recorder, {5, matrix_at(here), 6}).start(0, {});
  kernel_of(machine, recorder, {5, matrix_at(0), 6}).start(0, {here});
  EXPECT(recorder.starts.size() == 2);
  for (const Start& start : recorder.starts) {
    const auto map = start.parameter<Encoded>(1);
    EXPECT(map.address == reinterpret_cast<void*>(here));
    EXPECT(map.sizes[0] == 200 && map.sizes[1] == 300 && map.stride == 512);
    EXPECT(map.block[0] == 64 && map.block[1] == 128 && map.steps[0] == 1 && map.steps[1] == 1);
    EXPECT(map.type == 9 && map.interleave == 0 && map.swizzle == 3 && map.promotion == 2 && map.fill == 0);
    EXPECT(start.parameter<std::int32_t>(0) == 5);
    EXPECT(start.parameter<std::int32_t>(2) == 300 && start.parameter<std::int32_t>(3) == 200);
    EXPECT(start.parameter<std::int64_t>(4) == 256 && start.parameter<std::int64_t>(5) == 1);
    EXPECT(start.parameter<std::int64_t>(6) == 6 && start.parameter<std::int64_t>(7) == 0);
  }
}

void matrices_without_address_get_one_at_every_start() {
  const Machine machine;
  const Recorder recorder(of_matrix, of_matrix, of_matrix);
  Kernel kernel = kernel_of(machine, recorder, {matrix_at(0), matrix_at(elsewhere), matrix_at(0)});
  const auto expect = [&](std::uintptr_t first, std::uintptr_t last, std::uint64_t first_count, std::uint64_t last_count) {
    kernel.start(0, {first, last});
    const Start& start = recorder.starts.back();
    EXPECT(start.address_at(0) == first && start.address_at(5) == elsewhere && start.address_at(10) == last);
    EXPECT(start.count_at(0) == first_count && start.count_at(5) == 1 && start.count_at(10) == last_count);
  };
  expect(here, there, 2, 3);
  expect(here, there, 2, 3);  // the same are not encoded again
  expect(here, here, 2, 4);
  expect(there, here, 5, 4);
  expect(here, there, 6, 7);
}

void other_number_of_addresses_is_refused() {
  const Machine machine;
  const Recorder recorder(of_matrix, of_matrix);
  Kernel kernel = kernel_of(machine, recorder, {matrix_at(0), matrix_at(here)});
  EXPECT(text_of<GpuError>([&] { kernel.start(0, {}); }) == "the kernel takes 1 addresses, not 0");
  EXPECT(text_of<GpuError>([&] { kernel.start(0, {here, there}); }) == "the kernel takes 1 addresses, not 2");
  EXPECT(text_of<GpuError>([&] { kernel.start(0, {0}); }) == "a matrix of the kernel has no address");
  EXPECT(recorder.starts.empty());
}

// What goes wrong.

const std::string lost = " failed: unspecified launch failure (719)";

void encoding_that_fails_is_made_up_for() {
  const Machine machine;
  const Recorder recorder(of_matrix, of_matrix);
  const auto fails = [&](const auto& action) {
    machine.fail("cuTensorMapEncodeTiled", 1);
    EXPECT(text_of<GpuError>(action) == "cuTensorMapEncodeTiled" + lost);
  };
  fails([&] { kernel_of(machine, recorder, {matrix_at(here), matrix_at(there)}); });
  Kernel kernel = kernel_of(machine, recorder, {matrix_at(0), matrix_at(0)});
  fails([&] { kernel.start(0, {here, there}); });
  kernel.start(0, {here, there});
  fails([&] { kernel.start(0, {here, elsewhere}); });
  EXPECT(recorder.starts.size() == 1);
  kernel.start(0, {here, there});  // what the map holds after the failure nobody knows
  const Start& start = recorder.starts.back();
  EXPECT(recorder.starts.size() == 2 && start.address_at(0) == here && start.address_at(5) == there);
  EXPECT(start.count_at(0) == 1 && start.count_at(5) == 3);
}

void start_that_fails_says_why() {
  const Machine machine;
  const Recorder recorder(of_matrix);
  Kernel kernel = kernel_of(machine, recorder, {matrix_at(0)});
  machine.fail("cuLaunchKernel", 1);
  EXPECT(text_of<GpuError>([&] { kernel.start(0, {here}); }) == "cuLaunchKernel" + lost);
  kernel.start(0, {here});
  EXPECT(recorder.starts.size() == 1 && recorder.starts[0].count_at(0) == 1);
}

// Threads.

void starts_wait_for_each_other() {
  const Machine machine;
  const Recorder recorder(of_matrix);
  Kernel kernel = kernel_of(machine, recorder, {matrix_at(0)});
  machine.hang("cuLaunchKernel", 300);
  std::thread other([&] {
    machine.use_context();
    kernel.start(0, {here});
  });
  machine.until_it_hangs("cuLaunchKernel");
  kernel.start(0, {there});
  other.join();
  EXPECT(recorder.starts.size() == 2 && recorder.starts[0].address_at(0) == here && recorder.starts[1].address_at(0) == there);
}

// Each thread has a stream and addresses of its own: stream n goes with addresses 2n and 2n + 1.
void every_start_has_the_addresses_of_its_thread() {
  constexpr Stream threads = 2;
  constexpr int times = 1000;
  const Machine machine;
  const Recorder recorder(of_matrix, of_matrix);
  Kernel kernel = kernel_of(machine, recorder, {matrix_at(0), matrix_at(0)});
  std::vector<std::thread> running;
  for (Stream stream = 1; stream <= threads; ++stream)
    running.emplace_back([&, stream] {
      machine.use_context();
      for (int time = 0; time < times; ++time) kernel.start(stream, {2 * stream, 2 * stream + 1});
    });
  for (std::thread& thread : running) thread.join();
  EXPECT(recorder.starts.size() == threads * times);
  for (const Start& start : recorder.starts)
    EXPECT(start.address_at(0) == 2 * start.stream && start.address_at(5) == 2 * start.stream + 1);
}

void start_on_a_thread_without_a_context_has_that_of_the_first() {
  const Machine machine;
  const Recorder recorder(of_matrix);
  Kernel kernel = kernel_of(machine, recorder, {matrix_at(0)});
  std::thread([&] { kernel.start(0, {here}); }).join();
  EXPECT(recorder.starts.size() == 1 && recorder.starts[0].address_at(0) == here);
}

}  // namespace

int main(int count, char** arguments) {
  EXPECT(count == 2);
  library = arguments[1];
  int failures = 0;
  RUN(numbers_are_passed_in_the_sizes_of_the_parameters);
  RUN(number_that_is_too_large_is_refused);
  RUN(other_number_of_parameters_is_refused);
  RUN(parameter_of_another_size_is_refused);
  RUN(matrix_becomes_a_map_its_shape_and_its_strides);
  RUN(matrices_without_address_get_one_at_every_start);
  RUN(other_number_of_addresses_is_refused);
  RUN(encoding_that_fails_is_made_up_for);
  RUN(start_that_fails_says_why);
  RUN(starts_wait_for_each_other);
  RUN(every_start_has_the_addresses_of_its_thread);
  RUN(start_on_a_thread_without_a_context_has_that_of_the_first);
  return failures;
}
