// Hubs as threads: collectives and messages, over shared memory and TCP.
#include <atomic>
#include <chrono>
#include <cstring>
#include <string>
#include <thread>

#include "../../csrc/comm/p2p.hpp"
#include "sums.hpp"

TEST(sums_are_in_member_order_for_every_transport_and_size) {
  both([](bool shared) {
    Ranks ranks(4, shared);
    ranks.edit(1, ranks.all());
    for (size_t count : {1, 3, 1000, 1025, 40000, 300001}) {
      all_reduce_everywhere(ranks, ranks.all(), {2, 0, 3, 1}, count);
    }
  });
}

TEST(many_members_take_the_same_order) {
  both([](bool shared) {
    Ranks ranks(10, shared);
    ranks.edit(1, ranks.all());
    for (size_t count : {5, 70000}) all_reduce_everywhere(ranks, ranks.all(), ranks.all(), count);
    ranks.each(ranks.all(), [&](int r) {
      const GroupPtr g = ranks.hubs[size_t(r)]->group("g", ranks.all());
      for (int i = 0; i < 5; ++i) barrier(ranks.call(r, *g));
    });
  });
}

TEST(broadcast_gather_scatter_exchange) {
  both([](bool shared) {
    Ranks ranks(3, shared);
    ranks.edit(1, ranks.all());
    ranks.each(ranks.all(), [&](int r) {
      const GroupPtr g = ranks.hubs[size_t(r)]->group("g", ranks.all());
      for (size_t count : {0, 9, 5000, 200000}) {
        auto data = values(r == 1 ? 1 : 99, count);
        broadcast(ranks.call(r, *g), data.data(), count * 4, 1);
        CHECK(same_bits(data, values(1, count)));
        auto own = values(r, count);
        std::vector<std::vector<float>> rows(3, std::vector<float>(count));
        std::vector<Part> receive;
        for (auto& row : rows) receive.push_back(part_of(row));
        gather(ranks.call(r, *g), part_of(own), receive, 2);
        for (int j = 0; j < 3 && r == 2; ++j) CHECK(same_bits(rows[size_t(j)], values(j, count)));
        std::vector<std::vector<float>> out;
        std::vector<Part> send;
        for (int j = 0; j < 3; ++j) out.push_back(values(10 * r + j, count));
        for (auto& row : out) send.push_back(part_of(row));
        all_to_all(ranks.call(r, *g), send, receive);
        for (int j = 0; j < 3; ++j) CHECK(same_bits(rows[size_t(j)], values(10 * j + r, count)));
        scatter(ranks.call(r, *g), send, part_of(own), 0);
        CHECK(same_bits(own, values(r, count)));
      }
    });
  });
}

// A root is through with its broadcasts long before they fit into the ring or the socket, and never comes back.
TEST(what_did_not_go_out_at_once_is_sent_though_its_sender_is_gone) {
  both([](bool shared) {
    constexpr int kMessages = 4000;
    constexpr size_t kFloats = 2048;
    Ranks ranks(2, shared);
    ranks.edit(1, ranks.all());
    std::thread root([&] {
      const GroupPtr g = ranks.hubs[0]->group("g", ranks.all());
      for (int i = 0; i < kMessages; ++i) {
        auto data = values(i, kFloats);
        broadcast(ranks.call(0, *g), data.data(), kFloats * 4, 0);
      }
    });
    root.join();
    const GroupPtr g = ranks.hubs[1]->group("g", ranks.all());
    for (int i = 0; i < kMessages; ++i) {
      auto data = values(0, kFloats);
      broadcast(ranks.call(1, *g), data.data(), kFloats * 4, 0);
      CHECK(same_bits(data, values(i, kFloats)));
    }
  });
}

TEST(tags_may_come_in_any_order_and_large_messages_both_ways) {
  both([](bool shared) {
    Ranks ranks(2, shared);
    ranks.edit(1, ranks.all());
    ranks.each(ranks.all(), [&](int r) {
      const GroupPtr g = ranks.hubs[size_t(r)]->group("g", ranks.all());
      const Call c = ranks.call(r, *g);
      const size_t count = 300000;
      std::vector<std::vector<float>> out, in(4, std::vector<float>(count));
      std::vector<RequestPtr> requests;
      for (int t = 0; t < 4; ++t) {
        out.push_back(values(100 * r + t, count));
        requests.push_back(send_to(c, 1 - r, uint64_t(t), out.back().data(), count * 4));
      }
      for (int t : {2, 0, 3, 1}) {
        receive_from(c, 1 - r, uint64_t(t), in[size_t(t)].data(), count * 4)->wait(30);
        CHECK(same_bits(in[size_t(t)], values(100 * (1 - r) + t, count)));
      }
      for (auto& request : requests) request->wait(30);
      barrier(c);
    });
  });
}

