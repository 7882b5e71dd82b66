// Tests of what goes wrong on a link, without Python and without a GPU: lost peers, limits, aborts, errors. Built with the sanitizers
// (tests/test_native.py builds and runs them). The argument is a library that stands for libcuda and libnccl. Each case runs in a process
// of its own.
#include "link_test.h"

#include <signal.h>

#include <atomic>
#include <optional>

using namespace pymesh3d;
using std::chrono::milliseconds;

namespace {

void lost_peer_is_noticed_and_abort_ends_the_wait() {
  const int status = in_processes([](const Machine& machine, int rank) {
    Numbers numbers(100, rank);
    End end(machine, rank);
    end.wait_for(rank ? end.send(numbers) : end.receive(numbers));
    if (rank == 1) raise(SIGKILL);
    end.link.check();
    const auto number = end.receive(numbers);
    EXPECT(has(end.trouble(), "what was under way between rank 4 and rank 5 failed: remote process exited (6): the peer has closed"));
    EXPECT(end.link.abort(soon));
    end.wait_for(number);
  });
  EXPECT(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
}

void lost_peer_was_waited_for_so_long() {
  in_processes([](const Machine& machine, int rank) {
    Numbers numbers(100, rank);
    End end(machine, rank);
    end.wait_for(rank ? end.send(numbers) : end.receive(numbers));
    if (rank == 1) {
      std::this_thread::sleep_for(milliseconds(500));
      raise(SIGKILL);
    }
    const auto number = end.receive(numbers);
    std::string text;
    const double waited = seconds_of([&] {
      while (text.empty()) {
        std::this_thread::sleep_for(milliseconds(1));
        text = text_of<NcclError>([&] { end.link.join(number, end.computing.stream); });
      }
    });
    const std::string start = "a transfer between rank 4 and rank 5 failed: after ";
    EXPECT(has(text, start, " s of waiting for transfer 2, what was under way between rank 4 and rank 5 failed: remote process exited (6)"));
    const double told = std::atof(text.c_str() + start.size());
    EXPECT(0.1 <= told && told <= waited + 0.1);  // the watch looks every 0.05 s, and rounds
  });
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
    Numbers numbers(100);
    End end(machine, rank, {0, 0, 0.5});
    if (rank == 0) end.link.join(end.receive(numbers), end.computing.stream);
    const double waited = seconds_of([&] { end.computing.synchronize(); });
    EXPECT(rank == 1 ? waited < 0.4 : 0.4 < waited && waited < 5.0);
    std::this_thread::sleep_for(milliseconds(800));
    if (rank == 1) return end.link.check();  // a link without transfers has all the time there is
    const std::string reason = "transfer 1 has not finished within 0.5";
    EXPECT(has(text_of<NcclError>([&] { end.send(numbers); }), "a transfer between rank 4 and rank 5 failed: " + reason));
    EXPECT(has(text_of<NcclError>([&] { end.link.check(); }), reason));
    EXPECT(has(text_of<NcclError>([&] { end.link.join(1, end.computing.stream); }), reason));
  });
}

