#include "ring.hpp"

#include <cstring>

namespace elastic::comm {
namespace {

constexpr size_t padded(size_t n) {
  return (n + 63) & ~size_t(63);
}

}  // namespace

RingWriter::RingWriter(char* own, const char* peer, size_t capacity)
    : control_(reinterpret_cast<RingControl*>(own)),
      peer_(reinterpret_cast<const RingControl*>(peer)),
      data_(own + kRingDataOffset),
      capacity_(capacity) {}

bool RingWriter::push(const FrameHeader& header, const void* payload, size_t size) {
  const size_t record = sizeof(FrameHeader) + padded(size);
  const size_t at = head_ & (capacity_ - 1);
  const size_t to_end = capacity_ - at;
  const size_t pad = record > to_end ? to_end : 0;
  if (head_ + pad + record - cached_tail_ > capacity_) {
    cached_tail_ = peer_->peer_tail.load(std::memory_order_acquire);
    if (head_ + pad + record - cached_tail_ > capacity_) return false;
  }
  if (pad != 0) {
    FrameHeader filler;
    filler.kind = FrameKind::Pad;
    filler.length = pad - sizeof(FrameHeader);
    std::memcpy(data_ + at, &filler, sizeof filler);
    head_ += pad;
  }
  char* target = data_ + (head_ & (capacity_ - 1));
  std::memcpy(target, &header, sizeof header);
  if (size > 0) std::memcpy(target + sizeof header, payload, size);
  head_ += record;
  control_->head.store(head_, std::memory_order_release);
  return true;
}

RingReader::RingReader(char* own, const char* peer, size_t capacity)
    : control_(reinterpret_cast<RingControl*>(own)),
      peer_(reinterpret_cast<const RingControl*>(peer)),
      data_(peer + kRingDataOffset),
      capacity_(capacity) {}

const FrameHeader* RingReader::front(const char** payload, bool* sane) {
  *sane = true;
  for (;;) {
    const uint64_t tail = tail_.load(std::memory_order_relaxed);
    const uint64_t filled = peer_->head.load(std::memory_order_acquire) - tail;
    if (filled == 0) return nullptr;
    const size_t at = tail & (capacity_ - 1);
    std::memcpy(&copy_, data_ + at, sizeof copy_);
    const bool carries = copy_.kind == FrameKind::Data || copy_.kind == FrameKind::Pad;
    const size_t body = carries ? copy_.length : 0;
    const size_t record = sizeof(FrameHeader) + padded(body);
    if (copy_.magic != kFrameMagic || body > capacity_ || record > capacity_ - at || record > filled) {
      *sane = false;
      return nullptr;
    }
    current_ = record;
    if (copy_.kind != FrameKind::Pad) {
      *payload = data_ + at + sizeof(FrameHeader);
      return &copy_;
    }
    pop();
  }
}

void RingReader::pop() {
  const uint64_t tail = tail_.load(std::memory_order_relaxed) + current_;
  current_ = 0;
  tail_.store(tail, std::memory_order_relaxed);
  control_->peer_tail.store(tail, std::memory_order_release);
}

}  // namespace elastic::comm
