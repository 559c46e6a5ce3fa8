// c10d::Work for the three ways an operation ends: it has ended already (the
// caller's thread ran it), a worker ends it, or a point-to-point request does.
//
// torch's profiler sees an operation from the construction of its work to its end, with the shapes of its inputs.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "../group.hpp"
#include "../p2p.hpp"

namespace elastic::comm {

class ElasticWork : public c10d::Work {
 public:
  // `help` runs queued work of the group, or waits, until the condition holds or the time has passed.
  using Help = std::function<bool(const std::function<bool()>&, std::chrono::steady_clock::time_point)>;
  // `awaited` is set when a thread waits (Call::awaited).
  ElasticWork(c10d::OpType op, std::vector<at::Tensor> outputs, const std::vector<at::Tensor>& inputs,
              Help help = nullptr, std::shared_ptr<std::atomic<bool>> awaited = nullptr);

  bool wait(std::chrono::milliseconds timeout) override;
  void synchronize() override { wait(kNoTimeout); }

  std::vector<at::Tensor> result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  // Once. Returns what its futures' callbacks are run by, if it has any: they may wait for later work of the group.
  Rest end(std::exception_ptr error);
  void abort() override {}

 private:
  void mark(c10::ivalue::Future& future, const std::exception_ptr& error);
  std::vector<at::Tensor> outputs_;
  Help help_;
  std::shared_ptr<std::atomic<bool>> awaited_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

// send, recv, recv_anysource: the waiting thread also drives the message.
class RequestWork : public c10d::Work {
 public:
  // `tensors` are the ones that travel, `inputs` the caller's. `finish` runs once after success, in the waiting thread
  // (copying into a non-contiguous tensor). Callbacks of futures are run by `aside`, in a thread that may wait.
  RequestWork(c10d::OpType op, RequestPtr request, std::vector<at::Tensor> tensors,
              const std::vector<at::Tensor>& inputs, double timeout, std::function<void()> finish,
              std::function<int(int)> rank_of, std::function<void(Rest)> aside);

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  bool wait(std::chrono::milliseconds timeout) override;
  void synchronize() override { wait(kNoTimeout); }
  int sourceRank() const override;
  std::vector<at::Tensor> result() override { return tensors_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 private:
  void settle(double timeout);
  RequestPtr request_;
  std::vector<at::Tensor> tensors_;
  double seconds_;
  std::function<void()> finish_;
  std::function<int(int)> rank_of_;
  std::function<void(Rest)> aside_;
  std::mutex settle_mutex_;
  bool settled_ = false;
};

c10::intrusive_ptr<c10::ivalue::Future> make_tensors_future();

}  // namespace elastic::comm
