// ElasticProcessGroup: the operations that move data without reducing it.
#include <algorithm>
#include <numeric>

#include "process_group.hpp"

namespace elastic::comm {
namespace {

using WorkPtr = ElasticProcessGroup::WorkPtr;
using Tensors = ElasticProcessGroup::Tensors;

void copy_bytes(const Part& to, const at::Tensor& from) {
  const char* at = static_cast<const char*>(from.data_ptr());
  for (const Span& s : to) {
    if (s.data != at && s.size > 0) std::memmove(s.data, at, s.size);
    at += s.size;
  }
}

}  // namespace

WorkPtr ElasticProcessGroup::broadcast(Tensors& tensors, const c10d::BroadcastOptions& o) {
  const View v = view();
  const int root = v.root(o.rootRank);
  const Written w = writable(single(tensors), v.me == root);
  return launch(c10d::OpType::BROADCAST, o.asyncOp, tensors, tensors, [c = call(v, o.timeout), w, root, me = v.me] {
    elastic::comm::broadcast(c, w.flat.data_ptr(), bytes_of(w.flat), root);
    if (me != root) w.store();
  });
}

WorkPtr ElasticProcessGroup::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                       const c10d::AllgatherOptions& o) {
  const View v = view();
  expect(outputs.size() == inputs.size() && !inputs.empty(), "as many output lists as inputs are needed");
  struct One {
    at::Tensor in;
    std::vector<Written> out;
    std::vector<Part> parts;
  };
  std::vector<One> all;
  Tensors flat_outputs;
  for (size_t i = 0; i < inputs.size(); ++i) {
    expect(outputs[i].size() == v.entries(), "one output tensor a rank is needed");
    One one{readable(inputs[i]), {}, {}};
    for (size_t j = 0; j < v.living.size(); ++j) {
      one.out.push_back(writable(outputs[i][v.entry(j)], false));
      one.parts.push_back({span_of(one.out.back().flat)});
      flat_outputs.push_back(outputs[i][v.entry(j)]);
    }
    expect(v.me >= 0 && one.parts[size_t(v.me)][0].size == bytes_of(one.in), "input and own output differ in size");
    all.push_back(std::move(one));
  }
  return launch(c10d::OpType::ALLGATHER, o.asyncOp, flat_outputs, inputs, [c = call(v, o.timeout), all, me = v.me] {
    for (const One& one : all) {
      copy_bytes(one.parts[size_t(me)], one.in);
      all_gather(c, one.parts);
      for (const auto& w : one.out) w.store();
    }
  });
}

WorkPtr ElasticProcessGroup::allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                                 const c10d::AllgatherOptions& o) {
  // Here lists are by rank, then by tensor.
  std::vector<Tensors> by_tensor(inputs.size());
  for (auto& list : outputs) {
    expect(list.size() == inputs.size(), "as many outputs a rank as inputs are needed");
    for (size_t i = 0; i < list.size(); ++i) by_tensor[i].push_back(list[i]);
  }
  return allgather(by_tensor, inputs, o);
}

WorkPtr ElasticProcessGroup::all_gather_single(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& o) {
  Tensors outputs{output};
  Tensors inputs{input};
  return all_gather_single_coalesced(outputs, inputs, o);
}

WorkPtr ElasticProcessGroup::_allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& o) {
  return all_gather_single(output, input, o);
}

WorkPtr ElasticProcessGroup::all_gather_single_coalesced(Tensors& outputs, Tensors& inputs,
                                                         const c10d::AllgatherOptions& o) {
  expect(outputs.size() == inputs.size() && !outputs.empty(), "as many outputs as inputs are needed");
  const View v = view();
  struct One {
    at::Tensor in;
    Written out;
    std::vector<Part> parts;
  };
  std::vector<One> all;
  for (size_t i = 0; i < outputs.size(); ++i) {
    // Holes keep what they hold: a copied output starts with its values.
    One one{readable(inputs[i]), writable(outputs[i], v.living.size() < v.entries()), {}};
    const size_t each = bytes_of(one.in);
    expect(one.in.scalar_type() == one.out.target.scalar_type(), "input and output differ in type");
    expect(bytes_of(one.out.flat) == each * v.entries(), "the output must be the input's size times the group's");
    for (size_t j = 0; j < v.living.size(); ++j) {
      one.parts.push_back({Span{static_cast<char*>(one.out.flat.data_ptr()) + v.entry(j) * each, each}});
    }
    all.push_back(std::move(one));
  }
  return launch(c10d::OpType::_ALLGATHER_BASE, o.asyncOp, outputs, inputs, [c = call(v, o.timeout), all, me = v.me] {
    for (const One& one : all) {
      copy_bytes(one.parts.at(size_t(me)), one.in);
      all_gather(c, one.parts);
      one.out.store();
    }
  });
}

