#include "link.hpp"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

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

std::exception_ptr wrong_size(size_t arrived, size_t expected) {
  return std::make_exception_ptr(CommError("a message of " + std::to_string(arrived) + " bytes arrived where " +
                                           std::to_string(expected) + " were expected"));
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

void Link::probe() {
  char byte;
  const ssize_t n = ::recv(socket(), &byte, 1, MSG_PEEK | MSG_DONTWAIT);
  const bool quiet = n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR);
  if (!quiet && !(n > 0 && talks_on_socket())) mark_dead("connection closed");
}

std::exception_ptr Link::lost() {
  std::lock_guard<std::mutex> lock(why_mutex_);
  return std::make_exception_ptr(PeerLost(rank, why_.empty() ? "connection lost" : why_));
}

// Under rx: everything that had arrived was taken in, nothing more can come.
void Link::fail_if_dead_locked() {
  if (!dead() || failed_all_.exchange(true)) return;
  const auto error = lost();
  for (auto& [key, recvs] : posted_) {
    for (auto& recv : recvs) finish(recv, error);
  }
  posted_.clear();
  if (current_recv_) finish(current_recv_, error);
  current_recv_.reset();
  if (current_arrived_ && current_arrived_->claimed) finish(current_arrived_->claimed, error);
  current_arrived_.reset();
  redirect();
  std::lock_guard<std::mutex> lock(tx_);
  detach();
  for (auto& send : queue_) finish(send, error);
  queue_.clear();
  queued_.store(false, std::memory_order_release);
}

