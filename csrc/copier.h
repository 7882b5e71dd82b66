// Copies of one piece of memory to several places, other GPUs' among them, by the copy engines: nothing that computes makes room for them.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "gpu.h"

namespace pymesh3d {

// Where a piece goes, and the number (32 bits) that says that all of it is there; 0 if nobody is to be told.
struct Target {
  std::uintptr_t memory = 0, flag = 0;
};

// On a stream of its own, of the context that was current when this was made. No call makes the host wait for the GPU.
class Copier {
 public:
  explicit Copier(std::shared_ptr<const Gpu> gpu);
  ~Copier();
  Copier(const Copier&) = delete;
  Copier& operator=(const Copier&) = delete;

  // Copies to one target after the other, after all that is enqueued on `stream` by now, and sets each flag to `value` after its copy. What is
  // copied must stay as it is until a stream that has joined gets there; whoever calls keeps it alive. Throws GpuError; what was enqueued
  // before the call that failed is copied all the same.
  void start(Piece source, const std::vector<Target>& targets, std::uint32_t value, Stream stream);

  // What is enqueued on `stream` from now on runs after all copies that were started. Throws GpuError.
  void join(Stream stream);

 private:
  std::shared_ptr<const Gpu> gpu_;
  Context context_;
  std::mutex mutex_;  // of the event: two threads may start and join
  Stream stream_;
  Event event_ = 0;
};

}  // namespace pymesh3d
