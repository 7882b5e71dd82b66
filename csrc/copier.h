// A stream beside the one that computes, for copies between pieces of memory, those of other GPUs among them, by the copy engines: nothing
// that computes makes room for them.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <variant>
#include <vector>

#include "gpu.h"

namespace pymesh3d {

// What a copier does, one after the other. Numbers have 32 bits; all of them are told, or waited for, with the value of one start.
class Steps {
 public:
  void copy(std::uintptr_t to, std::uintptr_t from, std::size_t bytes) { steps_.emplace_back(Copy{to, from, bytes}); }
  void tell(std::uintptr_t flag) { steps_.emplace_back(Tell{flag}); }
  void wait_until(std::uintptr_t flag) { steps_.emplace_back(Wait{flag}); }

  // Enqueues them. Throws GpuError; what came before the step that failed is done all the same.
  void enqueue(const Gpu& gpu, Stream stream, std::uint32_t value) const;

 private:
  struct Copy {
    std::uintptr_t to, from;
    std::size_t bytes;
  };
  struct Tell {
    std::uintptr_t flag;
  };
  struct Wait {
    std::uintptr_t flag;
  };
  std::vector<std::variant<Copy, Tell, Wait>> steps_;
};

// On a stream of its own, of the context that was current when this was made. No call makes the host wait for the GPU.
class Copier {
 public:
  explicit Copier(std::shared_ptr<const Gpu> gpu);
  ~Copier();
  Copier(const Copier&) = delete;
  Copier& operator=(const Copier&) = delete;

  Stream stream() const { return stream_; }

  // Takes the steps after all that is enqueued on `stream` by now. What is copied must stay as it is until a stream that has joined gets
  // there; whoever calls keeps it alive. Throws GpuError.
  void start(const Steps& steps, std::uint32_t value, Stream stream);

  // What is enqueued on `stream` from now on runs after all steps that were started. Throws GpuError.
  void join(Stream stream);

 private:
  std::shared_ptr<const Gpu> gpu_;
  Context context_;
  std::mutex mutex_;  // of the event: two threads may start and join
  Stream stream_;
  Event event_ = 0;
};

}  // namespace pymesh3d
