// Tests of a link's values, streams, starts and ends, without Python and without a GPU. Built with the sanitizers (tests/test_native.py
// builds and runs them). Arguments: a library that stands for libcuda and libnccl, and how many transfers the long cases make. Each case
// runs in a process of its own.
#include "link_test.h"

#include <algorithm>
#include <deque>
#include <future>
#include <numeric>
#include <optional>
#include <stdexcept>

using namespace pymesh3d;
using std::chrono::microseconds;
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
  std::deque<Transfer> under_way;
  End end(machine, rank);
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
    for (look(); under_way.size() > 8; look()) std::this_thread::sleep_for(microseconds(100));
  }
  for (; !under_way.empty(); look()) std::this_thread::sleep_for(microseconds(100));
  EXPECT(checked == transfers);
  end.link.check();
  end.link.close();
}

void many_transfers_between_threads() { in_threads(many_transfers); }

void many_transfers_between_processes() { EXPECT(in_processes(many_transfers) == 0); }

// More than a connection takes before the other end receives: one after the other they would never end.
void both_directions_go_at_once() {
  const int status = in_processes([](const Machine& machine, int rank) {
    const Numbers sent(1 << 20, 5 + rank);
    Numbers received(1 << 20);
    End end(machine, rank);
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
    Numbers sent(1000, -1), received(1000);
    std::promise<void> gate;
    End end(machine, rank);
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
    Numbers first(100, rank), second(100, 2 * rank), third(100, 3 * rank);
    End end(machine, rank);
    if (rank == 1) {
      end.wait_for(end.send(first));
      go_on.get_future().wait();
      end.wait_for(end.send(second));
      go_on_again.get_future().wait();
      end.wait_for(end.send(third));
      return end.link.close();
    }
    const Computing other(machine);
    std::promise<void> gate;
    EXPECT(end.receive(first) == 1);
    other.run([&] { gate.get_future().wait(); });
    end.link.join(1, other.stream);  // gets to it when transfers 2 and 3 are under way, one of them with the event of the first
    const std::string too_early = text_of<std::out_of_range>([&] { end.link.join(2, other.stream); });
    EXPECT(too_early == "transfer 2 between rank 4 and rank 5 has not been started");
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
    end.wait_for(2);  // the host is told last
    EXPECT(second[0] == 20 && seen == 1 && end.link.finished() == 2);
    go_on_again.set_value();
    other.synchronize();
    end.wait_for(3);
    EXPECT(seen == 3 && end.link.finished() == 3);
    end.link.close();
  });
}

// Starts and ends.

void starting_without_a_peer_ends_in_time() {
  const Machine machine;
  std::string text;
  EXPECT(seconds_of([&] { text = text_of<NcclError>([&] { End(machine, 0, {0, 0, 0.3}); }); }) < 5.0);
  EXPECT(has(text, "ncclCommInitRankConfig between rank 4 and rank 5 took longer than 0.3"));
  EXPECT(machine.alive() == 0);
}

void connecting_that_hangs_ends_in_time() {
  const int status = in_processes([](const Machine& machine, int rank) {
    if (rank == 0) machine.hang("ncclSend", 1000);
    const std::string text = text_of<NcclError>([&] { End(machine, rank, {0, 0, rank == 0 ? 0.3 : 1.0}); });
    const std::string slow = rank == 0 ? "connecting between rank 4 and rank 5" : "the first transfer between rank 5 and rank 4";
    EXPECT(has(text, slow + " took longer than " + (rank == 0 ? "0.3 s" : "1 s")));
    std::this_thread::sleep_for(milliseconds(1300));  // the call returns to a link that is no more
  });
  EXPECT(status == 0);
}

// What a start that fails says.
std::string refused(const Machine& machine, const NcclOptions& options = {0, 0, soon}) {
  const std::string text = text_of<std::runtime_error>([&] { End(machine, 0, options); });
  EXPECT(machine.alive() == 0);
  return text;
}

