// The stand-in devices of this process, and which of them each thread uses.
//
// The current device and the current streams belong to a thread; a new thread begins at device 0 and at the default
// streams, as with CUDA. `own` restricts the process to one device: work on any other is an error.
#pragma once

#include <array>
#include <memory>
#include <string>

#include "memory.hpp"
#include "stream.hpp"

namespace standin {

constexpr int kStreams = 9;  // the default stream and a pool of eight

class Device {
 public:
  Device(int index, std::size_t capacity);

  int index() const { return index_; }
  Memory& memory() { return memory_; }
  Stream& stream(int id);
  // A stream of the pool, each in turn.
  Stream& next_stream();
  // Wait for the work of all streams.
  void synchronize();

  void fail(const std::string& error);
  bool failed() const { return failed_; }
  // Throws what a job threw.
  void check() const;

 private:
  const int index_;
  Memory memory_;
  std::array<std::unique_ptr<Stream>, kStreams> streams_;
  std::atomic<int> next_{0};
  std::atomic<bool> failed_{false};
  mutable std::mutex mutex_;
  std::string error_;
};

// How many devices there are, and the bytes of each. Before the first use of a device.
void configure(int devices, std::size_t capacity);
int device_count();
// Throws for an index that does not exist, or that is not this process's own.
Device& device(int index);
// From now on this process may use device `index` alone; -1: any.
void own(int index);

int current_device();
void set_current_device(int index);
Stream& current_stream(int device);
// Returns the stream that was current for its device.
Stream& exchange_stream(Stream& stream);

// Throws in a child of a process that had used a device: threads and memory stay with the parent.
void check_fork();

}  // namespace standin
