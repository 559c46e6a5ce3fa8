// Editing: which links exist, and since when.
//
// For a pair the higher rank dials. A link the other side opened waits, parked,
// until an edit names its incarnation; so a spare can open links ahead of time,
// and both sides of an edit may come in any order. All dials run at once from
// one poll loop, which also sees arrivals and interrupts.
#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "hub.hpp"
#include "link_shm.hpp"
#include "link_tcp.hpp"

namespace elastic::comm {
namespace {

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

bool refused_for_good(int error) {
  return error == ECONNREFUSED || error == ENOENT || error == ENETUNREACH;
}

constexpr auto kRetry = std::chrono::milliseconds(3);

}  // namespace

// ---------------------------------------------------------------- making links

Parts Hub::make_parts(uint64_t ring_bytes, const std::shared_ptr<SharedMemory>& ring) {
  Parts parts;
  if (ring_bytes == 0 || !outbox_) return parts;
  try {
    *ring = SharedMemory::create("elastic-ring", ring_segment_bytes(ring_bytes));
  } catch (const CommError&) {
    return parts;  // No room: the link goes over the socket itself.
  }
  parts.ring_bytes = ring_bytes;
  parts.descriptors = {ring->fd(), outbox_->fd(), bell_};
  return parts;
}

// A rank that dialed us and has proved who it is, until its link is parked or has failed: an edit here waits for
// that link and does not dial. Without it two links could come to be, and each end take another one.
struct Hub::Claim {
  Hub& hub;
  int rank = -1;
  uint64_t incarnation = 0;
  bool held = false;
  explicit Claim(Hub& h) : hub(h) {}
  void hold() {
    std::lock_guard<std::mutex> lock(hub.parked_mutex_);
    const bool dialed = rank < hub.config_.rank && hub.dialing_.count(rank) != 0;
    if (dialed || hub.linked_[size_t(rank)] == incarnation + 1) throw CommError("linked from here already");
    ++hub.claims_[rank];
    held = true;
  }
  ~Claim() {
    if (!held) return;
    {
      std::lock_guard<std::mutex> lock(hub.parked_mutex_);
      if (--hub.claims_[rank] == 0) hub.claims_.erase(rank);
    }
    eventfd_write(hub.edit_bell_, 1);
  }
};

std::unique_ptr<Negotiation> Hub::accept(int socket, bool unix_socket) {
  auto ring = std::make_shared<SharedMemory>();
  auto claim = std::make_shared<Claim>(*this);
  auto handshake = Handshake::accept(
      socket, secrets_, {config_.rank, config_.incarnation}, unix_socket,
      [this, claim](Identity who) {
        claim->rank = who.rank;
        claim->incarnation = who.incarnation;
        return admit(who);
      },
      [this, ring, claim](uint64_t bytes) {
        claim->hold();
        return make_parts(bytes, ring);
      });
  return std::make_unique<Negotiation>(std::move(handshake), std::move(ring));
}

Refusal Hub::admit(const Identity& who) {
  if (who.rank < 0 || who.rank >= config_.slots || who.rank == config_.rank) return Refusal::Garbage;
  std::lock_guard<std::mutex> lock(parked_mutex_);
  const size_t r = size_t(who.rank);
  if (who.incarnation < known_[r]) return Refusal::Stale;
  if (linked_[r] == who.incarnation + 1) return Refusal::Duplicate;
  if (who.rank < config_.rank && dialing_.count(who.rank) != 0) return Refusal::Duplicate;
  return Refusal::None;
}

LinkPtr Hub::make_link(Negotiation& n) {
  const Identity peer = n.handshake.peer();
  const Parts own = n.handshake.take_own_parts();
  Parts theirs = n.handshake.take_peer_parts();
  const bool shared = own.ring_bytes != 0 && theirs.ring_bytes == own.ring_bytes && theirs.descriptors.size() == 3;
  if (!shared) {
    for (int fd : theirs.descriptors) ::close(fd);
    return std::make_shared<TcpLink>(*this, peer.rank, peer.incarnation, n.handshake.take_socket());
  }
  ShmParts parts;
  parts.capacity = size_t(own.ring_bytes);
  parts.own = std::move(*n.ring);
  parts.peer_doorbell = theirs.descriptors[2];
  try {
    parts.peer = SharedMemory::open(theirs.descriptors[0], ring_segment_bytes(parts.capacity));
    theirs.descriptors[0] = -1;
    parts.outbox = SharedMemory::open(theirs.descriptors[1], Outbox::kDataOffset);
    theirs.descriptors[1] = -1;
    return std::make_shared<ShmLink>(*this, peer.rank, peer.incarnation, n.handshake.take_socket(), std::move(parts));
  } catch (...) {
    ::close(theirs.descriptors[2]);
    throw;
  }
}

void Hub::established(std::unique_ptr<Negotiation> n) {
  LinkPtr link = make_link(*n);
  {
    std::lock_guard<std::mutex> lock(parked_mutex_);
    const size_t r = size_t(link->rank);
    if (link->incarnation < known_[r] || linked_[r] == link->incarnation + 1) return;
    known_[r] = std::max(known_[r], link->incarnation);
    parked_[link->rank] = std::move(link);
  }
  eventfd_write(edit_bell_, 1);
}

// ---------------------------------------------------------------- dialing

struct Hub::Dial {
  Hub& hub;
  Peer peer;
  std::unique_ptr<Negotiation> negotiation;
  int connecting = -1;         // socket not connected yet
  Clock::time_point again{};   // when to try next, while neither of the two
  bool ready = false;
  int fd() const { return connecting >= 0 ? connecting : (negotiation ? negotiation->handshake.socket() : -1); }
  bool over = false;  // kept to the end of the edit: dialing_ says who is not to dial us
  void end() {
    over = true;
    if (connecting >= 0) ::close(std::exchange(connecting, -1));
    negotiation.reset();
  }
  // With may_dial's leave, which counted it in dialing_.
  Dial(Hub& h, Peer p) : hub(h), peer(std::move(p)) {}
  ~Dial() {
    if (connecting >= 0) ::close(connecting);
    std::lock_guard<std::mutex> lock(hub.parked_mutex_);
    if (--hub.dialing_[peer.rank] == 0) hub.dialing_.erase(peer.rank);
  }
};

// Counts the dial that follows, unless the other side has dialed us. The higher rank dials; both may ahead of an edit.
bool Hub::may_dial(const Peer& peer, bool upwards) {
  if (peer.rank > config_.rank && !upwards) return false;
  std::lock_guard<std::mutex> lock(parked_mutex_);
  const auto parked = parked_.find(peer.rank);
  if (parked != parked_.end() && parked->second->incarnation == peer.incarnation) return false;
  if (claims_.count(peer.rank) != 0) return false;
  ++dialing_[peer.rank];
  return true;
}

std::shared_ptr<Hub::Dial> Hub::start_dial(const Peer& peer) {
  auto dial = std::make_shared<Dial>(*this, peer);
  redial(*dial);
  return dial;
}

void Hub::redial(Dial& dial) {
  const Peer& peer = dial.peer;
  const bool local = outbox_ && !peer.unix_name.empty() && peer.machine == self_.machine;
  const int fd = socket(local ? AF_UNIX : AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (fd < 0) throw CommError(std::string("socket: ") + std::strerror(errno));
  dial.connecting = fd;
  int rc;
  if (local) {
    sockaddr_un name{};
    name.sun_family = AF_UNIX;
    const size_t length = std::min(peer.unix_name.size(), sizeof name.sun_path - 1);
    std::memcpy(name.sun_path + 1, peer.unix_name.data(), length);
    rc = ::connect(fd, reinterpret_cast<sockaddr*>(&name), socklen_t(offsetof(sockaddr_un, sun_path) + 1 + length));
  } else {
    const int one = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    sockaddr_in name{};
    name.sin_family = AF_INET;
    name.sin_port = htons(uint16_t(peer.port));
    if (inet_pton(AF_INET, peer.ip.c_str(), &name.sin_addr) != 1) throw CommError("not an IPv4 address: " + peer.ip);
    rc = ::connect(fd, reinterpret_cast<sockaddr*>(&name), sizeof name);
  }
  if (rc != 0 && errno != EINPROGRESS) {
    if (refused_for_good(errno)) throw PeerLost(peer.rank, "connection refused");
    ::close(fd);
    dial.connecting = -1;
    dial.again = Clock::now() + kRetry;  // EAGAIN: its backlog is full
  }
}

// Whether `dial` is over.
bool Hub::step_dial(Dial& dial, std::map<int, Peer>& missing, std::map<int, LinkPtr>* opened) {
  if (dial.connecting >= 0) {
    int error = 0;
    socklen_t size = sizeof error;
    getsockopt(dial.connecting, SOL_SOCKET, SO_ERROR, &error, &size);
    if (error != 0) {
      if (refused_for_good(error)) throw PeerLost(dial.peer.rank, "connection refused");
      ::close(dial.connecting);
      dial.connecting = -1;
      dial.again = Clock::now() + kRetry;
      return false;
    }
    auto ring = std::make_shared<SharedMemory>();
    const bool local = outbox_ && !dial.peer.unix_name.empty() && dial.peer.machine == self_.machine;
    const uint64_t bytes = local ? ring_bytes_ : 0;
    auto handshake = Handshake::dial(dial.connecting, secrets_, {config_.rank, config_.incarnation},
                                     {dial.peer.rank, dial.peer.incarnation},
                                     [this, ring, bytes] { return make_parts(bytes, ring); });
    dial.connecting = -1;
    dial.negotiation = std::make_unique<Negotiation>(std::move(handshake), std::move(ring));
  }
  switch (dial.negotiation->handshake.advance()) {
    case Handshake::Progress::Again:
      return false;
    case Handshake::Progress::Failed:
      // Turned away or cut off; an arrival or a newer generation may explain it.
      dial.negotiation.reset();
      dial.again = Clock::now() + kRetry;
      return false;
    default:
      (*opened)[dial.peer.rank] = make_link(*dial.negotiation);
      missing.erase(dial.peer.rank);
      return true;
  }
}

void Hub::collect_parked(std::map<int, Peer>& missing, std::map<int, LinkPtr>* opened) {
  std::lock_guard<std::mutex> lock(parked_mutex_);
  for (auto it = missing.begin(); it != missing.end();) {
    const auto parked = parked_.find(it->first);
    const bool right = parked != parked_.end() && parked->second->incarnation == it->second.incarnation;
    if (right) parked->second->probe();  // nobody has looked at it since it was opened
    if (right && parked->second->dead()) {
      parked_.erase(parked);
      ++it;
    } else if (right) {
      (*opened)[it->first] = std::move(parked->second);
      parked_.erase(parked);
      it = missing.erase(it);
    } else {
      ++it;
    }
  }
}

// Until every one of `missing` is linked: parked links are taken up, the others dialed. `ahead`: for an edit to come,
// so that lower ranks dial too and who refuses is left out. Returns how many stood at once; `dials` holds what is
// half-way.
int Hub::connect(std::map<int, Peer> missing, Clock::time_point deadline, double timeout,
                 const std::function<void()>& check, bool ahead, Dials* dials, std::map<int, LinkPtr>* opened) {
  collect_parked(missing, opened);
  const int stood = int(opened->size());
  for (auto it = dials->begin(); it != dials->end();) {
    const auto wanted = missing.find(it->first);
    const bool same = wanted != missing.end() && wanted->second.incarnation == it->second->peer.incarnation;
    it = same ? std::next(it) : dials->erase(it);
  }
  while (!missing.empty()) {
    check();
    if (Clock::now() >= deadline) {
      std::vector<int> ranks;
      for (const auto& entry : missing) ranks.push_back(entry.first);
      throw Timeout(timeout, ranks);
    }
    dial_missing(missing, ahead, dials);
    wait_for_dials(*dials);
    collect_parked(missing, opened);
    advance_dials(missing, ahead, dials, opened);
  }
  return stood;
}

void Hub::dial_missing(std::map<int, Peer>& missing, bool ahead, Dials* dials) {
  for (auto it = missing.begin(); it != missing.end();) {
    const auto& [rank, peer] = *it;
    try {
      if (dials->count(rank) == 0 && may_dial(peer, ahead)) dials->emplace(rank, start_dial(peer));
      ++it;
    } catch (const PeerLost&) {
      if (!ahead) throw;
      it = missing.erase(it);
    }
  }
}

// Sleeps until something may have happened; `ready` of a dial says that its socket has.
void Hub::wait_for_dials(Dials& dials) {
  std::vector<pollfd> watched{{edit_bell_, POLLIN, 0}};
  int patience = 50;
  for (auto& [rank, dial] : dials) {
    if (dial->fd() < 0 && !dial->over) patience = 1;
    const bool writes = dial->connecting >= 0 || (dial->negotiation && dial->negotiation->handshake.wants_write());
    watched.push_back({dial->fd(), short(POLLIN | (writes ? POLLOUT : 0)), 0});
  }
  poll(watched.data(), nfds_t(watched.size()), patience);
  eventfd_t count;
  if (watched[0].revents != 0) eventfd_read(edit_bell_, &count);
  size_t i = 1;
  for (auto& [rank, dial] : dials) dial->ready = watched[i++].revents != 0;
}

void Hub::advance_dials(std::map<int, Peer>& missing, bool ahead, Dials* dials, std::map<int, LinkPtr>* opened) {
  for (auto& [rank, at] : *dials) {
    Dial& dial = *at;
    if (dial.over) continue;
    try {
      if (missing.count(rank) == 0) {
        dial.end();  // the other side's came first
      } else if (dial.fd() < 0) {
        // Turned away. In an edit the higher rank dials: what a lower one began ahead of it is not begun again.
        if (!ahead && rank > config_.rank) {
          dial.end();
        } else if (Clock::now() >= dial.again) {
          redial(dial);
        }
      } else if (dial.ready && step_dial(dial, missing, opened)) {
        dial.end();
      }
    } catch (const PeerLost&) {
      if (!ahead) throw;
      missing.erase(rank);
      dial.end();
    }
  }
}

int Hub::prepare(const std::vector<Peer>& members, double timeout) {
  std::lock_guard<std::mutex> one_at_a_time(edit_mutex_);
  std::map<int, Peer> missing;
  {
    const Shared lock(topology_);
    for (const Peer& p : members) {
      const bool other = p.rank != config_.rank && p.rank >= 0 && p.rank < config_.slots;
      if (other && !links_[size_t(p.rank)]) missing[p.rank] = p;
    }
  }
  std::map<int, LinkPtr> opened;
  const auto deadline =
      Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(timeout));
  const uint64_t frozen_before = frozen();
  const auto check = [&] {
    if (frozen() > frozen_before || edits_waiting_.load() > 0) throw GenerationChanged(frozen());
  };
  try {
    connect(std::move(missing), deadline, timeout, check, true, &ahead_, &opened);
  } catch (const CommError&) {
    // What stands, stands; the edit takes over what is half-way and opens the rest.
  }
  {
    std::lock_guard<std::mutex> lock(parked_mutex_);
    for (auto& [rank, link] : opened) parked_[rank] = link;
  }
  for (auto it = ahead_.begin(); it != ahead_.end();) it = it->second->over ? ahead_.erase(it) : std::next(it);
  return int(opened.size());
}

// ---------------------------------------------------------------- the edit

EditStats Hub::edit(uint64_t generation, const std::vector<Peer>& members, double timeout) {
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
                    std::to_string(this->generation()));
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
  interrupt(generation);  // whatever still runs belongs to an older generation
  std::unique_lock<std::shared_mutex> alone(topology_);
  stats.quiesce = seconds_since(start);