void starting_that_fails_says_why() {
  const Machine machine;
  const std::string call = "ncclCommInitRankConfig between rank 4 and rank 5 failed: ";
  machine.fail("ncclCommInitRankConfig", 1);
  EXPECT(refused(machine) == call + "unhandled system error (2): ncclCommInitRankConfig was told to fail");
  const std::string lost = "cuCtxSetCurrent failed: unspecified launch failure (719)";
  machine.fail("cuCtxSetCurrent", 1);
  EXPECT(text_of<GpuError>([&] { machine.use_context(); }) == lost);
#ifndef __SANITIZE_THREAD__  // it does not see how the standard library counts who holds an exception that goes from thread to thread
  machine.fail("cuCtxSetCurrent", 1);
  EXPECT(refused(machine) == lost);
#endif
  EXPECT(refused(machine, {4, 2, soon}) == call + "invalid argument (4): numbers of CTAs that make no sense");
  EXPECT(has(refused(machine, {1, 2, 0.2}), "took longer than 0.2"));
  EXPECT(refused(machine) == call + "unhandled system error (2): rank 0 is there already");
}

// Rank 0 fails between the two steps of a start, or in the second.
void starting_that_fails_halfway_leaves_nothing_behind() {
  for (const std::string fails : {"ncclSend", "cuStreamCreateWithPriority", "cuEventQuery"}) {
    const int status = in_processes([&](const Machine& machine, int rank) {
      Numbers scratch(1);
      if (rank == 0) machine.fail(fails.c_str(), 1);
      const std::string text = text_of<std::runtime_error>(
          [&] { Link(machine.gpu, machine.nccl, machine.id, ends(rank), piece(scratch).data, {0, 0, rank == 0 ? soon : 1.0}); });
      EXPECT(rank == 1 || has(text, (fails == "ncclSend" ? "connecting between rank 4 and rank 5" : fails) + " failed"));
    });
    EXPECT(status == 0);
  }
}

// Rank 0 fails in the last step of a start.
void starting_that_fails_at_the_end_gives_the_counter_back() {
  const int status = in_processes([](const Machine& machine, int rank) {
    if (rank == 1) return (void)End(machine, rank);
    machine.fail("cuStreamWriteValue64", 1);
    EXPECT(has(text_of<std::runtime_error>([&] { End(machine, rank); }), "cuStreamWriteValue64 failed"));
    EXPECT(machine.host_memory() == 0);
  });
  EXPECT(status == 0);
}

void end_without_close_does_not_wait() {
  with_silent_peer([](const Machine& machine, std::optional<End>& end) {
    Numbers numbers(100);
    end->receive(numbers);
    end->send(numbers);
    machine.hang("cuMemFreeHost", 2000);  // which waits for the GPU, and nobody knows what that does
    EXPECT(seconds_of([&] { end.reset(); }) < 0.9);
  });
}

void closed_link_says_so() {
  in_threads([](const Machine& machine, int rank) {
    Numbers numbers(100);
    End end(machine, rank);
    end.wait_for(rank ? end.send(numbers) : end.receive(numbers));
    end.link.close();
    end.link.close();
    EXPECT(end.link.abort(0.0));
    const std::string gone = between(rank) + " failed: the communicator has been closed";
    EXPECT(text_of<NcclError>([&] { end.send(numbers); }) == "a transfer " + gone);
    EXPECT(text_of<NcclError>([&] { end.link.check(); }) == "ncclCommGetAsyncError " + gone);
    EXPECT(end.link.finished() == 1);
  });
}

void closed_link_gives_all_back() {
  const int status = in_processes([](const Machine& machine, int rank) {
    for (int times : {1, 2}) {
      std::optional<End> end(std::in_place, machine, rank);
      EXPECT(machine.host_memory() == 1);
      for (int n = 0; n < times; ++n) end->link.close();
      end.reset();
      EXPECT(machine.host_memory() == 0);
    }
  });
  EXPECT(status == 0);
}

