// Messages that are waited for together, and memory on loan: as its lender wrote it for as long as a peer has it.
#include <algorithm>
#include <chrono>
#include <deque>
#include <future>
#include <random>

#include "../../csrc/comm/transfers.hpp"
#include "ranks.hpp"

namespace {

constexpr size_t kCount = 20000;  // integers of a message: more than a ring holds

// What rank `from` sends in `round`.
int value_of(int from, int round) {
  return 1000 * from + round;
}

// Memory of a rank's messages, as its owner uses it again.
class Memory {
 public:
  explicit Memory(LentMemory& lent) : lent_(lent) {}
  ~Memory() {
    for (char* at : made_) lent_.give_back(at);
  }
  int* filled(int value) {
    char* found = nullptr;
    for (char* at : made_) {
      if (!lent_.on_loan(at)) found = at;
    }
    if (found == nullptr) made_.push_back(found = lent_.take(kCount * sizeof(int)));
    CHECK(found != nullptr);
    auto* const values = reinterpret_cast<int*>(found);
    std::fill(values, values + kCount, value);
    return values;
  }
  size_t made() const { return made_.size(); }
  bool none_on_loan() {
    return std::none_of(made_.begin(), made_.end(), [this](char* at) { return lent_.on_loan(at); });
  }

 private:
  LentMemory& lent_;
  std::vector<char*> made_;
};

struct Kept {
  std::shared_ptr<Loan> loan;
  int value;
};

void give_back(const Kept& kept) {
  const auto* const values = reinterpret_cast<const int*>(kept.loan->data());
  CHECK(std::all_of(values, values + kCount, [&](int one) { return one == kept.value; }));
  kept.loan->give_back();
}

}  // namespace

// Each rank lends to both others in every round, keeps what it has for some rounds, and gives it back in any thread.
// Links break.
TEST(a_loan_does_not_change_whatever_its_lender_and_edits_do) {
  const unsigned seed = 20261128;
  std::printf("  seed %u\n", seed);
  Ranks ranks(3, true);
  std::vector<std::unique_ptr<Memory>> memories;
  for (auto& hub : ranks.hubs) memories.push_back(std::make_unique<Memory>(*hub->lent_memory()));
  std::vector<std::deque<Kept>> kept(3);
  std::vector<GroupPtr> groups;
  for (auto& hub : ranks.hubs) groups.push_back(hub->group("mirror", ranks.all()));
  int round = 0;
  for (uint64_t generation = 1; generation <= 8; ++generation) {
    // Loans end also while their link is replaced.
    std::vector<Kept> ending;
    for (auto& mine : kept) {
      if (mine.empty()) continue;
      ending.push_back(mine.front());
      mine.pop_front();
    }
    std::thread meanwhile([&] { std::for_each(ending.begin(), ending.end(), give_back); });
    if (generation > 1) ranks.hubs[generation % 3]->sever(int((generation + 1) % 3), generation % 2 == 0);
    ranks.edit(generation, ranks.all());
    meanwhile.join();
    const int first = round;
    ranks.each(ranks.all(), [&](int r) {
      std::mt19937 random(seed + unsigned(r) + unsigned(100 * generation));
      auto& mine = kept[size_t(r)];
      for (int at = first; at < first + 12; ++at) {
        Transfers transfers(ranks.call(r, *groups[size_t(r)]), uint64_t(at));
        std::vector<std::vector<int>> unused(2, std::vector<int>(kCount, -1));
        for (int k = 0; k < 2; ++k) {
          transfers.receive((r + k + 1) % 3, unused[size_t(k)].data(), kCount * sizeof(int), nullptr);
        }
        const int* const values = memories[size_t(r)]->filled(value_of(r, at));
        for (int k = 0; k < 2; ++k) transfers.send((r + k + 1) % 3, values, kCount * sizeof(int), nullptr);
        for (auto came = transfers.wait(); !came.empty(); came = transfers.wait()) {
          for (int number : came) {
            mine.push_back({transfers.loan(number), value_of((r + number + 1) % 3, at)});
            CHECK(mine.back().loan != nullptr && unused[size_t(number)][0] == -1);
          }
        }
        while (mine.size() > 4 || (!mine.empty() && random() % 3 == 0)) {
          const Kept oldest = mine.front();
          mine.pop_front();
          std::thread(give_back, oldest).join();
        }
      }
    });
    round = first + 12;
  }
  for (auto& mine : kept) {
    for (const Kept& one : mine) give_back(one);
  }
  ranks.edit(9, ranks.all());
  ranks.each(ranks.all(), [&](int r) { barrier(ranks.call(r, *groups[size_t(r)])); });
  ranks.each(ranks.all(), [&](int r) { barrier(ranks.call(r, *groups[size_t(r)])); });
  for (auto& memory : memories) CHECK(memory->none_on_loan() && memory->made() <= 8);
}

