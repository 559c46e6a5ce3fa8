// Scratch memory that is handed back and taken again: fresh pages would have to be
// cleared by the kernel at every operation.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace elastic::comm {

class BufferPool {
 public:
  // Gives memory back to its pool, which must outlive it.
  struct Return {
    BufferPool* pool = nullptr;
    size_t size = 0;
    void operator()(char* memory) const { pool->give(memory, size); }
  };
  using Buffer = std::unique_ptr<char[], Return>;

  // At least `size` bytes, contents unspecified. Small ones are left to the allocator.
  Buffer take(size_t size) {
    if (size < kSmall) return {new char[size], {this, size}};
    std::lock_guard<std::mutex> lock(mutex_);
    // Last in, first out: what was used last is still in the cache.
    for (size_t i = free_.size(); i-- > 0;) {
      const size_t found = free_[i].second;
      if (found < size || found / 2 > size) continue;
      char* memory = free_[i].first.release();
      free_.erase(free_.begin() + std::ptrdiff_t(i));
      kept_ -= found;
      return {memory, {this, found}};
    }
    return {new char[size], {this, size}};
  }

 private:
  static constexpr size_t kSmall = 32 << 10;
  static constexpr size_t kKeep = size_t(32) << 20;  // bytes; the longest unused go first

  void give(char* memory, size_t size) {
    std::unique_ptr<char[]> owned(memory);
    if (size < kSmall) return;
    std::lock_guard<std::mutex> lock(mutex_);
    free_.emplace_back(std::move(owned), size);
    kept_ += size;
    while (kept_ > kKeep) {
      kept_ -= free_.front().second;
      free_.erase(free_.begin());
    }
  }

  std::mutex mutex_;
  std::vector<std::pair<std::unique_ptr<char[]>, size_t>> free_;
  size_t kept_ = 0;
};

}  // namespace elastic::comm
