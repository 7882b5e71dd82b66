// What tests of a link need where a library stands for libcuda and libnccl: ranks as threads or processes, streams that compute.
#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "expect.h"
#include "gpu.h"
#include "library.h"
#include "link.h"
#include "nccl.h"

namespace pymesh3d {

inline std::string library;  // its path

// The end of rank 4, which is 0, or that of rank 5, which is 1.
inline Ends ends(int end) { return {{4, 5}, end}; }

inline std::string between(int end) { return end == 0 ? "between rank 4 and rank 5" : "between rank 5 and rank 4"; }

constexpr double soon = 20.0;  // seconds that NCCL has, where a case is not about the limit

// What a process has: the libraries, and what else the one that stands for them can do.
struct Machine {
  std::shared_ptr<const Gpu> gpu = std::make_shared<Gpu>(library);
  std::shared_ptr<const Nccl> nccl = std::make_shared<Nccl>(library);
  Library stub{library};
  void (*hang)(const char*, int) = stub.function<void(const char*, int)>("stub_hang");
  void (*fail)(const char*, int) = stub.function<void(const char*, int)>("stub_fail");
  int (*is_to_hang)(const char*) = stub.function<int(const char*)>("stub_is_to_hang");
  void (*delay)(unsigned, unsigned) = stub.function<void(unsigned, unsigned)>("stub_delay");
  int (*alive)() = stub.function<int()>("stub_alive");
  int (*host_memory)() = stub.function<int()>("stub_host_memory");
  int (*synchronize)(Stream) = driver_function<int(Stream)>("cuStreamSynchronize");
  int (*launch)(Stream, void (*)(void*), void*) = driver_function<int(Stream, void (*)(void*), void*)>("cuLaunchHostFunc");
  UniqueId id = nccl->unique_id();

  Machine() { use_context(); }

  // Each thread has a context of its own.
  void use_context() const { gpu->use(reinterpret_cast<Context>(1)); }

  // Returns when somebody hangs in a call that was told to.
  void until_it_hangs(const char* function) const {
    while (is_to_hang(function)) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }

 private:
  template <typename Signature>
  Signature* driver_function(const char* name) const {
    void* function = nullptr;
    stub.function<int(const char*, void**, int, std::uint64_t)>("cuGetProcAddress")(name, &function, 12000, 0);
    EXPECT(function);
    return reinterpret_cast<Signature*>(function);
  }
};

// A stream that computes.
struct Computing {
  const Machine& machine;
  const Stream stream = machine.gpu->create_stream();

  explicit Computing(const Machine& machine) : machine(machine) {}
  Computing(const Computing&) = delete;
  Computing& operator=(const Computing&) = delete;
  ~Computing() { machine.gpu->destroy_stream(stream); }

  // Work, as a kernel is.
  void run(std::function<void()> work) const {
    const auto call = [](void* kept) {
      const std::unique_ptr<std::function<void()>> work(static_cast<std::function<void()>*>(kept));
      (*work)();
    };
    machine.launch(stream, call, new std::function<void()>(std::move(work)));
  }
  void synchronize() const { machine.synchronize(stream); }
};

using Numbers = std::vector<int>;

inline Piece piece(const Numbers& numbers) { return {reinterpret_cast<std::uintptr_t>(numbers.data()), numbers.size() * sizeof(int)}; }

// One end of a link, and a stream that computes there. What it transfers is declared before it, so that it is there as long.
struct End {
  Computing computing;
  Numbers scratch = Numbers(1);
  Link link;

  End(const Machine& machine, int rank, const NcclOptions& options = {0, 0, soon})
      : computing(machine), link(machine.gpu, machine.nccl, machine.id, ends(rank), piece(scratch).data, options) {}

  std::uint64_t exchange(const Numbers& sent, Numbers& received) { return link.transfer(piece(sent), piece(received), computing.stream).first; }
  std::uint64_t send(const Numbers& sent) { return link.transfer(piece(sent), {}, computing.stream).first; }
  std::uint64_t receive(Numbers& received) { return link.transfer({}, piece(received), computing.stream).first; }

  void wait_for(std::uint64_t number) {
    while (link.finished() < number) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }

  // Waits until something has gone wrong: what the link says then. It looks now and then, so that others get at the communicator too.
  std::string trouble() {
    std::string text;
    while ((text = ::text_of<NcclError>([&] { link.check(); })).empty()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return text;
  }
};

using Part = std::function<void(const Machine&, int rank)>;

inline void in_threads(const Part& part) {
  const Machine machine;
  std::thread other([&] {
    machine.use_context();
    part(machine, 1);
  });
  part(machine, 0);
  other.join();
  EXPECT(machine.alive() == 0);
}

// How rank 1 ended, as waitpid has it.
inline int in_processes(const Part& part) {
  const Machine machine;
  const pid_t child = fork();
  part(machine, child ? 0 : 1);
  EXPECT(machine.alive() == 0);
  if (!child) std::exit(0);
  int status = 0;
  EXPECT(waitpid(child, &status, 0) == child);
  return status;
}

inline double seconds_of(const std::function<void()>& action) {
  const auto began = std::chrono::steady_clock::now();
  action();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
}

template <typename... Words>
bool has(const std::string& text, const Words&... words) {
  const bool all = ((text.find(words) != std::string::npos) && ...);
  if (!all) std::fprintf(stderr, "the text is: %s\n", text.c_str());
  return all;
}

// The part of rank 0 while rank 1 does nothing.
inline void with_silent_peer(const std::function<void(const Machine&, std::optional<End>&)>& part) {
  std::promise<void> ended;
  in_threads([&](const Machine& machine, int rank) {
    std::optional<End> end(std::in_place, machine, rank);
    if (rank == 1) return ended.get_future().wait();
    part(machine, end);
    ended.set_value();
  });
}

inline unsigned time_limit = 60;  // seconds that a case has

// Runs a case in a process of its own. False, with its name, if it fails.
inline bool passes(const char* name, void (*run)()) {
  const pid_t child = fork();
  if (!child) {
    alarm(time_limit);  // what hangs is killed
    run();
    std::exit(0);
  }
  int status = 0;
  EXPECT(waitpid(child, &status, 0) == child);
  if (status == 0) return true;
  const bool killed = WIFSIGNALED(status);
  std::fprintf(stderr, "%s ended with %s %d\n", name, killed ? "signal" : "status", killed ? WTERMSIG(status) : WEXITSTATUS(status));
  return false;
}

}  // namespace pymesh3d

#define RUN(name) failures += !passes(#name, name)