// What was lent and never received is handed back by the edit; so is what comes in an older generation.
TEST(what_nobody_received_is_handed_back) {
  Ranks ranks(2, true);
  ranks.edit(1, ranks.all());
  Memory memory(*ranks.hubs[0]->lent_memory());
  std::vector<GroupPtr> groups;
  for (auto& hub : ranks.hubs) groups.push_back(hub->group("mirror", ranks.all()));
  {
    Transfers transfers(ranks.call(0, *groups[0]), 1);
    for (int i = 0; i < 5; ++i) transfers.send(1, memory.filled(i), kCount * sizeof(int), nullptr);
    CHECK(transfers.wait().empty() && memory.made() == 5);
  }
  ranks.edit(2, ranks.all());
  for (int i = 0; i < 2; ++i) ranks.each(ranks.all(), [&](int r) { barrier(ranks.call(r, *groups[size_t(r)])); });
  CHECK(memory.none_on_loan());
}

// The receiver let its request go: the link holds the last reference to the loan. To return it is to run callbacks of
// other messages, and one of these posts on the same link.
TEST(a_loan_whose_request_was_let_go_ends_outside_the_locks_of_its_link) {
  using namespace std::chrono_literals;
  Ranks ranks(3, true);
  ranks.edit(1, ranks.all());
  std::vector<GroupPtr> groups;
  for (auto& hub : ranks.hubs) groups.push_back(hub->group("mirror", ranks.all()));
  Memory memory(*ranks.hubs[0]->lent_memory());
  const auto keep = std::make_shared<int>(0);
  std::vector<int> unused(kCount, -1);
  Transfers(ranks.call(1, *groups[1]), 1).receive(0, unused.data(), kCount * sizeof(int), keep);
  // Both messages of rank 0 come while the thread that takes them in is held up, so it takes them in one turn.
  std::promise<void> held, go, posted;
  char from_0 = 0, from_2 = 0, never = 0;
  const auto second = receive_from(ranks.call(1, *groups[1]), 2, 2, &from_2, 1, keep);
  second->on_end([&] {
    held.set_value();
    go.get_future().wait();
  });
  const auto third = std::make_shared<Recv>();
  third->key = {groups[1]->id, 4};
  third->into = &never;
  third->size = 1;
  const auto first = receive_from(ranks.call(1, *groups[1]), 0, 3, &from_0, 1, keep);
  first->on_end([&] {
    ranks.hubs[1]->link(0)->post(third);
    posted.set_value();
  });
  const char sent = 7;
  send_to(ranks.call(2, *groups[2]), 1, 2, &sent, 1)->wait(30);
  held.get_future().wait();
  send_to(ranks.call(0, *groups[0]), 1, 3, &sent, 1)->wait(30);
  send_to(ranks.call(0, *groups[0]), 1, 1, memory.filled(1), kCount * sizeof(int))->wait(30);
  go.set_value();
  CHECK(posted.get_future().wait_for(20s) == std::future_status::ready && from_0 == sent);
  ranks.edit(2, ranks.all());
  for (int i = 0; i < 2; ++i) ranks.each(ranks.all(), [&](int r) { barrier(ranks.call(r, *groups[size_t(r)])); });
  CHECK(memory.none_on_loan() && unused[0] == -1);
}

