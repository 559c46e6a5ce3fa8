#include "operation.hpp"

#include <algorithm>
#include <cstring>

namespace elastic::comm {
namespace {

constexpr size_t kCopied = 16 << 10;  // up to here a send copies rather than be tracked

}  // namespace

size_t bytes_of(const Part& part) {
  size_t n = 0;
  for (const Span& span : part) n += span.size;
  return n;
}

char* contiguous(const Part& part, size_t offset, size_t size) {
  for (const Span& span : part) {
    if (offset < span.size || (size == 0 && offset == span.size)) {
      return size <= span.size - offset ? span.data + offset : nullptr;
    }
    offset -= span.size;
  }
  return nullptr;
}

Operation::Operation(Hub& hub, Group& group, uint64_t generation, double timeout, const std::atomic<bool>* awaited)
    : hub_(hub), group_(group), generation_(generation), shared_(hub.enter(generation)) {
  group.check_counted(generation);
  const int lost = group.lost.load(std::memory_order_acquire);
  if (lost >= 0)
    throw PeerLost(lost, "Connection closed by peer in an earlier collective of this group", hub.stands(lost),
                   hub.silent(lost));
  if (group.aborted.load(std::memory_order_acquire)) throw CommError("the group was aborted");
  if (group.broken.load(std::memory_order_acquire)) {
    throw CommError("an earlier collective of this group failed in this generation");
  }
  me_ = group.me.load(std::memory_order_relaxed);
  if (me_ < 0) throw CommError("this rank is not a member of group " + group.name);
  sequence_ = group.sequence.fetch_add(1, std::memory_order_relaxed);
  scope_.generation = generation;
  scope_.seconds = timeout;
  scope_.deadline = Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(timeout));
  scope_.group = &group;
  scope_.awaited = awaited;
}

Operation::~Operation() {
  if (!finished_) withdraw();
}

void Operation::withdraw() {
  const auto error = std::make_exception_ptr(CommError("withdrawn"));
  int lost = group_.lost.load(std::memory_order_acquire);
  for (auto& [rank, send] : sends_) {
    if (send->pending()) hub_.link(rank)->cancel(send, error);
  }
  for (auto& [rank, recv] : recvs_) {
    if (recv->pending()) hub_.link(rank)->cancel(recv, error);
  }
  group_.broken.store(true, std::memory_order_release);
  for (int rank : group_.living) {
    if (lost < 0 && rank != hub_.config().rank && hub_.link(rank)->dead()) lost = rank;
  }
  if (lost < 0 || hub_.frozen() > generation_) return;
  group_.lost.store(lost, std::memory_order_release);
  for (int rank : group_.living) {
    if (rank != hub_.config().rank && rank != lost) hub_.link(rank)->send_abort(group_.id, lost);
  }
}

void Operation::send(int to, uint32_t phase, const void* data, size_t size) {
  Link& l = link(to);
  if (l.dead())
    throw PeerLost(l.rank, "Connection closed by peer", false,
                   l.silent() ? std::vector<int>{l.rank} : std::vector<int>{});
  if (size <= kCopied) {
    l.send_small(key(phase), data, size);
  } else {
    auto s = std::make_shared<Send>();
    s->header.key = key(phase);
    s->header.generation = generation_;
    s->data = static_cast<const char*>(data);
    s->size = size;
    l.send(s);
    if (s->pending()) {
      sends_.emplace_back(l.rank, std::move(s));
    } else {
      s->rethrow();
    }
  }
  l.doorbell();
}

void Operation::share(int to, uint32_t phase, int index, size_t size) {
  Link& l = link(to);
  l.send_reference(key(phase), uint32_t(index), hub_.outbox()->offset(index), size);
  l.doorbell();
}

RecvPtr Operation::post(int from, uint32_t phase, void* into, size_t size) {
  Link& l = link(from);
  auto r = std::make_shared<Recv>();
  r->key = key(phase);
  r->into = static_cast<char*>(into);
  r->size = size;
  l.post(r);
  if (r->pending()) recvs_.emplace_back(l.rank, r);
  return r;
}

void Operation::wait(const std::function<bool()>& done, const std::function<void(std::vector<int>*)>& missing) {
  scope_.missing = missing;
  hub_.wait(scope_, done);
}

const char* Operation::await(const RecvPtr& recv) {
  if (recv->pending()) {
    wait([&] { return !recv->pending(); },
         [&](std::vector<int>* ranks) {
           for (auto& [rank, r] : recvs_) {
             if (r->pending()) ranks->push_back(rank);
           }
         });
  }
  recv->rethrow();
  // Completed receives need no withdrawal.
  if (recvs_.size() > 64) {
    recvs_.erase(std::remove_if(recvs_.begin(), recvs_.end(), [](auto& e) { return !e.second->pending(); }),
                 recvs_.end());
  }
  return recv->view;
}

void Operation::release(const RecvPtr& recv) {
  if (recv->block < 0) {
    recv->heap.reset();
    return;
  }
  Link& l = *hub_.link(recv->source);
  if (!l.still(generation_)) throw GenerationChanged(std::max(generation_ + 1, hub_.frozen()));
  l.send_ack(uint32_t(recv->block));
  recv->block = -1;
}

char* Operation::scratch(size_t size) {
  scratch_.push_back(hub_.buffers().take(std::max<size_t>(size, 1)));
  return scratch_.back().get();
}

void Operation::finish() {
  const auto pending = [&] {
    return std::any_of(sends_.begin(), sends_.end(), [](auto& e) { return e.second->pending(); });
  };
  if (pending()) {
    wait([&] { return !pending(); },
         [&](std::vector<int>* ranks) {
           for (auto& [rank, s] : sends_) {
             if (s->pending()) ranks->push_back(rank);
           }
         });
  }
  for (auto& entry : sends_) entry.second->rethrow();
  finished_ = true;
}

}  // namespace elastic::comm
