#include "p2p.hpp"

#include <algorithm>

namespace elastic::comm {
namespace {

LinkPtr link_to(const Call& call, int rank) {
  call.group.check_counted(call.generation);
  LinkPtr link = rank >= 0 && rank < call.hub.config().slots ? call.hub.link_ptr(rank) : nullptr;
  if (!link || !call.hub.is_alive(rank)) throw PeerLost(rank, "not a living member");
  return link;
}

RecvPtr make_recv(const Call& call, uint64_t tag, void* into, size_t size) {
  auto r = std::make_shared<Recv>();
  r->key = {call.group.id, tag & ~kCollectiveBit};
  r->into = static_cast<char*>(into);
  r->size = size;
  r->view_allowed = false;
  r->detached = true;
  return r;
}

}  // namespace

Request::~Request() {
  if (!kept_ && !ended()) withdraw(std::make_exception_ptr(CommError("let go")));
}

bool Request::ended() const {
  if (!sends_.empty()) return !sends_.front().second->pending();
  const auto decided = [](const auto& e) {
    const MessageState state = e.second->state.load(std::memory_order_acquire);
    return state == MessageState::Done || (state == MessageState::Failed && e.second->misfit);
  };
  if (std::any_of(recvs_.begin(), recvs_.end(), decided)) return true;
  // From any source: failed only when no source is left.
  return std::none_of(recvs_.begin(), recvs_.end(), [](const auto& e) { return e.second->pending(); });
}

void Request::missing(std::vector<int>* ranks) const {
  for (auto& [link, send] : sends_) {
    if (send->pending()) ranks->push_back(link->rank);
  }
  for (auto& [link, recv] : recvs_) {
    if (recv->pending()) ranks->push_back(link->rank);
  }
}

void Request::withdraw(const std::exception_ptr& error) {
  for (auto& [link, send] : sends_) {
    if (send->pending()) link->cancel(send, error);
  }
  for (auto& [link, recv] : recvs_) {
    if (recv->pending()) link->cancel(recv, error);
  }
  announce();
}

void Request::announce() {
  std::vector<std::function<void()>> calls;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!ended()) return;
    ended_announced_ = true;
    calls.swap(callbacks_);
  }
  for (auto& call : calls) call();
}

void Request::on_end(std::function<void()> fn) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    callbacks_.push_back(std::move(fn));
  }
  announce();
}

bool Request::test() {
  if (ended()) return true;
  try {
    const auto shared = hub_.enter(generation_);
    hub_.pump();
  } catch (...) {
    withdraw(std::current_exception());
  }
  return ended();
}

void Request::wait(double timeout) {
  if (!ended()) {
    try {
      const auto shared = hub_.enter(generation_);
      WaitScope scope;
      scope.generation = generation_;
      scope.seconds = timeout;
      scope.deadline =
          Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(timeout));
      scope.missing = [this](std::vector<int>* ranks) { missing(ranks); };
      hub_.wait(scope, [this] { return ended(); });
    } catch (...) {
      withdraw(std::current_exception());
    }
  }
  announce();
  if (!sends_.empty()) return sends_.front().second->rethrow();
  RecvPtr decisive;
  for (auto& [link, recv] : recvs_) {
    const MessageState state = recv->state.load(std::memory_order_acquire);
    if (state == MessageState::Pending) continue;
    if (!decisive || state == MessageState::Done || recv->misfit) decisive = recv;
    if (state == MessageState::Done || recv->misfit) break;
  }
  const auto taken = std::make_exception_ptr(CommError("taken by another source"));
  for (auto& [link, recv] : recvs_) {
    if (recv->pending()) link->cancel(recv, taken);
  }
  if (decisive) decisive->rethrow();
}

void Request::look_again() {
  for (auto& [link, recv] : recvs_) {
    if (recv->pending()) link->look_again(recv);
  }
}

std::shared_ptr<Loan> Request::loan() {
  return recvs_.empty() ? nullptr : std::move(recvs_.front().second->loan);
}

int Request::source() const {
  for (const auto& [link, recv] : recvs_) {
    if (recv->state.load(std::memory_order_acquire) == MessageState::Done) return link->rank;
  }
  return -1;
}

RequestPtr send_to(const Call& call, int to, uint64_t tag, const void* data, size_t size, Keep keep) {
  const auto shared = call.hub.enter(call.generation);
  auto request = std::make_shared<Request>(call.hub, call.generation, keep != nullptr);
  const LinkPtr link = link_to(call, to);
  auto s = std::make_shared<Send>();
  s->header.key = {call.group.id, tag & ~kCollectiveBit};
  s->header.generation = call.generation;
  s->data = static_cast<const char*>(data);
  s->size = size;
  s->detached = true;
  s->ended = [weak = std::weak_ptr<Request>(request), keep] {
    if (auto r = weak.lock()) r->announce();
  };
  request->sends_.emplace_back(link, s);
  if (!link->lend(s)) link->send(s);
  link->doorbell();
  return request;
}

RequestPtr receive_from(const Call& call, int from, uint64_t tag, void* into, size_t size, Keep keep, bool may_borrow) {
  const auto shared = call.hub.enter(call.generation);
  auto request = std::make_shared<Request>(call.hub, call.generation, keep != nullptr);
  const LinkPtr link = link_to(call, from);
  auto r = make_recv(call, tag, into, size);
  r->loan_allowed = may_borrow;
  r->ended = [weak = std::weak_ptr<Request>(request), keep] {
    if (auto q = weak.lock()) q->announce();
  };
  request->recvs_.emplace_back(link, r);
  link->post(r);
  return request;
}

RequestPtr receive_from_any(const Call& call, uint64_t tag, void* into, size_t size, Keep keep) {
  const auto shared = call.hub.enter(call.generation);
  auto request = std::make_shared<Request>(call.hub, call.generation, keep != nullptr);
  const auto any = std::make_shared<AnySource>();
  any->released = [weak = std::weak_ptr<Request>(request)] {
    if (auto q = weak.lock()) q->look_again();
  };
  for (int rank : call.group.living) {
    if (rank == call.hub.config().rank) continue;
    auto r = make_recv(call, tag, into, size);
    r->any = any;
    r->ended = [weak = std::weak_ptr<Request>(request), keep] {
      if (auto q = weak.lock()) q->announce();
    };
    request->recvs_.emplace_back(link_to(call, rank), r);
  }
  if (request->recvs_.empty()) throw CommError("no living rank to receive from");
  for (auto& [link, r] : request->recvs_) link->post(r);
  return request;
}

}  // namespace elastic::comm