void Link::purge(const std::exception_ptr& error) {
  {
    std::lock_guard<std::mutex> lock(rx_);
    for (auto& [key, recvs] : posted_) {
      for (auto& recv : recvs) finish(recv, error);
    }
    posted_.clear();
    for (auto& [key, messages] : arrived_) {
      for (auto& message : messages) {
        if (message->claimed) finish(message->claimed, error);
      }
    }
    arrived_.clear();
    if (current_recv_) finish(current_recv_, error);
    current_recv_.reset();
    if (current_arrived_ && current_arrived_->claimed) finish(current_arrived_->claimed, error);
    current_arrived_.reset();
    redirect();
    std::lock_guard<std::mutex> tx_lock(tx_);
    detach();
    for (auto& send : queue_) finish(send, error);
    queue_.clear();
    queued_.store(false, std::memory_order_release);
    waiting_for_room(false);
  }
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

void Link::send(const SendPtr& s) {
  s->header.total = s->size;
  {
    std::lock_guard<std::mutex> lock(tx_);
    if (failed_all_.load(std::memory_order_acquire)) {
      finish(s, lost());
    } else {
      queue_.push_back(s);
      queued_.store(true, std::memory_order_release);
      flush_locked();
      look_after(*s);
    }
  }
  run_ended();
}

// Nobody waits for these. What does not go out at once is the progress thread's to send: its sender may be through
// with its collective, and not come back before the peer has done what it waits for.
void Link::send_copied(const FrameHeader& header, const void* payload, size_t size) {
  struct Owned : Send {
    std::unique_ptr<char[]> memory;
  };
  std::lock_guard<std::mutex> lock(tx_);
  if (failed_all_.load(std::memory_order_acquire)) return;
  const bool begun =
      queue_.empty() && size <= largest_payload() && push_frame(header, static_cast<const char*>(payload), size);
  if (begun && drained()) return;
  auto s = std::make_shared<Owned>();
  s->header = header;
  s->detached = true;
  if (begun) {
    detach();
    s->started = true;  // the link has a copy by now: what is left of that is waited for, and nothing else
  } else if (size > 0) {
    s->size = size;
    s->memory.reset(new char[size]);
    std::memcpy(s->memory.get(), payload, size);
    s->data = s->memory.get();
  }
  queue_.push_back(s);
  queued_.store(true, std::memory_order_release);
  flush_locked();
  look_after(*s);
}

// Outside all locks: what was queued may have gone out with it, and who asked to be told of that is told here.
void Link::send_small(const Key& key, const void* data, size_t size) {
  FrameHeader h = header_for(key, host_.generation(), FrameKind::Data);
  h.length = h.total = size;
  send_copied(h, data, size);
  run_ended();
}

void Link::send_reference(const Key& key, uint32_t block, size_t size) {
  FrameHeader h = header_for(key, host_.generation(), FrameKind::Reference);
  h.block = block;
  h.length = h.total = size;
  send_copied(h, nullptr, 0);
  run_ended();
}

void Link::send_ack(uint32_t block) {
  acknowledge(block);
  run_ended();
}

// As send_ack, where the caller holds rx and tells afterwards.
void Link::acknowledge(uint32_t block) {
  FrameHeader h = header_for({}, host_.generation(), FrameKind::Ack);
  h.block = block;
  send_copied(h, nullptr, 0);
}

void Link::send_abort(uint64_t group, int lost) {
  FrameHeader h = header_for({group, 0}, host_.generation(), FrameKind::Abort);
  h.length = uint64_t(lost + 1);
  send_copied(h, nullptr, 0);
  run_ended();
  doorbell();
}

void Link::cancel(const SendPtr& s, const std::exception_ptr& error) {
  {
    std::lock_guard<std::mutex> lock(tx_);
    const auto it = std::find(queue_.begin(), queue_.end(), s);
    if (it != queue_.end()) {
      if (it == queue_.begin()) detach();
      finish(s, error);
      queue_.erase(it);
    }
  }
  run_ended();
}

// ---------------------------------------------------------------- receiving

void Link::post(const RecvPtr& recv) {
  {
    std::lock_guard<std::mutex> lock(rx_);
    const auto it = arrived_.find(recv->key);
    if (it != arrived_.end()) {
      // Messages of one key are taken in the order they came; one still arriving may be claimed once.
      const auto free = std::find_if(it->second.begin(), it->second.end(), [](auto& m) { return !m->claimed; });
      if (free != it->second.end()) {
        if (recv->any && recv->any->taken.exchange(true)) {
          finish(recv, std::make_exception_ptr(CommError("taken by another source")));
        } else if ((*free)->complete()) {
          const ArrivedPtr message = *free;
          it->second.erase(free);
          if (it->second.empty()) arrived_.erase(it);
          hand_over(recv, *message);
        } else {
          (*free)->claimed = recv;
          look_after(*recv);
        }
        goto out;
      }
    }
    if (failed_all_.load(std::memory_order_acquire)) {
      finish(recv, lost());
    } else {
      posted_[recv->key].push_back(recv);
      look_after(*recv);
    }
  }
out:
  run_ended();
}

void Link::cancel(const RecvPtr& recv, const std::exception_ptr& error) {
  {
    std::lock_guard<std::mutex> lock(rx_);
    const auto it = posted_.find(recv->key);
    if (it != posted_.end()) {
      auto& recvs = it->second;
      recvs.erase(std::remove(recvs.begin(), recvs.end(), recv), recvs.end());
      if (recvs.empty()) posted_.erase(it);
    }
    if (current_recv_ == recv) {
      current_recv_.reset();
      redirect();
    }
    const auto at = arrived_.find(recv->key);
    if (at != arrived_.end()) {
      for (auto& message : at->second) {
        if (message->claimed == recv) message->claimed.reset();
      }
    }
    finish(recv, error);
  }
  run_ended();
}

RecvPtr Link::take_posted(const Key& key) {
  const auto it = posted_.find(key);
  if (it == posted_.end()) return nullptr;
  RecvPtr found;
  while (!it->second.empty() && !found) {
    RecvPtr recv = it->second.front();
    it->second.pop_front();
    if (recv->any && recv->any->taken.exchange(true)) {
      finish(recv, std::make_exception_ptr(CommError("taken by another source")));
    } else {
      found = std::move(recv);
    }
  }
  if (it->second.empty()) posted_.erase(it);
  return found;
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
void Link::complete_view(const RecvPtr& recv, uint32_t block, size_t size) {
  recv->source = rank;
  const char* data = peer_block(block, size);
  if (size != recv->size || data == nullptr) {
    acknowledge(block);
    finish(recv, wrong_size(size, recv->size));
    return;
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
  finish(recv, nullptr);
}

void Link::hand_over(const RecvPtr& recv, Arrived& message) {
  if (message.block >= 0) return complete_view(recv, uint32_t(message.block), message.total);
  recv->source = rank;
  if (message.total != recv->size) return finish(recv, wrong_size(message.total, recv->size));
  if (recv->into != nullptr) {
    if (message.total > 0) std::memcpy(recv->into, message.heap.get(), message.total);
    recv->view = recv->into;
  } else {
    recv->heap = std::move(message.heap);
    recv->view = recv->heap.get();
  }
  finish(recv, nullptr);
}

Link::Gate Link::gate(const FrameHeader& h) const {
  return h.generation > host_.generation() ? Gate::Shut : Gate::Open;
}

char* Link::begin(const FrameHeader& h) {
  if (h.kind != FrameKind::Data || h.generation < host_.generation()) return nullptr;
  order_after_sends();
  if (h.offset == 0) {
    if (current_recv_) finish(current_recv_, std::make_exception_ptr(PeerLost(rank, "gave up sending a message")));
    current_arrived_.reset();
    current_key_ = h.key;
    current_recv_ = take_posted(h.key);
    if (current_recv_) {
      current_recv_->source = rank;
      if (current_recv_->size != h.total) {
        finish(current_recv_, wrong_size(h.total, current_recv_->size));
        current_recv_.reset();
        return nullptr;
      }
      if (current_recv_->into == nullptr && h.total > 0) {
        current_recv_->heap = host_.buffers().take(h.total);
      }
    } else {
      current_arrived_ = std::make_shared<Arrived>();
      current_arrived_->total = h.total;
      if (h.total > 0) current_arrived_->heap = host_.buffers().take(h.total);
      arrived_[h.key].push_back(current_arrived_);
    }
  }
  if (!(h.key == current_key_)) return nullptr;
  if (current_recv_) {
    Recv& r = *current_recv_;
    if (h.offset != r.got || h.offset + h.length > r.size) return nullptr;
    return (r.into != nullptr ? r.into : r.heap.get()) + h.offset;
  }
  if (current_arrived_) {
    Arrived& a = *current_arrived_;
    if (h.offset != a.got || h.offset + h.length > a.total) return nullptr;
    return a.heap.get() + h.offset;
  }
  return nullptr;
}

void Link::end(const FrameHeader& h) {
  if (h.generation < host_.generation()) return;
  switch (h.kind) {
    case FrameKind::Ack:
      return host_.block_returned(h.block);
    case FrameKind::Abort:
      return host_.group_aborted(h.key.group, int(h.length) - 1);
    case FrameKind::Reference: {
      if (RecvPtr recv = take_posted(h.key)) return complete_view(recv, h.block, h.total);
      auto message = std::make_shared<Arrived>();
      message->total = message->got = h.total;
      message->block = int(h.block);
      arrived_[h.key].push_back(std::move(message));
      return;
    }
    default:
      break;
  }
  if (!(h.key == current_key_)) return;
  if (current_recv_) {
    Recv& r = *current_recv_;
    if (h.offset != r.got) return;
    r.got += h.length;
    if (r.got < r.size) return;
    r.view = r.into != nullptr ? r.into : r.heap.get();
    finish(current_recv_, nullptr);
    current_recv_.reset();
  } else if (current_arrived_) {
    Arrived& a = *current_arrived_;
    if (h.offset != a.got) return;
    a.got += h.length;
    if (a.got < a.total) return;
    const ArrivedPtr message = std::move(current_arrived_);
    current_arrived_.reset();
    if (message->claimed) {
      auto& queue = arrived_[h.key];
      queue.erase(std::find(queue.begin(), queue.end(), message));
      if (queue.empty()) arrived_.erase(h.key);
      hand_over(message->claimed, *message);
    }
  }
}

bool Link::pump() {
  if (finished()) return false;  // what may still come has no place to go
  bool any = false;
  {
    std::unique_lock<std::mutex> lock(rx_, std::try_to_lock);
    if (!lock.owns_lock()) return false;
    any = pump_frames();
    if (dead()) {
      while (pump_frames()) any = true;
      fail_if_dead_locked();
    }
  }
  run_ended();
  return any;
}

}  // namespace elastic::comm
