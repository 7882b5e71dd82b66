// The half that stands for libnccl.so.2.
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <climits>
#include <cstdint>
#include <cstdio>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "stub.h"

using namespace stub;
using std::chrono::microseconds;
using std::chrono::milliseconds;

namespace {

constexpr Status system_error = 2, invalid_argument = 4, remote_error = 6;

struct Comm {
  int rank;
  std::array<int, 2> sockets;       // the second is for the word that something has been received
  std::multiset<void*> under_way{};  // the streams of groups that have not ended
  Status error = success;
  bool finalized = false, aborted = false;
};

struct Operation {
  bool sends, awaited;
  char* data;
  std::size_t bytes;
  std::shared_ptr<Comm> comm;
  void* stream;
};

struct World {
  std::map<void*, std::shared_ptr<Comm>> comms;
  std::mt19937 delays;
  unsigned longest_delay = 0;  // microseconds
  bool rendezvous = false;
  std::set<std::string> texts{""};
  const char* last_error = "";
};

World& world = *new World;  // never destroyed, as is the lock

thread_local int depth = 0;  // of groups
thread_local Status group_error = success;
thread_local std::vector<Operation> operations;

Status failed(Status status, const std::string& text) {
  const Held held(lock);
  remember(text);
  return status;
}

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

// Rank 0 waits for rank 1 under a name outside the file system. False if that is taken.
bool meet(const UniqueId& id, int rank, std::array<int, 2>& sockets) {
  sockaddr_un address{AF_UNIX, {}};
  std::copy(id.bytes, id.bytes + sizeof address.sun_path - 1, address.sun_path + 1);
  const auto* where = reinterpret_cast<const sockaddr*>(&address);
  const auto make = [] { return socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0); };
  if (rank == 1) {
    for (int& mine : sockets)
      for (mine = make(); connect(mine, where, sizeof address) != 0;) std::this_thread::sleep_for(milliseconds(1));
    return true;
  }
  const int door = make();
  const bool listens = bind(door, where, sizeof address) == 0 && listen(door, 2) == 0;
  if (listens)
    for (int& met : sockets) met = accept(door, nullptr, nullptr);
  close(door);
  return listens;
}

std::shared_ptr<Comm> find_comm(void* handle, const char* function) {
  const Held held(lock);
  const auto found = world.comms.find(handle);
  if (found == world.comms.end()) die(std::string(function) + " of a communicator that does not exist, or no longer");
  return found->second;
}

// What is under way ends at once, or is waited for.
void destroy(void* handle, const char* function, bool at_once) {
  if (!has_context()) die(std::string(function) + " on a thread without a context");
  const auto comm = find_comm(handle, function);
  Held held(lock);
  world.comms.erase(handle);
  comm->aborted = at_once;
  if (at_once)
    for (const int socket : comm->sockets) shutdown(socket, SHUT_RDWR);
  changed.notify_all();
  changed.wait(held, [&] { return comm->under_way.empty(); });
  for (const int socket : comm->sockets) close(socket);
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

// The number of bytes goes ahead, so that ends which do not match are noticed, and whether the sender waits until it hears of the arrival.
bool move(const Operation& operation) {
  std::array<std::uint64_t, 2> head{operation.bytes, operation.awaited};
  char* const start = reinterpret_cast<char*>(head.data());
  char word = 0;
  const auto [data, words] = operation.comm->sockets;
  if (operation.sends) {
    const bool sent = all(send, data, start, sizeof head) && all(send, data, operation.data, operation.bytes);
    return sent && (!operation.awaited || all(recv, words, &word, 1));
  }
  if (!all(recv, data, start, sizeof head)) return false;
  const auto [bytes, awaited] = head;
  if (bytes != operation.bytes) die(std::to_string(bytes) + " bytes sent, " + std::to_string(operation.bytes) + " expected");
  return all(recv, data, operation.data, operation.bytes) && (!awaited || all(send, words, &word, 1));
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
  comm.under_way.erase(comm.under_way.find(group[0].stream));
  changed.notify_all();
}

void begin_group() { ++depth; }

Status end_group() {
  if (--depth) return success;
  const auto group = std::exchange(operations, {});
  if (const Status error = std::exchange(group_error, success); error != success) return error;
  if (group.empty()) return success;
  for (const Operation& other : group)
    if (other.comm != group[0].comm || other.stream != group[0].stream) die("a group of several communicators or streams");
  Held held(lock);
  group[0].comm->under_way.insert(group[0].stream);
  held.unlock();
  enqueue(group[0].stream, [group] { run_group(group); });
  return success;
}

// Keeps an operation until its group ends.
Status add(const char* function, bool sends, const void* data, std::size_t count, int type, int peer, void* handle, void* stream) {
  const auto comm = find_comm(handle, function);
  if (!has_context() || !data || !count || type != 0 || peer != 1 - comm->rank)
    die(std::string(function) + " without context or data, of something else than bytes, or with a wrong peer");
  if (told_to_fail(function)) return group_error = system_error;
  const Held held(lock);
  if (comm->finalized) die(std::string(function) + " on a communicator that has been finalized");
  if (comm->aborted) return group_error = remote_error;  // while it was hanging
  operations.push_back({sends, world.rendezvous, static_cast<char*>(const_cast<void*>(data)), count, comm, stream});
  return success;
}

}  // namespace

