#include "side_channel.hpp"

#include <algorithm>
#include <utility>

namespace elastic::comm {
namespace {

constexpr uint64_t kPieces = 1ull << 32;  // above every tag that torch can give a message
constexpr uint64_t kConfirmations = 2ull << 32;
// Between two looks at whether the generation is over: an interruption tells waits of steps, not these.
constexpr auto kPatience = std::chrono::milliseconds(50);

size_t pieces_of(size_t size, size_t piece) {
  return (size + piece - 1) / piece;
}

}  // namespace

SideChannel::SideChannel(Hub& hub, GroupPtr group, uint32_t number, size_t piece_bytes, int beside, int hurried)
    : hub_(hub),
      group_(std::move(group)),
      generation_(hub_.generation()),
      number_(number),
      piece_bytes_(piece_bytes),
      hurried_(hurried),
      allowed_(beside) {}

Key SideChannel::key(bool confirmation) const {
  return {group_->id, (confirmation ? kConfirmations : kPieces) | number_};
}

// With the topology held.
Link& SideChannel::link_to(int rank) const {
  Link* link = rank >= 0 && rank < hub_.config().slots ? hub_.link(rank) : nullptr;
  if (link == nullptr || !hub_.is_alive(rank)) throw PeerLost(rank, "not a living member");
  return *link;
}

// ---------------------------------------------------------------- sending

void SideChannel::send(int to, const char* data, size_t size, const Keep& keep) {
  const size_t pieces = pieces_of(size, piece_bytes_);
  {
    const auto shared = hub_.enter(generation_);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      for (size_t i = 0; i < pieces; ++i) {
        const size_t at = i * piece_bytes_;
        outgoing_[to].queue.push_back({data + at, std::min(piece_bytes_, size - at), pieces > 1, keep});
      }
    }
    push(to);
  }
  await([this, to] { return outgoing_[to].queue.empty() && outgoing_[to].unsent == 0; });
}

// Hands over what may be under way. With the topology held: callers hold it, and so does the thread that takes in
// messages.
void SideChannel::push(int to) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (std::exchange(outgoing_[to].pushing, true)) return;
  }
  for (;;) {
    // Let go without the mutex: memory of a Python object is given back with the interpreter's lock, whose holder may
    // be waiting for the mutex.
    Piece piece;
    if (!next(to, &piece)) return;
    try {
      hand_over(to, piece);
    } catch (...) {
      fail(std::current_exception());
    }
  }
}

// The next piece that may be under way; else no thread is pushing any more.
bool SideChannel::next(int to, Piece* piece) {
  std::lock_guard<std::mutex> lock(mutex_);
  Outgoing& out = outgoing_[to];
  const bool none = given_up_ || error_ || out.queue.empty();
  if (none || (out.queue.front().confirmed && out.unconfirmed >= allowed_)) {
    out.pushing = false;
    return false;
  }
  *piece = std::move(out.queue.front());
  out.queue.pop_front();
  out.unconfirmed += piece->confirmed ? 1 : 0;
  ++out.unsent;
  return true;
}

void SideChannel::hand_over(int to, const Piece& piece) {
  if (hub_.generation() != generation_) throw GenerationChanged(hub_.generation());
  Link& link = link_to(to);
  if (piece.confirmed) expect_confirmation(to);
  auto s = std::make_shared<Send>();
  s->header.key = key(false);
  s->header.generation = generation_;
  s->data = piece.data;
  s->size = piece.size;
  s->detached = true;
  s->ended = [self = shared_from_this(), s, to, keep = piece.keep] {
    if (s->state.load(std::memory_order_acquire) == MessageState::Failed) return self->fail(s->error);
    bool through = false;
    {
      std::lock_guard<std::mutex> lock(self->mutex_);
      Outgoing& out = self->outgoing_[to];
      through = --out.unsent == 0 && out.queue.empty();
    }
    if (through) self->changed_.notify_all();
  };
  link.send(s);
  link.doorbell();
}

void SideChannel::expect_confirmation(int to) {
  auto r = std::make_shared<Recv>();
  r->key = key(true);
  r->size = 1;
  r->view_allowed = false;
  r->detached = true;
  r->ended = [self = shared_from_this(), r, to] {
    if (r->state.load(std::memory_order_acquire) == MessageState::Failed) return self->fail(r->error);
    bool idle = false;
    {
      std::lock_guard<std::mutex> lock(self->mutex_);
      Outgoing& out = self->outgoing_[to];
      --out.unconfirmed;
      idle = out.queue.empty();
    }
    if (idle) return self->changed_.notify_all();
    self->push(to);
  };
  link_to(to).post(r);
}

void SideChannel::drain(int to) {
  await([this, to] { return outgoing_[to].queue.empty() && outgoing_[to].unconfirmed == 0; });
}

// ---------------------------------------------------------------- receiving

void SideChannel::receive(int from, char* into, size_t size, const Keep& keep) {
  const size_t pieces = pieces_of(size, piece_bytes_);
  {
    const auto shared = hub_.enter(generation_);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      incoming_[from] = pieces;
    }
    for (size_t i = 0; i < pieces; ++i) {
      const size_t at = i * piece_bytes_;
      expect_piece(from, into + at, std::min(piece_bytes_, size - at), pieces > 1, keep);
    }
  }
  await([this, from] { return incoming_[from] == 0; });
}

void SideChannel::expect_piece(int from, char* into, size_t size, bool confirm, const Keep& keep) {
  auto r = std::make_shared<Recv>();
  r->key = key(false);
  r->into = into;
  r->size = size;
  r->view_allowed = false;
  r->detached = true;
  r->ended = [self = shared_from_this(), r, from, confirm, keep] {
    if (r->state.load(std::memory_order_acquire) == MessageState::Failed) return self->fail(r->error);
    if (confirm) self->confirm(from);
    bool last = false;
    {
      std::lock_guard<std::mutex> lock(self->mutex_);
      last = --self->incoming_[from] == 0;
    }
    if (last) self->changed_.notify_all();
  };
  link_to(from).post(r);
}

// Called where a message ends: no caller is left that could be told of the missing link.
void SideChannel::confirm(int from) {
  Link* link = hub_.link(from);
  if (link == nullptr || hub_.generation() != generation_) return;
  const char token = 0;
  link->send_small(key(true), &token, sizeof token);
  link->doorbell();
}

// ---------------------------------------------------------------- waiting

void SideChannel::fail(const std::exception_ptr& error) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!error_) error_ = error;
  }
  changed_.notify_all();
}

void SideChannel::await(const std::function<bool()>& done) {
  std::unique_lock<std::mutex> lock(mutex_);
  while (!done()) {
    if (error_) std::rethrow_exception(error_);
    if (given_up_) throw CommError("the side channel was closed");
    const uint64_t newest = std::max(hub_.frozen(), hub_.generation());
    if (newest > generation_) throw GenerationChanged(newest);
    changed_.wait_for(lock, kPatience);
  }
}

void SideChannel::hurry() {
  std::vector<int> peers;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    allowed_ = hurried_;
    for (const auto& [rank, out] : outgoing_) peers.push_back(rank);
  }
  const auto shared = hub_.enter(generation_);
  for (int rank : peers) push(rank);
}

void SideChannel::give_up() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    given_up_ = true;
  }
  changed_.notify_all();
}

int SideChannel::under_way(int to) const {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto it = outgoing_.find(to);
  return it == outgoing_.end() ? 0 : it->second.unconfirmed;
}

}  // namespace elastic::comm
