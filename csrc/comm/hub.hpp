// The communicator of one process: its links, its groups, its generation.
//
// Everything that uses links holds the topology lock shared; edit() holds it
// alone, so it begins only when all work of older generations has left (they
// are woken by the frozen word) and no thread sees links change under it.
//
// Waiting: look at the rings for a moment, yield, then sleep in epoll on the
// doorbell and all sockets. One thread sleeps there at a time (the leader) and
// takes in messages for all; others sleep on a condition variable.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "buffers.hpp"
#include "errors.hpp"
#include "group.hpp"
#include "link.hpp"
#include "listener.hpp"
#include "outbox.hpp"
#include "sizes.hpp"

namespace elastic::comm {

using Clock = std::chrono::steady_clock;

struct HubConfig {
  int rank = 0;
  int slots = 1;
  uint64_t incarnation = 0;
  std::string run_id;
  std::string secret;
  std::string bind = "127.0.0.1";   // IPv4 or IPv6 address to listen on and to be reached at
  bool shared_memory = true;
  double handshake_seconds = 3.0;
  double silent_seconds = 20.0;     // a host that acknowledges nothing for so long is not reached; its links break
  size_t outbox_bytes = 0;          // 0: by the living ranks on this host
  size_t ring_bytes = 0;
};

// The address of one incarnation of a rank.
struct Peer {
  int rank = 0;
  uint64_t incarnation = 0;
  std::string ip;
  int port = 0;
  std::string unix_name;  // empty: no shared memory there
  std::string machine;    // same text: same host and network namespace
  // (rank, incarnation) to which it has found its link broken: both ends drop it and open a new one.
  std::vector<std::pair<int, uint64_t>> broken;
};

using PeerPtr = std::shared_ptr<Peer>;
using Members = std::vector<PeerPtr>;

struct EditStats {
  double quiesce = 0, drop = 0, connect = 0, publish = 0;  // seconds
  int opened = 0, ahead = 0, dropped = 0, groups = 0;  // ahead: links that stood before the edit began
};

// The bounds of a wait besides its condition.
struct WaitScope {
  uint64_t generation = 0;
  Clock::time_point deadline{};
  double seconds = 0;                              // the time-out the deadline came from
  bool background = false;                         // the progress thread: leads only while no other thread waits
  const Group* group = nullptr;                    // may be lost to an Abort
  std::function<void(std::vector<int>*)> missing;  // ranks still waited for
  const std::atomic<bool>* awaited = nullptr;      // if given: no wait of the process until it is true
};

class Hub final : public LinkHost {
 public:
  explicit Hub(HubConfig config);
  // A hub that any thread may let go, also one of its own: a worker whose task held the last reference cannot wait
  // for itself to end, so the hub is then closed and freed by a thread made for it.
  static std::shared_ptr<Hub> make(HubConfig config);
  ~Hub() override;

  const HubConfig& config() const { return config_; }
  const PeerPtr& self() const { return self_; }
  const std::string& notice() const { return notice_; }  // why not shared memory; empty when it is used

  EditStats edit(uint64_t generation, const Members& members, double timeout);
  // Opens links ahead of an edit that may admit this process. Returns how many stand. An edit ends it early
  // and takes over what is half-way.
  int prepare(const Members& members, double timeout);
  void interrupt(uint64_t generation);
  // Fails what runs on `group` and all later work on it.
  void abort(Group& group);
  // Ends every wait and all links; queued work ends with CommError. Throws in a thread of this hub's own.
  void close();

  uint64_t generation() const override { return generation_.load(std::memory_order_acquire); }
  uint64_t frozen() const { return frozen_.load(std::memory_order_acquire); }
  std::vector<int> alive() const;
  GroupPtr group(const std::string& name, const std::vector<int>& members);
  void release(const GroupPtr& group);
  std::vector<int> waiting_for() const;
  std::map<std::string, uint64_t> counters() const;
  std::string transport(int rank) const;
  // (rank, incarnation) to which the link is broken.
  std::vector<std::pair<int, uint64_t>> broken() const;
  // Breaks the link to `rank`, nothing else: for tests and injected faults. `quietly`: only this end notices.
  void sever(int rank, bool quietly);

  // --- for operations ---
  using Shared = std::shared_lock<std::shared_mutex>;
  // Holds the topology for one operation. Throws GenerationChanged when `generation` is not the present one.
  Shared enter(uint64_t generation);
  Link* link(int rank) { return links_[size_t(rank)].get(); }
  LinkPtr link_ptr(int rank) { return links_[size_t(rank)]; }
  bool stands(int rank) const { return links_[size_t(rank)] && !links_[size_t(rank)]->dead(); }
  // `rank`, where the link to it broke because its host was silent; else nothing.
  std::vector<int> silent(int rank) const {
    const auto& link = links_[size_t(rank)];
    return link && link->silent() ? std::vector<int>{rank} : std::vector<int>{};
  }
  bool is_alive(int rank) const { return alive_[size_t(rank)]; }
  // Bytes of a pipeline chunk in a group of `members`: the same in each of them.
  size_t chunk_bytes(int members) const { return std::min(chunk_bytes_, socket_chunk_bytes_for(size_t(members))); }
  Outbox* outbox() { return outbox_.get(); }
  const std::shared_ptr<Outbox>& shared_outbox() const { return outbox_; }
  // All living members say they can share memory on one machine: the same answer on each of them.
  bool shares_memory() const { return shares_memory_; }
  Workers& workers() { return workers_; }
  // Until done() or an error; takes messages in meanwhile. With the topology held.
  void wait(const WaitScope& scope, const std::function<bool()>& done);
  bool pump();  // One round over all links; whether anything moved.