WorkPtr ElasticProcessGroup::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                             const c10d::AllgatherOptions& o) {
  return all_gather_single_coalesced(outputs, inputs, o);
}

WorkPtr ElasticProcessGroup::gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& o) {
  const View v = view();
  const int root = v.root(o.rootRank);
  const at::Tensor in = readable(single(inputs));
  std::vector<Written> out;
  std::vector<Part> parts(v.living.size());
  if (v.me == root) {
    expect(outputs.size() == 1 && outputs[0].size() == v.entries(), "the root needs one output tensor a rank");
    for (size_t j = 0; j < v.living.size(); ++j) {
      out.push_back(writable(outputs[0][v.entry(j)], false));
      parts[j] = {span_of(out.back().flat)};
    }
  }
  Tensors result = outputs.empty() ? Tensors{} : outputs[0];
  return launch(c10d::OpType::GATHER, o.asyncOp, result, inputs, [c = call(v, o.timeout), in, out, parts, root] {
    elastic::comm::gather(c, {span_of(in)}, parts, root);
    for (const auto& w : out) w.store();
  });
}

WorkPtr ElasticProcessGroup::gather_single(at::Tensor& output, at::Tensor& input, const c10d::GatherOptions& o) {
  const View v = view();
  const int root = v.root(o.rootRank);
  const at::Tensor in = readable(input);
  Tensors result;
  std::vector<Written> out;
  std::vector<Part> parts(v.living.size());
  if (v.me == root) {
    // Holes keep what they hold: a copied output starts with its values.
    out.push_back(writable(output, v.living.size() < v.entries()));
    result.push_back(output);
    const size_t each = bytes_of(in);
    expect(in.scalar_type() == output.scalar_type(), "input and output differ in type");
    expect(bytes_of(out[0].flat) == each * v.entries(), "the output must be the input's size times the group's");
    for (size_t j = 0; j < v.living.size(); ++j) {
      parts[j] = {Span{static_cast<char*>(out[0].flat.data_ptr()) + v.entry(j) * each, each}};
    }
  }
  return launch(c10d::OpType::GATHER, o.asyncOp, result, {input}, [c = call(v, o.timeout), in, out, parts, root] {
    elastic::comm::gather(c, {span_of(in)}, parts, root);
    for (const auto& w : out) w.store();
  });
}

WorkPtr ElasticProcessGroup::scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& o) {
  const View v = view();
  const int root = v.root(o.rootRank);
  const Written out = writable(single(outputs), false);
  Tensors kept;
  std::vector<Part> parts(v.living.size());
  if (v.me == root) {
    expect(inputs.size() == 1 && inputs[0].size() == v.entries(), "the root needs one input tensor a rank");
    for (size_t j = 0; j < v.living.size(); ++j) {
      kept.push_back(readable(inputs[0][v.entry(j)]));
      parts[j] = {span_of(kept.back())};
    }
  }
  return launch(c10d::OpType::SCATTER, o.asyncOp, outputs, kept, [c = call(v, o.timeout), out, kept, parts, root] {
    elastic::comm::scatter(c, parts, {span_of(out.flat)}, root);
    out.store();
  });
}

