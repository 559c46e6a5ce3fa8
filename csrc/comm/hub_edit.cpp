// The edit: the living ranks from a generation on, and the links to the others.
//
// With work of older generations gone and the topology held alone, links to the dead are dropped, missing ones opened
// (hub_dial.cpp), every group counted anew. Nothing of a survivor's link is touched but what was pending on it, and a
// rank makes no system call for one: with ranks outnumbering cores, an edit is over when the last of them has had its
// turn, so its processor time is what counts.
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <algorithm>
#include <utility>

#include "hub.hpp"
#include "hub_dial.hpp"

namespace elastic::comm {
namespace {

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// Memory is given back and asked for once an edit is over: the kernel takes milliseconds, which the work that follows
// an edit would wait for where ranks outnumber cores.
constexpr auto kAfterwards = std::chrono::milliseconds(100);
// An outbox grows only to this many times its size: one rank less on a host is not worth more memory.
constexpr size_t kGrowth = 2;

}  // namespace

EditStats Hub::edit(uint64_t generation, const Members& members, double timeout) {
  edits_waiting_.fetch_add(1);
  eventfd_write(edit_bell_, 1);  // prepare() gives way
  std::lock_guard<std::mutex> one_at_a_time(edit_mutex_);
  edits_waiting_.fetch_sub(1);
  EditStats stats;
  const auto start = Clock::now();
  const auto deadline = start + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(timeout));
  if (closed_.load()) throw CommError("the communicator was closed");
  const auto check = [&] {
    if (frozen() > generation) throw GenerationChanged(frozen());
  };
  check();
  if (generation <= this->generation()) {
    throw CommError("generation " + std::to_string(generation) + " is not newer than " +
                    std::to_string(this->generation()) + ", which is already used");
  }
  struct Flag {
    std::atomic<bool>& flag;
    explicit Flag(std::atomic<bool>& f) : flag(f) { flag.store(true); }
    ~Flag() { flag.store(false); }
  } flag(editing_);
  const auto stands_with = [this](const Link& link, const Peer& peer) {
    const auto& broken = peer.broken;
    return peer.incarnation == link.incarnation &&
           std::find(broken.begin(), broken.end(), std::make_pair(config_.rank, config_.incarnation)) == broken.end();
  };
  interrupt(generation);  // all operations that still run belong to an older generation
  std::unique_lock<std::shared_mutex> alone(topology_);
  stats.quiesce = seconds_since(start);

  std::vector<const Peer*> wanted(size_t(config_.slots), nullptr);
  for (const PeerPtr& p : members) {
    if (p->rank < 0 || p->rank >= config_.slots) throw CommError("member outside the slots");
    if (p->rank != config_.rank) wanted[size_t(p->rank)] = p.get();
  }
  auto mark = Clock::now();
  const auto changed = std::make_exception_ptr(GenerationChanged(generation));
  living_links_.clear();
  std::fill(alive_.begin(), alive_.end(), false);
  std::map<int, Peer> missing;
  auto gone = std::make_shared<std::vector<LinkPtr>>();
  collect_socket_events();  // one call says which of the watched links have ended
  for (int r = 0; r < config_.slots; ++r) {
    LinkPtr& link = links_[size_t(r)];
    const Peer* want = wanted[size_t(r)];
    if (link) {
      link->purge(changed);
      if (!link->watched() || link->has_input()) link->probe();
      // One that merely left keeps its link: both sides still have it if it comes back.
      if (link->dead() || (want != nullptr && !stands_with(*link, *want))) {
        link->unwatch();
        // The other end, if it lives, must find out before it is asked again which of its links are broken.
        ::shutdown(link->socket(), SHUT_WR);
        link->leave();
        loans_[r] = {link->incarnation, link->loans()};
        if (outbox_) outbox_->lent().doubt({r, link->incarnation});
        gone->push_back(std::move(link));
        link.reset();
        ++stats.dropped;
      } else if (want == nullptr) {
        link->unwatch();
      }
    }
    if (want != nullptr && !link) missing.emplace(r, *want);
  }
  // Unmapping returns the memory of lost ranks: no thread need wait for that, nor take turns with it.
  if (!gone->empty()) listener_->later(kAfterwards, [gone] { gone->clear(); });
  {
    std::lock_guard<std::mutex> lock(parked_mutex_);
    for (size_t r = 0; r < links_.size(); ++r) {
      linked_[r] = links_[r] ? links_[r]->incarnation + 1 : 0;
      if (wanted[r] != nullptr) known_[r] = std::max(known_[r], wanted[r]->incarnation);
    }
    for (auto it = parked_.begin(); it != parked_.end();) {
      const bool stale = it->second->incarnation < known_[size_t(it->first)];
      it = stale ? parked_.erase(it) : std::next(it);
    }
  }
  if (outbox_) {
    outbox_->lent().keep_only([&](const Borrower& one) {
      const Peer* want = wanted[size_t(one.rank)];
      const LinkPtr& link = links_[size_t(one.rank)];
      return (want != nullptr && want->incarnation == one.incarnation) ||
             (link && link->incarnation == one.incarnation);
    });
  }
  stats.drop = seconds_since(mark);

