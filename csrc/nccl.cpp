#include "nccl.h"

#include <algorithm>
#include <chrono>
#include <climits>
#include <cstdio>
#include <thread>
#include <utility>

namespace pymesh3d {
namespace {

constexpr int success = 0;   // ncclSuccess
constexpr int as_bytes = 0;  // ncclInt8
constexpr double patience = 10.0;  // seconds that NCCL has to give up when there is nobody to say otherwise

std::chrono::duration<double> seconds(double number) { return std::chrono::duration<double>(number); }

// Runs a task on a thread that outlives the caller if it has to.
template <typename Value>
std::future<Value> run_apart(std::function<Value()> run) {
  std::packaged_task<Value()> task(std::move(run));
  std::future<Value> ended = task.get_future();
  std::thread(std::move(task)).detach();
  return ended;
}

}  // namespace

// Not by a stream: where the standard library is linked into this one file and another is in the process, streams take the locale of the
// other and crash (seen with a Python that is built that way).
std::string text_of(double seconds) {
  char text[32];
  std::snprintf(text, sizeof text, "%g", seconds);
  return text;
}

std::string Ends::text() const { return "between rank " + std::to_string(ranks[here]) + " and rank " + std::to_string(ranks[there()]); }

// The first fields of ncclConfig_t, those of NCCL 2.18. NCCL reads as many as `size` says and takes its defaults for later ones.
struct Nccl::Config {
  std::size_t size = sizeof(Config);
  unsigned magic = 0xcafebeef;
  unsigned version = 21800;
  int blocking = 1;
  int cga_cluster_size = INT_MIN;  // INT_MIN and NULL: not set
  int min_ctas = INT_MIN;
  int max_ctas = INT_MIN;
  const char* net_name = nullptr;
  int split_share = INT_MIN;
};

Nccl::Nccl(const std::string& path)
    : library_(path),
      get_version_(library_.function<Result(int*)>("ncclGetVersion")),
      get_unique_id_(library_.function<Result(UniqueId*)>("ncclGetUniqueId")),
      init_(library_.function<Result(Comm*, int, UniqueId, int, Config*)>("ncclCommInitRankConfig")),
      send_(library_.function<Result(const void*, std::size_t, int, int, Comm, void*)>("ncclSend")),
      receive_(library_.function<Result(void*, std::size_t, int, int, Comm, void*)>("ncclRecv")),
      group_start_(library_.function<Result()>("ncclGroupStart")),
      group_end_(library_.function<Result()>("ncclGroupEnd")),
      async_error_(library_.function<Result(Comm, Result*)>("ncclCommGetAsyncError")),
      finalize_(library_.function<Result(Comm)>("ncclCommFinalize")),
      destroy_(library_.function<Result(Comm)>("ncclCommDestroy")),
      abort_(library_.function<Result(Comm)>("ncclCommAbort")),
      error_string_(library_.function<const char*(Result)>("ncclGetErrorString")),
      last_error_(library_.function<const char*(Comm)>("ncclGetLastError")) {}

int Nccl::version() const {
  int version = 0;
  if (const Result result = get_version_(&version); result != success) throw NcclError("ncclGetVersion failed: " + text(result, nullptr));
  return version;
}

UniqueId Nccl::unique_id() const {
  UniqueId id{};
  if (const Result result = get_unique_id_(&id); result != success) throw NcclError("ncclGetUniqueId failed: " + text(result, nullptr));
  return id;
}

Nccl::Result Nccl::exchange(Comm comm, int peer, Piece sent, Piece received, Stream stream) const {
  void* const on = reinterpret_cast<void*>(stream);
  Result first = group_start_();
  if (first != success) return first;
  if (sent.bytes) first = send_(reinterpret_cast<const void*>(sent.data), sent.bytes, as_bytes, peer, comm, on);
  if (received.bytes && first == success) first = receive_(reinterpret_cast<void*>(received.data), received.bytes, as_bytes, peer, comm, on);
  const Result end = group_end_();  // in any case, or the thread stays in the group
  return first == success ? end : first;
}

std::string Nccl::text(Result result, Comm comm) const {
  std::string text = std::string(error_string_(result)) + " (" + std::to_string(result) + ")";
  const char* last = last_error_(comm);
  return last && *last ? text + ": " + last : text;
}

Communicator::Communicator(std::shared_ptr<const Gpu> gpu, std::shared_ptr<const Nccl> nccl, const UniqueId& id, const Ends& ends,
                           const NcclOptions& options)
    : gpu_(std::move(gpu)), nccl_(std::move(nccl)), context_(gpu_->context()), ends_(ends), timeout_(options.timeout) {
  Nccl::Config config;
  if (options.min_ctas) config.min_ctas = options.min_ctas;
  if (options.max_ctas) config.max_ctas = options.max_ctas;
  const auto made = std::make_shared<Nccl::Comm>(nullptr);  // shared: the call may end after we have given up on it
  within_limit("ncclCommInitRankConfig", nullptr, [nccl = nccl_, made, id, rank = ends.here, config]() mutable {
    return nccl->init_(made.get(), 2, id, rank, &config);
  });
  comm_ = *made;
}

Communicator::~Communicator() {
  abort("the communicator is no more");
  wait_for_abort(1.0);
}

std::string Communicator::about(const char* call) const { return std::string(call) + " " + ends_.text(); }

Nccl::Comm Communicator::open(const char* call) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!comm_) throw NcclError(about(call) + " failed: " + why_closed_);
  return comm_;
}

