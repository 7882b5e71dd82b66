// The CUDA driver, opened while the program runs: its streams and events, and what goes wrong with them.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "library.h"

namespace pymesh3d {

// A driver call that failed: what() names the call and gives the driver's own text; or one that was not made, because it would fail.
struct GpuError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

using Stream = std::uintptr_t;  // a CUstream, as Python hands it over
using Event = std::uintptr_t;   // a CUevent

using Context = void*;  // a CUcontext

// A piece of device memory; no bytes mean that there is nothing to do.
struct Piece {
  std::uintptr_t data = 0;
  std::size_t bytes = 0;
};

// All calls act on the context that is current on the calling thread.
class Gpu {
 public:
  explicit Gpu(const std::string& path = "libcuda.so.1");

  using Status = int;  // CUresult

  // A function of the driver, as the CUDA of `interface` (12000 stands for 12.0) knew it. Throws LibraryError.
  template <typename Signature>
  Signature* driver_function(const char* name, int interface = 12000) const {
    return reinterpret_cast<Signature*>(find(name, interface));
  }
  // Throws GpuError where a `call` did not succeed.
  void check(Status status, const char* call) const;

  // The current context, for another thread to use.
  Context context() const;
  void use(Context context) const;
  void use_if_none(Context context) const;  // a thread of autograd may have none yet

  // A stream that does not wait for the default one, of the highest priority there is.
  Stream create_stream() const;
  void destroy_stream(Stream stream) const noexcept;

  // An event that takes no times.
  Event create_event() const;
  void destroy_event(Event event) const noexcept;

  void record(Event event, Stream stream) const;
  // What is enqueued on `stream` from now on runs after what `event` stands for. The host does not wait.
  void wait(Stream stream, Event event) const;
  bool finished(Event event) const;

  // Between any memory that this process has mapped.
  void copy(Stream stream, std::uintptr_t to, std::uintptr_t from, std::size_t bytes) const;
  // Sets a number of 32 bits. Whoever reads it then, on whatever GPU, sees all that the stream did before.
  void tell(Stream stream, std::uintptr_t flag, std::uint32_t value) const;
  // What is enqueued on `stream` from now on runs when the number at `flag`, in this GPU's own memory, has come to `value` or, as it counts
  // on after the largest, beyond. No processor waits.
  void wait_until(Stream stream, std::uintptr_t flag, std::uint32_t value) const;

  // A number in host memory that streams write and the host reads without a call of the driver, which might have to wait for another thread's.
  using Counter = std::atomic<std::uint64_t>;
  Counter* create_counter() const;
  void destroy_counter(Counter* counter) const noexcept;  // waits for the GPU
  void write(Stream stream, Counter* counter, std::uint64_t value) const;

 private:
  void* find(const char* name, int interface) const;

  Library library_;
  Status (*error_string_)(Status, const char**);
  Status (*get_context_)(void**);
  Status (*set_context_)(void*);
  Status (*priority_range_)(int*, int*);
  Status (*stream_create_)(void**, unsigned, int);
  Status (*stream_destroy_)(void*);
  Status (*stream_wait_event_)(void*, void*, unsigned);
  Status (*event_create_)(void**, unsigned);
  Status (*event_destroy_)(void*);
  Status (*event_record_)(void*, void*);
  Status (*event_query_)(void*);
  Status (*host_alloc_)(void**, std::size_t, unsigned);
  Status (*host_free_)(void*);
  Status (*stream_write_)(void*, std::uint64_t, std::uint64_t, unsigned);
  Status (*stream_write32_)(void*, std::uint64_t, std::uint32_t, unsigned);
  Status (*stream_wait32_)(void*, std::uint64_t, std::uint32_t, unsigned);
  Status (*memory_copy_)(std::uint64_t, std::uint64_t, std::size_t, void*);
};

}  // namespace pymesh3d
