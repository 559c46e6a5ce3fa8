// A link within a host: two rings in shared memory, the peer's outbox, its
// doorbell (an eventfd), and a Unix socket that only says whether the peer lives.
#pragma once

#include "link.hpp"
#include "outbox.hpp"
#include "ring.hpp"

namespace elastic::comm {

// The memory and doorbell that the two sides exchange after the handshake.
struct ShmParts {
  SharedMemory own;       // this side's ring
  SharedMemory peer;      // the other's
  int peer_doorbell = -1;
  size_t capacity = 0;    // bytes of data in each ring
};

class ShmLink final : public Link {
 public:
  ShmLink(LinkHost& host, int rank, uint64_t incarnation, int socket, ShmParts parts, PeerOutbox outbox);
  ~ShmLink() override;

  const char* transport() const override { return "shm"; }
  int socket() const override { return socket_; }
  bool talks_on_socket() const override { return false; }
  bool has_input() const override { return !reader_.empty(); }
  bool reads_in_place() const override { return true; }
  bool still(uint64_t generation) const override { return outbox_.still(generation); }
  void doorbell() override;
  void watch(int epoll) override;
  void unwatch() override;
  bool watched() override { return epoll_ >= 0; }
  void socket_event(uint32_t events) override;

 protected:
  bool push_frame(const FrameHeader& header, const char* payload, size_t size) override;
  size_t largest_payload() const override { return writer_.largest_payload(); }
  void waiting_for_room(bool yes) override;
  bool pump_frames() override;
  const char* peer_data(size_t offset, size_t size) const override { return outbox_.data(offset, size); }

 private:
  int socket_;
  int epoll_ = -1;
  int peer_doorbell_;
  bool waiting_ = false;
  SharedMemory own_;
  SharedMemory peer_;
  PeerOutbox outbox_;
  RingWriter writer_;
  RingReader reader_;
};

}  // namespace elastic::comm
