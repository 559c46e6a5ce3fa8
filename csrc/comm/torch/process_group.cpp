#include "process_group.hpp"

#include <algorithm>

#include "reduction.hpp"

namespace elastic::comm {
namespace {

using WorkPtr = ElasticProcessGroup::WorkPtr;
using Tensors = ElasticProcessGroup::Tensors;

}  // namespace

ElasticProcessGroup::ElasticProcessGroup(std::shared_ptr<Hub> hub, GroupPtr group, bool slot_space, double timeout)
    : ProcessGroup(hub->config().rank, int(group->members.size())),
      hub_(std::move(hub)),
      group_(std::move(group)),
      slot_space_(slot_space),
      timeout_(timeout),
      name_(group_->name),
      description_(slot_space ? "default_pg" : "elastic") {}

int ElasticProcessGroup::getRank() const {
  if (slot_space_) return hub_->config().rank;
  if (hub_->generation() > 0) return group_->me.load();
  const auto& all = group_->members;
  return int(std::find(all.begin(), all.end(), hub_->config().rank) - all.begin());
}

int ElasticProcessGroup::getSize() const {
  if (slot_space_) return hub_->config().slots;
  return hub_->generation() > 0 ? group_->count.load() : int(group_->members.size());
}

void ElasticProcessGroup::setTimeout(std::chrono::milliseconds timeout) {
  timeout_.store(std::chrono::duration<double>(timeout).count());
}

void ElasticProcessGroup::abort() {
  hub_->abort(*group_);
}

namespace {

int index_in(const std::vector<int>& list, int value) {
  const auto it = std::find(list.begin(), list.end(), value);
  return it == list.end() ? -1 : int(it - list.begin());
}

}  // namespace

size_t ElasticProcessGroup::View::entries() const {
  if (slot_space) return size_t(slots);
  return nominal() ? members.size() : living.size();
}

size_t ElasticProcessGroup::View::entry(size_t j) const {
  if (slot_space) return size_t(living[j]);
  return nominal() ? size_t(index_in(members, living[j])) : j;
}

int ElasticProcessGroup::View::position(int64_t rank) const {
  if (slot_space) return index_in(living, int(rank));
  if (nominal()) return rank >= 0 && size_t(rank) < members.size() ? index_in(living, members[size_t(rank)]) : -1;
  return rank >= 0 && size_t(rank) < living.size() ? int(rank) : -1;
}

int ElasticProcessGroup::View::root(int64_t rank) const {
  return std::max(position(rank), 0);
}

int ElasticProcessGroup::View::global(int64_t rank) const {
  const int at = position(rank);
  if (at >= 0) return living[size_t(at)];
  // Torch's table of ranks numbers members that are gone behind the living ones.
  int64_t gone = rank;
  if (!slot_space) {
    const int64_t index = nominal() ? rank : rank - int64_t(living.size());
    TORCH_CHECK_VALUE(index >= 0 && size_t(index) < members.size(), "elastic: no rank ", rank, " in this group");
    gone = members[size_t(index)];
  }
  throw PeerLost(int(gone), "not a living member");
}

int ElasticProcessGroup::View::rank_of(int global) const {
  if (slot_space || global < 0) return global;
  return index_in(nominal() ? members : living, global);
}

ElasticProcessGroup::View ElasticProcessGroup::view() const {
  View v;
  v.generation = hub_->generation();
  const auto shared = hub_->enter(v.generation);
  v.members = group_->members;
  v.living = group_->living;
  v.me = group_->me.load();
  v.slot_space = slot_space_;
  v.slots = hub_->config().slots;
  if (v.me < 0) throw CommError("this rank is not a living member of group " + group_->name);
  return v;
}

std::vector<int> ElasticProcessGroup::living() const {
  return view().living;
}

double ElasticProcessGroup::seconds(std::chrono::milliseconds timeout) const {
  return timeout == c10d::kUnsetTimeout ? timeout_.load() : std::chrono::duration<double>(timeout).count();
}

Call ElasticProcessGroup::call(const View& v, std::chrono::milliseconds timeout) {
  return Call{*hub_, *group_, v.generation, seconds(timeout)};
}

WorkPtr ElasticProcessGroup::launch(c10d::OpType op, bool async, Tensors outputs, const Tensors& inputs,
                                    std::function<void()> body, std::shared_ptr<std::atomic<bool>> awaited) {
  if (!async && !coalescing_) {
    auto work = c10::make_intrusive<ElasticWork>(op, std::move(outputs), inputs);
    at::NoGradGuard no_grad;
    group_->run(hub_->workers(), body);  // throws here, as torch does for calls that block
    work->end(nullptr);
    return work;
  }
  auto work = c10::make_intrusive<ElasticWork>(
      op, std::move(outputs), inputs,
      [hub = hub_, group = group_](const auto& done, auto deadline) {
        return group->help(hub->workers(), done, deadline);
      },
      std::move(awaited));
  // The hub outlives the queue: it is kept by the task.
  group_->enqueue(hub_->workers(), [work, body = std::move(body), hub = hub_] {
    std::exception_ptr error;
    try {
      at::NoGradGuard no_grad;
      body();
    } catch (...) {
      error = std::current_exception();
    }
    return work->end(error);
  });
  if (coalescing_) coalesced_.push_back(work);
  return work;
}

void ElasticProcessGroup::startCoalescing(c10::DeviceType) {
  coalescing_ = true;
  coalesced_.clear();
}

WorkPtr ElasticProcessGroup::endCoalescing(c10::DeviceType) {
  coalescing_ = false;
  // One work that ends when the last of them has, with the first error.
  auto works = std::make_shared<std::vector<WorkPtr>>(std::move(coalesced_));
  coalesced_.clear();
  auto all = c10::make_intrusive<ElasticWork>(c10d::OpType::COALESCED, Tensors{}, Tensors{});
  // Beside the group's queue: messages among them end when others send, which may take collectives that are queued.
  hub_->workers().submit([works, all, hub = hub_] {
    std::exception_ptr error;
    for (auto& work : *works) {
      try {
        work->wait();
      } catch (...) {
        if (!error) error = std::current_exception();
      }
    }
    if (auto rest = all->end(error)) rest();
  });
  return all;
}

// ---------------------------------------------------------------- reductions

WorkPtr ElasticProcessGroup::allreduce(Tensors& tensors, const c10d::AllreduceOptions& o) {
  c10d::AllreduceCoalescedOptions options;
  static_cast<c10d::AllreduceOptions&>(options) = o;
  if (single(tensors).layout() != at::kStrided) return reduce_sparse(tensors[0], o);
  return allreduce_coalesced(tensors, options);
}

WorkPtr ElasticProcessGroup::allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& o) {
  expect(!tensors.empty(), "no tensors");
  const View v = view();
  const Reduction reduction = reduction_of(o.reduceOp);
  std::vector<Written> written;
  // Tensors of one type travel as one: pieces of a single all-reduce.
  std::vector<std::pair<DType, Part>> batches;
  for (const auto& t : tensors) {
    TORCH_CHECK_VALUE(t.layout() == at::kStrided, "elastic: a sparse tensor is all-reduced by itself");
    reduction.check(t);
    written.push_back(writable(t, true));
    const DType type = dtype_of(t);
    auto it = std::find_if(batches.begin(), batches.end(), [&](auto& b) { return b.first == type; });
    if (it == batches.end()) it = batches.insert(batches.end(), {type, Part{}});
    it->second.push_back(span_of(written.back().flat));
  }
  return launch(c10d::OpType::ALLREDUCE, o.asyncOp, tensors, tensors,
                [c = call(v, o.timeout), written, batches, reduction] {
                  for (const auto& w : written) reduction.multiply(w.flat, w.flat);
                  for (const auto& [type, part] : batches) all_reduce(c, part, type, reduction.op);
                  for (const auto& w : written) w.store();
                });
}

