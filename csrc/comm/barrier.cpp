// Barrier: each member to each among few, through member 0 among many.
#include "collectives.hpp"

namespace elastic::comm {
namespace {

constexpr int kFlatMembers = 4;

}  // namespace

void barrier(const Call& call) {
  Operation op(call.hub, call.group, call.generation, call.timeout);
  const int n = op.size();
  const char nothing = 0;
  std::vector<RecvPtr> recvs;
  if (n <= kFlatMembers) {
    for (int step = 1; step < n; ++step) op.send((op.me() + step) % n, 0, &nothing, 0);
    for (int j = 0; j < n; ++j) {
      if (j != op.me()) recvs.push_back(op.post(j, 0, nullptr, 0));
    }
    for (auto& recv : recvs) op.await(recv);
  } else if (op.me() == 0) {
    for (int j = 1; j < n; ++j) recvs.push_back(op.post(j, 0, nullptr, 0));
    for (auto& recv : recvs) op.await(recv);
    for (int j = 1; j < n; ++j) op.send(j, 1, &nothing, 0);
  } else {
    op.send(0, 0, &nothing, 0);
    op.await(op.post(0, 1, nullptr, 0));
  }
  op.finish();
}

void monitored_barrier(const Call& call, bool wait_all) {
  // Others give member 0 time to find out and to say so.
  const bool first = call.group.me == 0;
  Operation op(call.hub, call.group, call.generation, first ? call.timeout : 2 * call.timeout);
  const char nothing = 0;
  if (!first) {
    op.send(0, 0, &nothing, 0);
    op.await(op.post(0, 1, nullptr, 0));
    op.finish();
    return;
  }
  std::vector<RecvPtr> recvs;
  for (int j = 1; j < op.size(); ++j) recvs.push_back(op.post(j, 0, nullptr, 0));
  for (size_t j = 0; j < recvs.size(); ++j) {
    try {
      op.await(recvs[j]);
    } catch (const Timeout& timeout) {
      std::vector<int> missing;
      for (size_t k = j; k < recvs.size(); ++k) {
        if (recvs[k]->pending() && (wait_all || missing.empty())) missing.push_back(call.group.living[k + 1]);
      }
      throw Timeout(timeout.seconds, missing);
    }
  }
  for (int j = 1; j < op.size(); ++j) op.send(j, 1, &nothing, 0);
  op.finish();
}

}  // namespace elastic::comm
