#include "copier.h"

#include <utility>

namespace pymesh3d {

void Steps::enqueue(const Gpu& gpu, Stream stream, std::uint32_t value) const {
  for (const auto& step : steps_) {
    if (const auto* copy = std::get_if<Copy>(&step)) {
      gpu.copy(stream, copy->to, copy->from, copy->bytes);
    } else if (const auto* tell = std::get_if<Tell>(&step)) {
      gpu.tell(stream, tell->flag, value);
    } else {
      gpu.wait_until(stream, std::get<Wait>(step).flag, value);
    }
  }
}

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

void Copier::start(const Steps& steps, std::uint32_t value, Stream stream) {
  gpu_->use_if_none(context_);
  const std::lock_guard<std::mutex> lock(mutex_);
  gpu_->record(event_, stream);
  gpu_->wait(stream_, event_);  // on what the event stands for now: it is free again at once
  steps.enqueue(*gpu_, stream_, value);
}

void Copier::join(Stream stream) {
  gpu_->use_if_none(context_);
  const std::lock_guard<std::mutex> lock(mutex_);
  gpu_->record(event_, stream_);
  gpu_->wait(stream, event_);
}

}  // namespace pymesh3d
