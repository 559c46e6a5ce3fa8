// Hubs as threads: messages beside a step, over shared memory and TCP.
#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>

#include "../../csrc/comm/p2p.hpp"
#include "../../csrc/comm/side_channel.hpp"
#include "sums.hpp"

namespace {

std::shared_ptr<SideChannel> side_channel(Ranks& ranks, int rank, uint32_t number) {
  Hub& hub = *ranks.hubs[size_t(rank)];
  return std::make_shared<SideChannel>(hub, hub.group("beside", ranks.all()), number, 4096, 1, 8);
}

using Kept = std::shared_ptr<std::vector<float>>;

void send_beside(SideChannel& channel, int to, const Kept& data) {
  channel.send(to, reinterpret_cast<const char*>(data->data()), data->size() * 4, data);
}

Kept receive_beside(SideChannel& channel, int from, size_t count) {
  auto data = std::make_shared<std::vector<float>>(count);
  channel.receive(from, reinterpret_cast<char*>(data->data()), count * 4, data);
  return data;
}

}  // namespace

// Long, short and empty messages, both ways at once, hurried half-way, with a step's messages on the same links.
TEST(what_goes_beside_a_step_arrives_whole_and_in_order) {
  const std::vector<size_t> counts{50000, 3, 0, 1024, 1025, 90001};
  both([&](bool shared) {
    Ranks ranks(3, shared);
    ranks.edit(1, ranks.all());
    ranks.each(ranks.all(), [&](int r) {
      const auto channel = side_channel(ranks, r, 7);
      std::vector<std::thread> threads;
      for (int peer : ranks.all()) {
        if (peer == r) continue;
        threads.emplace_back([&, peer] {
          for (size_t i = 0; i < counts.size(); ++i) {
            if (i == 4) channel->hurry();
            send_beside(*channel, peer, std::make_shared<std::vector<float>>(values(10 * r + peer, counts[i])));
          }
          channel->drain(peer);
          CHECK(channel->under_way(peer) == 0);
        });
        threads.emplace_back([&, peer] {
          for (size_t count : counts) {
            CHECK(same_bits(*receive_beside(*channel, peer, count), values(10 * peer + r, count)));
          }
        });
      }
      const GroupPtr group = ranks.hubs[size_t(r)]->group("g", ranks.all());
      for (int i = 0; i < 20; ++i) {
        auto data = values(r, 20000);
        all_reduce(ranks.call(r, *group), part_of(data), DType::F32, ReduceOp::Sum);
        CHECK(same_bits(data, sum_in_order(ranks.all(), 20000)));
      }
      for (auto& t : threads) t.join();
    });
  });
}

TEST(beside_a_step_one_piece_is_on_the_way_until_it_is_confirmed) {
  both([](bool shared) {
    Ranks ranks(2, shared);
    ranks.edit(1, ranks.all());
    const auto out = side_channel(ranks, 0, 1), in = side_channel(ranks, 1, 1);
    const auto data = std::make_shared<std::vector<float>>(values(0, 50000));
    std::thread sender([&] { send_beside(*out, 1, data); });
    while (out->under_way(1) == 0) std::this_thread::yield();
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    CHECK(out->under_way(1) == 1);
    CHECK(same_bits(*receive_beside(*in, 0, 50000), *data));
    sender.join();
    out->drain(1);
  });
}

// An interruption, a lost peer, a rank that gives up: each ends every wait, and the next generation has channels
// again.
TEST(waits_beside_a_step_end_with_their_generation) {
  both([](bool shared) {
    for (const char* how : {"interrupt", "loss", "give up"}) {
      Ranks ranks(3, shared);
      ranks.edit(1, ranks.all());
      const auto channel = side_channel(ranks, 0, 1);
      std::atomic<int> ended{0};
      const auto ends = [&](const std::function<void()>& wait) {
        return std::thread([&ended, wait] {
          try {
            wait();
          } catch (const CommError&) {
            ++ended;
          }
        });
      };
      std::thread sender = ends([&] { send_beside(*channel, 1, std::make_shared<std::vector<float>>(50000)); });
      std::thread receiver = ends([&] { receive_beside(*channel, 1, 50000); });
      while (channel->under_way(1) == 0) std::this_thread::yield();
      if (std::strcmp(how, "interrupt") == 0) {
        ranks.hubs[0]->interrupt(2);
      } else if (std::strcmp(how, "loss") == 0) {
        ranks.hubs[1].reset();
      } else {
        channel->give_up();
      }
      sender.join();
      receiver.join();
      CHECK(ended == 2);
      ranks.edit(2, {0, 2});
      ranks.each({0, 2}, [&](int r) {
        const auto next = side_channel(ranks, r, 1);
        if (r == 0) send_beside(*next, 2, std::make_shared<std::vector<float>>(values(0, 50000)));
        if (r == 2) CHECK(same_bits(*receive_beside(*next, 0, 50000), values(0, 50000)));
        next->drain(2 - r);
      });
    }
  });
}
