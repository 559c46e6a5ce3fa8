// Frames from one process to another through shared memory: one writer, one reader.
//
// Each side owns one segment and writes only there. The writer's holds the data
// and `head` (bytes written); `tail` (bytes consumed) lives in the reader's own
// segment, that of the opposite direction. Records are contiguous and 64-byte
// aligned; a Pad record fills the end when the next would not fit.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "frame.hpp"

namespace elastic::comm {

struct RingControl {
  alignas(64) std::atomic<uint64_t> head;        // bytes written by the owner
  alignas(64) std::atomic<uint64_t> peer_tail;   // bytes the owner has consumed of the peer's ring
  alignas(64) std::atomic<uint32_t> want_space;  // the owner waits for space in its own ring
};
static_assert(std::atomic<uint64_t>::is_always_lock_free, "shared between processes");

constexpr size_t kRingDataOffset = 4096;

inline size_t ring_segment_bytes(size_t capacity) {
  return kRingDataOffset + capacity;
}

class RingWriter {
 public:
  // `own`: this side's segment; `peer`: the reader's segment (read-only).
  RingWriter(char* own, const char* peer, size_t capacity);
  // Appends one record if there is space now.
  bool push(const FrameHeader& header, const void* payload, size_t size);
  size_t largest_payload() const { return capacity_ / 4; }
  void want_space(bool yes) { control_->want_space.store(yes ? 1 : 0, std::memory_order_seq_cst); }

 private:
  RingControl* control_;
  const RingControl* peer_;
  char* data_;
  size_t capacity_;
  uint64_t head_ = 0;
  uint64_t cached_tail_ = 0;
};

class RingReader {
 public:
  RingReader(char* own, const char* peer, size_t capacity);
  bool empty() const { return peer_->head.load(std::memory_order_acquire) == tail_.load(std::memory_order_relaxed); }
  // The record at the front, or null. False in `sane` means the writer broke the format.
  const FrameHeader* front(const char** payload, bool* sane);
  void pop();  // Drops what front() returned.
  bool writer_wants_space() const { return peer_->want_space.load(std::memory_order_seq_cst) != 0; }

 private:
  RingControl* control_;
  const RingControl* peer_;
  const char* data_;
  size_t capacity_;
  std::atomic<uint64_t> tail_{0};  // written under the link's receive lock, peeked at without
  size_t current_ = 0;
  FrameHeader copy_;  // read once: the peer could change the original under us
};

}  // namespace elastic::comm
