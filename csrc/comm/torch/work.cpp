#include "work.hpp"

namespace elastic::comm {
namespace {

// The operation's name in profiles: the backend's and that of the function of torch.distributed, as gloo has them.
const char* title_of(c10d::OpType op) {
  switch (op) {
    case c10d::OpType::BROADCAST:
      return "elastic:broadcast";
    case c10d::OpType::ALLREDUCE:
      return "elastic:all_reduce";
    case c10d::OpType::_ALLREDUCE_SPARSE:
      return "elastic:sparse_all_reduce";
    case c10d::OpType::REDUCE:
      return "elastic:reduce";
    case c10d::OpType::ALLGATHER:
      return "elastic:all_gather";
    case c10d::OpType::_ALLGATHER_BASE:
      return "elastic:all_gather_into_tensor";
    case c10d::OpType::GATHER:
      return "elastic:gather";
    case c10d::OpType::SCATTER:
      return "elastic:scatter";
    case c10d::OpType::REDUCE_SCATTER:
      return "elastic:reduce_scatter";
    case c10d::OpType::_REDUCE_SCATTER_BASE:
      return "elastic:reduce_scatter_tensor";
    case c10d::OpType::ALLTOALL:
    case c10d::OpType::ALLTOALL_BASE:
      return "elastic:all_to_all";
    case c10d::OpType::SEND:
      return "elastic:send";
    case c10d::OpType::RECV:
      return "elastic:recv";
    case c10d::OpType::RECVANYSOURCE:
      return "elastic:recvAnySource";
    case c10d::OpType::BARRIER:
      return "elastic:barrier";
    default:
      return nullptr;  // no event: a batch, whose operations have their own
  }
}

}  // namespace

c10::intrusive_ptr<c10::ivalue::Future> make_tensors_future() {
  return c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
}

ElasticWork::ElasticWork(c10d::OpType op, std::vector<at::Tensor> outputs, const std::vector<at::Tensor>& inputs,
                         Help help, std::shared_ptr<std::atomic<bool>> awaited)
    : Work(-1, op, title_of(op), inputs),
      outputs_(std::move(outputs)),
      help_(std::move(help)),
      awaited_(std::move(awaited)) {}

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

Rest ElasticWork::end(std::exception_ptr error) {
  finish(error);
  std::lock_guard<std::mutex> lock(mutex_);
  if (!future_) return nullptr;
  auto self = c10::intrusive_ptr<ElasticWork>::reclaim_copy(this);
  return [self, future = future_, error] { self->mark(*future, error); };
}

c10::intrusive_ptr<c10::ivalue::Future> ElasticWork::getFuture() {
  auto future = make_tensors_future();
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (future_) return future_;
    if (!completed_) return future_ = future;  // end() has it marked
  }
  mark(*future, exception_);
  return future;
}

RequestWork::RequestWork(c10d::OpType op, RequestPtr request, std::vector<at::Tensor> tensors,
                         const std::vector<at::Tensor>& inputs, double timeout, std::function<void()> finish,
                         std::function<int(int)> rank_of, std::function<void(Rest)> aside)
    : Work(-1, op, title_of(op), inputs),
      request_(std::move(request)),
      tensors_(std::move(tensors)),
      seconds_(timeout),
      finish_(std::move(finish)),
      rank_of_(std::move(rank_of)),
      aside_(std::move(aside)) {}

void RequestWork::settle(double timeout) {
  std::exception_ptr error;
  try {
    request_->wait(timeout);  // without the mutex: it may run what on_end() was given, which settles too
  } catch (...) {
    error = std::current_exception();
  }
  std::lock_guard<std::mutex> one(settle_mutex_);
  if (settled_) return;
  try {
    if (!error && finish_) finish_();
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
  // The thread that ends the message may be one that all others wait for.
  request_->on_end([future, self] {
    self->aside_([future, self] {
      self->settle(0);
      if (auto error = self->exception()) {
        future->setError(error);
      } else {
        future->markCompleted(c10::IValue(self->tensors_));
      }
    });
  });
  return future;
}

}  // namespace elastic::comm