// When the stream that writes there has come to the last transfer, and not at all if that takes too long: whoever gives it back waits too.
void closed_link_gives_its_counter_back_after_the_last_write() {
  for (const int late : {200, 1000}) {
    const int status = in_processes([=](const Machine& machine, int rank) {
      const Numbers sent(100, rank);
      Numbers received(100);
      std::optional<End> end(std::in_place, machine, rank);
      end->wait_for(end->exchange(sent, received));
      machine.hang("a write", late);
      end->link.join(end->exchange(sent, received), end->computing.stream);
      end->computing.synchronize();
      end->link.close();
      EXPECT(end->link.finished() == (late == 200 ? 2 : 1));
      end.reset();
      EXPECT(machine.host_memory() == (late == 200 ? 0 : 1));
    });
    EXPECT(status == 0);
  }
}

// A transfer that nobody can follow ends the link, and nothing is counted twice.
void transfer_that_cannot_be_followed_ends_the_link() {
  const int status = in_processes([](const Machine& machine, int rank) {
    Numbers numbers(100), others(100);
    End end(machine, rank);
    if (rank == 0) {
      machine.fail("cuStreamWriteValue64", 1);
      EXPECT(has(text_of<std::runtime_error>([&] { end.send(numbers); }), "cuStreamWriteValue64 failed"));
      const std::string start = "a transfer between rank 4 and rank 5 failed: cuStreamWriteValue64";
      for (int n = 0; n < 3; ++n) EXPECT(has(text_of<NcclError>([&] { end.send(numbers); }), start));
      EXPECT(has(text_of<NcclError>([&] { end.link.join(1, end.computing.stream); }), "cuStreamWriteValue64"));
      EXPECT(end.link.abort(soon));
    } else {
      end.receive(numbers);
      end.receive(others);
      end.trouble();
    }
  });
  EXPECT(status == 0);
}

// And waits until NCCL has given up.
void close_that_fails_aborts() {
  const int status = in_processes([](const Machine& machine, int rank) {
    End end(machine, rank);
    if (rank == 1) return end.link.close();
    machine.fail("ncclCommFinalize", 1);
    machine.hang("ncclCommAbort", 300);
    EXPECT(seconds_of([&] { end.link.close(); }) >= 0.3);
    EXPECT(has(text_of<NcclError>([&] { end.link.check(); }), between(rank) + " failed: the communicator could not be closed"));
  });
  EXPECT(status == 0);
}

void close_that_hangs_ends_in_time() {
  const int status = in_processes([](const Machine& machine, int rank) {
    std::optional<End> end(std::in_place, machine, rank, NcclOptions{0, 0, rank == 0 ? 0.3 : soon});
    if (rank == 1) return end->link.close();
    machine.hang("ncclCommDestroy", 2000);
    EXPECT(seconds_of([&] { end->link.close(); }) < 1.5);
    end.reset();
    while (machine.alive()) std::this_thread::sleep_for(milliseconds(1));
  });
  EXPECT(status == 0);
}

// A peer that has closed before may look like a lost one.
void errors_do_not_matter_to_a_link_that_closes() {
  in_threads([](const Machine& machine, int rank) {
    End end(machine, rank);
    if (rank == 1) return end.link.close();
    machine.hang("ncclCommFinalize", 300);
    std::thread closing([&] {
      machine.use_context();
      end.link.close();
    });
    machine.until_it_hangs("ncclCommFinalize");
    machine.fail("ncclCommGetAsyncError", 1);
    closing.join();
    EXPECT(has(text_of<NcclError>([&] { end.link.check(); }), "has been closed"));
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

}  // namespace

int main(int count, char** arguments) {
  EXPECT(count == 3);
  library = arguments[1];
  transfers = std::atoi(arguments[2]);
  if (transfers > quick) time_limit = 180;
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
  RUN(starting_that_fails_at_the_end_gives_the_counter_back);
  RUN(end_without_close_does_not_wait);
  RUN(closed_link_says_so);
  RUN(closed_link_gives_all_back);
  RUN(closed_link_gives_its_counter_back_after_the_last_write);
  RUN(transfer_that_cannot_be_followed_ends_the_link);
  RUN(close_that_fails_aborts);
  RUN(close_that_hangs_ends_in_time);
  RUN(errors_do_not_matter_to_a_link_that_closes);
  RUN(close_destroys_once);
  return failures;
}
