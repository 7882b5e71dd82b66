#include "copier.h"

#include <utility>

namespace pymesh3d {

Copier::Copier(std::shared_ptr<const Gpu> gpu) : gpu_(std::move(gpu)), context_(gpu_->context()), stream_(gpu_->create_stream()) {
  try {
    event_ = gpu_->create_event();
  } catch (...) {
    gpu_->destroy_stream(stream_);
    throw;
  }
}

Copier::~Copier() {
  gpu_->destroy_event(event_);
  gpu_->destroy_stream(stream_);
}

void Copier::start(Piece source, const std::vector<Target>& targets, std::uint32_t value, Stream stream) {
  gpu_->use_if_none(context_);
  const std::lock_guard<std::mutex> lock(mutex_);
  gpu_->record(event_, stream);
  gpu_->wait(stream_, event_);  // on what the event stands for now: it is free again at once
  for (const Target& target : targets) {
    gpu_->copy(stream_, target.memory, source.data, source.bytes);
    if (target.flag) gpu_->tell(stream_, target.flag, value);
  }
}

void Copier::join(Stream stream) {
  gpu_->use_if_none(context_);
  const std::lock_guard<std::mutex> lock(mutex_);
  gpu_->record(event_, stream_);
  gpu_->wait(stream, event_);
}

}  // namespace pymesh3d
