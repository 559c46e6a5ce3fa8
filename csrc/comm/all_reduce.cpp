// All-reduce. Small: each member sends everything to each (few members) or
// to member 0, which sends the result round (many): one or two rounds. Large:
// reduce-scatter and all-gather, pipelined. The sum is in member order in each.
#include <cstring>

#include "collectives.hpp"
#include "pipeline.hpp"
#include "reduce.hpp"

namespace elastic::comm {
namespace {

constexpr size_t kFlatBytes = 4 << 10;
constexpr int kFlatMembers = 8;

void flat(Operation& op, char* data, size_t count, DType type, ReduceOp reduction) {
  const size_t size = count * size_of(type);
  std::vector<RecvPtr> recvs(size_t(op.size()));
  for (int step = 1; step < op.size(); ++step) op.send((op.me() + step) % op.size(), 0, data, size);
  std::vector<const void*> sources(size_t(op.size()), data);
  for (int j = 0; j < op.size(); ++j) {
    if (j == op.me()) continue;
    recvs[size_t(j)] = op.post(j, 0, nullptr, size);
  }
  for (int j = 0; j < op.size(); ++j) {
    if (recvs[size_t(j)]) sources[size_t(j)] = op.await(recvs[size_t(j)]);
  }
  op.finish();  // before `data` changes: a send may still be queued
  reduce(type, reduction, data, sources.data(), sources.size(), count);
}

void rooted(Operation& op, char* data, size_t count, DType type, ReduceOp reduction) {
  const size_t size = count * size_of(type);
  if (op.me() != 0) {
    op.send(0, 0, data, size);
    op.finish();
    op.await(op.post(0, 1, data, size));
    return;
  }
  std::vector<RecvPtr> recvs;
  std::vector<const void*> sources{data};
  for (int j = 1; j < op.size(); ++j) recvs.push_back(op.post(j, 0, nullptr, size));
  for (auto& recv : recvs) sources.push_back(op.await(recv));
  reduce(type, reduction, data, sources.data(), sources.size(), count);
  for (int j = 1; j < op.size(); ++j) op.send(j, 1, data, size);
  op.finish();
}

}  // namespace

void all_reduce(const Call& call, const Part& data, DType type, ReduceOp reduction) {
  expect_defined(type, reduction);
  Operation op(call.hub, call.group, call.generation, call.timeout);
  const size_t size = bytes_of(data);
  if (op.size() > 1 && size > kFlatBytes) {
    const auto parts = split_evenly(data, size_of(type), op.size());
    PipelineJob job;
    job.type = type;
    job.op = reduction;
    job.inputs = job.outputs = &parts;
    job.target = &parts[size_t(op.me())];
    run_pipeline(op, job);
    op.finish();
    return;
  }
  char* whole = contiguous(data, 0, size);
  const bool pieces = whole == nullptr;
  if (pieces) {
    char* at = whole = op.scratch(size);
    for (const Span& s : data) {
      std::memcpy(at, s.data, s.size);
      at += s.size;
    }
  }
  const size_t count = size / size_of(type);
  if (op.size() == 1) {
    const void* sources[] = {whole};
    reduce(type, reduction, whole, sources, 1, count);
    op.finish();
  } else if (op.size() <= kFlatMembers) {
    flat(op, whole, count, type, reduction);
  } else {
    rooted(op, whole, count, type, reduction);
  }
  if (!pieces) return;
  for (const Span& s : data) {
    std::memcpy(s.data, whole, s.size);
    whole += s.size;
  }
}

}  // namespace elastic::comm
