#include "group.hpp"

#include <chrono>
#include <exception>
#include <thread>
#include <utility>

#include "errors.hpp"

namespace elastic::comm {
namespace {

thread_local const Workers* working_for = nullptr;  // those whose task this thread runs

}  // namespace

void Group::check_counted(uint64_t generation) const {
  if (counted != generation) throw CommError("group " + name + " was released in an earlier generation");
}

void Group::run_front(Workers& workers, std::unique_lock<std::mutex>& lock) {
  auto work = std::move(queue_.front());
  queue_.pop_front();
  busy_ = true;
  lock.unlock();
  Rest rest = work();
  lock.lock();
  busy_ = false;
  if (waiting_ > 0) ran_.notify_all();
  const bool last = queue_.empty();
  lock.unlock();
  if (rest && last) {
    rest();
  } else if (rest) {
    workers.submit(std::move(rest));  // another thread, so that the next piece begins at once
  }
  rest = nullptr;
  work = nullptr;  // what they held is let go without the lock; it may be the last that keeps the workers
  lock.lock();
}

// Without the mutex: workers that are stopping run the task in this thread.
void Group::hand_on(Workers& workers, std::unique_lock<std::mutex>& lock) {
  const bool needed = !busy_ && !scheduled_ && !queue_.empty();
  if (needed) scheduled_ = true;
  lock.unlock();
  if (needed) workers.submit([&workers, self = self_.lock()] { self->drain(workers); });
}

void Group::drain(Workers& workers) {
  std::unique_lock<std::mutex> lock(mutex_);
  scheduled_ = false;
  while (!busy_ && !queue_.empty()) run_front(workers, lock);
}

bool Group::help(Workers& workers, const std::function<bool()>& done, std::chrono::steady_clock::time_point deadline) {
  std::unique_lock<std::mutex> lock(mutex_);
  bool in_time = true;
  while (!done() && in_time) {
    if (!busy_ && !queue_.empty()) {
      run_front(workers, lock);
      continue;
    }
    ++waiting_;
    in_time = ran_.wait_until(lock, deadline) == std::cv_status::no_timeout;
    --waiting_;
  }
  in_time = done();
  hand_on(workers, lock);
  return in_time;
}

void Group::run(Workers& workers, const std::function<void()>& work) {
  std::exception_ptr error;
  const auto guarded = [&] {
    try {
      work();
    } catch (...) {
      error = std::current_exception();
    }
  };
  std::unique_lock<std::mutex> lock(mutex_);
  if (!busy_ && queue_.empty()) {
    busy_ = true;
    lock.unlock();
    guarded();
    lock.lock();
    busy_ = false;
    if (waiting_ > 0) ran_.notify_all();
    hand_on(workers, lock);
  } else {
    bool ran = false;  // under mutex_ where it is read
    queue_.push_back([&] {
      guarded();
      std::lock_guard<std::mutex> inner(mutex_);
      ran = true;
      return Rest();
    });
    lock.unlock();
    help(workers, [&] { return ran; }, std::chrono::steady_clock::time_point::max());
  }
  if (error) std::rethrow_exception(error);
}

void Group::enqueue(Workers& workers, std::function<Rest()> work) {
  std::unique_lock<std::mutex> lock(mutex_);
  queue_.push_back(std::move(work));
  hand_on(workers, lock);
}

Workers::~Workers() {
  stop();
}

void Workers::submit(std::function<void()> task) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (stopping_) {  // no caller would wait for a thread of ours any more
    lock.unlock();
    return task();
  }
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

bool Workers::contain_this_thread() const {
  return working_for == this;
}

void Workers::loop() {
  working_for = this;
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
