// What stands for libcuda.so.1 and libnccl.so.2 where there is no GPU, in one library. Streams are threads, communicators are sockets,
// device memory is the host's. It really moves the bytes, between processes or threads, and ends the program when it is called wrongly.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>

namespace stub {

using Status = int;  // CUresult or ncclResult_t
using Held = std::unique_lock<std::mutex>;

constexpr Status success = 0;

// What a CUfunction points to: a kernel is called when it is started, on the thread that starts it, before that call returns.
struct Function {
  const std::size_t* sizes;  // bytes of each parameter; 0 after the last
  void (*started)(const Function*, void* stream, unsigned programs, unsigned threads, unsigned shared_bytes, void** parameters);
};

// What a CUtensorMap of a matrix holds: what it was encoded from.
struct Encoded {
  std::uint64_t count;  // of encodings in this process, with this one
  void* address;
  std::uint64_t sizes[2], stride;
  std::uint32_t block[2], steps[2];
  int type, interleave, swizzle, promotion, fill;
};

// One lock for all; `changed` tells of every change that somebody may be waiting for. Never destroyed: threads outlive main().
extern std::mutex& lock;
extern std::condition_variable& changed;

[[noreturn]] void die(const std::string& text);

// Whether a test wants this call to fail. Does not return as long as it wants it to hang.
bool told_to_fail(const std::string& function);

bool has_context();  // the thread that asks
void enqueue(void* stream, std::function<void()> work);

// With the lock held:
void* new_handle();  // no handle is used twice, so that a late call is noticed
std::size_t streams_and_events();
void remember(const std::string& text);  // what NCCL says last
bool nccl_runs_on(void* stream);         // and nobody has aborted it

}  // namespace stub
