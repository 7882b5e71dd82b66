// Tests of the transport without Python and without a GPU, built with the sanitizers (tests/test_native.py builds and runs them).
// Arguments: a library that stands for libcuda and libnccl, and how many transfers the long cases make. Each case runs in a process of its
// own.
#include "link_test.h"

#include <signal.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <future>
#include <numeric>
#include <optional>
#include <stdexcept>

using namespace pymesh3d;
using std::chrono::milliseconds;

namespace {

constexpr int quick = 1000;

int transfers = quick;

// Values and order.

Numbers message(int sender, int number) {
  Numbers numbers(1 + number * 37 % 3000);
  std::iota(numbers.begin(), numbers.end(), 100000 * number + sender);
  return numbers;
}

// Transfers both ways and one way, up to 8 of them under way. What has finished is looked at and written over at once.
void many_transfers(const Machine& machine, int rank) {
  machine.delay(transfers > quick ? 1000 : 100, 7 + rank);
  struct Transfer {
    Numbers sent, received;
  };
  End end(machine, rank);
  std::deque<Transfer> under_way;
  int checked = 0;
  const auto look = [&] {
    for (const int finished = static_cast<int>(end.link.finished()); checked < finished; under_way.pop_front()) {
      Transfer& oldest = under_way.front();
      ++checked;
      EXPECT(oldest.received.empty() || oldest.received == message(1 - rank, checked));
      std::fill(oldest.sent.begin(), oldest.sent.end(), -1);
    }
  };
  for (int number = 1; number <= transfers; ++number) {
    const bool sends = number % 3 != 1 + rank, receives = number % 3 != 2 - rank;
    under_way.push_back({sends ? message(rank, number) : Numbers{}, Numbers(receives ? message(0, number).size() : 0)});
    EXPECT(end.exchange(under_way.back().sent, under_way.back().received) == static_cast<unsigned>(number));
    for (look(); under_way.size() > 8; look()) std::this_thread::yield();
  }
  for (; !under_way.empty(); look()) std::this_thread::yield();
  EXPECT(checked == transfers);
  end.link.check();
  end.link.close();
}

void many_transfers_between_threads() { in_threads(many_transfers); }

void many_transfers_between_processes() { EXPECT(in_processes(many_transfers) == 0); }

// More than a connection takes before the other end receives: one after the other they would never end.
void both_directions_go_at_once() {
  const int status = in_processes([](const Machine& machine, int rank) {
    End end(machine, rank);
    const Numbers sent(1 << 20, 5 + rank);
    Numbers received(1 << 20);
    end.wait_for(end.exchange(sent, received));
    EXPECT(received == Numbers(1 << 20, 6 - rank));
    end.link.close();
  });
  EXPECT(status == 0);
}

// Streams.

// A transfer takes what was computed before it, and neither waits for what is computed later nor holds it up.
void transfer_runs_beside_the_stream_that_computes() {
  in_threads([](const Machine& machine, int rank) {
    End end(machine, rank);
    Numbers sent(1000, -1), received(1000);
    std::promise<void> gate;
    end.computing.run([&] {
      std::this_thread::sleep_for(milliseconds(100));
      std::fill(sent.begin(), sent.end(), 7 + rank);
    });
    const auto number = end.exchange(sent, received);
    end.computing.run([&] { gate.get_future().wait(); });
    EXPECT(end.link.finished() == 0);
    end.wait_for(number);
    EXPECT(received == Numbers(1000, 8 - rank));
    gate.set_value();
    end.computing.synchronize();
    end.link.close();
  });
}

// Rank 1 sends the first of three at once, each other when it is told to. Rank 0 sees each at its time, on streams and on the host.
void join_waits_for_its_transfer_only() {
  std::promise<void> go_on, go_on_again;
  in_threads([&](const Machine& machine, int rank) {
    End end(machine, rank);
    if (rank == 1) {
      const Numbers first(100, 1), second(100, 2), third(100, 3);
      end.wait_for(end.send(first));
      go_on.get_future().wait();
      end.wait_for(end.send(second));
      go_on_again.get_future().wait();
      end.wait_for(end.send(third));
      return end.link.close();
    }
    Numbers first(100), second(100), third(100);
    const Computing other(machine);
    std::promise<void> gate;
    EXPECT(end.receive(first) == 1);
    other.run([&] { gate.get_future().wait(); });
    end.link.join(1, other.stream);  // gets to it when transfers 2 and 3 are under way, one of them with the event of the first
    EXPECT(has(text_of<std::out_of_range>([&] { end.link.join(2, other.stream); }), "transfer 2 has not been started"));
    end.wait_for(1);
    EXPECT(end.receive(second) == 2 && end.receive(third) == 3);
    end.link.join(1, other.stream);
    int seen = 0;
    other.run([&] { seen = first[99]; });
    gate.set_value();
    other.synchronize();
    EXPECT(seen == 1 && end.link.finished() == 1 && second[0] == 0);
    end.link.join(2, end.computing.stream);
    end.computing.run([&] { second[0] = 10 * second[99]; });
    end.link.join(3, other.stream);
    other.run([&] { seen = third[99]; });
    std::this_thread::sleep_for(milliseconds(50));
    go_on.set_value();
    end.computing.synchronize();
    EXPECT(second[0] == 20 && seen == 1 && end.link.finished() == 2);
    go_on_again.set_value();
    other.synchronize();
    EXPECT(seen == 3 && end.link.finished() == 3);
    end.link.close();
  });
}

// Starts and ends.

// The part of rank 0 while rank 1 does nothing.
void with_silent_peer(const std::function<void(const Machine&, std::optional<End>&)>& part) {
  std::promise<void> ended;
  in_threads([&](const Machine& machine, int rank) {
    std::optional<End> end(std::in_place, machine, rank);
    if (rank == 1) return ended.get_future().wait();
    part(machine, end);
    ended.set_value();
  });
}

void starting_without_a_peer_ends_in_time() {
  const Machine machine;
  std::string text;
  EXPECT(seconds_of([&] { text = text_of<NcclError>([&] { End(machine, 0, {0, 0, 0.3}); }); }) < 5.0);
  EXPECT(has(text, "ncclCommInitRankConfig between rank 0 and its peer took longer than 0.3"));
  EXPECT(machine.alive() == 0);
}

void connecting_that_hangs_ends_in_time() {
  in_threads([](const Machine& machine, int rank) {
    if (rank == 0) machine.hang("ncclSend", 1000);
    const std::string text = text_of<NcclError>([&] { End(machine, rank, {0, 0, rank == 0 ? 0.3 : 1.0}); });
    EXPECT(has(text, rank == 0 ? "connecting between rank 0 and its peer took longer than 0.3" : "the first transfer of rank 1 took longer than 1 s"));
    std::this_thread::sleep_for(milliseconds(1300));  // the call returns to a link that is no more
  });
}

// What a start that fails says.
std::string refused(const Machine& machine, const NcclOptions& options = {0, 0, soon}) {
  const std::string text = text_of<std::runtime_error>([&] { End(machine, 0, options); });
  EXPECT(machine.alive() == 0);
  return text;
}

void starting_that_fails_says_why() {
  const Machine machine;
  const std::string call = "ncclCommInitRankConfig between rank 0 and its peer failed: ";
  machine.fail("ncclCommInitRankConfig", 1);
  EXPECT(refused(machine) == call + "unhandled system error (2): ncclCommInitRankConfig was told to fail");
  EXPECT(refused(machine, {4, 2, soon}) == call + "invalid argument (4): numbers of CTAs that make no sense");
  EXPECT(has(refused(machine, {1, 2, 0.2}), "took longer than 0.2"));
  EXPECT(refused(machine) == call + "unhandled system error (2): rank 0 is there already");
}

// Rank 0 fails between the two steps of a start, or in the second.
void starting_that_fails_halfway_leaves_nothing_behind() {
  for (const std::string fails : {"ncclSend", "cuStreamCreateWithPriority"})
    in_threads([&](const Machine& machine, int rank) {
      Numbers scratch(1);
      if (rank == 0) machine.fail(fails.c_str(), fails == "ncclSend" ? 1 : 2);
      const std::string text = text_of<std::runtime_error>(
          [&] { Link(machine.gpu, machine.nccl, machine.id, rank, {piece(scratch).data, 1}, {0, 0, rank == 0 ? soon : 1.0}); });
      EXPECT(rank == 1 || has(text, fails == "ncclSend" ? "connecting between rank 0" : "cuStreamCreateWithPriority failed"));
    });
}

void end_without_close_does_not_wait() {
  with_silent_peer([](const Machine&, std::optional<End>& end) {
    Numbers numbers(100);
    end->receive(numbers);
    end->send(numbers);
    EXPECT(seconds_of([&] { end.reset(); }) < 0.9);
  });
}

void closed_link_says_so() {
  in_threads([](const Machine& machine, int rank) {
    End end(machine, rank);
    Numbers numbers(100);
    end.wait_for(rank ? end.send(numbers) : end.receive(numbers));
    end.link.close();
    end.link.close();
    EXPECT(end.link.abort(0.0));
    const std::string gone = "between rank " + std::to_string(rank) + " and its peer failed: the communicator has been closed";
    EXPECT(text_of<NcclError>([&] { end.send(numbers); }) == "a transfer " + gone);
    EXPECT(text_of<NcclError>([&] { end.link.check(); }) == "ncclCommGetAsyncError " + gone);
    EXPECT(end.link.finished() == 1);
  });
}

// A transfer that nobody can follow ends the link, and nothing is counted twice.
void transfer_that_cannot_be_followed_ends_the_link() {
  const int status = in_processes([](const Machine& machine, int rank) {
    End end(machine, rank);
    Numbers numbers(100);
    if (rank == 0) {
      machine.fail("cuStreamWriteValue64", 1);
      EXPECT(has(text_of<std::runtime_error>([&] { end.send(numbers); }), "cuStreamWriteValue64 failed"));
      for (int n = 0; n < 3; ++n) EXPECT(has(text_of<NcclError>([&] { end.send(numbers); }), "a transfer between rank 0", "cuStreamWriteValue64"));
      EXPECT(has(text_of<NcclError>([&] { end.link.join(1, end.computing.stream); }), "cuStreamWriteValue64"));
    } else {
      Numbers others(100);
      end.receive(numbers);
      end.receive(others);
      while (text_of<NcclError>([&] { end.link.check(); }).empty()) std::this_thread::yield();
    }
  });
  EXPECT(status == 0);
}

void close_that_fails_aborts() {
  in_threads([](const Machine& machine, int rank) {
    End end(machine, rank);
    if (rank == 0) machine.fail("ncclCommFinalize", 1);
    end.link.close();
    EXPECT(has(text_of<NcclError>([&] { end.link.check(); }), "and its peer failed: the communicator "));
  });
}

// Nothing may be done to a communicator after ncclCommDestroy, whatever that returned.
void close_destroys_once() {
  in_threads([](const Machine& machine, int rank) {
    End end(machine, rank);
    if (rank == 0) machine.fail("ncclCommDestroy", 1);
    end.link.close();
    EXPECT(has(text_of<NcclError>([&] { end.link.check(); }), "has been closed"));
  });
}

// What goes wrong.

bool has_gone(const Link& link) {
  const std::string text = text_of<NcclError>([&] { link.check(); });
  return text.find("has been aborted") != std::string::npos || text.find("process exited") != std::string::npos;
}

void lost_peer_is_noticed_and_abort_ends_the_wait() {
  const int status = in_processes([](const Machine& machine, int rank) {
    End end(machine, rank);
    Numbers numbers(100, rank);
    end.wait_for(rank ? end.send(numbers) : end.receive(numbers));
    if (rank == 1) raise(SIGKILL);
    end.link.check();
    const auto number = end.receive(numbers);
    std::string text;
    while (text.empty()) text = text_of<NcclError>([&] { end.link.check(); });
    EXPECT(has(text, "what was under way between rank 0 and its peer failed: remote process exited (6): the peer has closed"));
    EXPECT(end.link.abort(soon));
    end.wait_for(number);
  });
  EXPECT(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
}

// The host waits for a stream that waits for a transfer that never comes; another thread aborts.
void abort_ends_every_wait() {
  with_silent_peer([](const Machine&, std::optional<End>& end) {
    Numbers numbers(100);
    end->link.join(end->receive(numbers), end->computing.stream);
    std::thread watch([&] {
      std::this_thread::sleep_for(milliseconds(50));
      EXPECT(end->link.abort(soon));
    });
    EXPECT(seconds_of([&] { end->computing.synchronize(); }) < 10.0);
    watch.join();
    EXPECT(has(text_of<NcclError>([&] { end->receive(numbers); }), "has been aborted"));
    EXPECT(has(text_of<NcclError>([&] { end->link.check(); }), "has been aborted"));
    EXPECT(end->link.abort(soon));
    end->link.close();
  });
}

// Nobody looks and nobody aborts: the host waits for the stream.
void transfer_that_never_comes_is_given_up() {
  in_threads([](const Machine& machine, int rank) {
    End end(machine, rank, {0, 0, 0.5});
    Numbers numbers(100);
    if (rank == 0) end.link.join(end.receive(numbers), end.computing.stream);
    const double waited = seconds_of([&] { end.computing.synchronize(); });
    EXPECT(rank == 1 ? waited < 0.4 : 0.4 < waited && waited < 5.0);
    std::this_thread::sleep_for(milliseconds(800));
    if (rank == 1) return end.link.check();  // a link without transfers has all the time there is
    const std::string reason = "transfer 1 has not finished within 0.5";
    EXPECT(has(text_of<NcclError>([&] { end.send(numbers); }), "a transfer between rank 0 and its peer failed: " + reason));
    EXPECT(has(text_of<NcclError>([&] { end.link.check(); }), reason));
    EXPECT(has(text_of<NcclError>([&] { end.link.join(1, end.computing.stream); }), reason));
  });
}

// Each transfer has the time for itself.
void slow_transfers_are_not_given_up() {
  in_threads([](const Machine& machine, int rank) {
    End end(machine, rank, {0, 0, 0.5});
    std::vector<Numbers> received(8, Numbers(10));
    for (Numbers& numbers : received) {
      if (rank == 0) end.receive(numbers);
      if (rank == 1) end.computing.run([] { std::this_thread::sleep_for(milliseconds(200)); });
      if (rank == 1) end.send(numbers);
    }
    end.wait_for(8);
    end.link.check();
    end.link.close();
  });
}

// The host is stuck in a call that makes a transfer, and so holds the link.
void call_that_is_stuck_is_given_up() {
  in_threads([](const Machine& machine, int rank) {
    End end(machine, rank, {0, 0, 0.3});
    Numbers numbers(100);
    if (rank == 1) return std::this_thread::sleep_for(milliseconds(2200));
    machine.hang("ncclSend", 1800);
    std::thread look([&] {
      std::string text;
      EXPECT(seconds_of([&] { while (text.empty()) text = text_of<NcclError>([&] { end.link.check(); }); }) < 1.6);
      EXPECT(has(text, "transfer 1 has not finished within 0.3"));
    });
    EXPECT(!text_of<NcclError>([&] { end.send(numbers); }).empty());
    look.join();
  });
}

void abort_that_hangs_is_left_alone() {
  with_silent_peer([](const Machine& machine, std::optional<End>& end) {
    machine.hang("ncclCommAbort", 1500);
    EXPECT(seconds_of([&] { EXPECT(!end->link.abort(0.2)); }) < 1.3);
    std::this_thread::sleep_for(milliseconds(1800));
  });
}

// A transfer is stuck in NCCL on another thread.
void abort_does_not_wait_for_a_stuck_call() {
  with_silent_peer([](const Machine& machine, std::optional<End>& end) {
    Numbers numbers(100);
    machine.hang("ncclSend", 1500);
    std::thread stuck([&] {
      machine.use_context();
      EXPECT(has(text_of<NcclError>([&] { end->send(numbers); }), "a transfer between rank 0"));
    });
    std::this_thread::sleep_for(milliseconds(100));
    EXPECT(seconds_of([&] { EXPECT(end->link.abort(1.0)); }) < 1.2);
    stuck.join();
  });
}

// A thread makes one transfer after the other, and is nearly always in NCCL.
void abort_lets_a_call_end_and_no_other_begin() {
  with_silent_peer([](const Machine& machine, std::optional<End>& end) {
    const Numbers numbers(100);
    std::thread busy([&] {
      machine.use_context();
      std::string text;
      while (text.empty()) {
        machine.hang("ncclSend", 100);
        text = text_of<NcclError>([&] { end->send(numbers); });
      }
      EXPECT(has(text, "a transfer between rank 0 and its peer failed: the communicator has been aborted"));
    });
    std::this_thread::sleep_for(milliseconds(100));
    EXPECT(end->link.abort(soon));
    busy.join();
  });
}

// One thread makes transfers, one looks at the link, one aborts it.
void watching_and_aborting_from_other_threads() {
  in_threads([](const Machine& machine, int rank) {
    End end(machine, rank);
    const Numbers sent(10);
    Numbers received(10);
    std::atomic<int> made = 0;
    std::thread look([&] {
      while (!has_gone(end.link)) end.link.finished();
    });
    std::thread abort([&] {
      while (made < 100) std::this_thread::yield();
      EXPECT(end.link.abort(soon));
    });
    std::string text;
    for (; text.empty(); ++made) text = text_of<NcclError>([&] { end.exchange(sent, received); });
    EXPECT(has(text, "a transfer between rank", text.find("process exited") == std::string::npos ? "has been aborted" : "peer"));
    abort.join();
    look.join();
  });
}

void errors_name_call_rank_and_reason() {
  const int status = in_processes([](const Machine& machine, int rank) {
    End end(machine, rank);
    const Numbers sent(100, 4 + rank);
    Numbers received(100);
    if (rank == 0) {
      const auto text_of_transfer = [&](const char* fails) {
        machine.fail(fails, 1);
        return text_of<std::runtime_error>([&] { end.exchange(sent, received); });
      };
      const std::string start = "a transfer between rank 0 and its peer failed: unhandled system error (2): ";
      EXPECT(text_of_transfer("ncclSend") == start + "ncclSend was told to fail");
      EXPECT(text_of_transfer("ncclRecv") == start + "ncclRecv was told to fail");
      EXPECT(text_of_transfer("cuEventRecord") == "cuEventRecord failed: unspecified launch failure (719)");
      EXPECT(text_of_transfer("cuStreamWaitEvent") == "cuStreamWaitEvent failed: unspecified launch failure (719)");
      machine.fail("ncclCommGetAsyncError", 1);
      EXPECT(has(text_of<NcclError>([&] { end.link.check(); }), "ncclCommGetAsyncError between rank 0", "Error was told to fail"));
    }
    // A call that has failed leaves nothing behind: the next is the first.
    EXPECT(end.exchange(sent, received) == 1);
    end.wait_for(1);
    EXPECT(received == Numbers(100, 5 - rank));
    end.link.check();
    end.link.close();
  });
  EXPECT(status == 0);
}

// Runs a case in a process of its own. False, with its name, if it fails.
bool passes(const char* name, void (*run)()) {
  const pid_t child = fork();
  if (!child) {
    alarm(transfers > quick ? 180 : 60);  // what hangs is killed
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

}  // namespace

#define RUN(name) failures += !passes(#name, name)

int main(int count, char** arguments) {
  EXPECT(count == 3);
  library = arguments[1];
  transfers = std::atoi(arguments[2]);
  int failures = 0;
  RUN(many_transfers_between_threads);
  RUN(many_transfers_between_processes);
  if (transfers > quick) return failures;
  RUN(both_directions_go_at_once);
  RUN(transfer_runs_beside_the_stream_that_computes);
  RUN(join_waits_for_its_transfer_only);
  RUN(starting_without_a_peer_ends_in_time);
  RUN(connecting_that_hangs_ends_in_time);
  RUN(starting_that_fails_says_why);
  RUN(starting_that_fails_halfway_leaves_nothing_behind);
  RUN(end_without_close_does_not_wait);
  RUN(closed_link_says_so);
  RUN(transfer_that_cannot_be_followed_ends_the_link);
  RUN(close_that_fails_aborts);
  RUN(close_destroys_once);
  RUN(lost_peer_is_noticed_and_abort_ends_the_wait);
  RUN(abort_ends_every_wait);
  RUN(transfer_that_never_comes_is_given_up);
  RUN(slow_transfers_are_not_given_up);
  RUN(call_that_is_stuck_is_given_up);
  RUN(abort_that_hangs_is_left_alone);
  RUN(abort_does_not_wait_for_a_stuck_call);
  RUN(abort_lets_a_call_end_and_no_other_begin);
  RUN(watching_and_aborting_from_other_threads);
  RUN(errors_name_call_rank_and_reason);
  return failures;
}
