#include "hub.hpp"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <fstream>

#include "link_shm.hpp"
#include "link_tcp.hpp"
#include "silence.hpp"

namespace elastic::comm {
namespace {

constexpr uint64_t kBellEvent = ~0ull;
constexpr size_t kEvents = 64;  // taken from the kernel at once
constexpr int kLooks = 10;      // for silence, in the time after which a link breaks for it

// Text equal for processes that can hand each other descriptors over an abstract Unix socket.
std::string machine_identity() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  char space[128] = {};
  if (readlink("/proc/self/ns/net", space, sizeof space - 1) < 0) space[0] = 0;
  return boot + "/" + space;
}

std::string random_name() {
  uint8_t bytes[12];
  random_bytes(bytes, sizeof bytes);
  std::string out = "elastic-";
  for (uint8_t b : bytes) {
    out += "0123456789abcdef"[b >> 4];
    out += "0123456789abcdef"[b & 15];
  }
  return out;
}

thread_local const Hub* progressing_for = nullptr;  // whose progress thread this is

inline void pause_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

Hub::Hub(HubConfig config)
    : config_(std::move(config)),
      links_(size_t(config_.slots)),
      alive_(size_t(config_.slots), false),
      cores_(std::max(1u, std::thread::hardware_concurrency())),
      known_(size_t(config_.slots), 0),
      linked_(size_t(config_.slots), 0) {
  if (config_.rank < 0 || config_.rank >= config_.slots) throw CommError("rank outside the slots");
  secrets_ = {sha256(config_.run_id.data(), config_.run_id.size()), config_.secret};
  const size_t slots = size_t(config_.slots);
  const size_t outbox = config_.outbox_bytes != 0 ? config_.outbox_bytes : outbox_bytes_for(slots);
  ring_bytes_ = config_.ring_bytes != 0 ? power_of_two_below(config_.ring_bytes) : ring_bytes_for(slots);
  chunk_bytes_ = chunk_bytes_for(outbox, 1);
  bell_ = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  edit_bell_ = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  epoll_ = epoll_create1(EPOLL_CLOEXEC);
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = kBellEvent;
  epoll_ctl(epoll_, EPOLL_CTL_ADD, bell_, &event);
  if (config_.shared_memory) {
    const size_t wanted = outbox + 2 * ring_bytes_ * slots;
    try {
      if (shared_memory_headroom() / 4 < wanted) throw CommError("too little shared memory is free");
      outbox_ = std::make_shared<Outbox>(config_.outbox_bytes != 0 ? outbox : kMostOutbox, outbox, lent_bytes());
    } catch (const CommError& e) {
      notice_ = std::string("links within this host use TCP, not shared memory: ") + e.what();
    }
  }
  alive_[size_t(config_.rank)] = true;  // generation 0: a world of one
  self_->rank = config_.rank;
  self_->incarnation = config_.incarnation;
  self_->ip = config_.bind;
  self_->machine = machine_identity();
  if (outbox_) self_->unix_name = random_name();
  Listener::Callbacks callbacks;
  callbacks.accept = [this](int socket, bool unix_socket) { return accept(socket, unix_socket); };
  callbacks.established = [this](std::unique_ptr<Negotiation> n) { established(std::move(n)); };
  listener_ = std::make_unique<Listener>(config_.bind, self_->unix_name, config_.handshake_seconds,
                                         config_.silent_seconds, callbacks);
  self_->port = listener_->port();
  look_for_silence(*listener_);
}

// Not while an edit holds the topology: the listener's thread must go on taking connections for it. close() clears
// listener_ before that thread has ended, so it is not asked for here.
void Hub::look_for_silence(Listener& listener) {
  if (closed_.load()) return;
  bool found = false;
  if (const Shared lock(topology_, std::try_to_lock); lock.owns_lock()) {
    for (const auto& link : links_) {
      if (!link || link->dead() || !link->talks_on_socket() || !is_silent(link->socket(), config_.silent_seconds))
        continue;
      link->mark_silent();
      found = true;
    }
  }
  if (found) {
    wake_local();
    kick();
  }
  const auto pause = std::chrono::duration<double>(config_.silent_seconds / kLooks);
  listener.later(std::chrono::duration_cast<std::chrono::milliseconds>(pause),
                 [this, &listener] { look_for_silence(listener); });
}

std::shared_ptr<Hub> Hub::make(HubConfig config) {
  return {new Hub(std::move(config)), [](Hub* hub) {
            if (hub->own_thread()) {
              std::thread([hub] { delete hub; }).detach();
            } else {
              delete hub;
            }
          }};
}

bool Hub::own_thread() const {
  return workers_.contain_this_thread() || progressing_for == this || (listener_ && listener_->runs_this_thread());
}

Hub::~Hub() {
  close();
  ::close(epoll_);
  ::close(bell_);
  ::close(edit_bell_);
}

void Hub::close() {
  if (own_thread()) throw CommError("close() was called in a thread that it would wait for");
  if (closed_.exchange(true)) return;
  interrupt(UINT64_MAX);
  {
    std::lock_guard<std::mutex> lock(background_mutex_);
    background_stop_ = true;
    background_cv_.notify_all();
  }
  if (progress_.joinable()) progress_.join();
  workers_.stop();
  std::lock_guard<std::mutex> no_edit(edit_mutex_);
  listener_.reset();
  ahead_.clear();
  std::unique_lock<std::shared_mutex> alone(topology_);
  const auto gone = std::make_exception_ptr(CommError("the communicator was closed"));
  for (auto& link : links_) {
    if (!link) continue;
    link->purge(gone);
    link->unwatch();
    link->leave();
  }
  living_links_.clear();
  links_.assign(links_.size(), nullptr);
  std::lock_guard<std::mutex> lock(parked_mutex_);
  parked_.clear();
}

// ---------------------------------------------------------------- state

std::vector<int> Hub::alive() const {
  Shared lock(topology_);
  std::vector<int> out;
  for (size_t r = 0; r < alive_.size(); ++r) {
    if (alive_[r]) out.push_back(int(r));
  }
  return out;
}

std::string Hub::transport(int rank) const {
  Shared lock(topology_);
  const auto& link = links_.at(size_t(rank));
  return link ? link->transport() : (rank == config_.rank ? "self" : "none");
}

std::vector<std::pair<int, uint64_t>> Hub::broken() const {
  Shared lock(topology_);
  std::vector<std::pair<int, uint64_t>> out;
  for (const auto& link : links_) {
    if (!link) continue;
    link->probe();
    if (link->dead()) out.emplace_back(link->rank, link->incarnation);
  }
  return out;
}

void Hub::sever(int rank, bool quietly) {
  {
    Shared lock(topology_);
    const auto& link = links_.at(size_t(rank));
    if (!link) throw CommError("no link to rank " + std::to_string(rank));
    if (quietly) {
      link->mark_dead("link closed by this process");
    } else {
      ::shutdown(link->socket(), SHUT_RDWR);
    }
  }
  wake_local();
  kick();
}

GroupPtr Hub::group(const std::string& name, const std::vector<int>& members) {
  std::string text = name;
  for (int r : members) {
    if (r < 0 || r >= config_.slots) throw CommError("group member outside the slots");
    text += "," + std::to_string(r);
  }
  const Digest digest = sha256(text.data(), text.size());
  uint64_t id;
  std::memcpy(&id, digest.data(), sizeof id);
  Shared lock(topology_);
  std::lock_guard<std::mutex> groups_lock(groups_mutex_);
  GroupPtr& slot = groups_[id];
  if (!slot) {
    slot = std::make_shared<Group>();
    slot->self_ = slot;
    slot->id = id;
    slot->name = name;
    slot->members = members;
    place_group(*slot);
  }
  return slot;
}

void Hub::release(const GroupPtr& group) {
  std::lock_guard<std::mutex> lock(groups_mutex_);
  const auto it = groups_.find(group->id);
  if (it != groups_.end() && it->second == group) groups_.erase(it);  // else it is a later group of that name
}

std::vector<int> Hub::waiting_for() const {
  std::lock_guard<std::mutex> lock(waits_mutex_);
  std::vector<int> out;
  for (const auto& ranks : waits_) out.insert(out.end(), ranks.begin(), ranks.end());
  std::sort(out.begin(), out.end());
  out.erase(std::unique(out.begin(), out.end()), out.end());
  return out;
}

std::map<std::string, uint64_t> Hub::counters() const {
  static const char* names[] = {"none",      "garbage",   "wrong_run", "wrong_target", "stale",
                                "bad_proof", "duplicate", "closed",    "slow"};
  std::map<std::string, uint64_t> out;
  if (!listener_) return out;
  const auto refused = listener_->refused();
  for (size_t i = 1; i < refused.size(); ++i) out[names[i]] = refused[i];
  out["half_way"] = listener_->half_way();
  return out;
}

void Hub::block_returned(uint32_t block) {
  if (outbox_) outbox_->release(block);
}

void Hub::group_aborted(uint64_t id, int lost) {
  if (lost < 0 || lost >= config_.slots) return;
  {
    std::lock_guard<std::mutex> lock(groups_mutex_);
    const auto it = groups_.find(id);
    if (it == groups_.end()) return;
    it->second->lost.store(lost, std::memory_order_release);
  }
  wake_local();
}

// ---------------------------------------------------------------- waiting

Hub::Shared Hub::enter(uint64_t generation) {
  Shared lock(topology_);
  if (closed_.load()) throw CommError("the communicator was closed");
  const uint64_t now = this->generation();
  const uint64_t frozen = this->frozen();
  if (now != generation || frozen > now) throw GenerationChanged(std::max(now, frozen));
  return lock;
}

void Hub::interrupt(uint64_t generation) {
  uint64_t seen = frozen_.load();
  while (seen < generation && !frozen_.compare_exchange_weak(seen, generation)) {
  }
  kick();
  eventfd_write(edit_bell_, 1);
  {
    std::lock_guard<std::mutex> lock(wake_mutex_);
    ++wake_count_;
  }
  wake_.notify_all();
}

void Hub::abort(Group& group) {
  group.aborted.store(true);
  kick();
  {
    std::lock_guard<std::mutex> lock(wake_mutex_);
    ++wake_count_;
  }
  wake_.notify_all();
}

void Hub::kick() {
  eventfd_write(bell_, 1);
}

// A message ended: a sleeping thread may have been waiting for it.
void Hub::wake_local() {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (asleep_.load(std::memory_order_relaxed)) kick();
  if (followers_.load(std::memory_order_relaxed) > 0) {
    {
      std::lock_guard<std::mutex> lock(wake_mutex_);
      ++wake_count_;
    }
    wake_.notify_all();
  }
}

bool Hub::any_input() const {
  return std::any_of(living_links_.begin(), living_links_.end(),
                     [](const Link* l) { return l->has_input() || (l->dead() && !l->finished()); });
}

bool Hub::flush() {
  bool moved = false;
  for (Link* l : living_links_) {
    if (l->needs_flush()) moved |= l->flush();
  }
  return moved;
}

bool Hub::pump() {
  bool moved = false;
  for (Link* l : living_links_) {
    if (l->needs_flush()) moved |= l->flush();
    if (l->has_input() || (l->dead() && !l->finished())) moved |= l->pump();
  }
  return moved;
}

bool Hub::poll_sockets(int milliseconds) {
  epoll_event events[kEvents];
  const int n = epoll_wait(epoll_, events, int(kEvents), milliseconds);
  for (int i = 0; i < n; ++i) {
    if (events[i].data.u64 == kBellEvent) {
      eventfd_t count;
      eventfd_read(bell_, &count);
      continue;
    }
    const size_t rank = size_t(events[i].data.u64);
    if (rank < links_.size() && links_[rank]) links_[rank]->socket_event(events[i].events);
  }
  return n > 0;
}

void Hub::collect_socket_events() {
  // Level-triggered: what is not an end comes back each time, so as many rounds as there can be distinct ones.
  for (size_t round = 0; round * kEvents <= links_.size(); ++round) {
    if (!poll_sockets(0)) return;
  }
}

void Hub::check(const WaitScope& scope, unsigned round) const {
  const uint64_t frozen = this->frozen();
  if (frozen > scope.generation) throw GenerationChanged(frozen);
  if (scope.group != nullptr) {
    if (scope.group->aborted.load(std::memory_order_acquire)) throw CommError("the group was aborted");
    const int lost = scope.group->lost.load(std::memory_order_acquire);
    if (lost >= 0)
      throw PeerLost(lost, "Connection closed by peer, as another member found", stands(lost), silent(lost));
  }
  if (round % 16 == 15 && Clock::now() >= scope.deadline) {
    std::vector<int> ranks;
    if (scope.missing) scope.missing(&ranks);
    throw Timeout(scope.seconds, ranks);
  }
}

void Hub::wait(const WaitScope& scope, const std::function<bool()>& done) {
  // Registered from the first sleep to the end, so that the progress thread keeps out of the way.
  struct Registered {
    Hub& hub;
    bool yes = false;
    ~Registered() {
      if (!yes || hub.waiters_.fetch_sub(1) != 1 || hub.background_.load() == 0) return;
      std::lock_guard<std::mutex> lock(hub.background_mutex_);
      hub.background_cv_.notify_all();
    }
  } registered{*this};
  const unsigned looks = spin_;
  const unsigned awake = looks + yields_;
  unsigned round = 0;
  for (unsigned spin = scope.background ? awake : 0;; ++spin) {
    if (done()) return;
    check(scope, round++);  // the time is looked at whether or not other links have something
    if (pump()) {
      if (!scope.background) spin = 0;
      continue;
    }
    if (uses_sockets() && spin % 4 == 0 && poll_sockets(0)) continue;
    if (spin < looks) {
      pause_cpu();
    } else if (spin < awake) {
      std::this_thread::yield();
    } else {
      if (!scope.background && !registered.yes) {
        registered.yes = true;
        waiters_.fetch_add(1);
      }
      sleep(scope, done);
      check(scope, 15);
    }
  }
}

void Hub::sleep(const WaitScope& scope, const std::function<bool()>& done) {
  std::list<std::vector<int>>::iterator published;
  {
    std::vector<int> ranks;
    if (scope.missing && (scope.awaited == nullptr || scope.awaited->load())) scope.missing(&ranks);
    std::lock_guard<std::mutex> lock(waits_mutex_);
    waits_.push_front(std::move(ranks));
    published = waits_.begin();
  }
  const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(scope.deadline - Clock::now()).count();
  const int patience = int(std::max<int64_t>(1, std::min<int64_t>(left, 100)));
  std::unique_lock<std::mutex> lock(wake_mutex_);
  if (led_) {
    if (led_by_progress_ && !scope.background) kick();  // it gives way
    const uint64_t seen = wake_count_;
    followers_.fetch_add(1, std::memory_order_seq_cst);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (!done() && frozen() <= scope.generation) {
      wake_.wait_for(lock, std::chrono::milliseconds(patience), [&] { return wake_count_ != seen || !led_; });
    }
    followers_.fetch_sub(1, std::memory_order_seq_cst);
  } else {
    led_ = true;
    led_by_progress_ = scope.background;
    lock.unlock();
    asleep_.store(true, std::memory_order_seq_cst);
    if (outbox_) outbox_->sleeping(true);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    // Room for what is queued may have come before the peer could see that it has to say so.
    if (!flush() && !any_input() && !done() && frozen() <= scope.generation) poll_sockets(patience);
    asleep_.store(false, std::memory_order_seq_cst);
    if (outbox_) outbox_->sleeping(false);
    pump();
    lock.lock();
    led_ = false;
    ++wake_count_;
    if (followers_.load() > 0) wake_.notify_all();
  }
  lock.unlock();
  std::lock_guard<std::mutex> waits_lock(waits_mutex_);
  waits_.erase(published);
}

// ---------------------------------------------------------------- messages without a waiting thread

void Hub::background_changed(int by) {
  if (background_.fetch_add(by) != 0 || by < 0) return;
  std::lock_guard<std::mutex> lock(background_mutex_);
  if (background_stop_) return;
  if (!progress_.joinable()) progress_ = std::thread([this] { progress_loop(); });
  background_cv_.notify_all();
}

void Hub::progress_loop() {
  progressing_for = this;
  std::unique_lock<std::mutex> lock(background_mutex_);
  while (!background_stop_) {
    const uint64_t generation = this->generation();
    if (background_.load() == 0 || waiters_.load() > 0) {
      background_cv_.wait_for(lock, std::chrono::milliseconds(100));
      continue;
    }
    if (editing_.load() || frozen() > generation) {
      background_cv_.wait_for(lock, std::chrono::milliseconds(2));  // an edit's end is not announced here
      continue;
    }
    lock.unlock();
    try {
      const Shared shared = enter(generation);
      WaitScope scope;
      scope.generation = generation;
      scope.deadline = Clock::now() + std::chrono::milliseconds(100);
      scope.background = true;
      wait(scope, [this] { return background_.load() == 0 || editing_.load() || waiters_.load() > 0; });
    } catch (const CommError&) {
      // Frozen or closed: seen at the top; a time-out only paces this loop.
    }
    lock.lock();
  }
}

}  // namespace elastic::comm