bool stub::nccl_runs_on(void* stream) {
  return std::any_of(world.comms.begin(), world.comms.end(), [=](const auto& comm) { return comm.second->under_way.count(stream); });
}

void stub::remember(const std::string& text) { world.last_error = world.texts.insert(text).first->c_str(); }

extern "C" {

// What tests ask for, in this process: that every group waits up to so long before it moves anything; that a send ends when it has been
// received, as one does that is larger than NCCL's buffers, and not before; and how many streams, events and communicators there are.
void stub_delay(unsigned longest, unsigned seed) {
  const Held held(lock);
  world.longest_delay = longest;
  world.delays.seed(seed);
}

void stub_rendezvous(int on) {
  const Held held(lock);
  world.rendezvous = on;
}

int stub_alive() {
  const Held held(lock);
  return static_cast<int>(streams_and_events() + world.comms.size());
}

Status ncclGetVersion(int* version) { return *version = 22809, success; }

Status ncclGetUniqueId(UniqueId* id) {
  *id = {};
  const Held held(lock);
  std::snprintf(id->bytes, sizeof id->bytes, "stub-%d-%p-%08x", getpid(), new_handle(), std::random_device()());
  return success;
}

Status ncclCommInitRankConfig(void** comm, int ranks, UniqueId id, int rank, Config* config) {
  if (!has_context()) die("ncclCommInitRankConfig on a thread without a context");
  if (told_to_fail(__func__)) return system_error;
  if (ranks != 2 || rank < 0 || rank > 1) return failed(invalid_argument, "rank " + std::to_string(rank) + " of " + std::to_string(ranks));
  if (const char* wrong = what_is_wrong_with(*config)) return failed(invalid_argument, wrong);
  const auto made = std::make_shared<Comm>(Comm{rank, {}});
  if (!meet(id, rank, made->sockets)) return failed(system_error, "rank 0 is there already");
  const Held held(lock);
  world.comms[*comm = new_handle()] = made;
  return success;
}

Status ncclGroupStart() {
  if (told_to_fail(__func__)) return system_error;
  return begin_group(), success;
}

Status ncclGroupEnd() {
  if (!depth) die("the end of a group that nobody began");
  if (told_to_fail(__func__)) group_error = system_error;
  return end_group();
}

Status ncclSend(const void* data, std::size_t count, int type, int peer, void* comm, void* stream) {
  begin_group();  // one of its own where there is no other
  const Status added = add(__func__, true, data, count, type, peer, comm, stream);
  return std::max(added, end_group());
}

Status ncclRecv(void* data, std::size_t count, int type, int peer, void* comm, void* stream) {
  begin_group();
  const Status added = add(__func__, false, data, count, type, peer, comm, stream);
  return std::max(added, end_group());
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
  if (!has_context()) die("ncclCommFinalize on a thread without a context");
  if (told_to_fail(__func__)) return system_error;
  Held held(lock);
  comm->finalized = true;
  changed.wait(held, [&] { return comm->under_way.empty(); });
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
