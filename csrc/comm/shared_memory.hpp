// Anonymous shared memory: sealed memfds handed from process to process.
//
// A segment has no name, so nothing stale can be left behind by a dead job and
// no mount limits its size: it lives exactly as long as a process maps it. Its
// pages are allocated when it is made (no SIGBUS later) and its size is sealed
// (no peer can cut it off). Only the owner has a writable mapping: peers map it
// read-only, and F_SEAL_FUTURE_WRITE keeps them from doing otherwise.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace elastic::comm {

class SharedMemory {
 public:
  SharedMemory() = default;
  ~SharedMemory();
  SharedMemory(SharedMemory&& other) noexcept;
  SharedMemory& operator=(SharedMemory&& other) noexcept;
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  // Owner's side: `size` bytes of zeroes, of which the first `allocated` are backed. Throws CommError when the machine
  // has no memory left.
  static SharedMemory create(const std::string& label, size_t size, size_t allocated);
  static SharedMemory create(const std::string& label, size_t size) { return create(label, size, size); }
  // Backs the first `bytes`, or so many from `offset` on; false when the machine has no memory left.
  bool allocate(size_t bytes) { return allocate(0, bytes); }
  bool allocate(size_t offset, size_t bytes);
  // Peer's side: takes `fd` (closed in any case), checks seals and size. Throws CommError.
  static SharedMemory open(int fd, size_t minimum);

  char* data() const { return static_cast<char*>(base_); }
  size_t size() const { return size_; }
  // Descriptor to pass on, while still held; -1 after close_fd().
  int fd() const { return fd_; }
  void close_fd();
  explicit operator bool() const { return base_ != nullptr; }

 private:
  void* base_ = nullptr;
  size_t size_ = 0;
  int fd_ = -1;
};

// Bytes that may be allocated without pressing the machine or its cgroup.
size_t shared_memory_headroom();
// Addresses that a process sets aside for what it lends: no more than memory could ever fill; none where files or
// addresses are limited.
size_t lent_bytes();

}  // namespace elastic::comm