// A loan goes on when its link is opened again, and ends once: also one that was returned, or lent, over a broken link.
TEST(loans_over_a_broken_link_end_over_the_next_one) {
  Ranks ranks(2, true);
  std::vector<GroupPtr> groups;
  for (auto& hub : ranks.hubs) groups.push_back(hub->group("mirror", ranks.all()));
  Memory memory(*ranks.hubs[0]->lent_memory());
  LentMemory& lent = *ranks.hubs[0]->lent_memory();
  uint64_t generation = 0;
  const auto edit = [&] {
    ranks.edit(++generation, ranks.all());
    for (int i = 0; i < 2; ++i) ranks.each(ranks.all(), [&](int r) { barrier(ranks.call(r, *groups[size_t(r)])); });
  };
  const auto lend = [&](const int* values, int value) {
    Kept kept{nullptr, value};
    ranks.each(ranks.all(), [&](int r) {
      Transfers transfers(ranks.call(r, *groups[size_t(r)]), 1);
      std::vector<int> unused(kCount);
      if (r == 0) transfers.send(1, values, kCount * sizeof(int), nullptr);
      if (r == 1) transfers.receive(0, unused.data(), kCount * sizeof(int), nullptr);
      while (!transfers.wait().empty()) kept.loan = transfers.loan(0);
    });
    return kept;
  };
  edit();
  std::deque<Kept> over;  // several broken links, one more each time
  for (int round = 0; round < 6; ++round) {
    int* const values = memory.filled(round);
    over.push_back(lend(values, round));
    const int* const returned = memory.filled(100);
    const Kept early = lend(returned, 100);
    const int* const untaken = memory.filled(200);
    {
      Transfers transfers(ranks.call(0, *groups[0]), 2);
      transfers.send(1, untaken, kCount * sizeof(int), nullptr);
      CHECK(transfers.wait().empty());
    }
    ranks.hubs[size_t(round % 2)]->sever(1 - round % 2, true);
    give_back(early);
    edit();
    const auto on_loan = [&](const int* at) { return lent.on_loan(reinterpret_cast<const char*>(at)); };
    CHECK(on_loan(values) && !on_loan(returned) && !on_loan(untaken));
    // Lent once more over the new link: each of the two loans ends by itself, in either order.
    const Kept again = lend(values, round);
    give_back(round % 4 < 2 ? again : over.back());
    edit();
    CHECK(on_loan(values));
    if (round % 4 < 2) continue;
    give_back(again);
    for (const Kept& one : over) give_back(one);
    over.clear();
    edit();
    CHECK(memory.none_on_loan());
  }
  for (const Kept& one : over) give_back(one);
  edit();
  CHECK(memory.none_on_loan() && memory.made() <= 6);
}

// Its return waits for room in the link when the edit comes.
TEST(a_loan_returned_behind_a_message_that_an_edit_drops_is_over) {
  Ranks ranks(2, true);
  ranks.edit(1, ranks.all());
  std::vector<GroupPtr> groups;
  for (auto& hub : ranks.hubs) groups.push_back(hub->group("mirror", ranks.all()));
  Memory memory(*ranks.hubs[0]->lent_memory());
  std::vector<int> unused(kCount);
  const auto lent = send_to(ranks.call(0, *groups[0]), 1, 1, memory.filled(1), kCount * sizeof(int));
  const auto borrowed =
      receive_from(ranks.call(1, *groups[1]), 0, 1, unused.data(), kCount * sizeof(int), nullptr, true);
  borrowed->wait(30);
  const std::vector<char> large(1 << 20);  // more than the ring, and rank 0 reads nothing
  const auto stuck = send_to(ranks.call(1, *groups[1]), 0, 2, large.data(), large.size());
  borrowed->loan()->give_back();
  CHECK(!stuck->ended() && !memory.none_on_loan());
  ranks.edit(2, ranks.all());
  for (int i = 0; i < 2; ++i) ranks.each(ranks.all(), [&](int r) { barrier(ranks.call(r, *groups[size_t(r)])); });
  CHECK(memory.none_on_loan());
}
