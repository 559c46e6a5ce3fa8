#include "work.hpp"

namespace elastic::comm {

c10::intrusive_ptr<c10::ivalue::Future> make_tensors_future() {
  return c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
}

ElasticWork::ElasticWork(c10d::OpType op, std::vector<at::Tensor> outputs, Help help,
                         std::shared_ptr<std::atomic<bool>> awaited)
    : Work(-1, op), outputs_(std::move(outputs)), help_(std::move(help)), awaited_(std::move(awaited)) {}

bool ElasticWork::wait(std::chrono::milliseconds timeout) {
  if (awaited_) awaited_->store(true);
  if (help_ && !isCompleted()) {
    const auto deadline = timeout == kNoTimeout ? std::chrono::steady_clock::time_point::max()
                                                : std::chrono::steady_clock::now() + timeout;
    if (!help_([this] { return isCompleted(); }, deadline)) {
      throw Timeout(std::chrono::duration<double>(timeout).count(), {});
    }
  }
  // Not Work::wait, which calls synchronize() with the mutex held.
  std::unique_lock<std::mutex> lock(mutex_);
  cv_.wait(lock, [this] { return completed_; });
  if (exception_) std::rethrow_exception(exception_);
  return true;
}

void ElasticWork::mark(c10::ivalue::Future& future, const std::exception_ptr& error) {
  if (error) {
    future.setError(error);
  } else {
    future.markCompleted(c10::IValue(outputs_));
  }
}

void ElasticWork::end(std::exception_ptr error) {
  c10::intrusive_ptr<c10::ivalue::Future> future;
  finish(error);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    future = future_;
  }
  if (future) mark(*future, error);
}

c10::intrusive_ptr<c10::ivalue::Future> ElasticWork::getFuture() {
  auto future = make_tensors_future();
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (future_) return future_;
    future_ = future;
    if (!completed_) return future_;  // end() marks it
  }
  mark(*future, exception_);
  return future;
}

RequestWork::RequestWork(c10d::OpType op, RequestPtr request, std::vector<at::Tensor> tensors, double timeout,
                         std::function<void()> finish, std::function<int(int)> rank_of)
    : Work(-1, op),
      request_(std::move(request)),
      tensors_(std::move(tensors)),
      seconds_(timeout),
      finish_(std::move(finish)),
      rank_of_(std::move(rank_of)) {}

void RequestWork::settle(double timeout) {
  std::lock_guard<std::mutex> one(settle_mutex_);
  if (settled_) return;
  std::exception_ptr error;
  try {
    request_->wait(timeout);
    if (finish_) finish_();
  } catch (...) {
    error = std::current_exception();
  }
  settled_ = true;
  finish(error);
}

bool RequestWork::isCompleted() {
  if (!request_->test()) return false;
  settle(0);
  return true;
}

bool RequestWork::isSuccess() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return completed_ && !exception_;
}

std::exception_ptr RequestWork::exception() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return exception_;
}

bool RequestWork::wait(std::chrono::milliseconds timeout) {
  settle(timeout == kNoTimeout ? seconds_ : std::chrono::duration<double>(timeout).count());
  std::lock_guard<std::mutex> lock(mutex_);
  if (exception_) std::rethrow_exception(exception_);
  return true;
}

int RequestWork::sourceRank() const {
  return rank_of_(request_->source());
}

c10::intrusive_ptr<c10::ivalue::Future> RequestWork::getFuture() {
  auto future = make_tensors_future();
  auto self = c10::intrusive_ptr<RequestWork>::reclaim_copy(this);
  request_->on_end([future, self] {
    self->settle(0);
    if (auto error = self->exception()) {
      future->setError(error);
    } else {
      future->markCompleted(c10::IValue(self->tensors_));
    }
  });
  return future;
}

}  // namespace elastic::comm
