#include "group.hpp"

#include <chrono>
#include <exception>
#include <thread>
#include <utility>

namespace elastic::comm {

void Group::run(Workers& workers, const std::function<void()>& work) {
  {
    std::unique_lock<std::mutex> lock(mutex_);
    if (busy_ || !queue_.empty()) {
      std::mutex done_mutex;
      std::condition_variable done_cv;
      bool done = false;
      std::exception_ptr error;
      queue_.push_back([&] {
        try {
          work();
        } catch (...) {
          error = std::current_exception();
        }
        std::lock_guard<std::mutex> done_lock(done_mutex);
        done = true;
        done_cv.notify_one();
      });
      lock.unlock();
      std::unique_lock<std::mutex> done_lock(done_mutex);
      done_cv.wait(done_lock, [&] { return done; });
      if (error) std::rethrow_exception(error);
      return;
    }
    busy_ = true;
  }
  std::exception_ptr error;
  try {
    work();
  } catch (...) {
    error = std::current_exception();
  }
  bool more = false;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    busy_ = more = !queue_.empty();
  }
  if (more) {
    workers.submit([self = self_.lock()] { self->drain(); });
  }
  if (error) std::rethrow_exception(error);
}

void Group::enqueue(Workers& workers, std::function<void()> work) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    queue_.push_back(std::move(work));
    if (busy_) return;
    busy_ = true;
  }
  workers.submit([self = self_.lock()] { self->drain(); });
}

void Group::drain() {
  for (;;) {
    std::function<void()> work;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (queue_.empty()) {
        busy_ = false;
        return;
      }
      work = std::move(queue_.front());
      queue_.pop_front();
    }
    work();
  }
}

Workers::~Workers() { stop(); }

void Workers::submit(std::function<void()> task) {
  std::lock_guard<std::mutex> lock(mutex_);
  tasks_.push_back(std::move(task));
  if (idle_ >= tasks_.size()) {
    ready_.notify_one();
    return;
  }
  ++threads_;
  std::thread([this] { loop(); }).detach();
}

void Workers::stop() {
  std::unique_lock<std::mutex> lock(mutex_);
  stopping_ = true;
  ready_.notify_all();
  gone_.wait(lock, [this] { return threads_ == 0; });
}

void Workers::loop() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    if (tasks_.empty()) {
      ++idle_;
      ready_.wait_for(lock, std::chrono::seconds(2), [this] { return stopping_ || !tasks_.empty(); });
      --idle_;
      if (tasks_.empty()) break;
    }
    auto task = std::move(tasks_.front());
    tasks_.pop_front();
    lock.unlock();
    task();
    task = nullptr;
    lock.lock();
  }
  --threads_;
  gone_.notify_all();
}

}  // namespace elastic::comm
