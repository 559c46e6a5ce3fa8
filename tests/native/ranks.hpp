// Threads as ranks: several hubs in one process, edited together.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "../../csrc/comm/collectives.hpp"
#include "../../csrc/comm/hub.hpp"
#include "check.hpp"

using namespace elastic::comm;

struct Ranks {
  explicit Ranks(int n, bool shared_memory, size_t outbox_bytes = 1 << 20, size_t ring_bytes = 64 << 10,
                 std::string address = "127.0.0.1")
      : shared(shared_memory), outbox(outbox_bytes), ring(ring_bytes), bind(std::move(address)) {
    for (int r = 0; r < n; ++r) hubs.push_back(make(r, n, 0));
  }

  std::unique_ptr<Hub> make(int rank, int slots, uint64_t incarnation) const {
    HubConfig config;
    config.rank = rank;
    config.slots = slots;
    config.incarnation = incarnation;
    config.bind = bind;
    config.run_id = "native tests";
    config.secret = "secret";
    config.shared_memory = shared;
    config.outbox_bytes = outbox;
    config.ring_bytes = ring;
    return std::make_unique<Hub>(config);
  }

  int size() const { return int(hubs.size()); }

  // Runs body(rank) in a thread for each of `ranks`; the first error is thrown here.
  void each(const std::vector<int>& ranks, const std::function<void(int)>& body) {
    std::vector<std::thread> threads;
    std::mutex mutex;
    std::exception_ptr error;
    for (int r : ranks) {
      threads.emplace_back([&, r] {
        try {
          body(r);
        } catch (...) {
          std::lock_guard<std::mutex> lock(mutex);
          if (!error) error = std::current_exception();
        }
      });
    }
    for (auto& t : threads) t.join();
    if (error) std::rethrow_exception(error);
  }

  std::vector<int> all() const {
    std::vector<int> out;
    for (int r = 0; r < size(); ++r) out.push_back(r);
    return out;
  }

  // As members report themselves: with the links they found broken.
  Members peers(const std::vector<int>& ranks) const {
    Members out;
    for (int r : ranks) {
      out.push_back(std::make_shared<Peer>(*hubs[size_t(r)]->self()));
      out.back()->broken = hubs[size_t(r)]->broken();
    }
    return out;
  }

  void edit(uint64_t generation, const std::vector<int>& ranks) {
    const auto members = peers(ranks);
    each(ranks, [&](int r) { hubs[size_t(r)]->edit(generation, members, 30); });
  }

  Call call(int rank, Group& group, double timeout = 30) {
    Hub& hub = *hubs[size_t(rank)];
    return Call{hub, group, hub.generation(), timeout};
  }

  bool shared;
  size_t outbox;
  size_t ring;
  std::string bind;
  std::vector<std::unique_ptr<Hub>> hubs;
};
