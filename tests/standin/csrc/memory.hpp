// Memory of the stand-in devices.
//
// A device address is an address that the host cannot read or write: the device range is reserved without access. The
// bytes lie a fixed distance away, in the backing range, which kernels alone know (`backing`). So a host access to
// device memory faults at the access itself, also while a kernel runs on another thread.
//
// A freed block can be taken again at once by the stream that it was allocated on, as with CUDA's caching allocator.
// It is overwritten with 0xFF (NaN, -1) in the order of that stream: a read without an order to it reads NaN.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

namespace standin {

class Stream;

constexpr int kMaxDevices = 16;
constexpr std::size_t kSpan = std::size_t(1) << 36;  // addresses of one device

struct OutOfMemory : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Where the bytes of a device address lie. For kernels only.
void* backing(const void* device_address);

// The device of an address, -1 for memory of the host.
int device_of(const void* address);

// Print one line and the stack of a host access to device memory, then end as the process would have ended.
void explain_faults();

struct Usage {
  std::size_t total, used, reserved, peak;  // bytes
};

// The blocks of one device. Thread-safe.
class Memory {
 public:
  Memory(int device, std::size_t capacity);

  // `size` bytes for work of `stream`. Throws OutOfMemory.
  void* take(std::size_t size, Stream& stream);
  void give(void* address);
  // The block is also used by `stream`: it is not overwritten before that stream's present work is done.
  void used_by(void* address, Stream& stream);
  // Give cached blocks back, once all streams of the device are idle.
  void release_cached();
  Usage usage() const;
  void reset_peak();

 private:
  struct Block {
    std::size_t size;
    Stream* stream;
    std::set<Stream*> others;
  };

  void* take_from_space(std::size_t size);
  void return_to_space(std::size_t offset, std::size_t size);

  const int device_;
  const std::size_t capacity_;
  char* const base_;
  mutable std::mutex mutex_;
  std::map<std::size_t, std::size_t> space_;  // offset -> size of what no block covers
  std::map<std::pair<Stream*, std::size_t>, std::vector<void*>> cached_;
  std::unordered_map<void*, Block> blocks_;
  std::size_t used_ = 0, peak_ = 0;
};

}  // namespace standin
