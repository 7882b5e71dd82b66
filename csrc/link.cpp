#include "link.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <stdexcept>
#include <utility>

namespace pymesh3d {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::milliseconds look{50};  // the time between two looks of the watch
constexpr double courtesy = 0.5;               // seconds for what is about to end: a call on another thread, before it is aborted under it

double since(Clock::time_point began) { return std::chrono::duration<double>(Clock::now() - began).count(); }

}  // namespace

Link::Link(std::shared_ptr<const Gpu> gpu, std::shared_ptr<const Nccl> nccl, const UniqueId& id, const Ends& ends, std::uintptr_t scratch,
           const NcclOptions& options)
    : gpu_(std::move(gpu)),
      timeout_(options.timeout),
      communicator_(gpu_, std::move(nccl), id, ends, options),
      stream_(gpu_->create_stream()) {
  try {
    communicator_.connect({scratch, 1}, {scratch + 1, 1}, stream_);  // both ways: NCCL connects each at its first use
    unused_.push_back(gpu_->create_event());
    gpu_->record(unused_.back(), stream_);
    const auto began = Clock::now();
    while (!gpu_->finished(unused_.back())) {
      if (since(began) > timeout_)
        throw NcclError("the first transfer " + ends.text() + " took longer than " + text_of(timeout_) + " s");
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
    telling_ = gpu_->create_stream();
    finished_ = gpu_->create_counter();
    gpu_->write(telling_, finished_, 0);  // fails here, and not in the first step, where a GPU cannot
    watch_ = std::thread([this, end = end_.get_future()] { watch(end); });
  } catch (...) {
    communicator_.abort("the link could not be made");
    communicator_.wait_for_abort(1.0);  // NCCL may still run on the stream
    for (const Event event : unused_) gpu_->destroy_event(event);
    gpu_->destroy_stream(stream_);
    if (telling_) gpu_->destroy_stream(telling_);
    if (finished_) gpu_->destroy_counter(finished_);
    throw;
  }
}

Link::~Link() {
  end_watch();
  abort(1.0);  // unless it has been closed
  for (const Event event : pending_) gpu_->destroy_event(event);
  for (const Event event : unused_) gpu_->destroy_event(event);
  gpu_->destroy_stream(stream_);
  gpu_->destroy_stream(telling_);
  if (closed_) gpu_->destroy_counter(finished_);  // which waits for the GPU: otherwise it ends with the process
}

std::pair<std::uint64_t, std::uint64_t> Link::transfer(Piece sent, Piece received, Stream stream) {
  const std::lock_guard<std::mutex> lock(mutex_);
  retire();
  if (unused_.empty()) unused_.push_back(gpu_->create_event());
  const Event event = unused_.back();
  gpu_->record(event, stream);
  gpu_->wait(stream_, event);  // on what the event stands for now: it is free again at once
  const std::uint64_t number = started_ + 1;
  started_ = number;  // from here on the watch counts
  try {
    communicator_.exchange(sent, received, stream_);
  } catch (...) {
    started_ = number - 1;
    throw;
  }
  unused_.pop_back();
  pending_.push_back(event);
  try {
    gpu_->record(event, stream_);
    gpu_->wait(telling_, event);
    gpu_->write(telling_, finished_, number);
  } catch (const std::exception& error) {  // nobody would know when it ends
    communicator_.abort(error.what());
    throw;
  }
  return {number, done_};
}

void Link::join(std::uint64_t number, Stream stream) {
  const std::lock_guard<std::mutex> lock(mutex_);
  communicator_.require_open("a transfer");
  if (number > done_ + pending_.size())
    throw std::out_of_range("transfer " + std::to_string(number) + " " + communicator_.ends().text() + " has not been started");
  if (number > done_) gpu_->wait(stream, pending_[number - done_ - 1]);
}

std::uint64_t Link::finished() const { return *finished_; }

void Link::retire() {
  for (; done_ < *finished_ && !pending_.empty(); ++done_) {
    unused_.push_back(pending_.front());
    pending_.pop_front();
  }
}

void Link::check() const { communicator_.check(); }

void Link::watch(const std::future<void>& end) {
  auto began = Clock::now();
  for (std::uint64_t seen = 0; end.wait_for(look) != std::future_status::ready;) {
    if (const std::uint64_t finished = *finished_; finished != seen || finished == started_) {
      seen = finished;
      began = Clock::now();
    }
    const double waited = since(began);
    const std::string transfer = "transfer " + std::to_string(seen + 1);
    try {
      communicator_.check();
    } catch (const std::exception& error) {
      const std::string after = "after " + text_of(std::round(10 * waited) / 10) + " s of waiting for " + transfer + ", ";
      return give_up(courtesy, (seen < started_ ? after : "") + error.what());
    }
    if (waited > timeout_) return give_up(courtesy, transfer + " has not finished within " + text_of(timeout_) + " s");
  }
}

void Link::end_watch() noexcept {
  if (!watch_.joinable()) return;
  end_.set_value();
  watch_.join();
}

bool Link::abort(double seconds) noexcept {
  const auto began = Clock::now();
  give_up(std::min(courtesy, seconds / 2), "the communicator has been aborted");
  return communicator_.wait_for_abort(seconds - since(began));
}

void Link::give_up(double patience, const std::string& reason) noexcept {
  const auto began = Clock::now();
  communicator_.refuse(reason);  // or a host that makes one transfer after the other keeps the lock
  std::unique_lock<std::mutex> lock(mutex_, std::defer_lock);
  while (!lock.try_lock() && since(began) < patience) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  communicator_.abort(reason);
}

void Link::close() noexcept {
  end_watch();
  const std::lock_guard<std::mutex> lock(mutex_);
  if (closed_ || !communicator_.close()) return;
  // The last transfer has finished, but the other stream may be about to tell.
  const auto began = Clock::now();
  while (*finished_ != started_ && since(began) < courtesy) std::this_thread::sleep_for(std::chrono::microseconds(100));
  closed_ = *finished_ == started_;
}

}  // namespace pymesh3d
