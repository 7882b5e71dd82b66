// NCCL, opened while the program runs, and communicators of two ranks that never make the host wait without a limit.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>

#include "gpu.h"
#include "library.h"

namespace pymesh3d {

// A call that failed or took too long. what() names the call and both ranks, and gives NCCL's own text.
struct NcclError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct UniqueId {  // ncclUniqueId, which NCCL takes by value
  char bytes[128];
};

// The two ranks of a communicator as the rest of the world counts them, and which of them this one is: 0 or 1, as NCCL counts them.
struct Ends {
  std::array<int, 2> ranks;
  int here;
  int there() const { return 1 - here; }
  std::string text() const;  // between rank 4 and rank 5, this one first
};

// A number of CTAs left at 0 is NCCL's choice; `timeout` in seconds bounds every call that may wait for the peer.
struct NcclOptions {
  int min_ctas = 0;
  int max_ctas = 0;
  double timeout = 300.0;
};

std::string text_of(double seconds);  // 0.3, and not 0.300000

// The functions of the library.
class Nccl {
 public:
  explicit Nccl(const std::string& path = "libnccl.so.2");
  int version() const;  // 22809 for 2.28.9
  UniqueId unique_id() const;

 private:
  friend class Communicator;
  using Comm = void*;
  using Result = int;
  struct Config;
  std::string text(Result result, Comm comm) const;
  Result exchange(Comm comm, int peer, Piece sent, Piece received, Stream stream) const;

  Library library_;
  Result (*get_version_)(int*);
  Result (*get_unique_id_)(UniqueId*);
  Result (*init_)(Comm*, int, UniqueId, int, Config*);
  Result (*send_)(const void*, std::size_t, int, int, Comm, void*);
  Result (*receive_)(void*, std::size_t, int, int, Comm, void*);
  Result (*group_start_)();
  Result (*group_end_)();
  Result (*async_error_)(Comm, Result*);
  Result (*finalize_)(Comm);
  Result (*destroy_)(Comm);
  Result (*abort_)(Comm);
  const char* (*error_string_)(Result);
  const char* (*last_error_)(Comm);
};

// What two ranks share. What may wait for the peer (the constructor, `close`, `abort`) runs on a thread of its own, so that the caller waits
// no longer than the limit. NCCL's non-blocking mode would do that too, but costs 60 us of the host for each operation (H200, NCCL 2.28.9:
// a thread is started and waited for; a blocking communicator takes 10 us).
class Communicator {
 public:
  Communicator(std::shared_ptr<const Gpu> gpu, std::shared_ptr<const Nccl> nccl, const UniqueId& id, const Ends& ends, const NcclOptions& options);
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  const Ends& ends() const noexcept { return ends_; }

  // Enqueues one kernel that sends and receives.
  void exchange(Piece sent, Piece received, Stream stream);

  // The first exchange: it connects the two ranks, which may take long.
  void connect(Piece sent, Piece received, Stream stream);

  // Throws if it has been closed or aborted.
  void require_open(const char* call) const;

  // Throws what has gone wrong since.
  void check() const;

  // Lets every later call throw the reason. What is under way goes on, and so does a call that another thread is in.
  void refuse(std::string reason) noexcept;

  // Refuses, and gives up on all that is under way. Returns at once. What NCCL has it for is a call that another thread is stuck in; one that
  // is just about to go into NCCL would find the communicator gone.
  void abort(std::string reason) noexcept;
  // False if NCCL has not given up within so many seconds.
  bool wait_for_abort(double seconds) const noexcept;

  // After all work has ended. Aborts where that fails. Whether it was open and has been closed.
  bool close() noexcept;

 private:
  void within_limit(const char* call, Nccl::Comm comm, std::function<Nccl::Result()> run) const;
  void require(Nccl::Result result, const char* call, Nccl::Comm comm) const;
  Nccl::Comm open(const char* call) const;
  std::string about(const char* call) const;

  std::shared_ptr<const Gpu> gpu_;
  std::shared_ptr<const Nccl> nccl_;
  Context context_;  // of whoever made it, for other threads
  Ends ends_;
  double timeout_;
  mutable std::mutex mutex_;  // of what follows
  Nccl::Comm comm_ = nullptr;
  Nccl::Comm refused_ = nullptr;  // what comm_ was, until it is aborted
  std::string why_closed_ = "the communicator has been closed";
  std::shared_future<void> aborted_;
};

}  // namespace pymesh3d
