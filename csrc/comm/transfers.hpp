// Point-to-point messages to and from several peers, which one thread waits for together.
//
// A wait for one message after another sleeps and wakes for each, and every time the caches of a busy core are someone
// else's. Here the thread sleeps only while nothing that it has not been told of has come.
//
// Within one generation, under one tag. The messages of one pair have one order. One thread at a time.
#pragma once

#include <vector>

#include "p2p.hpp"

namespace elastic::comm {

class Transfers {
 public:
  // The hub and the group must outlive all calls. The memory of a message is kept by `keep`.
  Transfers(const Call& call, uint64_t tag);

  // `from`, `to`: global ranks of living members. Receives are numbered in the order of these calls.
  void receive(int from, void* into, size_t size, const Keep& keep);
  void send(int to, const void* data, size_t size, const Keep& keep);
  // Numbers of the receives that have ended since the last answer, ascending. Throws what one of them ended with.
  std::vector<int> come();
  // As come(), but not before there is one; without numbers when all receives were told of and all sends have ended.
  // Any exception withdraws what has not ended.
  std::vector<int> wait();
  // The message of an ended receive, if its sender has lent it: then nothing was written to the receive's memory.
  std::shared_ptr<Loan> loan(int number) { return receives_.at(size_t(number))->loan(); }

 private:
  std::vector<int> ended();
  bool anything_to_tell() const;
  void withdraw(const std::exception_ptr& error);

  const Call call_;
  const uint64_t tag_;
  std::vector<RequestPtr> receives_;
  std::vector<RequestPtr> sends_;
  std::vector<size_t> open_;  // receives that were not told of, ascending
};

}  // namespace elastic::comm
