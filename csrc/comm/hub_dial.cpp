// Opening links: from the result of a handshake, by dialing, or where the other side dialed.
//
// For a pair the higher rank dials. A link the other side opened waits, parked,
// until an edit names its incarnation; so a spare can open links ahead of time,
// and both sides of an edit may come in any order. All dials run at once from
// one poll loop, which also sees arrivals and interrupts.
#include "hub_dial.hpp"

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
#include <optional>
#include <utility>

#include "address.hpp"
#include "congestion.hpp"
#include "hub.hpp"
#include "link_shm.hpp"
#include "link_tcp.hpp"
#include "silence.hpp"

namespace elastic::comm {
namespace {

constexpr double kNamed = 1.1;  // times the silence after which a host counts as silent

bool refused_for_good(int error) {
  return error == ECONNREFUSED || error == ENOENT;
}

// Descriptors received from a peer, closed unless taken.
class Received {
 public:
  explicit Received(std::vector<int> descriptors) : descriptors_(std::move(descriptors)) {}
  ~Received() {
    for (int fd : descriptors_) {
      if (fd >= 0) ::close(fd);
    }
  }
  Received(const Received&) = delete;
  Received& operator=(const Received&) = delete;
  size_t size() const { return descriptors_.size(); }
  int take(size_t i) { return std::exchange(descriptors_[i], -1); }

 private:
  std::vector<int> descriptors_;
};

}  // namespace

// ---------------------------------------------------------------- making links

Parts Hub::make_parts(uint64_t ring_bytes, const std::shared_ptr<SharedMemory>& ring) {
  Parts parts;
  if (ring_bytes == 0 || !outbox_) return parts;
  try {
    *ring = SharedMemory::create("elastic-ring", ring_segment_bytes(ring_bytes));
  } catch (const CommError&) {
    return parts;  // No shared memory left: the link uses the socket itself.
  }
  parts.ring_bytes = ring_bytes;
  parts.descriptors = {ring->fd(), outbox_->fd(), bell_};
  return parts;
}

// A rank that dialed us and has proved its identity, until its link is parked or has failed: an edit here waits for
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
    if (dialed || hub.linked_[size_t(rank)] == incarnation + 1) throw CommError("a link to this rank is open already");
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
  Received received(std::move(theirs.descriptors));
  const bool shared = own.ring_bytes != 0 && theirs.ring_bytes == own.ring_bytes && received.size() == 3;
  if (!shared) {
    limit_unacknowledged(n.handshake.socket(), 0);  // the peer may not read for any time
    return std::make_shared<TcpLink>(*this, peer.rank, peer.incarnation, n.handshake.take_socket());
  }
  ShmParts parts;
  parts.capacity = size_t(own.ring_bytes);
  parts.own = std::move(*n.ring);
  parts.peer = SharedMemory::open(received.take(0), ring_segment_bytes(parts.capacity));
  PeerOutbox outbox(SharedMemory::open(received.take(1), Outbox::kDataOffset));
  // Nothing fails from here on: what is taken has an owner.
  parts.peer_doorbell = received.take(2);
  return std::make_shared<ShmLink>(*this, peer.rank, peer.incarnation, n.handshake.take_socket(), std::move(parts),
                                   std::move(outbox));
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
  const bool local = outbox_ && !peer.unix_name.empty() && peer.machine == self_->machine;
  std::optional<SocketAddress> address;
  if (local) {
    dial.asked = Clock::now();  // a full backlog says nothing about the network
  } else {
    address.emplace(peer.ip, peer.port);
  }
  const int fd = socket(local ? AF_UNIX : address->family(), SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
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
    ask_when_idle(fd, config_.silent_seconds);
    limit_unacknowledged(fd, config_.silent_seconds);  // of the handshake
    if (peer.machine == self_->machine) use_plain_congestion_control(fd);
    rc = ::connect(fd, address->get(), address->size());
  }
  if (rc != 0 && errno != EINPROGRESS) {
    if (refused_for_good(errno)) throw PeerLost(peer.rank, "connection refused");
    ::close(fd);
    dial.connecting = -1;
    dial.later();
  }
}

// True if `dial` is over.
bool Hub::step_dial(Dial& dial, std::map<int, Peer>& missing, std::map<int, LinkPtr>* opened) {
  if (dial.connecting >= 0) {
    int error = 0;
    socklen_t size = sizeof error;
    getsockopt(dial.connecting, SOL_SOCKET, SO_ERROR, &error, &size);
    if (error != 0) {
      if (refused_for_good(error)) throw PeerLost(dial.peer.rank, "connection refused");
      ::close(dial.connecting);
      dial.connecting = -1;
      dial.later();
      return false;
    }
    auto ring = std::make_shared<SharedMemory>();
    const bool local = outbox_ && !dial.peer.unix_name.empty() && dial.peer.machine == self_->machine;
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
      dial.asked = Clock::now();
      dial.later();
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
    if (right) parked->second->probe();  // no thread has read it since it was opened
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
// so that lower ranks dial too and ranks that refuse are left out. Returns how many stood already or had been opened by
// the other side, whose last word was under way to us; `dials` holds what is half-way.
int Hub::connect(std::map<int, Peer> missing, Clock::time_point deadline, double timeout,
                 const std::function<void()>& check, bool ahead, Dials* dials, std::map<int, LinkPtr>* opened) {
  std::map<int, int> claimed;
  {
    std::lock_guard<std::mutex> lock(parked_mutex_);
    claimed = claims_;
  }
  collect_parked(missing, opened);
  int stood = int(opened->size());
  for (const auto& entry : missing) stood += int(claimed.count(entry.first));
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
    give_up_silent(missing, ahead, dials);
  }
  return stood;
}

// All are named together, so that the halves of the network show: dials that began later get a little more time.
void Hub::give_up_silent(std::map<int, Peer>& missing, bool ahead, Dials* dials) {
  const auto silent_for = [&](double seconds) {
    std::vector<int> ranks;
    for (const auto& [rank, dial] : *dials) {
      if (dial->silent(seconds)) ranks.push_back(rank);
    }
    return ranks;
  };
  if (silent_for(kNamed * config_.silent_seconds).empty()) return;
  const std::vector<int> silent = silent_for(config_.silent_seconds);
  if (!ahead) throw PeerLost(silent.front(), "its host does not answer", false, silent);
  for (int rank : silent) {
    missing.erase(rank);
    (*dials)[rank]->end();
  }
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
    if (dial->fd() < 0 && !dial->over) {
      const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(dial->again - Clock::now()).count();
      patience = std::min(patience, std::max(1, int(left) + 1));
    }
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

int Hub::prepare(const Members& members, double timeout) {
  std::lock_guard<std::mutex> one_at_a_time(edit_mutex_);
  size_rings(members);
  std::map<int, Peer> missing;
  {
    const Shared lock(topology_);
    for (const PeerPtr& p : members) {
      const bool other = p->rank != config_.rank && p->rank >= 0 && p->rank < config_.slots;
      if (other && !links_[size_t(p->rank)]) missing[p->rank] = *p;
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
    // The edit takes over the links that are up or being opened, and opens the rest.
  }
  {
    std::lock_guard<std::mutex> lock(parked_mutex_);
    for (auto& [rank, link] : opened) parked_[rank] = link;
  }
  for (auto it = ahead_.begin(); it != ahead_.end();) it = it->second->over ? ahead_.erase(it) : std::next(it);
  return int(opened.size());
}

}  // namespace elastic::comm
