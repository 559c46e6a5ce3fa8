#include "outbox.hpp"

#include <algorithm>

#include "errors.hpp"

namespace elastic::comm {

Outbox::Outbox(size_t capacity, size_t allocated, size_t lent)
    : capacity_(capacity),
      memory_(SharedMemory::create("elastic-outbox", kDataOffset + capacity + lent, kDataOffset + allocated)),
      lent_(memory_, kDataOffset, kDataOffset + capacity, kDataOffset + capacity + lent),
      allocated_(allocated),
      block_bytes_(allocated) {
  start(0, allocated);
}

int Outbox::acquire(int readers) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (free_.empty()) return -1;
  const int index = free_.back();
  free_.pop_back();
  readers_[size_t(index)] = uint16_t(readers);
  return index;
}

void Outbox::release(uint32_t index) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (index >= readers_.size() || readers_[index] == 0) return;
  if (--readers_[index] == 0) free_.push_back(int(index));
}

void Outbox::start(uint64_t generation, size_t block_bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  control()->epoch.store(generation, std::memory_order_seq_cst);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  block_bytes_ = block_bytes;
  free_.clear();
  readers_.clear();
  add_blocks();
}

void Outbox::grow(size_t bytes) {
  std::lock_guard<std::mutex> one_at_a_time(growing_);
  bytes = std::min(bytes, capacity_);
  if (bytes <= allocated() || !memory_.allocate(kDataOffset + bytes)) return;
  std::lock_guard<std::mutex> lock(mutex_);
  allocated_ = bytes;
  add_blocks();
}

size_t Outbox::allocated() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return allocated_;
}

void Outbox::add_blocks() {
  const size_t before = readers_.size();
  readers_.resize(allocated_ / block_bytes_, 0);
  // The lowest is taken first: the list is used from its end.
  std::vector<int> added;
  for (size_t i = readers_.size(); i-- > before;) added.push_back(int(i));
  free_.insert(free_.begin(), added.begin(), added.end());
}

}  // namespace elastic::comm