// Each transfer has the time for itself.
void slow_transfers_are_not_given_up() {
  in_threads([](const Machine& machine, int rank) {
    std::vector<Numbers> received(8, Numbers(10));
    End end(machine, rank, {0, 0, 2.0});
    for (Numbers& numbers : received) {
      if (rank == 0) end.receive(numbers);
      if (rank == 1) end.computing.run([] { std::this_thread::sleep_for(milliseconds(300)); });
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
    Numbers numbers(100);
    End end(machine, rank, {0, 0, 0.3});
    if (rank == 1) return std::this_thread::sleep_for(milliseconds(2200));
    machine.hang("ncclSend", 1800);
    std::thread look([&] {
      EXPECT(seconds_of([&] { EXPECT(has(end.trouble(), "transfer 1 has not finished within 0.3")); }) < 1.6);
    });
    EXPECT(!text_of<NcclError>([&] { end.send(numbers); }).empty());
    look.join();
  });
}

// One that is late, and returns within the courtesy.
void call_that_is_about_to_end_is_not_aborted() {
  std::promise<void> ended;
  in_threads([&](const Machine& machine, int rank) {
    const Numbers numbers(100);
    End end(machine, rank, {0, 0, 0.5});
    if (rank == 1) return ended.get_future().wait();
    machine.hang("ncclSend", 700);
    EXPECT(text_of<NcclError>([&] { end.send(numbers); }).empty());
    EXPECT(has(end.trouble(), "transfer 1 has not finished within 0.5"));
    EXPECT(end.link.abort(soon));
    ended.set_value();
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
      EXPECT(has(text_of<NcclError>([&] { end->send(numbers); }), "a transfer between rank 4 and rank 5"));
    });
    std::this_thread::sleep_for(milliseconds(100));
    EXPECT(seconds_of([&] { EXPECT(end->link.abort(1.0)); }) < 1.2);
    stuck.join();
  });
}

// Half the time, if that is less, is for the stuck call to end.
void abort_of_a_stuck_call_keeps_to_its_limit() {
  with_silent_peer([](const Machine& machine, std::optional<End>& end) {
    const Numbers numbers(100);
    machine.hang("ncclSend", 1500);
    std::thread stuck([&] {
      machine.use_context();
      EXPECT(has(text_of<NcclError>([&] { end->send(numbers); }), "a transfer between rank 4 and rank 5"));
    });
    std::this_thread::sleep_for(milliseconds(100));
    EXPECT(seconds_of([&] { end->link.abort(0.02); }) < 0.5);
    EXPECT(end->link.abort(soon));
    stuck.join();
  });
}

// The call and then NCCL's abort: the time that went by with the one is not there for the other.
void abort_that_hangs_after_a_stuck_call_keeps_to_its_limit() {
  with_silent_peer([](const Machine& machine, std::optional<End>& end) {
    const Numbers numbers(100);
    machine.hang("ncclSend", 1600);
    machine.hang("ncclCommAbort", 1500);
    std::thread stuck([&] {
      machine.use_context();
      text_of<NcclError>([&] { end->send(numbers); });
    });
    machine.until_it_hangs("ncclSend");
    EXPECT(seconds_of([&] { EXPECT(!end->link.abort(1.0)); }) < 1.4);
    stuck.join();
    EXPECT(end->link.abort(soon));
  });
}

// A thread is in NCCL to close: it is not aborted under it, unless it takes long, and goes no further then.
void abort_while_the_link_closes() {
  with_silent_peer([](const Machine& machine, std::optional<End>& end) {
    machine.hang("ncclCommFinalize", 1500);
    std::thread closing([&] {
      machine.use_context();
      end->link.close();
    });
    machine.until_it_hangs("ncclCommFinalize");
    EXPECT(seconds_of([&] { EXPECT(end->link.abort(soon)); }) >= 0.4);
    closing.join();
    EXPECT(has(text_of<NcclError>([&] { end->link.check(); }), "has been aborted"));
  });
}

// The watch learns of an error while a thread is in NCCL.
void error_lets_a_call_end() {
  const int status = in_processes([](const Machine& machine, int rank) {
    Numbers numbers(100);
    End end(machine, rank);
    if (rank == 1) return end.receive(numbers), end.receive(numbers), end.trouble(), void();
    machine.hang("ncclSend", 250);
    std::thread fails([&] {
      std::this_thread::sleep_for(milliseconds(50));
      machine.fail("ncclCommGetAsyncError", 1);
    });
    EXPECT(text_of<NcclError>([&] { end.send(numbers); }).empty());
    fails.join();
    EXPECT(has(end.trouble(), "ncclCommGetAsyncError between rank 4 and rank 5 failed: ", "was told to fail"));
    EXPECT(end.link.abort(soon));
  });
  EXPECT(status == 0);
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
      EXPECT(has(text, "a transfer between rank 4 and rank 5 failed: the communicator has been aborted"));
    });
    std::this_thread::sleep_for(milliseconds(100));
    EXPECT(end->link.abort(soon));
    busy.join();
  });
}