  // --- LinkHost ---
  void block_returned(uint32_t block) override;
  LentMemory* lent_memory() override { return outbox_ ? &outbox_->lent() : nullptr; }
  BufferPool& buffers() override { return buffers_; }
  void group_aborted(uint64_t group, int lost) override;
  void wake_local() override;
  void background_changed(int by) override;

 private:
  struct Dial;
  struct Claim;
  using Dials = std::map<int, std::shared_ptr<Dial>>;
  void check(const WaitScope& scope, unsigned round) const;
  void sleep(const WaitScope& scope, const std::function<bool()>& done);
  bool any_input() const;
  bool flush();  // Sends data queued on any link; true if some was sent.
  bool poll_sockets(int milliseconds);
  void look_for_silence(Listener& listener);  // Again and again, in its thread.
  void give_up_silent(std::map<int, Peer>& missing, bool ahead, Dials* dials);
  void collect_socket_events();  // All of them that are there now.
  void kick();  // Makes the leader look again.
  std::unique_ptr<Negotiation> accept(int socket, bool unix_socket);
  Refusal admit(const Identity& who);
  void established(std::unique_ptr<Negotiation> negotiation);
  LinkPtr make_link(Negotiation& negotiation);
  Parts make_parts(uint64_t ring_bytes, const std::shared_ptr<SharedMemory>& ring);
  std::shared_ptr<Dial> start_dial(const Peer& peer);
  void redial(Dial& dial);
  void dial_missing(std::map<int, Peer>& missing, bool ahead, Dials* dials);
  void wait_for_dials(Dials& dials);
  void advance_dials(std::map<int, Peer>& missing, bool ahead, Dials* dials, std::map<int, LinkPtr>* opened);
  bool may_dial(const Peer& peer, bool upwards);
  int connect(std::map<int, Peer> missing, Clock::time_point deadline, double timeout,
              const std::function<void()>& check, bool ahead, Dials* dials, std::map<int, LinkPtr>* opened);
  bool step_dial(Dial& dial, std::map<int, Peer>& missing, std::map<int, LinkPtr>* opened);
  void collect_parked(std::map<int, Peer>& missing, std::map<int, LinkPtr>* opened);
  void progress_loop();
  bool own_thread() const;
  void place_group(Group& group) const;
  int on_this_host(const Members& members) const;
  void size_rings(const Members& members);
  void size_outbox(const Members& members, uint64_t generation);
  bool uses_sockets() const { return socket_links_ > 0; }

  HubConfig config_;
  Secrets secrets_;
  PeerPtr self_ = std::make_shared<Peer>();
  std::string notice_;
  size_t ring_bytes_;    // of links that are dialed now; under edit_mutex_
  size_t chunk_bytes_;   // by the host with the most living ranks
  std::shared_ptr<Outbox> outbox_;  // also of what lies in its lent memory
  std::unique_ptr<Listener> listener_;
  int epoll_ = -1;
  int bell_ = -1;        // peers ring it; also for waking ourselves
  int edit_bell_ = -1;   // a link was parked, or an interrupt: an edit in progress looks again

  mutable std::shared_mutex topology_;
  BufferPool buffers_;               // before the links, which hold some
  std::vector<LinkPtr> links_;       // by rank; null where none
  std::vector<bool> alive_;
  std::vector<Link*> living_links_;  // those of the living, for pump()
  int socket_links_ = 0;
  bool shares_memory_ = false;
  uint16_t spin_ = 0;                // rounds of looking again before yielding
  uint16_t yields_ = 0;              // rounds of yielding before sleeping
  const unsigned cores_;             // of this machine; asking for them reads a file
  std::unordered_map<uint64_t, GroupPtr> groups_;
  mutable std::mutex groups_mutex_;
  std::mutex edit_mutex_;
  // By rank, with the incarnation: of a link that was dropped, until the next one is opened. Under edit_mutex_.
  std::map<int, std::pair<uint64_t, std::shared_ptr<HeldLoans>>> loans_;
  Dials ahead_;                      // half-way when prepare() was ended; under edit_mutex_
  std::atomic<int> edits_waiting_{0};

  std::mutex parked_mutex_;
  std::map<int, LinkPtr> parked_;            // opened by the other side, not yet in an edit
  std::vector<uint64_t> known_;              // newest incarnation heard of, by rank
  std::vector<uint64_t> linked_;             // incarnation + 1 of the link in use, 0 where none
  std::map<int, int> dialing_;               // ranks being dialed from here
  std::map<int, int> claims_;                // ranks that dialed us and have proved their identity

  std::atomic<uint64_t> generation_{0};
  std::atomic<uint64_t> frozen_{0};
  std::atomic<bool> editing_{false};
  std::atomic<bool> closed_{false};

  std::mutex wake_mutex_;
  std::condition_variable wake_;
  uint64_t wake_count_ = 0;
  bool led_ = false;
  bool led_by_progress_ = false;
  std::atomic<int> followers_{0};
  std::atomic<bool> asleep_{false};

  mutable std::mutex waits_mutex_;
  std::list<std::vector<int>> waits_;

  std::mutex background_mutex_;
  std::condition_variable background_cv_;
  std::atomic<int> background_{0};
  std::atomic<int> waiters_{0};  // threads in wait() for a caller, not the progress thread
  bool background_stop_ = false;
  std::thread progress_;

  Workers workers_;
};

}  // namespace elastic::comm
