#include "stream.hpp"

#include <pthread.h>

#include <stdexcept>

#include "device.hpp"

namespace standin {
namespace {

constexpr std::size_t kDepth = 1024;  // jobs that a stream holds, as with CUDA: who asks for more waits

std::atomic<std::int64_t> lateness{-1};

}  // namespace

void set_lateness(std::chrono::nanoseconds time) { lateness = time.count(); }

std::uint64_t Stream::push(Job job) {
  check_fork();
  std::unique_lock<std::mutex> lock(mutex_);
  if (!started_) {
    started_ = true;
    std::thread([this] { run(); }).detach();
  }
  queue_.push_back({std::move(job), std::chrono::steady_clock::now()});
  ++issued_;
  const std::uint64_t position = issued_;
  if (position > kDepth) wanted_ = std::max(wanted_, position - kDepth);
  changed_.notify_all();
  changed_.wait(lock, [&] { return queue_.size() <= kDepth; });
  return position;
}

void Stream::push_wait(Stream& other, std::uint64_t position) {
  if (&other != this) push([&other, position] { other.wait(position); });
}

std::uint64_t Stream::issued() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return issued_;
}

void Stream::wait(std::uint64_t position) {
  check_fork();
  std::unique_lock<std::mutex> lock(mutex_);
  wanted_ = std::max(wanted_, position);
  changed_.notify_all();
  changed_.wait(lock, [&] { return done_ >= position; });
}

bool Stream::done(std::uint64_t position) {
  std::lock_guard<std::mutex> lock(mutex_);
  wanted_ = std::max(wanted_, position);
  changed_.notify_all();
  return done_ >= position;
}

bool Stream::may_run() const { return !queue_.empty() && (done_ < wanted_ || lateness >= 0); }

void Stream::run() {
  pthread_setname_np(pthread_self(), ("standin" + std::to_string(device_.index())).c_str());
  set_current_device(device_.index());
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return may_run(); });
    Entry entry = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    if (lateness > 0) std::this_thread::sleep_until(entry.called + std::chrono::nanoseconds(lateness));
    if (!device_.failed()) {
      try {
        entry.job();
      } catch (const std::exception& error) {
        device_.fail(error.what());
      }
    }
    entry.job = nullptr;  // what the job held is released before its position is reached
    lock.lock();
    ++done_;
    changed_.notify_all();
  }
}

void Event::record(Stream& stream) {
  stream_ = &stream;
  time_ = std::make_shared<std::atomic<std::int64_t>>(0);
  position_ = stream.push([time = time_] { *time = std::chrono::steady_clock::now().time_since_epoch().count(); });
}

void Event::block(Stream& stream) const {
  if (stream_) stream.push_wait(*stream_, position_);
}

bool Event::query() const { return !stream_ || stream_->done(position_); }

void Event::synchronize() const {
  if (stream_) stream_->wait(position_);
}

std::int64_t Event::reached() const {
  if (!stream_ || !stream_->done(position_)) throw std::runtime_error("the stand-in's event has not been reached");
  return *time_;
}

}  // namespace standin
