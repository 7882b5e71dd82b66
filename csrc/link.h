// What joins two ranks: tensors go both ways, in order, on streams of its own beside what the GPU computes meanwhile.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <future>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "gpu.h"
#include "nccl.h"

namespace pymesh3d {

// What one end sends, the other receives in the same order. Which sends and receives share a transfer may differ, and so may the transfers'
// numbers. No call makes the host wait for the GPU or for the peer, except start and end. The memory of a transfer must stay as it is until
// the transfer has finished; whoever calls keeps it alive.
//
// A thread of its own watches. If a transfer does not finish within the timeout, or NCCL reports an error, it aborts: every wait ends, and
// every later call throws the reason. It makes no call of the driver's before that, because a host that has filled the queues of a GPU
// waits inside the driver until the GPU goes on.
class Link {
 public:
  // `scratch`: two bytes of device memory, to connect with. They are free again afterwards.
  Link(std::shared_ptr<const Gpu> gpu, std::shared_ptr<const Nccl> nccl, const UniqueId& id, const Ends& ends, std::uintptr_t scratch,
       const NcclOptions& options);
  ~Link();
  Link(const Link&) = delete;
  Link& operator=(const Link&) = delete;

  // Sends one piece and receives the other (either may be empty) after all that is enqueued on `stream` by now. Returns the transfer's
  // number, from 1, and how many have finished before it.
  std::pair<std::uint64_t, std::uint64_t> transfer(Piece sent, Piece received, Stream stream);

  // What is enqueued on `stream` from now on runs after the transfer. The host does not wait.
  void join(std::uint64_t number, Stream stream);

  // How many transfers have finished; they finish in order. Those that were given up count too: ask `check`.
  std::uint64_t finished() const;

  // Throws what has gone wrong since.
  void check() const;

  // Ends every wait on this link; later calls throw. False if NCCL has not given up within `seconds`.
  bool abort(double seconds) noexcept;

  // After all transfers have finished. On an aborted link it waits, within limits, until NCCL has given up.
  void close() noexcept;

 private:
  void retire();
  void watch(const std::future<void>& end);
  void end_watch() noexcept;
  void give_up(double patience, const std::string& reason) noexcept;

  std::shared_ptr<const Gpu> gpu_;
  double timeout_;
  std::mutex mutex_;  // the watch and `abort` may come from other threads
  std::deque<Event> pending_;  // of transfers done_ + 1, done_ + 2, ...
  std::vector<Event> unused_;
  std::uint64_t done_ = 0;
  Communicator communicator_;
  Stream stream_ = 0;
  Stream telling_ = 0;  // writes how many transfers have finished: on `stream_` the next transfer would wait for that, 5 us (H200)
  Gpu::Counter* finished_ = nullptr;
  std::atomic<std::uint64_t> started_ = 0;
  bool closed_ = false;
  std::promise<void> end_;
  std::thread watch_;
};

}  // namespace pymesh3d