WorkPtr ElasticProcessGroup::reduce(Tensors& tensors, const c10d::ReduceOptions& o) {
  const View v = view();
  const int root = v.root(o.rootRank);
  const Written w = writable(single(tensors), true);
  const Reduction reduction = reduction_of(o.reduceOp);
  reduction.check(w.target);
  const DType type = dtype_of(w.target);
  const Written sum{w.target, reduction.room(w.flat)};  // products: elsewhere than at the root, the tensor stays
  return launch(c10d::OpType::REDUCE, o.asyncOp, tensors, tensors,
                [c = call(v, o.timeout), w, sum, type, reduction, root, me = v.me] {
                  reduction.multiply(w.flat, sum.flat);
                  reduce_to(c, {span_of(sum.flat)}, type, reduction.op, root);
                  if (me == root) sum.store();
                });
}

WorkPtr ElasticProcessGroup::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                            const c10d::ReduceScatterOptions& o) {
  const View v = view();
  const Written out = writable(single(outputs), false);
  expect(inputs.size() == 1 && inputs[0].size() == v.entries(), "one input tensor a rank is needed");
  const Reduction reduction = reduction_of(o.reduceOp);
  reduction.check(out.target);
  std::vector<std::pair<at::Tensor, at::Tensor>> kept;  // an input, and what is sent of it
  std::vector<Part> parts;
  for (size_t j = 0; j < v.living.size(); ++j) {
    const at::Tensor in = readable(inputs[0][v.entry(j)]);
    kept.emplace_back(in, reduction.room(in));
    parts.push_back({span_of(kept.back().second)});
  }
  expect(v.me >= 0 && parts[size_t(v.me)][0].size == bytes_of(out.flat), "output and own input differ in size");
  return launch(c10d::OpType::REDUCE_SCATTER, o.asyncOp, outputs, inputs[0],
                [c = call(v, o.timeout), out, kept, parts, reduction, type = dtype_of(out.target)] {
                  for (const auto& [in, sent] : kept) reduction.multiply(in, sent);
                  elastic::comm::reduce_scatter(c, parts, {span_of(out.flat)}, type, reduction.op);
                  out.store();
                });
}