void Communicator::require_open(const char* call) const { open(call); }

void Communicator::require(Nccl::Result result, const char* call, Nccl::Comm comm) const {
  if (result != success) throw NcclError(about(call) + " failed: " + nccl_->text(result, comm));
}

void Communicator::within_limit(const char* call, Nccl::Comm comm, std::function<Nccl::Result()> run) const {
  auto ended = run_apart<Nccl::Result>([gpu = gpu_, context = context_, run = std::move(run)] {
    gpu->use(context);
    return run();
  });
  if (ended.wait_for(seconds(timeout_)) != std::future_status::ready)
    throw NcclError(about(call) + " took longer than " + text_of(timeout_) + " s");
  require(ended.get(), call, comm);
}

void Communicator::exchange(Piece sent, Piece received, Stream stream) {
  const Nccl::Comm comm = open("a transfer");
  require(nccl_->exchange(comm, ends_.there(), sent, received, stream), "a transfer", comm);
}

void Communicator::connect(Piece sent, Piece received, Stream stream) {
  const Nccl::Comm comm = open("connecting");
  within_limit("connecting", comm, [nccl = nccl_, comm, peer = ends_.there(), sent, received, stream] {
    return nccl->exchange(comm, peer, sent, received, stream);
  });
}

void Communicator::check() const {
  const std::lock_guard<std::mutex> lock(mutex_);  // so that nobody aborts it meanwhile
  if (!comm_) throw NcclError(about("ncclCommGetAsyncError") + " failed: " + why_closed_);
  Nccl::Result result = success;
  require(nccl_->async_error_(comm_, &result), "ncclCommGetAsyncError", comm_);
  require(result, "what was under way", comm_);
}

void Communicator::refuse(std::string reason) noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!comm_) return;
  refused_ = std::exchange(comm_, nullptr);
  why_closed_ = std::move(reason);
}

void Communicator::abort(std::string reason) noexcept {
  refuse(std::move(reason));
  const std::lock_guard<std::mutex> lock(mutex_);
  const Nccl::Comm comm = std::exchange(refused_, nullptr);
  if (!comm) return;
  try {
    aborted_ = run_apart<void>([gpu = gpu_, context = context_, nccl = nccl_, comm] {
      gpu->use(context);
      nccl->abort_(comm);
    });
  } catch (const std::exception&) {  // no thread or no memory to be had: what is left of the communicator goes with the process
  }
}

bool Communicator::wait_for_abort(double limit) const noexcept {
  std::shared_future<void> aborted;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    aborted = aborted_;
  }
  return !aborted.valid() || aborted.wait_for(seconds(limit)) == std::future_status::ready;
}

bool Communicator::close() noexcept {
  try {
    const Nccl::Comm comm = open("ncclCommFinalize");
    within_limit("ncclCommFinalize", comm, [nccl = nccl_, comm] { return nccl->finalize_(comm); });
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (!std::exchange(comm_, nullptr)) return false;  // aborted meanwhile
    }
    within_limit("ncclCommDestroy", nullptr, [nccl = nccl_, comm] { return nccl->destroy_(comm); });
    return true;
  } catch (const std::exception&) {
    abort("the communicator could not be closed");
    wait_for_abort(std::min(timeout_, patience));
    return false;
  }
}

}  // namespace pymesh3d
