// The receiving half of a link: which message goes to which receive, and what is kept that no receive has asked for.
#include <algorithm>
#include <climits>
#include <cstring>
#include <utility>

#include "errors.hpp"
#include "link.hpp"

namespace elastic::comm {
namespace {

std::exception_ptr error(const std::string& what) {
  return std::make_exception_ptr(CommError(what));
}

std::exception_ptr taken_elsewhere() {
  return error("taken by another source");
}

FrameHeader control(FrameKind kind, uint64_t generation) {
  FrameHeader h;
  h.kind = kind;
  h.generation = generation;
  return h;
}

}  // namespace

void Link::post(const RecvPtr& recv) {
  {
    std::lock_guard<std::mutex> lock(rx_);
    if (!claim(recv)) {
      if (failed_all_.load(std::memory_order_acquire)) {
        finish(recv, lost());
      } else {
        posted_[recv->key].push_back(recv);
      }
    }
    look_after(*recv);
  }
  run_ended();
  ring_if_asked();
}

void Link::look_again(const RecvPtr& recv) {
  {
    std::lock_guard<std::mutex> lock(rx_);
    const auto it = posted_.find(recv->key);
    if (it == posted_.end()) return;
    const auto at = std::find(it->second.begin(), it->second.end(), recv);
    if (at == it->second.end() || !claim(recv)) return;
    it->second.erase(at);
    if (it->second.empty()) posted_.erase(it);
  }
  run_ended();
  ring_if_asked();
}

void Link::cancel(const RecvPtr& recv, const std::exception_ptr& why) {
  {
    std::lock_guard<std::mutex> lock(rx_);
    const auto it = posted_.find(recv->key);
    if (it != posted_.end()) {
      auto& recvs = it->second;
      recvs.erase(std::remove(recvs.begin(), recvs.end(), recv), recvs.end());
      if (recvs.empty()) posted_.erase(it);
    }
    if (current_recv_ == recv) current_recv_.reset();
    for (auto granted = granted_.begin(); granted != granted_.end();) {
      granted = granted->second == recv ? granted_.erase(granted) : std::next(granted);
    }
    if (filling_ == recv.get()) {
      filling_ = nullptr;
      redirect();
    }
    const auto at = arrived_.find(recv->key);
    if (at != arrived_.end()) {
      for (auto& message : at->second) {
        if (message->claimed == recv) message->claimed.reset();
      }
    }
    finish(recv, why);
  }
  run_ended();
}

// ---------------------------------------------------------------- matching

// A message that has come, or has begun to, goes to `recv`; false where there is none for it. Messages of one key are
// taken in the order they came.
bool Link::claim(const RecvPtr& recv) {
  if (recv->any && recv->any->done.load()) {
    finish(recv, taken_elsewhere());
    return true;
  }
  const auto it = arrived_.find(recv->key);
  if (it == arrived_.end()) return false;
  const auto free = std::find_if(it->second.begin(), it->second.end(), [](auto& m) { return !m->claimed; });
  if (free == it->second.end()) return false;
  if (recv->any && recv->any->taken.exchange(true)) return false;
  recv->source = rank;
  const ArrivedPtr message = *free;
  if (message->offer == 0 && !message->complete()) {
    message->claimed = recv;
    return true;
  }
  it->second.erase(free);
  if (it->second.empty()) arrived_.erase(it);
  if (message->bodiless()) {
    --bodiless_;
  } else {
    asked_for(message->total);
  }
  if (message->offer != 0) {
    grant(recv, message->offer, message->total);
  } else {
    hand_over(recv, *message);
  }
  return true;
}

// The receive that the next message of `key` goes to, if one waits.
RecvPtr Link::take_posted(const Key& key) {
  const auto it = posted_.find(key);
  if (it == posted_.end()) return nullptr;
  auto& recvs = it->second;
  RecvPtr found;
  for (auto at = recvs.begin(); at != recvs.end() && !found;) {
    const RecvPtr recv = *at;
    if (recv->any && recv->any->done.load()) {
      finish(recv, taken_elsewhere());
      at = recvs.erase(at);
    } else if (recv->any && recv->any->taken.exchange(true)) {
      ++at;  // another source's message is on its way: if that one is lost, this is asked again
    } else {
      found = recv;
      found->source = rank;
      recvs.erase(at);
      break;
    }
  }
  if (recvs.empty()) posted_.erase(it);
  return found;
}

// The sender may send what it has offered.
void Link::grant(const RecvPtr& recv, uint32_t offer, size_t total) {
  if (total != recv->size) {
    misfit(recv, total);  // its bytes are taken in and dropped
  } else {
    granted_[offer] = recv;
  }
  FrameHeader h = control(FrameKind::Take, host_.generation());
  h.message = offer;
  send_control(h);
  ring_.store(true);
}

// The message that `recv` had taken was withdrawn.
void Link::give_back(const RecvPtr& recv) {
  recv->got = 0;
  recv->heap.reset();
  release(recv);
  recv->source = -1;
  if (!claim(recv)) posted_[recv->key].push_front(recv);
}

// A receive has taken a message that came without being asked for: its sender may send as much again.
void Link::return_credit(size_t total) {
  owed_ += total + kMessageCost;
  if (owed_ < kEagerBytes / 4) return;
  FrameHeader h = control(FrameKind::Credit, host_.generation());
  h.length = std::exchange(owed_, 0);
  send_control(h);
  ring_.store(true);
}

// The same for one that was kept until now.
void Link::asked_for(size_t total) {
  unasked_ -= total + kMessageCost;
  return_credit(total);
}

void Link::ring_if_asked() {
  if (ring_.load(std::memory_order_relaxed) && ring_.exchange(false)) doorbell();
}

void Link::complete(const RecvPtr& recv) {
  if (recv->any) recv->any->done.store(true);
  finish(recv, nullptr);
}

void Link::misfit(const RecvPtr& recv, size_t size) {
  recv->source = rank;
  recv->misfit = true;
  finish(recv, error("a message of " + std::to_string(size) + " bytes arrived where " + std::to_string(recv->size) +
                     " were expected"));
}

// Before this thread writes where another one's contribution to the same collective was read from: the peer sent the
// result after that contribution had arrived, so the read is over. The order goes by way of the peer, through memory
// mapped twice or a socket, where ThreadSanitizer does not follow it: under it, and only there, the lock that every
// send holds while it reads says the same once more.
void Link::order_after_sends() {
#if defined(__SANITIZE_THREAD__)
  std::lock_guard<std::mutex> lock(tx_);
#endif
}

// A reference for `recv`: kept as a view, or copied and handed back.
void Link::complete_view(const RecvPtr& recv, uint32_t block, size_t offset, size_t size) {
  recv->source = rank;
  const char* data = peer_data(offset, size);
  if (size != recv->size || data == nullptr) {
    acknowledge(block);
    return misfit(recv, size);
  }
  if (recv->view_allowed) {
    recv->view = data;
    recv->block = int(block);
  } else {
    order_after_sends();
    std::memcpy(recv->into, data, size);
    recv->view = recv->into;
    const bool valid = still(host_.generation());
    acknowledge(block);
    if (!valid) return finish(recv, std::make_exception_ptr(GenerationChanged(host_.generation() + 1)));
  }
  complete(recv);
}

// What is lent for `recv`: on loan from now on, or copied and handed back.
void Link::complete_loan(const RecvPtr& recv, size_t offset, size_t size) {
  recv->source = rank;
  const char* data = peer_data(offset, size);
  if (size != recv->size || data == nullptr) {
    hand_back(offset);
    return misfit(recv, size);
  }
  if (recv->loan_allowed) {
    {
      std::lock_guard<std::mutex> lock(loans_->mutex);
      loans_->offsets.push_back(offset);
    }
    recv->loan = std::make_shared<Loan>(shared_from_this(), offset, data, size);
    // If its request was let go, no reference is left but those here. The end of a loan runs callbacks, so the last
    // reference has to go without rx.
    std::lock_guard<std::mutex> lock(ended_mutex_);
    ended_.push_back([recv] {});
  } else {
    order_after_sends();
    if (recv->into == nullptr) recv->heap = host_.buffers().take(size);
    char* const into = recv->into != nullptr ? recv->into : recv->heap.get();
    std::memcpy(into, data, size);
    recv->view = into;
    hand_back(offset);
  }
  complete(recv);
}

void Link::hand_over(const RecvPtr& recv, Arrived& message) {
  if (message.lent) return complete_loan(recv, message.offset, message.total);
  if (message.block >= 0) return complete_view(recv, uint32_t(message.block), message.offset, message.total);
  if (message.total != recv->size) return misfit(recv, message.total);
  if (recv->into != nullptr) {
    if (message.total > 0) std::memcpy(recv->into, message.heap.get(), message.total);
    recv->view = recv->into;
  } else {
    recv->heap = std::move(message.heap);
    recv->view = recv->heap.get();
  }
  complete(recv);
}

// ---------------------------------------------------------------- frames

Link::Gate Link::gate(const FrameHeader& h) const {
  return h.generation > host_.generation() ? Gate::Shut : Gate::Open;
}

// The first frame of a message that was not offered: its receive, or the place where it is kept.
void Link::begin_message(const FrameHeader& h) {
  if (current_recv_ || current_arrived_) {
    return malformed("a message begins within another one");
  }
  current_key_ = h.key;
  current_recv_ = take_posted(h.key);
  if (current_recv_) {
    return_credit(h.total);
    if (current_recv_->size != h.total) {
      misfit(std::exchange(current_recv_, nullptr), h.total);
    }
  } else {
    if (h.total > kEagerBytes || unasked_ + h.total + kMessageCost > kEagerBytes) {
      return malformed("more than was asked for");
    }
    current_arrived_ = std::make_shared<Arrived>();
    current_arrived_->total = h.total;
    if (h.total > 0) current_arrived_->heap = host_.buffers().take(h.total);
    unasked_ += h.total + kMessageCost;
    arrived_[h.key].push_back(current_arrived_);
  }
}

char* Link::begin(const FrameHeader& h) {
  filling_ = nullptr;
  if (h.kind != FrameKind::Data || h.generation < host_.generation()) return nullptr;
  order_after_sends();
  if (h.message == 0 && h.offset == 0) begin_message(h);
  if (rejected_) return nullptr;
  Recv* recv = current_recv_.get();
  if (h.message != 0) {
    const auto it = granted_.find(h.message);
    recv = it == granted_.end() ? nullptr : it->second.get();
  } else if (!(h.key == current_key_)) {
    return nullptr;
  }
  if (recv != nullptr) {
    if (h.offset != recv->got || h.length > recv->size - recv->got) return nullptr;
    if (recv->into == nullptr && !recv->heap && recv->size > 0) recv->heap = host_.buffers().take(recv->size);
    filling_ = recv;
    return (recv->into != nullptr ? recv->into : recv->heap.get()) + h.offset;
  }
  if (h.message == 0 && current_arrived_) {
    Arrived& a = *current_arrived_;
    if (h.offset != a.got || h.length > a.total - a.got) return nullptr;
    return a.heap.get() + h.offset;
  }
  return nullptr;
}

void Link::end_data(const FrameHeader& h) {
  filling_ = nullptr;
  const auto granted = h.message != 0 ? granted_.find(h.message) : granted_.end();
  const RecvPtr recv = granted != granted_.end() ? granted->second : (h.message == 0 ? current_recv_ : nullptr);
  if (h.message == 0 && !(h.key == current_key_)) return;
  if (recv) {
    if (h.offset != recv->got || h.length > recv->size - recv->got) return malformed("bytes out of order");
    recv->got += h.length;
    if (recv->got < recv->size) return;
    recv->view = recv->into != nullptr ? recv->into : recv->heap.get();
    if (granted != granted_.end()) {
      granted_.erase(granted);
    } else {
      current_recv_.reset();
    }
    complete(recv);
  } else if (h.message == 0 && current_arrived_) {
    Arrived& a = *current_arrived_;
    if (h.offset != a.got || h.length > a.total - a.got) return malformed("bytes out of order");
    a.got += h.length;
    if (a.got < a.total) return;
    const ArrivedPtr message = std::exchange(current_arrived_, nullptr);
    if (!message->claimed) return;
    forget(h.key, message);
    asked_for(message->total);
    hand_over(message->claimed, *message);
  }
}

// Its sender gave a message up.
void Link::withdrawn(const FrameHeader& h) {
  if (h.message == 0) {
    if (current_recv_) return give_back(std::exchange(current_recv_, nullptr));
    const ArrivedPtr message = std::exchange(current_arrived_, nullptr);
    if (!message) return;
    forget(current_key_, message);
    asked_for(message->total);
    if (message->claimed) give_back(message->claimed);
    return;
  }
  const auto granted = granted_.find(h.message);
  if (granted != granted_.end()) {
    const RecvPtr recv = granted->second;
    granted_.erase(granted);
    return give_back(recv);
  }
  const auto it = arrived_.find(h.key);
  if (it == arrived_.end()) return;
  const auto offered = [&](const ArrivedPtr& m) { return m->offer == h.message; };
  const auto at = std::find_if(it->second.begin(), it->second.end(), offered);
  if (at == it->second.end()) return;
  --bodiless_;
  forget(h.key, ArrivedPtr(*at));
}

// Keeps a message whose bytes are elsewhere.
void Link::keep(const Key& key, ArrivedPtr message) {
  if (bodiless_ >= kMostOffers + kMostReferences) return malformed("more messages than are allowed");
  ++bodiless_;
  arrived_[key].push_back(std::move(message));
}

// The message is no longer kept.
void Link::forget(const Key& key, const ArrivedPtr& message) {
  const auto it = arrived_.find(key);
  if (it == arrived_.end()) return;
  const auto at = std::find(it->second.begin(), it->second.end(), message);
  if (at == it->second.end()) return;
  it->second.erase(at);
  if (it->second.empty()) arrived_.erase(it);
}

// The peer says of what was lent to it.
void Link::end_lent(const FrameHeader& h) {
  LentMemory* const memory = host_.lent_memory();
  if (memory == nullptr && h.kind == FrameKind::AllHeld) return;  // none, then
  if (memory == nullptr) return malformed("nothing was lent");
  const Borrower peer{rank, incarnation};
  if (h.kind == FrameKind::Return) return memory->returned(h.offset, peer, (h.flags & kEarlierLink) != 0);
  if (h.kind == FrameKind::Held) return memory->confirmed(h.offset, peer);
  memory->end_doubtful(peer);
}

void Link::end(const FrameHeader& h) {
  if (h.kind == FrameKind::Return || h.kind == FrameKind::Held || h.kind == FrameKind::AllHeld) {
    return end_lent(h);
  }
  if (h.generation < host_.generation()) {
    if (h.kind == FrameKind::Lend) hand_back(h.offset);
    return;
  }
  switch (h.kind) {
    case FrameKind::Data:
      return end_data(h);
    case FrameKind::Ack:
      return host_.block_returned(h.block);
    case FrameKind::Abort:
      if (h.length == 0 || h.length > INT_MAX) return malformed("no such rank");
      return host_.group_aborted(h.key.group, int(h.length) - 1);
    case FrameKind::Reference: {
      if (h.block > INT_MAX || peer_data(h.offset, h.total) == nullptr) return malformed("no such block");
      if (RecvPtr recv = take_posted(h.key)) return complete_view(recv, h.block, h.offset, h.total);
      auto message = std::make_shared<Arrived>();
      message->total = message->got = h.total;
      message->block = int(h.block);
      message->offset = h.offset;
      return keep(h.key, std::move(message));
    }
    case FrameKind::Lend: {
      if (peer_data(h.offset, h.total) == nullptr) return malformed("no such memory");
      if (RecvPtr recv = take_posted(h.key)) return complete_loan(recv, h.offset, h.total);
      auto message = std::make_shared<Arrived>();
      message->total = message->got = h.total;
      message->lent = true;
      message->offset = h.offset;
      return keep(h.key, std::move(message));
    }
    case FrameKind::Offer: {
      if (h.message == 0 || granted_.count(h.message) != 0) return malformed("an offer without a number of its own");
      if (RecvPtr recv = take_posted(h.key)) return grant(recv, h.message, h.total);
      auto message = std::make_shared<Arrived>();
      message->total = h.total;
      message->offer = h.message;
      return keep(h.key, std::move(message));
    }
    case FrameKind::Withdraw:
      return withdrawn(h);
    case FrameKind::Take:
    case FrameKind::Credit: {
      std::lock_guard<std::mutex> lock(tx_);
      if (h.kind == FrameKind::Take) {
        taken(h.message);
      } else {
        credit_ += size_t(std::min<uint64_t>(h.length, kEagerBytes - credit_));
      }
      admit_waiting();
      flush_locked();
      return ring_.store(true);
    }
    default:
      return malformed("of no known kind");
  }
}

bool Link::pump() {
  if (finished()) return false;  // what may still come has no place to go
  bool any = false;
  {
    std::unique_lock<std::mutex> lock(rx_, std::try_to_lock);
    if (!lock.owns_lock()) return false;
    try {
      any = pump_frames();
      if (dead()) {
        while (!rejected_ && pump_frames()) any = true;
        fail_if_dead_locked();
      }
    } catch (const std::bad_alloc&) {
      malformed("no memory for what has arrived");
      fail_if_dead_locked();
    }
  }
  run_ended();
  ring_if_asked();
  return any;
}

}  // namespace elastic::comm