  std::vector<const Peer*> wanted(size_t(config_.slots), nullptr);
  for (const Peer& p : members) {
    if (p.rank < 0 || p.rank >= config_.slots) throw CommError("member outside the slots");
    if (p.rank != config_.rank) wanted[size_t(p.rank)] = &p;
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
        gone->push_back(std::move(link));
        link.reset();
        ++stats.dropped;
      } else if (want == nullptr) {
        link->unwatch();
      }
    }
    if (want != nullptr && !link) missing.emplace(r, *want);
  }
  // Unmapping gives back the memory of the dead: nobody need wait for that.
  if (!gone->empty()) workers_.submit([gone] { gone->clear(); });
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
  stats.drop = seconds_since(mark);

  mark = Clock::now();
  std::map<int, LinkPtr> opened;
  const auto keep = [&] {
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
    keep();  // They stand for both sides: the next edit takes them up.
    ahead_.clear();
    throw;
  }
  keep();
  ahead_.clear();
  stats.opened = int(opened.size()) - stats.ahead;
  stats.connect = seconds_since(mark);

  mark = Clock::now();
  check();
  if (outbox_) outbox_->start(generation);
  generation_.store(generation, std::memory_order_release);
  socket_links_ = 0;
  int local = 1;
  shares_memory_ = !self_.unix_name.empty();
  for (const Peer* peer : wanted) {
    if (peer == nullptr) continue;
    alive_[size_t(peer->rank)] = true;
    shares_memory_ = shares_memory_ && !peer->unix_name.empty() && peer->machine == self_.machine;
    Link* link = links_[size_t(peer->rank)].get();
    living_links_.push_back(link);
    if (link->reads_in_place()) {
      ++local;
    } else {
      ++socket_links_;
      if (peer->machine == self_.machine) ++local;
    }
    link->watch(epoll_);
    // Frames of this generation may have come before us; sockets may hold one back without saying so.
    if (!link->reads_in_place() || link->has_input() || link->dead()) link->pump();
  }
  alive_[size_t(config_.rank)] = true;
  spin_ = unsigned(local) <= cores_ ? 2000 : (unsigned(local) <= 8 * cores_ ? 20 : 0);
  {
    std::lock_guard<std::mutex> lock(groups_mutex_);
    for (auto& entry : groups_) place_group(*entry.second);
    stats.groups = int(groups_.size());
  }
  stats.publish = seconds_since(mark);
  return stats;
}

void Hub::place_group(Group& g) const {
  g.living.clear();
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
}

}  // namespace elastic::comm
