// Streams and events of the stand-in devices.
//
// A stream runs its jobs in order on a thread of its own, and late. Lateness is a setting of the process: a time that
// passes between the call and the execution, or `lazy`, the latest that is allowed: nothing runs before the host (or
// another stream) waits for it. So a missing synchronisation is seen each time, not by chance.
//
// A job that throws stops its device: later jobs are skipped, and each wait reports the first error.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

namespace standin {

class Device;

// Time between call and execution of each job; negative: lazy.
void set_lateness(std::chrono::nanoseconds time);

class Stream {
 public:
  using Job = std::function<void()>;

  Stream(Device& device, int id) : device_(device), id_(id) {}

  Device& device() const { return device_; }
  int id() const { return id_; }

  // Queue a job, once there is room for it. Returns its position; positions begin at 1.
  std::uint64_t push(Job job);
  // Later jobs of this stream run after `other` has reached `position`.
  void push_wait(Stream& other, std::uint64_t position);
  std::uint64_t issued() const;
  // Wait until `position` is done. Does not report errors (Device::check does).
  void wait(std::uint64_t position);
  // True if `position` is done. Lets the stream run up to there: a host that polls makes progress.
  bool done(std::uint64_t position);

 private:
  struct Entry {
    Job job;
    std::chrono::steady_clock::time_point called;
  };

  void run();
  bool may_run() const;

  Device& device_;
  const int id_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Entry> queue_;
  std::uint64_t issued_ = 0, done_ = 0, wanted_ = 0;
  bool started_ = false;
};

// A position of a stream, and the time at which it was reached.
class Event {
 public:
  void record(Stream& stream);
  void block(Stream& stream) const;
  bool query() const;
  void synchronize() const;
  bool recorded() const { return stream_ != nullptr; }
  Stream* stream() const { return stream_; }
  // Nanoseconds of the device's clock; both must have been reached.
  std::int64_t reached() const;

 private:
  Stream* stream_ = nullptr;
  std::uint64_t position_ = 0;
  std::shared_ptr<std::atomic<std::int64_t>> time_;
};

}  // namespace standin
