#include "outbox.hpp"

#include "errors.hpp"

namespace elastic::comm {

Outbox::Outbox(size_t block_bytes, size_t block_count)
    : block_bytes_(block_bytes),
      memory_(SharedMemory::create("elastic-outbox", kDataOffset + block_bytes * block_count)),
      readers_(block_count, 0) {
  control()->block_bytes = uint32_t(block_bytes);
  control()->block_count = uint32_t(block_count);
  start(0);
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

void Outbox::start(uint64_t generation) {
  std::lock_guard<std::mutex> lock(mutex_);
  control()->epoch.store(generation, std::memory_order_seq_cst);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  free_.clear();
  for (size_t i = readers_.size(); i-- > 0;) {
    readers_[i] = 0;
    free_.push_back(int(i));
  }
}

PeerOutbox::PeerOutbox(SharedMemory memory) : memory_(std::move(memory)) {
  block_bytes_ = control()->block_bytes;
  block_count_ = control()->block_count;
  if (Outbox::kDataOffset + block_bytes_ * block_count_ > memory_.size()) throw CommError("peer's outbox is malformed");
}

const char* PeerOutbox::block(uint32_t index, size_t size) const {
  if (index >= block_count_ || size > block_bytes_) return nullptr;
  return memory_.data() + Outbox::kDataOffset + size_t(index) * block_bytes_;
}

}  // namespace elastic::comm
