// The half that stands for libcuda.so.1, and what both share.
#include "stub.h"

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <thread>
#include <utility>

using namespace stub;
using std::chrono::milliseconds;

namespace {

constexpr Status invalid_value = 1, invalid_context = 201, not_found = 500, not_ready = 600, launch_failed = 719;

struct Stream {
  std::deque<std::function<void()>> work;
  std::uint64_t enqueued = 0, done = 0;
  bool destroyed = false;  // its thread ends after the work that is left
};

// What an event stands for: a stream, and how much of its work must be done.
struct Position {
  std::shared_ptr<Stream> stream;
  std::uint64_t count = 0;
  bool passed() const { return !stream || stream->done >= count; }
};

struct World {
  std::map<void*, std::shared_ptr<Stream>> streams;
  std::map<void*, Position> events;
  std::map<void*, Position> host_memory;  // with the last write to each; what is not given back ends with the process
  std::uintptr_t last_handle = 0x1000;
  std::uint64_t encodings = 0;
  std::map<std::string, milliseconds> hanging;
  std::map<std::string, int> failing;
};

World& world = *new World;  // never destroyed, as is the lock

thread_local void* context = nullptr;

void run_stream(const std::shared_ptr<Stream>& stream) {
  Held held(lock);
  for (;;) {
    changed.wait(held, [&] { return !stream->work.empty() || stream->destroyed; });
    if (stream->work.empty()) return;
    const auto work = std::move(stream->work.front());
    stream->work.pop_front();
    held.unlock();
    work();
    held.lock();
    ++stream->done;
    changed.notify_all();
  }
}

std::shared_ptr<Stream> start_stream(void* handle) {
  const auto stream = world.streams[handle] = std::make_shared<Stream>();
  std::thread(run_stream, stream).detach();
  return stream;
}

std::shared_ptr<Stream> find_stream(void* handle) {
  const auto found = world.streams.find(handle);
  if (found != world.streams.end()) return found->second;
  if (handle) die("a stream that does not exist, or no longer");
  return start_stream(nullptr);  // the default one
}

Position& find_event(void* handle) {
  const auto found = world.events.find(handle);
  if (found == world.events.end()) die("an event that does not exist, or no longer");
  return found->second;
}

Position& find_host_memory(void* memory) {
  const auto found = world.host_memory.find(memory);
  if (found == world.host_memory.end()) die("host memory that does not exist, or no longer");
  return found->second;
}

}  // namespace

// What both share.

namespace stub {

std::mutex& lock = *new std::mutex;
std::condition_variable& changed = *new std::condition_variable;

void die(const std::string& text) {
  std::fprintf(stderr, "called wrongly: %s\n", text.c_str());
  std::abort();
}

bool told_to_fail(const std::string& function) {
  Held held(lock);
  if (const auto hanging = world.hanging.extract(function)) {
    held.unlock();
    std::this_thread::sleep_for(hanging.mapped());
    held.lock();
  }
  if (world.failing[function] == 0) return false;
  --world.failing[function];
  remember(function + " was told to fail");
  return true;
}

void* new_handle() { return reinterpret_cast<void*>(++world.last_handle); }

bool has_context() { return context; }

void enqueue(void* handle, std::function<void()> work) {
  const Held held(lock);
  const auto stream = find_stream(handle);
  stream->work.push_back(std::move(work));
  ++stream->enqueued;
  changed.notify_all();
}

std::size_t streams_and_events() { return world.streams.size() - world.streams.count(nullptr) + world.events.size(); }

}  // namespace stub

// The driver.