WorkPtr ElasticProcessGroup::all_to_all_single(at::Tensor& output, at::Tensor& input,
                                               std::vector<int64_t>& output_splits, std::vector<int64_t>& input_splits,
                                               const c10d::AllToAllOptions& o) {
  const View v = view();
  const size_t n = v.entries();
  // Start of each rank's rows, in bytes, with the end behind the last.
  const auto offsets = [&](const at::Tensor& t, const std::vector<int64_t>& splits) {
    expect(t.dim() > 0, "a tensor with at least one dimension is needed");
    const int64_t rows = t.size(0);
    const size_t row = rows == 0 ? 0 : bytes_of(t) / size_t(rows);
    expect(splits.empty() ? rows % int64_t(n) == 0 : splits.size() == n, "one split size a rank is needed");
    std::vector<size_t> out{0};
    for (size_t i = 0; i < n; ++i) {
      out.push_back(out.back() + row * size_t(splits.empty() ? rows / int64_t(n) : splits[i]));
    }
    expect(out.back() == bytes_of(t), "split sizes do not add up to the first dimension");
    return out;
  };
  const at::Tensor in = readable(input);
  const Written out = writable(output, v.living.size() < n);
  const auto from = offsets(in, input_splits);
  const auto to = offsets(out.flat, output_splits);
  std::vector<Part> send;
  std::vector<Part> receive;
  for (size_t j = 0; j < v.living.size(); ++j) {
    const size_t e = v.entry(j);
    send.push_back({Span{static_cast<char*>(in.data_ptr()) + from[e], from[e + 1] - from[e]}});
    receive.push_back({Span{static_cast<char*>(out.flat.data_ptr()) + to[e], to[e + 1] - to[e]}});
  }
  return launch(c10d::OpType::ALLTOALL_BASE, o.asyncOp, {output}, {input},
                [c = call(v, o.timeout), in, out, send, receive] {
                  all_to_all(c, send, receive);
                  out.store();
                });
}

WorkPtr ElasticProcessGroup::alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                                           std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& o) {
  return all_to_all_single(output, input, output_splits, input_splits, o);
}

WorkPtr ElasticProcessGroup::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& o) {
  const View v = view();
  expect(outputs.size() == v.entries() && inputs.size() == v.entries(), "one tensor a rank is needed");
  Tensors kept;
  std::vector<Written> out;
  std::vector<Part> send;
  std::vector<Part> receive;
  for (size_t j = 0; j < v.living.size(); ++j) {
    kept.push_back(readable(inputs[v.entry(j)]));
    out.push_back(writable(outputs[v.entry(j)], false));
    send.push_back({span_of(kept.back())});
    receive.push_back({span_of(out.back().flat)});
  }
  return launch(c10d::OpType::ALLTOALL, o.asyncOp, outputs, inputs, [c = call(v, o.timeout), kept, out, send, receive] {
    all_to_all(c, send, receive);
    for (const auto& w : out) w.store();
  });
}

// One that is part of a batch is waited for with it.
WorkPtr ElasticProcessGroup::message(WorkPtr work) {
  if (coalescing_) coalesced_.push_back(work);
  return work;
}

std::function<void(Rest)> ElasticProcessGroup::aside() const {
  return [kept = std::weak_ptr<Hub>(hub_)](Rest rest) {
    if (auto hub = kept.lock()) {
      hub->workers().submit(std::move(rest));
    } else {
      rest();
    }
  };
}

WorkPtr ElasticProcessGroup::send(Tensors& tensors, int to, int tag) {
  const View v = view();
  const at::Tensor data = readable(single(tensors));
  auto request = send_to(call(v, c10d::kUnsetTimeout), v.global(to), uint64_t(uint32_t(tag)), data.data_ptr(),
                         bytes_of(data), std::make_shared<at::Tensor>(data));
  return message(c10::make_intrusive<RequestWork>(
      c10d::OpType::SEND, std::move(request), Tensors{data}, tensors, timeout_.load(), nullptr, [](int) { return -1; },
      aside()));
}

WorkPtr ElasticProcessGroup::recv(Tensors& tensors, int from, int tag) {
  const View v = view();
  const Written w = writable(single(tensors), false);
  auto request = receive_from(call(v, c10d::kUnsetTimeout), v.global(from), uint64_t(uint32_t(tag)), w.flat.data_ptr(),
                              bytes_of(w.flat), std::make_shared<at::Tensor>(w.flat));
  return message(c10::make_intrusive<RequestWork>(
      c10d::OpType::RECV, std::move(request), Tensors{w.flat}, tensors, timeout_.load(), [w] { w.store(); },
      [v](int global) { return v.rank_of(global); }, aside()));
}

WorkPtr ElasticProcessGroup::recvAnysource(Tensors& tensors, int tag) {
  const View v = view();
  const Written w = writable(single(tensors), false);
  auto request = receive_from_any(call(v, c10d::kUnsetTimeout), uint64_t(uint32_t(tag)), w.flat.data_ptr(),
                                  bytes_of(w.flat), std::make_shared<at::Tensor>(w.flat));
  return message(c10::make_intrusive<RequestWork>(
      c10d::OpType::RECVANYSOURCE, std::move(request), Tensors{w.flat}, tensors, timeout_.load(), [w] { w.store(); },
      [v](int global) { return v.rank_of(global); }, aside()));
}

}  // namespace elastic::comm
