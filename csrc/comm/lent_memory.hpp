// Memory of this process that peers on its host read in place, each for as long as it wants to.
//
// A message that lies here is sent by naming its place. The peer that takes it has it on loan until it returns it, also
// over generations: it may keep what it received where the sender has it. The owner writes there again only when no
// loan of it is left. A peer that ends returns nothing: its loans are over when its process is known to be gone. When
// the link to a peer is dropped, its loans are in doubt: the peer may hold them, or have returned them, or never have
// heard of them. It says over the next link which of them go on.
//
// Ranges are never given back to the kernel, whose seal against other writers forbids it too. They are used again.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <vector>

#include "shared_memory.hpp"

namespace elastic::comm {

struct Borrower {
  int rank;
  uint64_t incarnation;
  bool operator==(const Borrower& o) const { return rank == o.rank && incarnation == o.incarnation; }
};

class LentMemory {
 public:
  // The part [begin, end) of `memory`, whose pages are asked for when they are first needed. All offsets count from
  // `origin` on, as peers count theirs.
  LentMemory(SharedMemory& memory, size_t origin, size_t begin, size_t end);

  // `size` bytes on a page of their own; null where the part or the machine has no room.
  char* take(size_t size);
  // What was taken is of no more use here. It is used again when no loan of it is left.
  void give_back(const char* at);
  // Whether `size` bytes from `at` on lie in what was taken at once.
  bool covers(const char* at, size_t size);
  size_t offset(const char* at) const { return size_t(at - memory_.data()) - origin_; }

  // A loan of the range with `offset` in it; a borrower may have several.
  void lend(size_t offset, Borrower to);
  // One loan is over, which came over the present link or over an earlier one. Ignored where there is none.
  void returned(size_t offset, Borrower by, bool earlier_link = false);
  // The link to this borrower was dropped: its loans are in doubt.
  void doubt(Borrower of);
  // One loan that was in doubt goes on. Ignored where there is none.
  void confirmed(size_t offset, Borrower by);
  // Loans that are still in doubt are over.
  void end_doubtful(Borrower by);
  bool on_loan(const char* at);
  // Loans of borrowers that do not live are over.
  void keep_only(const std::function<bool(const Borrower&)>& lives);

 private:
  enum class Came { PresentLink, EarlierLink, Doubtful };
  struct Lent {
    Borrower to;
    Came came;
    bool operator==(const Lent& o) const { return to == o.to && came == o.came; }
  };
  struct Range {
    size_t size = 0;
    bool taken = false;
    std::vector<Lent> loans;
  };
  using Ranges = std::map<size_t, Range>;  // by offset, without gaps
  void end_where(const std::function<bool(const Lent&)>& over);
  Ranges::iterator at(size_t offset);
  void merge(Ranges::iterator range);

  SharedMemory& memory_;
  const size_t origin_;
  std::mutex mutex_;
  Ranges ranges_;
  size_t allocated_;  // pages before this offset are there
};

}  // namespace elastic::comm
