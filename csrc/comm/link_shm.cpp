#include "link_shm.hpp"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cstring>

namespace elastic::comm {

ShmLink::ShmLink(LinkHost& host, int rank, uint64_t incarnation, int socket, ShmParts parts, PeerOutbox outbox)
    : Link(host, rank, incarnation),
      socket_(socket),
      peer_doorbell_(parts.peer_doorbell),
      own_(std::move(parts.own)),
      peer_(std::move(parts.peer)),
      outbox_(std::move(outbox)),
      writer_(own_.data(), peer_.data(), parts.capacity),
      reader_(own_.data(), peer_.data(), parts.capacity) {
  own_.close_fd();
}

ShmLink::~ShmLink() {
  unwatch();
  close(socket_);
  close(peer_doorbell_);
}

void ShmLink::doorbell() {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (outbox_.owner_sleeps()) eventfd_write(peer_doorbell_, 1);
}

void ShmLink::watch(int epoll) {
  if (epoll_ >= 0) return;
  epoll_event event{};
  event.events = EPOLLIN | EPOLLRDHUP;
  event.data.u64 = uint64_t(rank);
  if (epoll_ctl(epoll, EPOLL_CTL_ADD, socket_, &event) == 0) epoll_ = epoll;
}

void ShmLink::unwatch() {
  if (epoll_ >= 0) epoll_ctl(epoll_, EPOLL_CTL_DEL, socket_, nullptr);
  epoll_ = -1;
}

void ShmLink::socket_event(uint32_t) {
  // Nothing is ever sent on this socket, so any event on it is its end.
  mark_dead("Connection closed by peer");
  unwatch();
}

bool ShmLink::push_frame(const FrameHeader& header, const char* payload, size_t size) {
  return writer_.push(header, payload, size);
}

void ShmLink::waiting_for_room(bool yes) {
  if (waiting_ == yes) return;
  waiting_ = yes;
  writer_.want_space(yes);
}

bool ShmLink::pump_frames() {
  bool any = false;
  size_t taken = 0;
  const char* payload = nullptr;
  bool sane = true;
  while (taken < kPumpBytes) {
    const FrameHeader* h = reader_.front(&payload, &sane);
    if (!sane) malformed("not a frame");
    if (!sane) return any;
    if (h == nullptr || gate(*h) == Gate::Shut) break;
    char* target = begin(*h);
    if (target != nullptr && h->length > 0) std::memcpy(target, payload, h->length);
    if (!rejected()) end(*h);
    if (rejected()) return any;
    taken += sizeof(FrameHeader) + (h->kind == FrameKind::Data ? h->length : 0);
    reader_.pop();
    any = true;
  }
  if (any) {
    // The reader frees space before it checks whether the writer waits; the writer does the two in the other order.
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (reader_.writer_wants_space()) doorbell();
  }
  return any;
}

}  // namespace elastic::comm
