// Broadcast: the root writes each chunk once for all that read in place; over
// sockets, large ones are scattered and all-gathered so that the root's wire
// carries them once, not once a member.
#include "collectives.hpp"
#include "pipeline.hpp"

namespace elastic::comm {
namespace {

constexpr size_t kScatterBytes = 256 << 10;

}  // namespace

void broadcast(const Call& call, void* data, size_t size, int root) {
  Operation op(call.hub, call.group, call.generation, call.timeout);
  std::vector<Part> parts(size_t(op.size()));
  parts[size_t(root)] = {Span{static_cast<char*>(data), size}};
  // Every member must come to the same choice: it rests on the agreed addresses alone.
  if (size < kScatterBytes || op.size() == 2 || call.hub.shares_memory()) {
    PipelineJob job;
    job.outputs = &parts;
    run_pipeline(op, job);
    op.finish();
    return;
  }
  const auto even = split_evenly({Span{static_cast<char*>(data), size}}, 1, op.size());
  std::vector<Part> send(size_t(op.size()));
  std::vector<Part> receive(size_t(op.size()));
  if (op.me() == root) send = even;
  if (op.me() != root) receive[size_t(root)] = even[size_t(op.me())];
  send[size_t(op.me())].clear();
  exchange(op, send, receive);
  op.finish();
  {
    Operation second(call.hub, call.group, call.generation, call.timeout);
    PipelineJob job;
    job.outputs = &even;
    run_pipeline(second, job);
    second.finish();
  }
}

}  // namespace elastic::comm
