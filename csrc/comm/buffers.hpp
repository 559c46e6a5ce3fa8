// Scratch memory that collectives hand back and take again: fresh pages would have
// to be cleared by the kernel at every operation.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <vector>

namespace elastic::comm {

class BufferPool {
 public:
  struct Buffer {
    std::unique_ptr<char[]> memory;
    size_t size = 0;
  };

  // At least `size` bytes, contents unspecified.
  Buffer take(size_t size) {
    std::lock_guard<std::mutex> lock(mutex_);
    // Last in, first out: what was used last is still in the cache.
    for (size_t i = free_.size(); i-- > 0;) {
      if (free_[i].size < size || free_[i].size / 2 > size) continue;
      Buffer found = std::move(free_[i]);
      free_.erase(free_.begin() + std::ptrdiff_t(i));
      kept_ -= found.size;
      return found;
    }
    return {std::unique_ptr<char[]>(new char[size]), size};
  }

  void give(Buffer buffer) {
    std::lock_guard<std::mutex> lock(mutex_);
    kept_ += buffer.size;
    free_.push_back(std::move(buffer));
    while (kept_ > kKeep) {
      kept_ -= free_.front().size;
      free_.erase(free_.begin());
    }
  }

 private:
  static constexpr size_t kKeep = size_t(32) << 20;  // bytes; the longest unused go first
  std::mutex mutex_;
  std::vector<Buffer> free_;
  size_t kept_ = 0;
};

}  // namespace elastic::comm
