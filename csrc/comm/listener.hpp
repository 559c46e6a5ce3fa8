// The listening end: accepts on a Unix and a TCP socket and never blocks.
//
// Every connection is a state machine with a deadline. Strangers, stale
// incarnations, garbage and those that say nothing are closed and counted. So
// many may be half-way that the process has descriptors left for its own work.
// While there are as many, new ones wait in the backlog; once the oldest one of
// the address that has most of them had its time, it is closed.
//
// Its thread sleeps almost always, so it also does what may be done a little later (later()).
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "handshake.hpp"
#include "shared_memory.hpp"

namespace elastic::comm {

// A handshake and the ring made for it.
struct Negotiation {
  Negotiation(Handshake h, std::shared_ptr<SharedMemory> r) : handshake(std::move(h)), ring(std::move(r)) {}
  Handshake handshake;
  std::shared_ptr<SharedMemory> ring;
  std::chrono::steady_clock::time_point came{};
  std::string address;  // it came from; empty on a Unix socket
};

class Listener {
 public:
  struct Callbacks {
    std::function<std::unique_ptr<Negotiation>(int socket, bool unix_socket)> accept;
    std::function<void(std::unique_ptr<Negotiation>)> established;
  };
  // Throws CommError when it cannot bind. `address`: IPv4 or IPv6 to bind; an empty Unix name means no Unix socket.
  // `silent_seconds`: see silence.hpp.
  Listener(const std::string& address, const std::string& unix_name, double handshake_seconds, double silent_seconds,
           Callbacks callbacks);
  ~Listener();

  int port() const { return port_; }
  bool runs_this_thread() const { return thread_.get_id() == std::this_thread::get_id(); }
  // Connections turned away, by Refusal.
  std::array<uint64_t, 9> refused() const;
  // Runs `task`, which must not throw, in the listener's thread, not before `delay`; at the latest when this ends.
  void later(std::chrono::milliseconds delay, std::function<void()> task);
  size_t half_way() const { return half_way_.load(std::memory_order_relaxed); }

 private:
  void loop();
  void accept_all(int listening, bool unix_socket);
  bool make_room();
  void listen_on(bool yes);
  void advance(std::list<std::unique_ptr<Negotiation>>::iterator it);
  void drop(std::list<std::unique_ptr<Negotiation>>::iterator it, Refusal why);
  void drop_late();
  void wake_after(std::chrono::nanoseconds delay);  // under tasks_mutex_
  void run_due(bool all);

  Callbacks callbacks_;
  std::chrono::duration<double> patience_;
  const double silent_seconds_;
  const size_t most_half_way_;  // by the process's limit of open files at the start
  bool paused_ = false;  // too many are half-way: what comes now waits in the backlog
  int tcp_ = -1;
  std::string congestion_control_;  // the system's, for connections from other hosts
  int unix_ = -1;
  int epoll_ = -1;
  int wake_ = -1;
  int timer_ = -1;    // when the next task is due
  int reserve_ = -1;  // given up for a moment when descriptors run out, to refuse instead of spinning
  int port_ = 0;
  std::atomic<bool> stop_{false};
  std::atomic<size_t> half_way_{0};
  std::array<std::atomic<uint64_t>, 9> refused_{};
  std::list<std::unique_ptr<Negotiation>> pending_;  // oldest first
  struct Task {
    std::chrono::steady_clock::time_point due;
    std::function<void()> run;
  };
  std::mutex tasks_mutex_;
  std::vector<Task> tasks_;
  std::thread thread_;
};

}  // namespace elastic::comm