  mark = Clock::now();
  size_rings(members);
  std::map<int, LinkPtr> opened;
  const auto keep = [&] {
    for (auto& [rank, link] : opened) {
      const auto before = loans_.find(rank);
      if (before == loans_.end()) continue;
      if (before->second.first == link->incarnation) link->take_over(before->second.second);
      loans_.erase(before);
    }
    std::lock_guard<std::mutex> lock(parked_mutex_);
    for (auto& [rank, link] : opened) {
      link->watch(epoll_);
      linked_[size_t(rank)] = link->incarnation + 1;
      links_[size_t(rank)] = link;
    }
  };
  try {
    stats.ahead = connect(std::move(missing), deadline, timeout, check, false, &ahead_, &opened);
  } catch (...) {
    keep();  // These links are up on both sides: the next edit takes them.
    ahead_.clear();
    throw;
  }
  keep();
  ahead_.clear();
  stats.opened = int(opened.size()) - stats.ahead;
  stats.connect = seconds_since(mark);

  mark = Clock::now();
  check();
  size_outbox(members, generation);
  generation_.store(generation, std::memory_order_release);
  socket_links_ = 0;
  int local = 1;
  shares_memory_ = !self_->unix_name.empty();
  for (const Peer* peer : wanted) {
    if (peer == nullptr) continue;
    alive_[size_t(peer->rank)] = true;
    shares_memory_ = shares_memory_ && !peer->unix_name.empty() && peer->machine == self_->machine;
    Link* link = links_[size_t(peer->rank)].get();
    living_links_.push_back(link);
    if (link->reads_in_place()) {
      ++local;
    } else {
      ++socket_links_;
      if (peer->machine == self_->machine) ++local;
    }
    link->watch(epoll_);
    // Frames of this generation may have come before us; sockets may hold one back without saying so.
    if (!link->reads_in_place() || link->has_input() || link->dead()) link->pump();
  }
  alive_[size_t(config_.rank)] = true;
  // With more ranks than cores, polling costs the peer that we wait for its turn. A yield passes it on where the peer
  // is there at once, in shared memory. Over sockets a sleeping thread is woken as soon as bytes come, while one that
  // polls, or yields, runs after all other runnable threads.
  // A round of yielding costs processor time. In a job most waits are longer than 16 rounds. With 64, collectives in a
  // loop took a tenth less time, but each step 0.1 ms more of the processor (docs/log.md).
  const bool crowded = unsigned(local) > cores_;
  const bool very = unsigned(local) > 8 * cores_;
  const bool sockets = socket_links_ > 0;
  spin_ = very ? 0 : crowded ? 20 : sockets ? 200 : 2000;
  yields_ = sockets ? 0 : very ? 2 : 16;
  {
    std::lock_guard<std::mutex> lock(groups_mutex_);
    for (auto& entry : groups_) place_group(*entry.second);
    stats.groups = int(groups_.size());
  }
  stats.publish = seconds_since(mark);
  return stats;
}

// Those that can share memory with this process, which is one of them.
int Hub::on_this_host(const Members& members) const {
  return 1 + int(std::count_if(members.begin(), members.end(), [this](const PeerPtr& p) {
           return p->rank != config_.rank && !p->unix_name.empty() && p->machine == self_->machine;
         }));
}

void Hub::size_rings(const Members& members) {
  if (config_.ring_bytes == 0) ring_bytes_ = ring_bytes_for(size_t(on_this_host(members)));
}

// Chunks go by the fullest host, which all members see alike; the outbox by this one. Its memory is allocated some time
// after the edit, and used as soon as it is there.
void Hub::size_outbox(const Members& members, uint64_t generation) {
  std::map<std::string, int> hosts;
  int most = 1;
  for (const PeerPtr& p : members) {
    if (!p->unix_name.empty()) most = std::max(most, ++hosts[p->machine]);
  }
  const size_t whole = config_.outbox_bytes != 0 ? config_.outbox_bytes : outbox_bytes_for(size_t(most));
  chunk_bytes_ = chunk_bytes_for(whole, size_t(most));
  if (!outbox_) return;
  outbox_->start(generation, chunk_bytes_);
  const size_t wanted = outbox_bytes_for(size_t(on_this_host(members)));
  const size_t allocated = outbox_->allocated();
  if (config_.outbox_bytes != 0 || wanted < kGrowth * allocated) return;
  listener_->later(kAfterwards, [this, wanted, more = wanted - allocated] {
    if (shared_memory_headroom() / 4 > more) outbox_->grow(wanted);
  });
}

void Hub::place_group(Group& g) const {
  g.living.clear();
  g.counted = generation();
  int me = -1;
  for (int r : g.members) {
    if (!alive_[size_t(r)]) continue;
    if (r == config_.rank) me = int(g.living.size());
    g.living.push_back(r);
  }
  g.me.store(me, std::memory_order_relaxed);
  g.count.store(int(g.living.size()), std::memory_order_relaxed);
  g.sequence.store(0, std::memory_order_relaxed);
  g.lost.store(-1, std::memory_order_relaxed);
  g.broken.store(false, std::memory_order_relaxed);
  g.aborted.store(false, std::memory_order_relaxed);
}

}  // namespace elastic::comm