WorkPtr ElasticProcessGroup::reduce_scatter_single(at::Tensor& output, at::Tensor& input,
                                                   const c10d::ReduceScatterOptions& o) {
  Tensors outputs{output};
  Tensors inputs{input};
  return reduce_scatter_single_coalesced(outputs, inputs, o);
}

WorkPtr ElasticProcessGroup::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                  const c10d::ReduceScatterOptions& o) {
  return reduce_scatter_single(output, input, o);
}

WorkPtr ElasticProcessGroup::reduce_scatter_single_coalesced(Tensors& outputs, Tensors& inputs,
                                                             const c10d::ReduceScatterOptions& o) {
  expect(outputs.size() == inputs.size() && !outputs.empty(), "as many outputs as inputs are needed");
  const View v = view();
  struct One {
    Written out;
    at::Tensor in;
    at::Tensor sent;
    std::vector<Part> parts;
  };
  const Reduction reduction = reduction_of(o.reduceOp);
  std::vector<One> all;
  for (size_t i = 0; i < outputs.size(); ++i) {
    const at::Tensor in = readable(inputs[i]);
    One one{writable(outputs[i], false), in, reduction.room(in), {}};
    reduction.check(in);
    const size_t each = bytes_of(one.out.flat);
    expect(one.in.scalar_type() == one.out.target.scalar_type(), "input and output differ in type");
    expect(bytes_of(one.in) == each * v.entries(), "the input must be the output's size times the group's");
    for (size_t j = 0; j < v.living.size(); ++j) {
      one.parts.push_back({Span{static_cast<char*>(one.sent.data_ptr()) + v.entry(j) * each, each}});
    }
    all.push_back(std::move(one));
  }
  return launch(
      c10d::OpType::_REDUCE_SCATTER_BASE, o.asyncOp, outputs, inputs, [c = call(v, o.timeout), all, reduction] {
        for (const One& one : all) {
          reduction.multiply(one.in, one.sent);
          elastic::comm::reduce_scatter(c, one.parts, {span_of(one.out.flat)}, dtype_of(one.in), reduction.op);
          one.out.store();
        }
      });
}

