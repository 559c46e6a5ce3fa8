// torch.distributed's face of a Group.
//
// The default group is the slot space: ranks are global slots, its size is the
// nominal world size, collectives run over the living, and what belongs to a
// hole is left untouched. Any other group counts its living members: rank and
// size follow the edit while the object stays.
//
// Calls with asyncOp = false run in the caller's thread; others in a worker, in
// the order they were made on this group.
#pragma once

#ifndef NDEBUG
#error "torch is compiled with NDEBUG, and classes of its headers have other members without it"
#endif

#include <functional>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "../collectives.hpp"
#include "../hub.hpp"
#include "../transfers.hpp"
#include "staging.hpp"
#include "work.hpp"

namespace elastic::comm {

class ElasticProcessGroup : public c10d::ProcessGroup {
 public:
  using Tensors = std::vector<at::Tensor>;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  ElasticProcessGroup(std::shared_ptr<Hub> hub, GroupPtr group, bool slot_space, double timeout);

  int getRank() const override;
  int getSize() const override;
  const std::string getBackendName() const override { return "elastic"; }
  void setTimeout(std::chrono::milliseconds timeout) override;
  const std::string& getGroupName() const override { return name_; }
  void setGroupName(const std::string& name) override { name_ = name; }
  const std::string& getGroupDesc() const override { return description_; }
  void setGroupDesc(const std::string& text) override { description_ = text; }
  void abort() override;
  void shutdown() override {}
  void setSequenceNumberForGroup() {}  // virtual up to torch 2.13
  uint64_t getSequenceNumberForGroup() { return group_->sequence.load(); }
  void startCoalescing(c10::DeviceType device) override;
  WorkPtr endCoalescing(c10::DeviceType device) override;

  // The *_single forms are virtual from torch 2.13 on, gather_single from 2.14 on.
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override;
  WorkPtr all_gather_single(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options);
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                              const c10d::AllgatherOptions& options) override;
  WorkPtr all_gather_single_coalesced(Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options);
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override;
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override;
  WorkPtr gather_single(at::Tensor& output, at::Tensor& input, const c10d::GatherOptions& options);
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override;
  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& options) override;
  WorkPtr reduce_scatter_single(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options);
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override;
  WorkPtr reduce_scatter_single_coalesced(Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options);
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override;
  WorkPtr all_to_all_single(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                            std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& options);
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& options) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override;
  WorkPtr send(Tensors& tensors, int to, int tag) override;
  WorkPtr recv(Tensors& tensors, int from, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;
  WorkPtr barrier(const c10d::BarrierOptions& options) override;
  void monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all) override;

  // Block-list forms over a flat tensor: (start, stop, owner), elements and global ranks.
  using Blocks = std::vector<std::tuple<int64_t, int64_t, int>>;
  // The sums of `values` over all members, in member order.
  std::vector<double> sum(std::vector<double> values);
  void reduce_scatter_blocks(const at::Tensor& flat, const Blocks& blocks);
  void all_gather_blocks(const at::Tensor& flat, const Blocks& blocks);
  // The same in a worker, while the caller computes; `flat` is neither read nor written by others until the work has
  // ended. An interruption ends it; after the edit that follows it touches `flat` no more.
  WorkPtr begin_reduce_scatter_blocks(const at::Tensor& flat, const Blocks& blocks);
  WorkPtr begin_all_gather_blocks(const at::Tensor& flat, const Blocks& blocks);

  // Messages of this generation under one tag, which no other operation of this group uses meanwhile.
  std::unique_ptr<Transfers> transfers(int tag) {
    return std::make_unique<Transfers>(call(view(), c10d::kUnsetTimeout), uint64_t(uint32_t(tag)));
  }

  // The requests of torch's reconfiguration protocol to the fabric this group belongs to (torch 2.14 and later call it
  // through the virtual functions below; Python has the same methods in every version).
  struct Reconfiguration {
    std::function<std::string()> handle;
    // Generation, handles, whether their order counts, seconds (below 0: the default).
    std::function<void(int64_t, const std::vector<std::string>&, bool, double)> edit;
  };
  void on_reconfigure(Reconfiguration reconfiguration) { reconfiguration_ = std::move(reconfiguration); }
#ifdef C10D_BACKEND_HAS_RECONFIGURE
  bool supportsReconfigure() const override { return bool(reconfiguration_.edit); }
  c10d::ReconfigureHandle get_reconfigure_handle() const override;
  WorkPtr reconfigure(const c10d::ReconfigureOptions& options) override;
#endif

  void release() { hub_->release(group_); }
  const std::shared_ptr<Hub>& hub() const { return hub_; }
  const GroupPtr& group() const { return group_; }
  std::vector<int> living() const;
  // A collective of the present generation ended by a time-out or a loss: later ones fail until the next edit.
  bool failed() const { return group_->broken.load() || group_->lost.load() >= 0; }

 private:
  // The part of the membership that an operation needs, read once. Before the first edit
  // this process is alone while sizes and ranks are those of all members: models
  // are built to nominal sizes.
  struct View {
    uint64_t generation = 0;
    std::vector<int> members;  // global ranks
    std::vector<int> living;
    int me = -1;               // position among the living
    bool slot_space = false;
    int slots = 0;
    bool nominal() const { return generation == 0 && !slot_space; }
    size_t entries() const;              // length of per-rank lists
    size_t entry(size_t j) const;        // the entry of position `j`
    int position(int64_t rank) const;    // of a torch rank; -1 for one that is gone
    int root(int64_t rank) const;        // the first living member stands in for one that is gone
    int global(int64_t rank) const;      // throws PeerLost for one that is gone
    int rank_of(int global) const;       // torch rank of a living member; -1 otherwise
  };
  View view() const;
  double seconds(std::chrono::milliseconds timeout) const;
  Call call(const View& view, std::chrono::milliseconds timeout);
  // Runs `body` now or queues it, by `async` and coalescing. Profiles have the shapes of `inputs`.
  WorkPtr launch(c10d::OpType op, bool async, Tensors outputs, const Tensors& inputs, std::function<void()> body,
                 std::shared_ptr<std::atomic<bool>> awaited = nullptr);
  WorkPtr message(WorkPtr work);
  // Runs callbacks of futures in a worker.
  std::function<void(Rest)> aside() const;
  WorkPtr reduce_sparse(const at::Tensor& tensor, const c10d::AllreduceOptions& options);
  std::vector<Part> parts_of_blocks(const View& view, const at::Tensor& flat, const Blocks& blocks) const;

  std::shared_ptr<Hub> hub_;
  GroupPtr group_;
  const bool slot_space_;
  std::atomic<double> timeout_;
  std::string name_;
  std::string description_;
  Reconfiguration reconfiguration_;
  bool coalescing_ = false;
  std::vector<WorkPtr> coalesced_;
};

}  // namespace elastic::comm