TEST(the_progress_thread_ends_what_nobody_waits_for) {
  both([](bool shared) {
    Ranks ranks(2, shared);
    ranks.edit(1, ranks.all());
    ranks.each(ranks.all(), [&](int r) {
      const GroupPtr g = ranks.hubs[size_t(r)]->group("g", ranks.all());
      const Call c = ranks.call(r, *g);
      std::vector<float> data = values(0, 500000);
      std::atomic<bool> ended{false};
      auto request =
          r == 0 ? send_to(c, 1, 5, data.data(), data.size() * 4) : receive_from(c, 0, 5, data.data(), data.size() * 4);
      request->on_end([&] { ended = true; });
      for (int i = 0; i < 20000 && !ended; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      CHECK(ended);
      request->wait(1);
      CHECK(same_bits(data, values(0, 500000)));
    });
  });
}

TEST(a_reduction_that_is_not_defined_leaves_its_group_usable) {
  both([](bool shared) {
    Ranks ranks(3, shared);
    ranks.edit(1, ranks.all());
    for (const size_t count : {10, 5000}) {
      ranks.each(ranks.all(), [&](int r) {
        const GroupPtr g = ranks.hubs[size_t(r)]->group("g", ranks.all());
        const Call call = ranks.call(r, *g);
        auto data = values(r, count);
        std::vector<Part> parts;
        for (int j = 0; j < 3; ++j) parts.push_back(part_of(data));
        int refused = 0;
        for (const auto& attempt : std::vector<std::function<void()>>{
                 [&] { all_reduce(call, part_of(data), DType::F32, ReduceOp::Bxor); },
                 [&] { reduce_to(call, part_of(data), DType::F32, ReduceOp::Bor, 1); },
                 [&] { reduce_scatter(call, parts, part_of(data), DType::Bool, ReduceOp::Avg); }}) {
          try {
            attempt();
          } catch (const CommError&) {
            ++refused;
          }
        }
        CHECK(refused == 3 && same_bits(data, values(r, count)));
      });
      all_reduce_everywhere(ranks, ranks.all(), ranks.all(), count);
    }
  });
}

// Between the last attempt to push and the announcement that this process sleeps, the peer makes room: nothing tells
// the sender, who must look itself. `missing` is asked for in between.
TEST(room_that_comes_just_before_a_sender_sleeps_is_seen) {
  Ranks ranks(2, true);
  ranks.edit(1, ranks.all());
  Hub& sender = *ranks.hubs[0];
  Hub& receiver = *ranks.hubs[1];
  std::vector<char> data(4 << 20, 'x'), into(data.size());
  const Key key{sender.group("g", ranks.all())->id, 1};
  auto r = std::make_shared<Recv>();
  r->key = key;
  r->into = into.data();
  r->size = into.size();
  r->view_allowed = false;
  receiver.link(0)->post(r);
  auto s = std::make_shared<Send>();
  s->header.key = key;
  s->header.generation = 1;
  s->data = data.data();
  s->size = data.size() - kMessageCost;
  r->size = s->size;
  const auto lock = sender.enter(1);
  sender.link(1)->send(s);
  WaitScope scope;
  scope.generation = 1;
  scope.seconds = 4;  // a ring holds a sixty-fourth of it, and a sleep that is not ended lasts 0.1 s
  scope.deadline = Clock::now() + std::chrono::seconds(4);
  scope.missing = [&](std::vector<int>*) {
    while (receiver.pump()) {
    }
  };
  sender.wait(scope, [&] { return !s->pending(); });
  receiver.pump();
  CHECK(r->state.load() == MessageState::Done && std::memcmp(into.data(), data.data(), r->size) == 0);
}

TEST(several_threads_on_several_groups) {
  both([](bool shared) {
    Ranks ranks(3, shared);
    ranks.edit(1, ranks.all());
    const auto wanted = sum_in_order(ranks.all(), 3000);
    ranks.each(ranks.all(), [&](int r) {
      std::vector<std::thread> threads;
      for (int t = 0; t < 4; ++t) {
        threads.emplace_back([&, r, t] {
          const GroupPtr g = ranks.hubs[size_t(r)]->group("g" + std::to_string(t), ranks.all());
          for (int i = 0; i < 20; ++i) {
            auto data = values(r, 3000);
            all_reduce(ranks.call(r, *g), part_of(data), DType::F32, ReduceOp::Sum);
            CHECK(same_bits(data, wanted));
          }
        });
      }
      for (auto& t : threads) t.join();
    });
  });
}