WorkPtr ElasticProcessGroup::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                             const c10d::ReduceScatterOptions& o) {
  return reduce_scatter_single_coalesced(outputs, inputs, o);
}

// ---------------------------------------------------------------- blocks

std::vector<Part> ElasticProcessGroup::parts_of_blocks(const View& v, const at::Tensor& flat,
                                                       const Blocks& blocks) const {
  expect(flat.is_cpu() && flat.is_contiguous() && flat.dim() == 1, "a flat contiguous host tensor is needed");
  std::vector<Part> parts(v.living.size());
  const auto size = size_t(flat.element_size());
  for (const auto& [start, stop, owner] : blocks) {
    expect(0 <= start && start <= stop && stop <= flat.numel(), "a block lies outside the tensor");
    const auto it = std::find(v.living.begin(), v.living.end(), owner);
    if (it == v.living.end()) throw PeerLost(owner, "owns a block but is not a living member");
    parts[size_t(it - v.living.begin())].push_back(
        {static_cast<char*>(flat.data_ptr()) + size_t(start) * size, size_t(stop - start) * size});
  }
  return parts;
}

std::vector<double> ElasticProcessGroup::sum(std::vector<double> values) {
  const Call c = call(view(), c10d::kUnsetTimeout);
  const Part part{Span{reinterpret_cast<char*>(values.data()), values.size() * sizeof(double)}};
  group_->run(hub_->workers(), [&] { all_reduce(c, part, DType::F64, ReduceOp::Sum); });
  return values;
}

void ElasticProcessGroup::reduce_scatter_blocks(const at::Tensor& flat, const Blocks& blocks) {
  const View v = view();
  const auto parts = parts_of_blocks(v, flat, blocks);
  const Call c = call(v, c10d::kUnsetTimeout);
  group_->run(hub_->workers(),
              [&] { elastic::comm::reduce_scatter(c, parts, parts.at(size_t(v.me)), dtype_of(flat), ReduceOp::Sum); });
}

void ElasticProcessGroup::all_gather_blocks(const at::Tensor& flat, const Blocks& blocks) {
  const View v = view();
  const auto parts = parts_of_blocks(v, flat, blocks);
  const Call c = call(v, c10d::kUnsetTimeout);
  group_->run(hub_->workers(), [&] { all_gather(c, parts); });
}

WorkPtr ElasticProcessGroup::begin_reduce_scatter_blocks(const at::Tensor& flat, const Blocks& blocks) {
  const View v = view();
  auto awaited = std::make_shared<std::atomic<bool>>(false);
  Call c = call(v, c10d::kUnsetTimeout);
  c.awaited = awaited.get();
  const auto body = [c, flat, parts = parts_of_blocks(v, flat, blocks), me = size_t(v.me), awaited] {
    elastic::comm::reduce_scatter(c, parts, parts.at(me), dtype_of(flat), ReduceOp::Sum);
  };
  return launch(c10d::OpType::REDUCE_SCATTER, true, {flat}, {flat}, body, awaited);
}

WorkPtr ElasticProcessGroup::begin_all_gather_blocks(const at::Tensor& flat, const Blocks& blocks) {
  const View v = view();
  auto awaited = std::make_shared<std::atomic<bool>>(false);
  Call c = call(v, c10d::kUnsetTimeout);
  c.awaited = awaited.get();
  const auto body = [c, flat, parts = parts_of_blocks(v, flat, blocks), awaited] { all_gather(c, parts); };
  return launch(c10d::OpType::ALLGATHER, true, {flat}, {flat}, body, awaited);
}

// ---------------------------------------------------------------- barriers

WorkPtr ElasticProcessGroup::barrier(const c10d::BarrierOptions& o) {
  return launch(c10d::OpType::BARRIER, o.asyncOp, {}, {}, [c = call(view(), o.timeout)] { elastic::comm::barrier(c); });
}

void ElasticProcessGroup::monitoredBarrier(const c10d::BarrierOptions& o, bool wait_all) {
  const Call c = call(view(), o.timeout);
  group_->run(hub_->workers(), [&] { monitored_barrier(c, wait_all); });
}

}  // namespace elastic::comm
