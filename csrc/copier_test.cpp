// Tests of copies, without Python and without a GPU. Built with the sanitizers (tests/test_native.py builds and runs them). Argument: a
// library that stands for libcuda and libnccl. Each case runs in a process of its own.
#include "copier.h"

#include <algorithm>
#include <atomic>
#include <thread>
#include <vector>

#include "link_test.h"

using namespace pymesh3d;

namespace {

using Flag = std::atomic<std::uint32_t>;

// Memory to which a piece is copied, and its flag.
struct Place {
  Numbers memory = Numbers(1000);
  Flag flag{0};

  std::uintptr_t number() { return reinterpret_cast<std::uintptr_t>(&flag); }
  void wait_for(std::uint32_t value) const {
    while (flag != value) std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
};

Numbers numbers_from(int first) {
  Numbers numbers(1000);
  for (int& number : numbers) number = 0x7f000000 + first++;  // no byte of which is 0 in all of them
  return numbers;
}

Steps copies(const Numbers& source, const std::vector<Place*>& places, bool told = true) {
  Steps steps;
  for (Place* place : places) {
    steps.copy(piece(place->memory).data, piece(source).data, piece(source).bytes);
    if (told) steps.tell(place->number());
  }
  return steps;
}

void flag_comes_after_all_numbers() {
  const Machine machine;
  const Computing computing(machine);
  Copier copier(machine.gpu);
  Place one, two;
  const Numbers source = numbers_from(7);
  machine.hang("a copy", 100);  // the first is late
  copier.start(copies(source, {&one, &two}), 0xfffffff0u, computing.stream);
  EXPECT(one.flag == 0 && two.flag == 0);
  machine.until_it_hangs("a copy");
  machine.hang("a copy", 100);  // and then the second
  one.wait_for(0xfffffff0u);
  EXPECT(two.flag == 0);  // one after the other
  two.wait_for(0xfffffff0u);
  EXPECT(one.memory == source && two.memory == source);
}

void copies_wait_for_what_was_computed_before() {
  const Machine machine;
  const Computing computing(machine);
  Copier copier(machine.gpu);
  Place place;
  Numbers source(1000);
  std::promise<void> go_on;
  computing.run([&] {
    go_on.get_future().wait();
    const Numbers computed = numbers_from(1);
    std::copy(computed.begin(), computed.end(), source.begin());  // where it is: its address is known already
  });
  copier.start(copies(source, {&place}), 1, computing.stream);  // the host does not wait
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  EXPECT(place.flag == 0);
  go_on.set_value();
  place.wait_for(1);
  EXPECT(place.memory == numbers_from(1));
}

void what_is_computed_after_a_join_finds_the_copies() {
  const Machine machine;
  const Computing computing(machine), other(machine);
  Copier copier(machine.gpu);
  Place place;
  const Numbers source = numbers_from(5);
  std::atomic<int> found{0};
  machine.hang("a copy", 100);
  copier.start(copies(source, {&place}, false), 1, computing.stream);
  other.run([&] { found += 1; });  // nobody waits without a join
  other.synchronize();
  copier.join(other.stream);
  other.run([&] { found += place.memory == source ? 10 : 100; });
  other.synchronize();
  EXPECT(found == 11 && place.flag == 0);
}

void starts_follow_each_other() {
  const Machine machine;
  const Computing computing(machine);
  Copier copier(machine.gpu);
  Place place;
  std::vector<Numbers> sources;
  for (int call = 1; call <= 50; ++call) sources.push_back(numbers_from(call));
  for (std::uint32_t call = 1; call <= 50; ++call) copier.start(copies(sources[call - 1], {&place}), call, computing.stream);
  place.wait_for(50);
  EXPECT(place.memory == sources.back());
  copier.join(computing.stream);
  computing.synchronize();
}

void steps_are_taken_in_order_and_again() {
  const Machine machine;
  const Computing computing(machine), other(machine);
  Copier copier(machine.gpu);
  Place early, late;
  Flag go_on{0};
  const Numbers source = numbers_from(9);
  Steps steps = copies(source, {&early});
  steps.wait_until(reinterpret_cast<std::uintptr_t>(&go_on));
  steps.copy(piece(late.memory).data, piece(early.memory).data, piece(source).bytes);
  steps.tell(late.number());
  for (const std::uint32_t call : {1u, 2u}) {
    copier.start(steps, call, computing.stream);
    early.wait_for(call);
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    EXPECT(late.flag == call - 1);  // it waits
    machine.gpu->tell(other.stream, reinterpret_cast<std::uintptr_t>(&go_on), call);
    late.wait_for(call);
    EXPECT(late.memory == source);
    late.memory.assign(late.memory.size(), 0);
  }
  EXPECT(copier.stream() != computing.stream && copier.stream() != 0);
}

void nothing_is_copied_to_nowhere() {
  const Machine machine;
  const Computing computing(machine);
  Copier copier(machine.gpu);
  copier.start({}, 1, computing.stream);
  copier.join(computing.stream);
  computing.synchronize();
}

void thread_without_a_context_has_that_of_the_first() {
  const Machine machine;
  const Computing computing(machine);
  Copier copier(machine.gpu);
  Place place;
  const Numbers source = numbers_from(3);
  std::thread([&] { copier.start(copies(source, {&place}), 1, computing.stream); }).join();
  std::thread([&] { copier.join(computing.stream); }).join();
  const auto other = reinterpret_cast<Context>(2);
  std::thread([&] {
    machine.gpu->use(other);
    copier.join(computing.stream);
    EXPECT(machine.gpu->context() == other);  // it stays
  }).join();
  computing.synchronize();
  EXPECT(place.flag == 1 && place.memory == source);
}

void threads_start_and_join_at_the_same_time() {
  const Machine machine;
  const Computing computing(machine);
  Copier copier(machine.gpu);
  Place place;
  const Numbers source = numbers_from(3);
  std::vector<std::thread> running;
  for (int number = 0; number < 2; ++number)
    running.emplace_back([&] {
      machine.use_context();
      for (int time = 0; time < 200; ++time) {
        copier.start(copies(source, {&place}), 1, computing.stream);
        copier.join(computing.stream);
      }
    });
  for (std::thread& thread : running) thread.join();
  computing.synchronize();
  EXPECT(place.memory == source);
}

void a_stream_waits_until_a_number_has_come() {
  const Machine machine;
  const Computing computing(machine), other(machine);
  std::atomic<int> done{0};
  Flag flag{0xfffffffeu};  // and it counts on from 0
  const auto address = reinterpret_cast<std::uintptr_t>(&flag);
  machine.gpu->wait_until(computing.stream, address, 1);
  computing.run([&] { ++done; });
  for (const std::uint32_t value : {0xffffffffu, 0u}) {
    machine.gpu->tell(other.stream, address, value);
    other.synchronize();
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    EXPECT(flag == value && done == 0);
  }
  machine.gpu->tell(other.stream, address, 2);  // beyond is as good
  computing.synchronize();
  EXPECT(done == 1);
  machine.gpu->wait_until(computing.stream, address, 2);  // it has come
  computing.synchronize();
  machine.fail("cuStreamWaitValue32", 1);
  EXPECT(has(text_of<GpuError>([&] { machine.gpu->wait_until(computing.stream, address, 3); }), "cuStreamWaitValue32", "failed"));
  computing.synchronize();
}

void call_that_fails_says_so() {
  const Machine machine;
  const Computing computing(machine);
  Place place;
  const Numbers source = numbers_from(3);
  for (const char* call : {"cuStreamCreateWithPriority", "cuEventCreate"}) {
    machine.fail(call, 1);
    EXPECT(has(text_of<GpuError>([&] { Copier copier(machine.gpu); }), call, "failed: unspecified launch failure (719)"));
  }
  Copier copier(machine.gpu);
  for (const char* call : {"cuEventRecord", "cuStreamWaitEvent", "cuMemcpyAsync", "cuStreamWriteValue32"}) {
    machine.fail(call, 1);
    EXPECT(has(text_of<GpuError>([&] { copier.start(copies(source, {&place}), 1, computing.stream); }), call, "failed"));
    EXPECT(place.flag == 0);
  }
  for (const char* call : {"cuEventRecord", "cuStreamWaitEvent"}) {
    machine.fail(call, 1);
    EXPECT(has(text_of<GpuError>([&] { copier.join(computing.stream); }), call, "failed"));
  }
  copier.start(copies(source, {&place}), 2, computing.stream);  // and the next is as if nothing had been
  place.wait_for(2);
}

void nothing_is_left_behind() {
  const Machine machine;
  const int before = machine.alive();
  {
    Copier copier(machine.gpu);
    EXPECT(machine.alive() == before + 2);  // a stream and an event
  }
  EXPECT(machine.alive() == before);
  machine.fail("cuEventCreate", 1);
  EXPECT(!text_of<GpuError>([&] { Copier copier(machine.gpu); }).empty());
  EXPECT(machine.alive() == before);
}

}  // namespace

int main(int count, char** arguments) {
  EXPECT(count == 2);
  library = arguments[1];
  int failures = 0;
  RUN(flag_comes_after_all_numbers);
  RUN(copies_wait_for_what_was_computed_before);
  RUN(what_is_computed_after_a_join_finds_the_copies);
  RUN(starts_follow_each_other);
  RUN(steps_are_taken_in_order_and_again);
  RUN(nothing_is_copied_to_nowhere);
  RUN(thread_without_a_context_has_that_of_the_first);
  RUN(threads_start_and_join_at_the_same_time);
  RUN(a_stream_waits_until_a_number_has_come);
  RUN(call_that_fails_says_so);
  RUN(nothing_is_left_behind);
  return failures;
}