namespace {

Position now_on(void* stream) {
  const auto found = find_stream(stream);
  return {found, found->enqueued};
}

void wait_for(Held& held, const Position& position) {
  changed.wait(held, [&] { return position.passed(); });
}

Status error_string(Status status, const char** text) {
  *text = status == launch_failed ? "unspecified launch failure" : status == invalid_context ? "invalid device context" : nullptr;
  return success;
}

Status get_context(void** current) { return *current = context, success; }

Status set_context(void* current) {
  if (told_to_fail("cuCtxSetCurrent")) return launch_failed;
  return context = current, success;
}

Status priority_range(int* least, int* greatest) { return *least = 0, *greatest = -5, success; }

Status stream_create(void** stream, unsigned flags, int priority) {
  if (told_to_fail("cuStreamCreateWithPriority")) return launch_failed;
  if (!context) return invalid_context;
  if (priority != -5 || flags != 1) die("a stream that is not of the highest priority, or waits for the default one");
  const Held held(lock);
  start_stream(*stream = new_handle());
  return success;
}

Status stream_destroy(void* stream) {
  const Held held(lock);
  if (nccl_runs_on(stream)) die("a stream is destroyed while NCCL runs on it");
  find_stream(stream)->destroyed = true;
  world.streams.erase(stream);
  changed.notify_all();
  return success;
}

Status stream_wait_event(void* stream, void* event, unsigned flags) {
  if (flags != 0) die("a wait with flags");
  if (told_to_fail("cuStreamWaitEvent")) return launch_failed;
  if (!context) return invalid_context;
  Held held(lock);
  const Position position = find_event(event);
  held.unlock();
  enqueue(stream, [position] {
    Held held(lock);
    wait_for(held, position);
  });
  return success;
}

Status stream_synchronize(void* stream) {
  Held held(lock);
  wait_for(held, now_on(stream));
  return success;
}

Status launch_host_function(void* stream, void (*function)(void*), void* argument) {
  enqueue(stream, [=] { function(argument); });
  return success;
}

Status event_create(void** event, unsigned flags) {
  if (flags != 2) die("an event that takes the time, which is slow");
  if (told_to_fail("cuEventCreate")) return launch_failed;
  if (!context) return invalid_context;
  const Held held(lock);
  world.events[*event = new_handle()] = {};
  return success;
}

Status event_destroy(void* event) {
  const Held held(lock);
  find_event(event);
  world.events.erase(event);
  return success;
}

Status event_record(void* event, void* stream) {
  if (told_to_fail("cuEventRecord")) return launch_failed;
  if (!context) return invalid_context;
  const Held held(lock);
  find_event(event) = now_on(stream);
  return success;
}

Status event_query(void* event) {
  if (told_to_fail("cuEventQuery")) return launch_failed;
  const Held held(lock);
  return find_event(event).passed() ? success : not_ready;
}

Status host_alloc(void** memory, std::size_t bytes, unsigned flags) {
  if (flags != 3) die("host memory that not every GPU can write");
  const Held held(lock);
  world.host_memory[*memory = std::malloc(bytes)] = {};
  return success;
}

Status host_free(void* memory) {
  if (told_to_fail("cuMemFreeHost")) return launch_failed;
  Held held(lock);
  wait_for(held, Position(find_host_memory(memory)));
  world.host_memory.erase(memory);
  std::free(memory);
  return success;
}

Status stream_write(void* stream, std::uint64_t address, std::uint64_t value, unsigned flags) {
  if (flags != 0) die("a write with flags: it must come after all that the stream did before");
  if (told_to_fail("cuStreamWriteValue64")) return launch_failed;
  auto* const memory = reinterpret_cast<std::atomic<std::uint64_t>*>(address);
  enqueue(stream, [=] {
    told_to_fail("a write");  // it cannot fail any more, but be late
    *memory = value;
  });
  const Held held(lock);
  find_host_memory(memory) = now_on(stream);
  return success;
}

Status stream_write_small(void* stream, std::uint64_t address, std::uint32_t value, unsigned flags) {
  if (flags != 0) die("a write with flags: it must come after all that the stream did before");
  if (told_to_fail("cuStreamWriteValue32")) return launch_failed;
  if (!context) return invalid_context;
  enqueue(stream, [=] { *reinterpret_cast<std::atomic<std::uint32_t>*>(address) = value; });
  return success;
}

Status stream_wait_small(void* stream, std::uint64_t address, std::uint32_t value, unsigned flags) {
  if (flags != 0) die("a wait for another order than that of numbers that count on");
  if (told_to_fail("cuStreamWaitValue32")) return launch_failed;
  if (!context) return invalid_context;
  enqueue(stream, [=] {
    const auto* const number = reinterpret_cast<const std::atomic<std::uint32_t>*>(address);
    while (static_cast<std::int32_t>(*number - value) < 0) std::this_thread::sleep_for(std::chrono::microseconds(50));
  });
  return success;
}

Status memory_copy(std::uint64_t to, std::uint64_t from, std::size_t bytes, void* stream) {
  if (told_to_fail("cuMemcpyAsync")) return launch_failed;
  if (!context) return invalid_context;
  enqueue(stream, [=] {
    told_to_fail("a copy");  // it cannot fail any more, but be late
    std::memcpy(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes);
  });
  return success;
}

Status parameter_info(const Function* function, std::size_t index, std::size_t* offset, std::size_t* size) {
  if (told_to_fail("cuFuncGetParamInfo")) return launch_failed;
  *offset = 0;
  for (std::size_t before = 0; function->sizes[before]; *offset += function->sizes[before++])
    if (before == index) return *size = function->sizes[index], success;
  return invalid_value;
}

Status encode_map(void* map, int type, std::uint32_t rank, void* address, const std::uint64_t* sizes, const std::uint64_t* strides,
                  const std::uint32_t* block, const std::uint32_t* steps, int interleave, int swizzle, int promotion, int fill) {
  if (reinterpret_cast<std::uintptr_t>(map) % 64 != 0 || rank != 2) die("a map that is not aligned, or not of a matrix");
  if (told_to_fail("cuTensorMapEncodeTiled")) return launch_failed;
  const Held held(lock);
  *static_cast<Encoded*>(map) = {++world.encodings,    address, {sizes[0], sizes[1]}, strides[0], {block[0], block[1]},
                                 {steps[0], steps[1]}, type,    interleave,           swizzle,    promotion, fill};
  return success;
}

Status launch_kernel(const Function* function, unsigned programs, unsigned grid_y, unsigned grid_z, unsigned threads, unsigned block_y,
                     unsigned block_z, unsigned shared_bytes, void* stream, void** parameters, void** extra) {
  if (grid_y != 1 || grid_z != 1 || block_y != 1 || block_z != 1 || extra) die("a kernel of more than one dimension, or with options");
  if (told_to_fail("cuLaunchKernel")) return launch_failed;
  if (!context) return invalid_context;
  function->started(function, stream, programs, threads, shared_bytes, parameters);
  return success;
}

}  // namespace

