#include "gpu.h"

#include <new>

namespace pymesh3d {
namespace {

constexpr int success = 0, not_ready = 600;  // CUDA_SUCCESS, CUDA_ERROR_NOT_READY
constexpr unsigned non_blocking = 1;         // CU_STREAM_NON_BLOCKING
constexpr unsigned without_timing = 2;       // CU_EVENT_DISABLE_TIMING
constexpr unsigned at_least = 0;             // CU_STREAM_WAIT_VALUE_GEQ, of the difference with sign
constexpr unsigned for_device = 1 | 2;       // CU_MEMHOSTALLOC_PORTABLE, CU_MEMHOSTALLOC_DEVICEMAP

void* pointer(std::uintptr_t handle) { return reinterpret_cast<void*>(handle); }

}  // namespace

void* Gpu::find(const char* name, int interface) const {
  auto* look_up = library_.function<Status(const char*, void**, int, std::uint64_t)>("cuGetProcAddress");
  void* address = nullptr;
  if (look_up(name, &address, interface, 0) != success || !address)
    throw LibraryError(std::string("the CUDA driver has no function ") + name);
  return address;
}

Gpu::Gpu(const std::string& path)
    : library_(path),
      error_string_(driver_function<Status(Status, const char**)>("cuGetErrorString")),
      get_context_(driver_function<Status(void**)>("cuCtxGetCurrent")),
      set_context_(driver_function<Status(void*)>("cuCtxSetCurrent")),
      priority_range_(driver_function<Status(int*, int*)>("cuCtxGetStreamPriorityRange")),
      stream_create_(driver_function<Status(void**, unsigned, int)>("cuStreamCreateWithPriority")),
      stream_destroy_(driver_function<Status(void*)>("cuStreamDestroy")),
      stream_wait_event_(driver_function<Status(void*, void*, unsigned)>("cuStreamWaitEvent")),
      event_create_(driver_function<Status(void**, unsigned)>("cuEventCreate")),
      event_destroy_(driver_function<Status(void*)>("cuEventDestroy")),
      event_record_(driver_function<Status(void*, void*)>("cuEventRecord")),
      event_query_(driver_function<Status(void*)>("cuEventQuery")),
      host_alloc_(driver_function<Status(void**, std::size_t, unsigned)>("cuMemHostAlloc")),
      host_free_(driver_function<Status(void*)>("cuMemFreeHost")),
      stream_write_(driver_function<Status(void*, std::uint64_t, std::uint64_t, unsigned)>("cuStreamWriteValue64")),
      stream_write32_(driver_function<Status(void*, std::uint64_t, std::uint32_t, unsigned)>("cuStreamWriteValue32")),
      stream_wait32_(driver_function<Status(void*, std::uint64_t, std::uint32_t, unsigned)>("cuStreamWaitValue32")),
      memory_copy_(driver_function<Status(std::uint64_t, std::uint64_t, std::size_t, void*)>("cuMemcpyAsync")) {}

void Gpu::check(Status status, const char* call) const {
  if (status == success) return;
  const char* text = nullptr;
  error_string_(status, &text);
  throw GpuError(std::string(call) + " failed: " + (text ? text : "unknown error") + " (" + std::to_string(status) + ")");
}

Context Gpu::context() const {
  Context context = nullptr;
  check(get_context_(&context), "cuCtxGetCurrent");
  return context;
}

void Gpu::use(Context context) const { check(set_context_(context), "cuCtxSetCurrent"); }

void Gpu::use_if_none(Context context) const {
  if (!this->context()) use(context);
}

Stream Gpu::create_stream() const {
  int least = 0, greatest = 0;
  check(priority_range_(&least, &greatest), "cuCtxGetStreamPriorityRange");
  void* stream = nullptr;
  check(stream_create_(&stream, non_blocking, greatest), "cuStreamCreateWithPriority");
  return reinterpret_cast<Stream>(stream);
}

void Gpu::destroy_stream(Stream stream) const noexcept { stream_destroy_(pointer(stream)); }

Event Gpu::create_event() const {
  void* event = nullptr;
  check(event_create_(&event, without_timing), "cuEventCreate");
  return reinterpret_cast<Event>(event);
}

void Gpu::destroy_event(Event event) const noexcept { event_destroy_(pointer(event)); }

void Gpu::record(Event event, Stream stream) const { check(event_record_(pointer(event), pointer(stream)), "cuEventRecord"); }

void Gpu::wait(Stream stream, Event event) const {
  check(stream_wait_event_(pointer(stream), pointer(event), 0), "cuStreamWaitEvent");
}

bool Gpu::finished(Event event) const {
  const Status status = event_query_(pointer(event));
  if (status == not_ready) return false;
  check(status, "cuEventQuery");
  return true;
}

void Gpu::copy(Stream stream, std::uintptr_t to, std::uintptr_t from, std::size_t bytes) const {
  check(memory_copy_(to, from, bytes, pointer(stream)), "cuMemcpyAsync");
}

void Gpu::tell(Stream stream, std::uintptr_t flag, std::uint32_t value) const {
  check(stream_write32_(pointer(stream), flag, value, 0), "cuStreamWriteValue32");
}

void Gpu::wait_until(Stream stream, std::uintptr_t flag, std::uint32_t value) const {
  check(stream_wait32_(pointer(stream), flag, value, at_least), "cuStreamWaitValue32");
}

Gpu::Counter* Gpu::create_counter() const {
  static_assert(sizeof(Counter) == sizeof(std::uint64_t) && Counter::is_always_lock_free);
  void* memory = nullptr;
  check(host_alloc_(&memory, sizeof(Counter), for_device), "cuMemHostAlloc");
  return new (memory) Counter(0);
}

void Gpu::destroy_counter(Counter* counter) const noexcept { host_free_(counter); }

void Gpu::write(Stream stream, Counter* counter, std::uint64_t value) const {
  check(stream_write_(pointer(stream), reinterpret_cast<std::uint64_t>(counter), value, 0), "cuStreamWriteValue64");
}

}  // namespace pymesh3d
