// Tagged point-to-point messages: buffered in the link's ring when small, else
// pushed as space becomes free, by a waiting thread or by the progress thread.
#pragma once

#include <memory>
#include <vector>

#include "collectives.hpp"

namespace elastic::comm {

using Keep = std::shared_ptr<void>;

class Request {
 public:
  Request(Hub& hub, uint64_t generation, bool kept) : hub_(hub), generation_(generation), kept_(kept) {}
  ~Request();
  // Drives the message a little; whether it has ended (well or not). Never throws.
  bool test();
  // Until it has ended; throws what it ended with. After any exception the buffer is free.
  void wait(double timeout);
  // Global rank the message came from; -1 before.
  int source() const;
  // Whether it has ended (well or not), without driving it.
  bool ended() const;
  // Adds the ranks whose part is still to come.
  void missing(std::vector<int>* ranks) const;
  // The message that came as a loan, which is the caller's from now on; null if it came otherwise.
  std::shared_ptr<Loan> loan();
  // Ends it with `error` if it has not ended. Its memory is free then.
  void withdraw(const std::exception_ptr& error);
  // `fn` is called once, when the message ends, from any thread. At once if it has ended already.
  void on_end(std::function<void()> fn);

 private:
  friend std::shared_ptr<Request> send_to(const Call&, int, uint64_t, const void*, size_t, Keep);
  friend std::shared_ptr<Request> receive_from(const Call&, int, uint64_t, void*, size_t, Keep, bool);
  friend std::shared_ptr<Request> receive_from_any(const Call&, uint64_t, void*, size_t, Keep);
  void announce();
  void look_again();  // from any source, when one that had been taken is lost

  Hub& hub_;
  uint64_t generation_;
  bool kept_;  // the message keeps its memory alive itself
  std::vector<std::pair<LinkPtr, SendPtr>> sends_;
  std::vector<std::pair<LinkPtr, RecvPtr>> recvs_;  // several: from any source
  mutable std::mutex mutex_;
  bool ended_announced_ = false;
  std::vector<std::function<void()>> callbacks_;
};

using RequestPtr = std::shared_ptr<Request>;

// `to`, `from`: global ranks of living members. Tags below 2^63. The message holds `keep` until it has ended, so that
// the request may be let go before; without one, a request that is let go withdraws its message.
RequestPtr send_to(const Call& call, int to, uint64_t tag, const void* data, size_t size, Keep keep = nullptr);
// `may_borrow`: the message may stay where its sender has it (Request::loan).
RequestPtr receive_from(const Call& call, int from, uint64_t tag, void* into, size_t size, Keep keep = nullptr,
                        bool may_borrow = false);
RequestPtr receive_from_any(const Call& call, uint64_t tag, void* into, size_t size, Keep keep = nullptr);

}  // namespace elastic::comm
