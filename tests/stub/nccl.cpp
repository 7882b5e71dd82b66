// A library that stands for both libcuda.so.1 and libnccl.so.2 where there is no GPU. Streams are threads, communicators are sockets,
// device memory is the host's. It really moves the bytes, between processes or threads, and ends the program when it is called wrongly.
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <climits>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace {

using Status = int;  // CUresult or ncclResult_t
using Held = std::unique_lock<std::mutex>;
using std::chrono::microseconds;
using std::chrono::milliseconds;

constexpr Status success = 0;
constexpr Status invalid_context = 201, not_found = 500, not_ready = 600, launch_failed = 719;
constexpr Status system_error = 2, invalid_argument = 4, remote_error = 6;

struct Stream {
  std::deque<std::function<void()>> work;
  std::uint64_t enqueued = 0, done = 0;
  bool destroyed = false;  // its thread ends after the work that is left
};

// What an event stands for: a stream, and how much of its work must be done.
struct Position {
  std::shared_ptr<Stream> stream;
  std::uint64_t count = 0;
  bool passed() const { return !stream || stream->done >= count; }
};

struct Comm {
  int rank, socket;
  int under_way = 0;  // groups that have not ended
  Status error = success;
  bool finalized = false, aborted = false;
};

struct Operation {
  bool sends;
  char* data;
  std::size_t bytes;
  std::shared_ptr<Comm> comm;
  void* stream;
};

struct World {
  std::map<void*, std::shared_ptr<Stream>> streams;
  std::map<void*, Position> events;
  std::map<void*, std::shared_ptr<Comm>> comms;
  std::set<void*> host_memory;  // the driver's: what is not given back ends with the process
  std::uintptr_t last_handle = 0x1000;  // no handle is used twice, so that a late call is noticed
  std::map<std::string, milliseconds> hanging;
  std::map<std::string, int> failing;
  std::mt19937 delays;
  unsigned longest_delay = 0;  // microseconds
  std::set<std::string> texts{""};
  const char* last_error = "";
};

// One lock for all; `changed` tells of every change that somebody may be waiting for. Never destroyed: threads outlive main().
World& world = *new World;
std::mutex& lock = *new std::mutex;
std::condition_variable& changed = *new std::condition_variable;

thread_local void* context = nullptr;
thread_local int depth = 0;  // of groups
thread_local Status group_error = success;
thread_local std::vector<Operation> operations;

[[noreturn]] void die(const std::string& text) {
  std::fprintf(stderr, "called wrongly: %s\n", text.c_str());
  std::abort();
}

void* new_handle() { return reinterpret_cast<void*>(++world.last_handle); }

void remember(const std::string& text) { world.last_error = world.texts.insert(text).first->c_str(); }

Status failed(Status status, const std::string& text) {
  const Held held(lock);
  remember(text);
  return status;
}

// Whether a test wants this call to fail. Does not return as long as it wants it to hang.
bool told_to_fail(const std::string& function) {
  Held held(lock);
  if (const auto hanging = world.hanging.extract(function)) {
    held.unlock();
    std::this_thread::sleep_for(hanging.mapped());
    held.lock();
  }
  if (world.failing[function] == 0) return false;
  --world.failing[function];
  remember(function + " was told to fail");
  return true;
}

// The driver.

void run_stream(const std::shared_ptr<Stream>& stream) {
  Held held(lock);
  for (;;) {
    changed.wait(held, [&] { return !stream->work.empty() || stream->destroyed; });
    if (stream->work.empty()) return;
    const auto work = std::move(stream->work.front());
    stream->work.pop_front();
    held.unlock();
    work();
    held.lock();
    ++stream->done;
    changed.notify_all();
  }
}

std::shared_ptr<Stream> start_stream(void* handle) {
  const auto stream = world.streams[handle] = std::make_shared<Stream>();
  std::thread(run_stream, stream).detach();
  return stream;
}

std::shared_ptr<Stream> find_stream(void* handle) {
  const auto found = world.streams.find(handle);
  if (found != world.streams.end()) return found->second;
  if (handle) die("a stream that does not exist, or no longer");
  return start_stream(nullptr);  // the default one
}

Position& find_event(void* handle) {
  const auto found = world.events.find(handle);
  if (found == world.events.end()) die("an event that does not exist, or no longer");
  return found->second;
}

void enqueue(void* handle, std::function<void()> work) {
  const Held held(lock);
  const auto stream = find_stream(handle);
  stream->work.push_back(std::move(work));
  ++stream->enqueued;
  changed.notify_all();
}

Position now_on(void* stream) {
  const auto found = find_stream(stream);
  return {found, found->enqueued};
}

void wait_for(Held& held, const Position& position) {
  changed.wait(held, [&] { return position.passed(); });
}

Status error_string(Status status, const char** text) {
  *text = status == launch_failed ? "unspecified launch failure" : status == invalid_context ? "invalid device context" : nullptr;
  return success;
}

Status get_context(void** current) { return *current = context, success; }

Status set_context(void* current) { return context = current, success; }

Status priority_range(int* least, int* greatest) { return *least = 0, *greatest = -5, success; }

Status stream_create(void** stream, unsigned, int priority) {
  if (told_to_fail("cuStreamCreateWithPriority")) return launch_failed;
  if (!context) return invalid_context;
  if (priority != -5) die("a stream that is not of the highest priority");
  const Held held(lock);
  start_stream(*stream = new_handle());
  return success;
}

Status stream_destroy(void* stream) {
  const Held held(lock);
  find_stream(stream)->destroyed = true;
  world.streams.erase(stream);
  changed.notify_all();
  return success;
}

Status stream_wait_event(void* stream, void* event, unsigned) {
  if (told_to_fail("cuStreamWaitEvent")) return launch_failed;
  Held held(lock);
  const Position position = find_event(event);
  held.unlock();
  enqueue(stream, [position] {
    Held held(lock);
    wait_for(held, position);
  });
  return success;
}

Status stream_synchronize(void* stream) {
  Held held(lock);
  wait_for(held, now_on(stream));
  return success;
}

Status launch_host_function(void* stream, void (*function)(void*), void* argument) {
  enqueue(stream, [=] { function(argument); });
  return success;
}

Status event_create(void** event, unsigned) {
  if (told_to_fail("cuEventCreate")) return launch_failed;
  if (!context) return invalid_context;
  const Held held(lock);
  world.events[*event = new_handle()] = {};
  return success;
}

Status event_destroy(void* event) {
  const Held held(lock);
  find_event(event);
  world.events.erase(event);
  return success;
}

Status event_record(void* event, void* stream) {
  if (told_to_fail("cuEventRecord")) return launch_failed;
  const Held held(lock);
  find_event(event) = now_on(stream);
  return success;
}

Status event_query(void* event) {
  if (told_to_fail("cuEventQuery")) return launch_failed;
  const Held held(lock);
  return find_event(event).passed() ? success : not_ready;
}

// Counters.

Status host_alloc(void** memory, std::size_t bytes, unsigned) {
  const Held held(lock);
  world.host_memory.insert(*memory = std::malloc(bytes));
  return success;
}

Status host_free(void* memory) {
  const Held held(lock);
  if (!world.host_memory.erase(memory)) die("host memory that does not exist, or no longer");
  std::free(memory);
  return success;
}

Status stream_write(void* stream, std::uint64_t address, std::uint64_t value, unsigned) {
  if (told_to_fail("cuStreamWriteValue64")) return launch_failed;
  enqueue(stream, [=] { *reinterpret_cast<std::atomic<std::uint64_t>*>(address) = value; });
  return success;
}

// NCCL.

struct UniqueId {
  char bytes[128];
};

struct Config {  // ncclConfig_t of NCCL 2.18
  std::size_t size;
  unsigned magic, version;
  int blocking, cga_cluster_size, min_ctas, max_ctas;
  const char* net_name;
  int split_share;
};

const char* what_is_wrong_with(const Config& config) {
  if (config.magic != 0xcafebeef || config.version != 21800 || config.size != sizeof(Config)) return "not a configuration of NCCL 2.18";
  if (config.blocking != 1 || config.cga_cluster_size != INT_MIN || config.net_name || config.split_share != INT_MIN)
    return "an option that nobody asked for";
  const bool left_out = config.min_ctas == INT_MIN && config.max_ctas == INT_MIN;
  return left_out || (0 < config.min_ctas && config.min_ctas <= config.max_ctas) ? nullptr : "numbers of CTAs that make no sense";
}

// Rank 0 waits for rank 1 under a name outside the file system. The socket, or -1.
int meet(const UniqueId& id, int rank) {
  sockaddr_un address{AF_UNIX, {}};
  std::copy(id.bytes, id.bytes + sizeof address.sun_path - 1, address.sun_path + 1);
  const auto* where = reinterpret_cast<const sockaddr*>(&address);
  const int mine = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (rank == 1) {
    while (connect(mine, where, sizeof address) != 0) std::this_thread::sleep_for(milliseconds(1));
    return mine;
  }
  const bool listens = bind(mine, where, sizeof address) == 0 && listen(mine, 1) == 0;
  const int met = listens ? accept(mine, nullptr, nullptr) : -1;
  close(mine);
  return met;
}

std::shared_ptr<Comm> find_comm(void* handle, const char* function) {
  const Held held(lock);
  const auto found = world.comms.find(handle);
  if (found == world.comms.end()) die(std::string(function) + " of a communicator that does not exist, or no longer");
  return found->second;
}

// What is under way ends at once, or is waited for.
void destroy(void* handle, const char* function, bool at_once) {
  const auto comm = find_comm(handle, function);
  Held held(lock);
  world.comms.erase(handle);
  comm->aborted = at_once;
  if (at_once) shutdown(comm->socket, SHUT_RDWR);
  changed.notify_all();
  changed.wait(held, [&] { return comm->under_way == 0; });
  close(comm->socket);
}

// `step` is send or recv. False if the connection ends before all bytes are through.
template <typename Step>
bool all(Step step, int socket, char* data, std::size_t bytes) {
  while (bytes) {
    const ssize_t moved = step(socket, data, bytes, MSG_NOSIGNAL);
    if (moved <= 0) return false;
    data += moved;
    bytes -= static_cast<std::size_t>(moved);
  }
  return true;
}

// The number of bytes goes ahead, so that ends which do not match are noticed.
bool move(const Operation& operation) {
  std::size_t bytes = operation.bytes;
  char* const head = reinterpret_cast<char*>(&bytes);
  const int socket = operation.comm->socket;
  if (operation.sends) return all(send, socket, head, sizeof bytes) && all(send, socket, operation.data, bytes);
  if (!all(recv, socket, head, sizeof bytes)) return false;
  if (bytes != operation.bytes) die(std::to_string(bytes) + " bytes sent, " + std::to_string(operation.bytes) + " expected");
  return all(recv, socket, operation.data, bytes);
}

// All operations at the same time, as one kernel does it. A group that has lost its peer waits until it is aborted.
void run_group(const std::vector<Operation>& group) {
  Held held(lock);
  const auto delay = microseconds(world.longest_delay ? world.delays() % world.longest_delay : 0);
  held.unlock();
  std::this_thread::sleep_for(delay);
  std::vector<char> moved(group.size());
  std::vector<std::thread> threads;
  for (std::size_t n = 1; n < group.size(); ++n) threads.emplace_back([&, n] { moved[n] = move(group[n]); });
  moved[0] = move(group[0]);
  for (std::thread& thread : threads) thread.join();
  held.lock();
  Comm& comm = *group[0].comm;
  for (const char well : moved)
    if (!well && !comm.aborted) {
      comm.error = remote_error;
      remember("the peer has closed the connection");
      changed.wait(held, [&] { return comm.aborted; });
    }
  --comm.under_way;
  changed.notify_all();
}

Status launch_group() {
  const auto group = std::exchange(operations, {});
  if (const Status error = std::exchange(group_error, success); error != success) return error;
  if (group.empty()) return success;
  for (const Operation& other : group)
    if (other.comm != group[0].comm || other.stream != group[0].stream) die("a group of several communicators or streams");
  Held held(lock);
  ++group[0].comm->under_way;
  held.unlock();
  enqueue(group[0].stream, [group] { run_group(group); });
  return success;
}

// Keeps an operation until its group ends.
Status add(const char* function, bool sends, const void* data, std::size_t count, int type, int peer, void* handle, void* stream) {
  const auto comm = find_comm(handle, function);
  if (!context || !data || !count || type != 0 || peer != 1 - comm->rank)
    die(std::string(function) + " without context or data, of something else than bytes, or with a wrong peer");
  if (told_to_fail(function)) return group_error = system_error;
  const Held held(lock);
  if (comm->finalized) die(std::string(function) + " on a communicator that has been finalized");
  if (comm->aborted) return group_error = remote_error;  // while it was hanging
  operations.push_back({sends, static_cast<char*>(const_cast<void*>(data)), count, comm, stream});
  return success;
}

}  // namespace

