#include "link.h"

#include <chrono>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

namespace pymesh3d {

Link::Link(std::shared_ptr<const Gpu> gpu, std::shared_ptr<const Nccl> nccl, const UniqueId& id, int rank, Piece scratch, const NcclOptions& options)
    : gpu_(std::move(gpu)), communicator_(gpu_, std::move(nccl), id, rank, options), stream_(gpu_->create_stream()) {
  try {
    communicator_.connect(rank == 0 ? scratch : Piece{}, rank == 0 ? Piece{} : scratch, stream_);
    unused_.push_back(gpu_->create_event());
    gpu_->record(unused_.back(), stream_);
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::duration<double>(options.timeout);
    while (!gpu_->finished(unused_.back())) {
      if (std::chrono::steady_clock::now() > deadline)
        throw NcclError("the first transfer of rank " + std::to_string(rank) + " took longer than " + std::to_string(options.timeout) + " s");
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
  } catch (...) {
    for (const Event event : unused_) gpu_->destroy_event(event);
    gpu_->destroy_stream(stream_);
    throw;
  }
}

Link::~Link() {
  abort(1.0);  // unless it has been closed
  for (const Event event : pending_) gpu_->destroy_event(event);
  for (const Event event : unused_) gpu_->destroy_event(event);
  gpu_->destroy_stream(stream_);
}

std::uint64_t Link::transfer(Piece sent, Piece received, Stream stream) {
  const std::lock_guard<std::mutex> lock(mutex_);
  retire();
  if (unused_.empty()) unused_.push_back(gpu_->create_event());
  const Event event = unused_.back();
  gpu_->record(event, stream);
  gpu_->wait(stream_, event);  // on what the event stands for now: it is free again at once
  communicator_.exchange(sent, received, stream_);
  gpu_->record(event, stream_);
  unused_.pop_back();
  pending_.push_back(event);
  return done_ + pending_.size();
}

void Link::join(std::uint64_t number, Stream stream) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (number > done_ + pending_.size()) throw std::out_of_range("transfer " + std::to_string(number) + " has not been started");
  if (number > done_) gpu_->wait(stream, pending_[number - done_ - 1]);
}

std::uint64_t Link::finished() {
  const std::lock_guard<std::mutex> lock(mutex_);
  retire();
  return done_;
}

void Link::retire() {
  while (!pending_.empty() && gpu_->finished(pending_.front())) {
    unused_.push_back(pending_.front());
    pending_.pop_front();
    ++done_;
  }
}

void Link::check() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  communicator_.check();
}

bool Link::abort(double seconds) noexcept {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  std::unique_lock<std::mutex> lock(mutex_, std::defer_lock);
  while (!lock.try_lock()) {  // a call of NCCL's may be stuck on another thread
    if (std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return communicator_.abort(seconds);
}

void Link::close() noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  communicator_.close();
}

}  // namespace pymesh3d
