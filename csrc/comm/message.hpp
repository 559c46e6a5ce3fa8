// Messages in flight: one Send or Recv for each, shared by the waiting thread and the link.
//
// `state` ends as Done or Failed exactly once, under the link's lock; after that
// nothing reads (Send) or writes (Recv) the user's memory any more.
#pragma once

#include <unistd.h>

#include <atomic>
#include <exception>
#include <functional>
#include <memory>
#include <utility>

#include "buffers.hpp"
#include "frame.hpp"

namespace elastic::comm {

enum class MessageState : int { Pending, Done, Failed };

struct Message {
  std::atomic<MessageState> state{MessageState::Pending};
  std::exception_ptr error;     // set before state becomes Failed
  std::function<void()> ended;  // called once, with no lock of the link held; may be empty
  bool detached = false;        // no thread need wait for it: the progress thread sends it
  bool counted = false;         // the progress thread knows of it; under the link's lock

  bool pending() const { return state.load(std::memory_order_acquire) == MessageState::Pending; }
  void rethrow() const {
    if (state.load(std::memory_order_acquire) == MessageState::Failed) std::rethrow_exception(error);
  }
};

struct Send : Message {
  FrameHeader header;  // key, generation; offset and length are set frame by frame
  const char* data = nullptr;
  size_t size = 0;
  size_t sent = 0;
  size_t cost = 0;  // in the receiver's budget for messages that no receive has asked for
  bool started = false;
};

// One receive posted at several links: the first message takes it. If that message is lost or withdrawn, another may.
struct AnySource {
  std::atomic<bool> taken{false};
  std::atomic<bool> done{false};
  std::function<void()> released;  // called with no lock of a link held, when `taken` is false again
};

class Link;

// A message that a peer has lent; over at the end of this object's life, or before. A forked process has no part in it:
// it may collect its parent's garbage, and locks that other threads held when it was forked are locked there for ever.
class Loan {
 public:
  Loan(std::shared_ptr<Link> link, size_t offset, const char* data, size_t size)
      : link_(std::move(link)), offset_(offset), data_(data), size_(size) {}
  ~Loan() { give_back(); }
  Loan(const Loan&) = delete;
  Loan& operator=(const Loan&) = delete;
  // Once. From any thread, also when the hub is gone.
  void give_back();
  const char* data() const { return data_; }
  size_t size() const { return size_; }
  // Keeps the peer's memory mapped, which may have changed once the loan is over.
  const std::shared_ptr<Link>& mapping() const { return link_; }

 private:
  const std::shared_ptr<Link> link_;  // over which it came
  const size_t offset_;
  const char* const data_;
  const size_t size_;
  const pid_t process_ = getpid();
  std::atomic<bool> over_{false};
};

struct Recv : Message {
  Key key;
  size_t size = 0;
  char* into = nullptr;     // null: the link finds memory for it
  bool view_allowed = true; // may end with `view` in the sender's outbox; then release it
  bool loan_allowed = false;  // may end with a `loan` instead of bytes in `into`
  std::shared_ptr<Loan> loan;
  std::shared_ptr<AnySource> any;

  size_t got = 0;
  int source = -1;          // rank whose message took it
  bool misfit = false;      // failed: the message that took it has another size
  const char* view = nullptr;
  int block = -1;           // outbox block behind `view`, to be released
  BufferPool::Buffer heap;
};

using SendPtr = std::shared_ptr<Send>;
using RecvPtr = std::shared_ptr<Recv>;

}  // namespace elastic::comm
