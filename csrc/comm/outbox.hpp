// A process's outbox: blocks its peers on the same host read in place.
//
// Each generation cuts it into blocks of its own size. The memory behind it may
// grow at any time; what is not allocated yet is never handed out.
//
// A block is filled once and read by one or many peers, each of which hands it
// back with an Ack. Every generation starts with all blocks free, so a reader
// that lags in an older one may see a block change under it: after reading it
// compares the owner's `epoch`, which is raised before any block is reused
// (a sequence lock), and discards what it read when that has moved.
//
// Behind the blocks is memory that is lent (lent_memory.hpp).
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <utility>
#include <vector>

#include "lent_memory.hpp"
#include "shared_memory.hpp"

namespace elastic::comm {

struct OutboxControl {
  alignas(64) std::atomic<uint64_t> epoch;
  alignas(64) std::atomic<uint32_t> sleeping;  // the owner waits for its doorbell
};

class Outbox {
 public:
  // Room for `capacity` bytes in blocks, `allocated` of them now, and for `lent` bytes to be lent, none of them yet.
  // Throws CommError when the machine has none.
  Outbox(size_t capacity, size_t allocated, size_t lent = 0);

  // A block to be read by `readers` peers; -1 when none is free.
  int acquire(int readers);
  size_t offset(int index) const { return size_t(index) * block_bytes_; }
  char* block(int index) { return memory_.data() + kDataOffset + offset(index); }
  void release(uint32_t index);  // One reader is done.
  // Raises the epoch; all blocks are free and have `block_bytes`. With no operation of an older generation running.
  void start(uint64_t generation, size_t block_bytes);
  // Reserves up to `bytes` in all, as far as the machine has memory. From any thread.
  void grow(size_t bytes);
  size_t allocated() const;
  void sleeping(bool yes) { control()->sleeping.store(yes ? 1 : 0, std::memory_order_seq_cst); }
  int fd() const { return memory_.fd(); }
  LentMemory& lent() { return lent_; }

  static constexpr size_t kDataOffset = 4096;

 private:
  OutboxControl* control() { return reinterpret_cast<OutboxControl*>(memory_.data()); }
  void add_blocks();  // under the mutex: those that memory has come for
  const size_t capacity_;
  SharedMemory memory_;
  LentMemory lent_;
  std::mutex growing_;
  mutable std::mutex mutex_;
  size_t allocated_;
  size_t block_bytes_;
  std::vector<uint16_t> readers_;  // 0: free
  std::vector<int> free_;          // last in, first out: the block used last is still in the cache
};

class PeerOutbox {
 public:
  explicit PeerOutbox(SharedMemory memory) : memory_(std::move(memory)) {}
  // Null when it lies outside.
  const char* data(size_t offset, size_t size) const {
    const size_t room = memory_.size() - Outbox::kDataOffset;
    return offset <= room && size <= room - offset ? memory_.data() + Outbox::kDataOffset + offset : nullptr;
  }
  // Call after reading a block: whether it was still that of `generation`.
  bool still(uint64_t generation) const {
    std::atomic_thread_fence(std::memory_order_acquire);
    return control()->epoch.load(std::memory_order_relaxed) == generation;
  }
  bool owner_sleeps() const { return control()->sleeping.load(std::memory_order_seq_cst) != 0; }

 private:
  const OutboxControl* control() const { return reinterpret_cast<const OutboxControl*>(memory_.data()); }
  SharedMemory memory_;
};

}  // namespace elastic::comm
