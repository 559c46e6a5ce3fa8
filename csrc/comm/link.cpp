#include "link.hpp"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "errors.hpp"

namespace elastic::comm {
namespace {

FrameHeader header_for(const Key& key, uint64_t generation, FrameKind kind) {
  FrameHeader h;
  h.kind = kind;
  h.generation = generation;
  h.key = key;
  return h;
}

// Frames that an edit does not make void.
bool of_no_generation(const FrameHeader& h) {
  return h.kind == FrameKind::Return || h.kind == FrameKind::Held || h.kind == FrameKind::AllHeld;
}

}  // namespace

Link::Link(LinkHost& host, int rank_, uint64_t incarnation_) : rank(rank_), incarnation(incarnation_), host_(host) {}
Link::~Link() = default;

// ---------------------------------------------------------------- ending

void Link::finish(const std::shared_ptr<Message>& message, std::exception_ptr error) {
  if (!message->pending()) return;
  message->error = std::move(error);
  message->state.store(message->error ? MessageState::Failed : MessageState::Done, std::memory_order_release);
  if (message->counted) host_.background_changed(-1);
  // After the state, which `ended` asks for: any thread that uses this link may run it from here on.
  if (message->ended) {
    std::lock_guard<std::mutex> lock(ended_mutex_);
    ended_.push_back(std::move(message->ended));
  }
  host_.wake_local();
}

// A receive from any source whose message is lost waits for another one's; callers have seen to `recv` itself.
void Link::release(const RecvPtr& recv) {
  if (!recv->any || recv->source < 0) return;
  recv->source = -1;
  recv->any->taken.store(false);
  if (!recv->any->released) return;
  std::lock_guard<std::mutex> lock(ended_mutex_);
  ended_.push_back(recv->any->released);
}

void Link::fail(const RecvPtr& recv, const std::exception_ptr& error) {
  finish(recv, error);
  release(recv);
}

void Link::look_after(Message& message) {
  if (!message.detached || !message.pending()) return;
  message.counted = true;
  host_.background_changed(+1);
}

void Link::run_ended() {
  std::vector<std::function<void()>> calls;
  {
    std::lock_guard<std::mutex> lock(ended_mutex_);
    calls.swap(ended_);
  }
  for (auto& call : calls) call();
}

void Link::mark_dead(const std::string& why) {
  {
    std::lock_guard<std::mutex> lock(why_mutex_);
    if (why_.empty()) why_ = why;
  }
  dead_.store(true, std::memory_order_release);
}

void Link::mark_dead(int error, const std::string& why) {
  if (error == ETIMEDOUT || error == EHOSTUNREACH || error == ENETUNREACH) return mark_silent();
  mark_dead(why);
}

void Link::mark_silent() {
  silent_.store(true, std::memory_order_release);
  mark_dead("its host does not answer");
}

void Link::probe() {
  pollfd asked{socket(), POLLIN | POLLRDHUP, 0};
  if (::poll(&asked, 1, 0) <= 0) return;
  // The kernel tells of an end also while there is something to read before it.
  const bool ended = (asked.revents & (POLLRDHUP | POLLHUP | POLLERR | POLLNVAL)) != 0;
  if (!ended && talks_on_socket()) return;
  int error = 0;
  socklen_t size = sizeof error;
  getsockopt(socket(), SOL_SOCKET, SO_ERROR, &error, &size);
  mark_dead(error, "Connection closed by peer");
}

std::exception_ptr Link::lost() {
  std::lock_guard<std::mutex> lock(why_mutex_);
  const auto silent = this->silent() ? std::vector<int>{rank} : std::vector<int>{};
  return std::make_exception_ptr(PeerLost(rank, why_.empty() ? "Connection closed by peer" : why_, false, silent));
}

void Link::malformed(const char* what) {
  rejected_ = true;
  mark_dead(std::string("malformed frame: ") + what);
}

// Under rx: everything that had arrived was taken in, nothing more can come.
void Link::fail_if_dead_locked() {
  if (!dead() || failed_all_.exchange(true)) return;
  const auto error = lost();
  // Messages that have arrived whole can still be received.
  for (auto it = arrived_.begin(); it != arrived_.end();) {
    auto& messages = it->second;
    for (auto& m : messages) {
      if (m->claimed) fail(m->claimed, error);
    }
    const auto cut_off = [](const ArrivedPtr& m) { return !m->complete(); };
    messages.erase(std::remove_if(messages.begin(), messages.end(), cut_off), messages.end());
    it = messages.empty() ? arrived_.erase(it) : std::next(it);
  }
  drop_receives(error);
  std::lock_guard<std::mutex> lock(tx_);
  drop_sends(error, true);
}

// Under rx. What has arrived stays.
void Link::drop_receives(const std::exception_ptr& error) {
  for (auto& [key, recvs] : posted_) {
    for (auto& recv : recvs) fail(recv, error);
  }
  posted_.clear();
  for (auto& [offer, recv] : granted_) fail(recv, error);
  granted_.clear();
  if (current_recv_) fail(current_recv_, error);
  current_recv_.reset();
  current_arrived_.reset();
  filling_ = nullptr;
  redirect();
}

// Not `for_good`: the link goes on, and so do frames of no generation. They go out with the next ones.
void Link::drop_sends(const std::exception_ptr& error, bool for_good) {
  detach();
  std::deque<SendPtr> kept;
  for (auto& send : queue_) {
    if (!for_good && of_no_generation(send->header) && !send->started) {
      if (std::exchange(send->counted, false)) host_.background_changed(-1);
      kept.push_back(send);
      continue;
    }
    if (send->header.kind == FrameKind::Lend) {
      host_.lent_memory()->returned(send->header.offset, {rank, incarnation});  // the peer never had it
    }
    finish(send, error);
  }
  for (auto& [offer, send] : offered_) finish(send, error);
  for (auto& send : waiting_) finish(send, error);
  queue_.swap(kept);
  offered_.clear();
  waiting_.clear();
  queued_.store(!queue_.empty(), std::memory_order_release);
}

void Link::purge(const std::exception_ptr& error) {
  std::vector<size_t> lent;
  {
    std::lock_guard<std::mutex> lock(rx_);
    for (auto& [key, messages] : arrived_) {
      for (auto& message : messages) {
        if (message->claimed) fail(message->claimed, error);
        if (message->lent) lent.push_back(message->offset);
      }
    }
    arrived_.clear();
    drop_receives(error);
    unasked_ = bodiless_ = owed_ = 0;
    std::lock_guard<std::mutex> tx_lock(tx_);
    drop_sends(error, false);
    credit_ = kEagerBytes;
    waiting_for_room(false);
  }
  for (size_t offset : lent) hand_back(offset);
  run_ended();
}

// ---------------------------------------------------------------- sending

// One message as far as it goes; whether it has left altogether.
bool Link::push_message(Send& s, bool* moved) {
  const bool whole = s.header.kind != FrameKind::Data;
  while (!s.started || s.sent < s.size) {
    const size_t n = whole ? 0 : std::min(largest_payload(), s.size - s.sent);
    if (!whole) {
      s.header.offset = s.sent;
      s.header.length = n;
    }
    if (!push_frame(s.header, s.data + s.sent, n)) {
      waiting_for_room(true);
      // Room may have come between the attempt and the request for a wake-up.
      if (!push_frame(s.header, s.data + s.sent, n)) return false;
    }
    s.started = true;
    s.sent += n;
    *moved = true;
  }
  if (drained()) return true;
  waiting_for_room(true);
  return drained();
}

bool Link::flush_locked() {
  bool moved = false;
  while (!queue_.empty()) {
    if (!push_message(*queue_.front(), &moved)) return moved;
    finish(queue_.front(), nullptr);
    queue_.pop_front();
  }
  if (!drained()) {
    waiting_for_room(true);
    return moved;
  }
  waiting_for_room(false);
  queued_.store(false, std::memory_order_release);
  return moved;
}

bool Link::flush() {
  if (!queued_.load(std::memory_order_acquire)) return false;
  bool moved = false;
  {
    std::unique_lock<std::mutex> lock(tx_, std::try_to_lock);
    if (!lock.owns_lock()) return false;
    moved = flush_locked();
  }
  if (moved) doorbell();
  run_ended();
  return moved;
}

// A frame without a payload, which costs the peer nothing to take in: ahead of `before`.
SendPtr Link::queue_control(const FrameHeader& header, std::deque<SendPtr>::iterator before) {
  auto s = std::make_shared<Send>();
  s->header = header;
  s->detached = true;
  queue_.insert(before, s);
  queued_.store(true, std::memory_order_release);
  return s;
}

// Puts a message where it can flow: into the queue if the credit covers it, else into an offer.
bool Link::admit(const SendPtr& s) {
  const size_t cost = s->size + kMessageCost;
  if (cost <= credit_) {
    credit_ -= cost;
    s->cost = cost;
    queue_.push_back(s);
    queued_.store(true, std::memory_order_release);
    return true;
  }
  if (offered_.size() >= kMostOffers) return false;
  do {
    ++last_offer_;
  } while (last_offer_ == 0 || offered_.count(last_offer_) != 0);
  s->header.message = last_offer_;
  offered_.emplace(last_offer_, s);
  FrameHeader offer = header_for(s->header.key, s->header.generation, FrameKind::Offer);
  offer.message = last_offer_;
  offer.total = s->size;
  queue_control(offer, queue_.end());
  return true;
}

void Link::queue_message(const SendPtr& s) {
  if (!waiting_.empty() || !admit(s)) waiting_.push_back(s);
}

void Link::admit_waiting() {
  while (!waiting_.empty() && admit(waiting_.front())) waiting_.pop_front();
}

// A receive has taken the offer.
void Link::taken(uint32_t offer) {
  const auto it = offered_.find(offer);
  if (it == offered_.end()) return;  // withdrawn meanwhile
  queue_.push_back(std::move(it->second));
  queued_.store(true, std::memory_order_release);
  offered_.erase(it);
}

void Link::send(const SendPtr& s) {
  s->header.total = s->size;
  {
    std::lock_guard<std::mutex> lock(tx_);
    if (failed_all_.load(std::memory_order_acquire)) {
      finish(s, lost());
    } else {
      queue_message(s);
      flush_locked();
      look_after(*s);
    }
  }
  run_ended();
}

// No thread waits for these. The progress thread sends the rest that does not go out at once: its sender may be through
// with its collective, and not come back before the peer has done what it waits for.
void Link::send_copied(const FrameHeader& header, const void* payload, size_t size) {
  struct Owned : Send {
    std::unique_ptr<char[]> memory;
  };
  std::lock_guard<std::mutex> lock(tx_);
  if (failed_all_.load(std::memory_order_acquire)) return;
  const size_t cost = size + kMessageCost;
  const bool begun = queue_.empty() && waiting_.empty() && cost <= credit_ && size <= largest_payload() &&
                     push_frame(header, static_cast<const char*>(payload), size);
  if (begun) credit_ -= cost;
  if (begun && drained()) return;
  auto s = std::make_shared<Owned>();
  s->header = header;
  s->detached = true;
  if (begun) {
    detach();
    s->started = true;  // the link has a copy by now: what is left of that is waited for, and nothing else
    queue_.push_back(s);
    queued_.store(true, std::memory_order_release);
  } else {
    if (size > 0) {
      s->size = size;
      s->memory.reset(new char[size]);
      std::memcpy(s->memory.get(), payload, size);
      s->data = s->memory.get();
    }
    queue_message(s);
  }
  flush_locked();
  look_after(*s);
}

void Link::send_control(const FrameHeader& header) {
  std::lock_guard<std::mutex> lock(tx_);
  if (failed_all_.load(std::memory_order_acquire)) return;
  const bool begun = queue_.empty() && push_frame(header, nullptr, 0);
  if (begun && drained()) return;
  const SendPtr s = queue_control(header, queue_.end());
  s->started = begun;
  flush_locked();
  look_after(*s);
}

// Outside all locks: queued messages may have gone out with it, and their callbacks run here.
void Link::send_small(const Key& key, const void* data, size_t size) {
  FrameHeader h = header_for(key, host_.generation(), FrameKind::Data);
  h.length = h.total = size;
  send_copied(h, data, size);
  run_ended();
}

void Link::send_reference(const Key& key, uint32_t block, size_t offset, size_t size) {
  FrameHeader h = header_for(key, host_.generation(), FrameKind::Reference);
  h.block = block;
  h.offset = offset;
  h.length = h.total = size;
  send_control(h);
  run_ended();
}

void Link::send_ack(uint32_t block) {
  acknowledge(block);
  run_ended();
}

// Messages of one key keep their order: not past those that have no credit yet.
bool Link::lend(const SendPtr& s) {
  LentMemory* const memory = host_.lent_memory();
  if (memory == nullptr || !reads_in_place() || !memory->covers(s->data, s->size)) return false;
  const Borrower peer{rank, incarnation};
  const size_t offset = memory->offset(s->data);
  {
    std::lock_guard<std::mutex> lock(tx_);
    if (!waiting_.empty()) return false;
    if (failed_all_.load(std::memory_order_acquire)) {
      finish(s, lost());
    } else {
      memory->lend(offset, peer);
      FrameHeader h = header_for(s->header.key, s->header.generation, FrameKind::Lend);
      h.offset = offset;
      h.total = s->size;
      const SendPtr frame = queue_control(h, queue_.end());
      flush_locked();
      look_after(*frame);
      finish(s, nullptr);
    }
  }
  run_ended();
  return true;
}

void Link::return_loan(size_t offset) {
  LinkPtr latest;
  {
    std::lock_guard<std::mutex> lock(loans_->mutex);
    auto& offsets = loans_->offsets;
    const auto at = std::find(offsets.begin(), offsets.end(), offset);
    if (at != offsets.end()) offsets.erase(at);
    latest = loans_->latest.lock();
  }
  if (!latest) latest = shared_from_this();
  latest->hand_back(offset, latest.get() == this ? 0 : kEarlierLink);
  latest->run_ended();
}

// Under the lock: no loan that is named may be returned before it was.
void Link::take_over(const std::shared_ptr<HeldLoans>& loans) {
  loans_ = loans;
  {
    std::lock_guard<std::mutex> lock(loans->mutex);
    loans->latest = weak_from_this();
    FrameHeader h = header_for({}, 0, FrameKind::Held);
    for (size_t offset : loans->offsets) {
      h.offset = offset;
      send_control(h);
    }
    send_control(header_for({}, 0, FrameKind::AllHeld));
  }
  run_ended();
}

// The caller runs what has ended afterwards, without rx. Of no generation: it is heard in any.
void Link::hand_back(size_t offset, uint16_t flags) {
  FrameHeader h = header_for({}, 0, FrameKind::Return);
  h.flags = flags;
  h.offset = offset;
  send_control(h);
}

void Link::leave() {
  {
    std::lock_guard<std::mutex> lock(tx_);
    failed_all_.store(true, std::memory_order_release);
    drop_sends(std::make_exception_ptr(CommError("the link was let go")), true);  // also what was returned meanwhile
  }
  run_ended();
}

void Loan::give_back() {
  if (getpid() == process_ && !over_.exchange(true)) link_->return_loan(offset_);
}

// As send_ack, where the caller holds rx and tells afterwards.
void Link::acknowledge(uint32_t block) {
  FrameHeader h = header_for({}, host_.generation(), FrameKind::Ack);
  h.block = block;
  send_control(h);
}

void Link::send_abort(uint64_t group, int lost) {
  FrameHeader h = header_for({group, 0}, host_.generation(), FrameKind::Abort);
  h.length = uint64_t(lost + 1);
  send_control(h);
  run_ended();
  doorbell();
}

void Link::cancel(const SendPtr& s, const std::exception_ptr& error) {
  {
    std::lock_guard<std::mutex> lock(tx_);
    if (s->pending()) withdraw(s);
    finish(s, error);
  }
  run_ended();
  doorbell();
}

// Where part of the message has left, or a receive may have taken its offer, the peer is told: in the message's place,
// so that the next one begins behind it.
void Link::withdraw(const SendPtr& s) {
  FrameHeader header = header_for(s->header.key, s->header.generation, FrameKind::Withdraw);
  header.message = s->header.message;
  SendPtr told;
  const auto at = std::find(queue_.begin(), queue_.end(), s);
  const auto offered = offered_.find(s->header.message);
  if (at != queue_.end()) {
    if (s->started) {
      detach();
    } else {
      credit_ += s->cost;
    }
    const bool expected = s->started ? s->sent < s->size : s->header.message != 0;
    const auto next = queue_.erase(at);
    if (expected) told = queue_control(header, next);
  } else if (offered != offered_.end() && offered->second == s) {
    offered_.erase(offered);
    told = queue_control(header, queue_.end());
  } else {
    waiting_.erase(std::remove(waiting_.begin(), waiting_.end(), s), waiting_.end());
  }
  admit_waiting();
  flush_locked();
  if (told) look_after(*told);
}

}  // namespace elastic::comm
