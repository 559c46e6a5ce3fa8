// A link between hosts: one TCP connection, non-blocking both ways.
#pragma once

#include <vector>

#include "link.hpp"

namespace elastic::comm {

class TcpLink final : public Link {
 public:
  TcpLink(LinkHost& host, int rank, uint64_t incarnation, int socket);
  ~TcpLink() override;

  const char* transport() const override { return "tcp"; }
  int socket() const override { return socket_; }
  bool talks_on_socket() const override { return true; }
  bool has_input() const override { return ready_.load(std::memory_order_acquire); }
  bool still(uint64_t) const override { return true; }
  void doorbell() override {}
  void watch(int epoll) override;
  void unwatch() override;
  bool watched() override;
  void socket_event(uint32_t events) override;

 protected:
  bool push_frame(const FrameHeader& header, const char* payload, size_t size) override;
  size_t largest_payload() const override { return kFrameBytes; }
  bool drained() override;
  void detach() override;
  void waiting_for_room(bool yes) override;
  bool pump_frames() override;
  void redirect() override { target_ = nullptr; }

 private:
  static constexpr size_t kFrameBytes = 512 << 10;
  static constexpr size_t kStaging = 8 << 10;  // small frames together; of large ones little is copied twice

  bool write_tail();          // the rest of the last frame; false while some is left
  bool take_header(size_t* used);
  bool read_payload();        // false when the socket is empty
  void want_in(bool yes);
  void want_out(bool yes);
  void modify_locked();
  void read_ended(const char* what, int error = 0);
  void broken(const char* what, int error);

  int socket_;
  std::mutex epoll_mutex_;
  int epoll_ = -1;
  bool want_in_ = true;
  bool want_out_ = false;
  std::atomic<bool> ready_{false};

  // tx: what is left of the frame pushed last
  FrameHeader tail_header_;
  size_t tail_header_left_ = 0;
  const char* tail_data_ = nullptr;
  size_t tail_left_ = 0;
  std::vector<char> tail_owned_;

  // rx
  std::vector<char> staging_;
  size_t begin_ = 0;
  size_t end_ = 0;
  FrameHeader header_;
  bool in_frame_ = false;
  bool ended_ = false;         // end of stream: all data before it has been read
  bool held_ = false;          // header_ belongs to a newer generation
  char* target_ = nullptr;
  size_t payload_left_ = 0;
};

}  // namespace elastic::comm