extern "C" {

// What tests ask for, in this process: that the next call of a function hangs, whether that is still to come, that the next few of it fail;
// and how many pieces of host memory there are.
void stub_hang(const char* function, int how_long) {
  const Held held(lock);
  world.hanging[function] = milliseconds(how_long);
}

int stub_is_to_hang(const char* function) {
  const Held held(lock);
  return static_cast<int>(world.hanging.count(function));
}

void stub_fail(const char* function, int times) {
  const Held held(lock);
  world.failing[function] = times;
}

int stub_host_memory() {
  const Held held(lock);
  return static_cast<int>(world.host_memory.size());
}

Status cuDriverGetVersion(int* version) { return *version = 12080, success; }

Status cuGetProcAddress(const char* name, void** function, int version, std::uint64_t) {
  const auto address = [](auto* function) { return reinterpret_cast<void*>(function); };
  static const std::map<std::string, void*> functions{
      {"cuGetErrorString", address(error_string)},
      {"cuCtxGetCurrent", address(get_context)},
      {"cuCtxSetCurrent", address(set_context)},
      {"cuCtxGetStreamPriorityRange", address(priority_range)},
      {"cuStreamCreateWithPriority", address(stream_create)},
      {"cuStreamDestroy", address(stream_destroy)},
      {"cuStreamWaitEvent", address(stream_wait_event)},
      {"cuStreamSynchronize", address(stream_synchronize)},
      {"cuLaunchHostFunc", address(launch_host_function)},
      {"cuMemHostAlloc", address(host_alloc)},
      {"cuMemFreeHost", address(host_free)},
      {"cuStreamWriteValue64", address(stream_write)},
      {"cuStreamWriteValue32", address(stream_write_small)},
      {"cuStreamWaitValue32", address(stream_wait_small)},
      {"cuMemcpyAsync", address(memory_copy)},
      {"cuEventCreate", address(event_create)},
      {"cuEventDestroy", address(event_destroy)},
      {"cuEventRecord", address(event_record)},
      {"cuEventQuery", address(event_query)},
      {"cuFuncGetParamInfo", address(parameter_info)},
      {"cuTensorMapEncodeTiled", address(encode_map)},
      {"cuLaunchKernel", address(launch_kernel)},
  };
  const int since = std::string(name) == "cuFuncGetParamInfo" ? 12040 : 12000;  // some were others before
  const auto found = functions.find(name);
  *function = found == functions.end() || version < since ? nullptr : found->second;
  return *function ? success : not_found;
}

}  // extern "C"
