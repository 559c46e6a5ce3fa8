#include "link_tcp.hpp"

#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

namespace elastic::comm {

TcpLink::TcpLink(LinkHost& host, int rank, uint64_t incarnation, int socket)
    : Link(host, rank, incarnation), socket_(socket), staging_(kStaging) {}

TcpLink::~TcpLink() {
  unwatch();
  shutdown(socket_, SHUT_WR);
  // Unread bytes at close() would turn into a reset and cost the peer what it has not read yet.
  while (recv(socket_, staging_.data(), staging_.size(), MSG_DONTWAIT) > 0) {
  }
  close(socket_);
}

void TcpLink::watch(int epoll) {
  std::lock_guard<std::mutex> lock(epoll_mutex_);
  if (epoll_ >= 0) return;
  epoll_event event{};
  event.events = EPOLLRDHUP | (want_in_ ? EPOLLIN : 0u) | (want_out_ ? EPOLLOUT : 0u);
  event.data.u64 = uint64_t(rank);
  if (epoll_ctl(epoll, EPOLL_CTL_ADD, socket_, &event) == 0) epoll_ = epoll;
}

void TcpLink::unwatch() {
  std::lock_guard<std::mutex> lock(epoll_mutex_);
  if (epoll_ >= 0) epoll_ctl(epoll_, EPOLL_CTL_DEL, socket_, nullptr);
  epoll_ = -1;
}

bool TcpLink::watched() {
  std::lock_guard<std::mutex> lock(epoll_mutex_);
  return epoll_ >= 0;
}

void TcpLink::want_in(bool yes) {
  std::lock_guard<std::mutex> lock(epoll_mutex_);
  if (std::exchange(want_in_, yes) != yes) modify_locked();
}

void TcpLink::want_out(bool yes) {
  std::lock_guard<std::mutex> lock(epoll_mutex_);
  if (std::exchange(want_out_, yes) != yes) modify_locked();
}

void TcpLink::modify_locked() {
  if (epoll_ < 0) return;
  epoll_event event{};
  event.events = EPOLLRDHUP | (want_in_ ? EPOLLIN : 0u) | (want_out_ ? EPOLLOUT : 0u);
  event.data.u64 = uint64_t(rank);
  epoll_ctl(epoll_, EPOLL_CTL_MOD, socket_, &event);
}

void TcpLink::read_ended(const char* what, int error) {
  ended_ = true;
  broken(what, error);
}

void TcpLink::broken(const char* what, int error) {
  mark_dead(error, what);
  unwatch();
}

void TcpLink::socket_event(uint32_t events) {
  if ((events & (EPOLLIN | EPOLLRDHUP | EPOLLHUP | EPOLLERR)) != 0) ready_.store(true, std::memory_order_release);
  // The end has been received: one more pump finds it behind the last data, nothing else can come.
  if ((events & (EPOLLHUP | EPOLLERR | EPOLLRDHUP)) != 0) unwatch();
}

// ---------------------------------------------------------------- sending

bool TcpLink::write_tail() {
  while (tail_header_left_ + tail_left_ > 0) {
    iovec parts[2] = {
        {reinterpret_cast<char*>(&tail_header_) + sizeof(FrameHeader) - tail_header_left_, tail_header_left_},
        {const_cast<char*>(tail_data_), tail_left_}};
    msghdr message{};
    message.msg_iov = parts;
    message.msg_iovlen = 2;
    const ssize_t n = sendmsg(socket_, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n < 0) {
      if (errno == EINTR) continue;
      if (errno != EAGAIN && errno != EWOULDBLOCK) broken("Connection closed by peer while sending", errno);
      return false;
    }
    const size_t of_header = std::min(size_t(n), tail_header_left_);
    tail_header_left_ -= of_header;
    tail_data_ += size_t(n) - of_header;
    tail_left_ -= size_t(n) - of_header;
  }
  return true;
}

bool TcpLink::push_frame(const FrameHeader& header, const char* payload, size_t size) {
  if (!write_tail()) return false;
  tail_header_ = header;
  tail_header_left_ = sizeof(FrameHeader);
  tail_data_ = payload;
  tail_left_ = size;
  write_tail();
  return true;
}

bool TcpLink::drained() {
  return write_tail();
}

void TcpLink::detach() {
  const size_t kept = tail_owned_.size();
  if (tail_left_ == 0 || (tail_left_ <= kept && tail_data_ == tail_owned_.data() + (kept - tail_left_))) return;
  tail_owned_.assign(tail_data_, tail_data_ + tail_left_);
  tail_data_ = tail_owned_.data();
}

void TcpLink::waiting_for_room(bool yes) {
  want_out(yes);
}

// ---------------------------------------------------------------- receiving

bool TcpLink::take_header(size_t* used) {
  if (held_) {
    if (gate(header_) == Gate::Shut) return false;
    held_ = false;
  } else {
    if (end_ - begin_ < sizeof(FrameHeader)) return false;
    std::memcpy(&header_, staging_.data() + begin_, sizeof header_);
    begin_ += sizeof header_;
    *used += sizeof header_;
    if (header_.magic != kFrameMagic || (header_.kind == FrameKind::Data && header_.length > kFrameBytes)) {
      read_ended("malformed frame");
      return false;
    }
    if (gate(header_) == Gate::Shut) {
      held_ = true;
      want_in(false);  // Nothing is read until this process has reached that generation.
      return false;
    }
  }
  want_in(true);
  target_ = begin(header_);
  if (rejected()) {
    read_ended("malformed frame");
    return false;
  }
  in_frame_ = true;
  payload_left_ = header_.kind == FrameKind::Data ? header_.length : 0;
  return true;
}

bool TcpLink::pump_frames() {
  ready_.store(false, std::memory_order_release);
  size_t used = 0;
  for (;;) {
    if (!in_frame_ && !take_header(&used)) {
      if (held_ || ended_) return used > 0;
      std::memmove(staging_.data(), staging_.data() + begin_, end_ - begin_);
      end_ -= begin_;
      begin_ = 0;
      const ssize_t n = recv(socket_, staging_.data() + end_, kStaging - end_, MSG_DONTWAIT);
      if (n <= 0) {
        if (n < 0 && errno == EINTR) continue;
        if (n == 0) read_ended("Connection closed by peer");
        if (n < 0 && errno != EAGAIN && errno != EWOULDBLOCK) read_ended("Connection reset by peer", errno);
        return used > 0;
      }
      end_ += size_t(n);
      continue;
    }
    const size_t buffered = std::min(payload_left_, end_ - begin_);
    if (target_ != nullptr && buffered > 0) {
      std::memcpy(target_, staging_.data() + begin_, buffered);
      target_ += buffered;
    }
    begin_ += buffered;
    payload_left_ -= buffered;
    used += buffered;
    while (payload_left_ > 0) {
      const size_t before = payload_left_;
      if (ended_ || !read_payload()) return used > 0;
      used += std::max<size_t>(before - payload_left_, 1);
    }
    in_frame_ = false;
    end(header_);
    if (rejected()) {
      read_ended("malformed frame");
      return true;
    }
    if (used >= kPumpBytes) {
      ready_.store(true, std::memory_order_release);  // what is left comes with the next call
      return true;
    }
  }
}

// Straight into its place, and the next header behind it: one call for the rest of a frame.
bool TcpLink::read_payload() {
  const bool direct = target_ != nullptr;
  iovec parts[2] = {{direct ? target_ : staging_.data(), direct ? payload_left_ : std::min(payload_left_, kStaging)},
                    {staging_.data(), direct ? sizeof(FrameHeader) : 0}};
  begin_ = end_ = 0;
  msghdr message{};
  message.msg_iov = parts;
  message.msg_iovlen = direct ? 2 : 1;
  const ssize_t n = recvmsg(socket_, &message, MSG_DONTWAIT);
  if (n <= 0) {
    if (n < 0 && errno == EINTR) return true;
    if (n == 0) read_ended("Connection closed by peer");
    if (n < 0 && errno != EAGAIN && errno != EWOULDBLOCK) read_ended("Connection reset by peer", errno);
    return false;
  }
  const size_t of_payload = std::min(size_t(n), payload_left_);
  end_ = size_t(n) - of_payload;
  if (direct) target_ += of_payload;
  payload_left_ -= of_payload;
  return true;
}

}  // namespace elastic::comm