// One thread makes transfers, one looks at the link, one aborts it.
void watching_and_aborting_from_other_threads() {
  in_threads([](const Machine& machine, int rank) {
    const Numbers sent(10);
    Numbers received(10);
    End end(machine, rank);
    std::atomic<int> made = 0;
    std::thread look([&] {
      const std::string text = end.trouble();
      EXPECT(text.find("has been aborted") != std::string::npos || has(text, "process exited"));
    });
    std::thread abort([&] {
      while (made < 100) std::this_thread::sleep_for(milliseconds(1));
      EXPECT(end.link.abort(soon));
    });
    std::string text;
    for (; text.empty(); ++made) text = text_of<NcclError>([&] { end.exchange(sent, received); });
    made = 100;  // the other end may have been quicker
    EXPECT(has(text, "a transfer " + between(rank), text.find("process exited") == std::string::npos ? "has been aborted" : "peer"));
    abort.join();
    look.join();
  });
}

void errors_name_call_rank_and_reason() {
  const int status = in_processes([](const Machine& machine, int rank) {
    const Numbers sent(100, 4 + rank);
    Numbers received(100);
    End end(machine, rank);
    if (rank == 0) {
      const auto text_of_transfer = [&](const char* fails) {
        machine.fail(fails, 1);
        return text_of<std::runtime_error>([&] { end.exchange(sent, received); });
      };
      const std::string start = "a transfer between rank 4 and rank 5 failed: unhandled system error (2): ";
      EXPECT(text_of_transfer("ncclSend") == start + "ncclSend was told to fail");
      EXPECT(text_of_transfer("ncclRecv") == start + "ncclRecv was told to fail");
      EXPECT(text_of_transfer("ncclGroupStart") == start + "ncclGroupStart was told to fail");
      EXPECT(text_of_transfer("ncclGroupEnd") == start + "ncclGroupEnd was told to fail");
      EXPECT(text_of_transfer("cuEventRecord") == "cuEventRecord failed: unspecified launch failure (719)");
      EXPECT(text_of_transfer("cuStreamWaitEvent") == "cuStreamWaitEvent failed: unspecified launch failure (719)");
      machine.fail("ncclCommGetAsyncError", 1);
      const std::string text = text_of<NcclError>([&] { end.link.check(); });
      EXPECT(has(text, "ncclCommGetAsyncError between rank 4 and rank 5", "Error was told to fail"));
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

}  // namespace

int main(int count, char** arguments) {
  EXPECT(count == 2);
  library = arguments[1];
  int failures = 0;
  RUN(lost_peer_is_noticed_and_abort_ends_the_wait);
  RUN(lost_peer_was_waited_for_so_long);
  RUN(abort_ends_every_wait);
  RUN(transfer_that_never_comes_is_given_up);
  RUN(slow_transfers_are_not_given_up);
  RUN(call_that_is_stuck_is_given_up);
  RUN(call_that_is_about_to_end_is_not_aborted);
  RUN(abort_that_hangs_is_left_alone);
  RUN(abort_does_not_wait_for_a_stuck_call);
  RUN(abort_of_a_stuck_call_keeps_to_its_limit);
  RUN(abort_that_hangs_after_a_stuck_call_keeps_to_its_limit);
  RUN(abort_while_the_link_closes);
  RUN(error_lets_a_call_end);
  RUN(abort_lets_a_call_end_and_no_other_begin);
  RUN(watching_and_aborting_from_other_threads);
  RUN(errors_name_call_rank_and_reason);
  return failures;
}
