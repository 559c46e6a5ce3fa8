// A process's outbox: blocks its peers on the same host read in place.
//
// A block is filled once and read by one or many peers, each of which hands it
// back with an Ack. Every generation starts with all blocks free, so a reader
// that lags in an older one may see a block change under it: after reading it
// compares the owner's `epoch`, which is raised before any block is reused
// (a sequence lock), and discards what it read when that has moved.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

#include "shared_memory.hpp"

namespace elastic::comm {

struct OutboxControl {
  alignas(64) std::atomic<uint64_t> epoch;
  alignas(64) std::atomic<uint32_t> sleeping;  // the owner waits for its doorbell
  alignas(64) uint32_t block_bytes;
  uint32_t block_count;
};

class Outbox {
 public:
  // Throws CommError when the machine has no room.
  Outbox(size_t block_bytes, size_t block_count);

  // A block to be read by `readers` peers; -1 when none is free.
  int acquire(int readers);
  char* block(int index) { return memory_.data() + kDataOffset + size_t(index) * block_bytes_; }
  size_t block_bytes() const { return block_bytes_; }
  void release(uint32_t index);      // One reader is done.
  void start(uint64_t generation);   // Raises the epoch, frees all blocks.
  void sleeping(bool yes) { control()->sleeping.store(yes ? 1 : 0, std::memory_order_seq_cst); }
  int fd() const { return memory_.fd(); }
  size_t bytes() const { return memory_.size(); }

  static constexpr size_t kDataOffset = 4096;

 private:
  OutboxControl* control() { return reinterpret_cast<OutboxControl*>(memory_.data()); }
  size_t block_bytes_;
  SharedMemory memory_;
  std::mutex mutex_;
  std::vector<uint16_t> readers_;  // 0: free
  std::vector<int> free_;          // last in, first out: the block used last is still in the cache
};

class PeerOutbox {
 public:
  explicit PeerOutbox(SharedMemory memory);
  // Null when the reference points outside.
  const char* block(uint32_t index, size_t size) const;
  // Call after reading a block: whether it was still that of `generation`.
  bool still(uint64_t generation) const {
    std::atomic_thread_fence(std::memory_order_acquire);
    return control()->epoch.load(std::memory_order_relaxed) == generation;
  }
  bool owner_sleeps() const { return control()->sleeping.load(std::memory_order_seq_cst) != 0; }

 private:
  const OutboxControl* control() const { return reinterpret_cast<const OutboxControl*>(memory_.data()); }
  SharedMemory memory_;
  size_t block_bytes_;
  size_t block_count_;
};

}  // namespace elastic::comm
