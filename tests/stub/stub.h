// What stands for libcuda.so.1 and libnccl.so.2 where there is no GPU, in one library. Streams are threads, communicators are sockets,
// device memory is the host's. It really moves the bytes, between processes or threads, and ends the program when it is called wrongly.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <functional>
#include <mutex>
#include <string>

namespace stub {

using Status = int;  // CUresult or ncclResult_t
using Held = std::unique_lock<std::mutex>;

constexpr Status success = 0;

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