extern "C" {

// What tests ask for, in this process: that the next call of a function hangs, that the next few of it fail, that every group waits up to
// so long before it moves anything; and how many streams, events and communicators there are.
void stub_hang(const char* function, int how_long) {
  const Held held(lock);
  world.hanging[function] = milliseconds(how_long);
}

void stub_fail(const char* function, int times) {
  const Held held(lock);
  world.failing[function] = times;
}

void stub_delay(unsigned longest, unsigned seed) {
  const Held held(lock);
  world.longest_delay = longest;
  world.delays.seed(seed);
}

int stub_alive() {
  const Held held(lock);
  return static_cast<int>(world.streams.size() - world.streams.count(nullptr) + world.events.size() + world.comms.size());
}

Status cuDriverGetVersion(int* version) { return *version = 12080, success; }

Status cuGetProcAddress(const char* name, void** function, int version, std::uint64_t) {
  const auto address = [](auto* function) { return reinterpret_cast<void*>(function); };
  static const std::map<std::string, void*> functions{
      {"cuGetErrorString", address(error_string)},
      {"cuCtxGetCurrent", address(get_context)},
      {"cuCtxSetCurrent", address(set_context)},
      {"cuCtxGetStreamPriorityRange", address(priority_range)},
      {"cuStreamCreateWithPriority", address(stream_create)},
      {"cuStreamDestroy", address(stream_destroy)},
      {"cuStreamWaitEvent", address(stream_wait_event)},
      {"cuStreamSynchronize", address(stream_synchronize)},
      {"cuLaunchHostFunc", address(launch_host_function)},
      {"cuMemHostAlloc", address(host_alloc)},
      {"cuMemFreeHost", address(host_free)},
      {"cuStreamWriteValue64", address(stream_write)},
      {"cuEventCreate", address(event_create)},
      {"cuEventDestroy", address(event_destroy)},
      {"cuEventRecord", address(event_record)},
      {"cuEventQuery", address(event_query)},
  };
  const auto found = functions.find(name);
  *function = found == functions.end() || version < 12000 ? nullptr : found->second;  // some were others before
  return *function ? success : not_found;
}

Status ncclGetVersion(int* version) { return *version = 22809, success; }

Status ncclGetUniqueId(UniqueId* id) {
  *id = {};
  const Held held(lock);
  std::snprintf(id->bytes, sizeof id->bytes, "stub-%d-%lu-%08x", getpid(), ++world.last_handle, std::random_device()());
  return success;
}

Status ncclCommInitRankConfig(void** comm, int ranks, UniqueId id, int rank, Config* config) {
  if (!context) die("ncclCommInitRankConfig on a thread without a context");
  if (told_to_fail(__func__)) return system_error;
  if (ranks != 2 || rank < 0 || rank > 1) return failed(invalid_argument, "rank " + std::to_string(rank) + " of " + std::to_string(ranks));
  if (const char* wrong = what_is_wrong_with(*config)) return failed(invalid_argument, wrong);
  const int socket = meet(id, rank);
  if (socket < 0) return failed(system_error, "rank 0 is there already");
  const Held held(lock);
  world.comms[*comm = new_handle()] = std::make_shared<Comm>(Comm{rank, socket});
  return success;
}

Status ncclGroupStart() { return ++depth, success; }

Status ncclGroupEnd() {
  if (!depth) die("the end of a group that nobody began");
  return --depth ? success : launch_group();
}

Status ncclSend(const void* data, std::size_t count, int type, int peer, void* comm, void* stream) {
  ncclGroupStart();  // a group of its own where there is no other
  const Status added = add(__func__, true, data, count, type, peer, comm, stream);
  return std::max(added, ncclGroupEnd());
}

Status ncclRecv(void* data, std::size_t count, int type, int peer, void* comm, void* stream) {
  ncclGroupStart();
  const Status added = add(__func__, false, data, count, type, peer, comm, stream);
  return std::max(added, ncclGroupEnd());
}

Status ncclCommGetAsyncError(void* handle, Status* error) {
  const auto comm = find_comm(handle, __func__);
  const bool fails = told_to_fail(__func__);
  const Held held(lock);
  *error = comm->error;
  return fails ? system_error : success;
}

Status ncclCommFinalize(void* handle) {
  const auto comm = find_comm(handle, __func__);
  if (told_to_fail(__func__)) return system_error;
  Held held(lock);
  comm->finalized = true;
  changed.wait(held, [&] { return comm->under_way == 0; });
  return success;
}

Status ncclCommDestroy(void* comm) {
  const bool fails = told_to_fail(__func__);
  destroy(comm, __func__, false);
  return fails ? system_error : success;
}

Status ncclCommAbort(void* comm) {
  const bool fails = told_to_fail(__func__);
  destroy(comm, __func__, true);
  return fails ? system_error : success;
}

const char* ncclGetErrorString(Status status) {
  return status == system_error ? "unhandled system error" : status == remote_error ? "remote process exited" : "invalid argument";
}

const char* ncclGetLastError(void*) {
  const Held held(lock);
  return world.last_error;
}

}  // extern "C"
