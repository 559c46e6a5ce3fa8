// One collective of one group: its messages, its deadline, its end.
//
// Holds the topology while it lives. If it ends by an exception, every message
// of it is withdrawn first, so that no buffer is touched afterwards, and the
// other members are told of a lost peer (they may be waiting for us).
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "hub.hpp"

namespace elastic::comm {

// Contiguous bytes of the user's; a part of a collective is a list of them.
struct Span {
  char* data;
  size_t size;
};
using Part = std::vector<Span>;

size_t bytes_of(const Part& part);

// Calls fn(pointer, size) for the pieces of `part` that make up its bytes [offset, offset + size).
template <typename Fn>
void for_pieces(const Part& part, size_t offset, size_t size, Fn fn) {
  for (const Span& span : part) {
    if (size == 0) return;
    if (offset >= span.size) {
      offset -= span.size;
      continue;
    }
    const size_t n = std::min(size, span.size - offset);
    fn(span.data + offset, n);
    offset = 0;
    size -= n;
  }
}

// The pointer to [offset, offset + size) when it lies in one span, else null.
char* contiguous(const Part& part, size_t offset, size_t size);

class Operation {
 public:
  // Throws GenerationChanged, or what broke an earlier collective of the group in this generation.
  // `awaited` as in WaitScope.
  Operation(Hub& hub, Group& group, uint64_t generation, double timeout, const std::atomic<bool>* awaited = nullptr);
  ~Operation();
  Operation(const Operation&) = delete;
  Operation& operator=(const Operation&) = delete;

  int size() const { return int(group_.living.size()); }
  int me() const { return me_; }
  Hub& hub() { return hub_; }
  Link& link(int member) { return *hub_.link(group_.living[size_t(member)]); }
  // Reference frames reach this member.
  bool in_place(int member) { return link(member).reads_in_place(); }

  // `data` must stay as it is until finish().
  void send(int to, uint32_t phase, const void* data, size_t size);
  // Block `index` of the outbox, filled, acquired for one reader each.
  void share(int to, uint32_t phase, int index, size_t size);
  // Into `into`, or (null) into memory of its own; a view where the sender shares a block.
  RecvPtr post(int from, uint32_t phase, void* into, size_t size);
  // Waits; returns where the bytes are. Throws if they are void.
  const char* await(const RecvPtr& recv);
  // Hands a view back after reading it; throws GenerationChanged when it had changed under the reader.
  void release(const RecvPtr& recv);
  // Takes bytes along that must outlive this collective's sends.
  char* scratch(size_t size);
  // Returns when every send has left.
  void finish();

 private:
  void withdraw();  // nothing of this collective touches its buffers any more; tells the others of a lost peer
  void wait(const std::function<bool()>& done, const std::function<void(std::vector<int>*)>& missing);
  Key key(uint32_t phase) const { return {group_.id, collective_tag(sequence_, phase)}; }

  Hub& hub_;
  Group& group_;
  uint64_t generation_;
  Hub::Shared shared_;
  uint32_t sequence_;
  int me_;
  WaitScope scope_;
  bool finished_ = false;
  std::vector<std::pair<int, SendPtr>> sends_;  // global rank
  std::vector<std::pair<int, RecvPtr>> recvs_;
  std::vector<BufferPool::Buffer> scratch_;
};

}  // namespace elastic::comm
