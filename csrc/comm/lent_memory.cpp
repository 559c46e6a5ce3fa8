#include "lent_memory.hpp"

#include <algorithm>
#include <iterator>

namespace elastic::comm {
namespace {

constexpr size_t kPage = 4096;

}  // namespace

LentMemory::LentMemory(SharedMemory& memory, size_t origin, size_t begin, size_t end)
    : memory_(memory), origin_(origin), allocated_(begin - origin) {
  if (begin < end) ranges_[begin - origin].size = end - begin;
}

char* LentMemory::take(size_t size) {
  size = std::max(size + kPage - 1, kPage) / kPage * kPage;
  std::lock_guard<std::mutex> lock(mutex_);
  auto best = ranges_.end();
  for (auto it = ranges_.begin(); it != ranges_.end(); ++it) {
    const Range& range = it->second;
    if (range.taken || !range.loans.empty() || range.size < size) continue;
    if (best == ranges_.end() || range.size < best->second.size) best = it;
  }
  if (best == ranges_.end()) return nullptr;
  const size_t stop = best->first + size;
  if (stop > allocated_) {
    if (shared_memory_headroom() / 4 < stop - allocated_ ||
        !memory_.allocate(origin_ + allocated_, stop - allocated_)) {
      return nullptr;
    }
    allocated_ = stop;
  }
  if (best->second.size > size) ranges_[stop].size = best->second.size - size;
  best->second.size = size;
  best->second.taken = true;
  return memory_.data() + origin_ + best->first;
}

void LentMemory::give_back(const char* memory) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto range = at(offset(memory));
  if (range == ranges_.end()) return;
  range->second.taken = false;
  merge(range);
}

bool LentMemory::covers(const char* memory, size_t size) {
  const char* const base = memory_.data();
  if (memory < base + origin_ || memory >= base + memory_.size()) return false;
  std::lock_guard<std::mutex> lock(mutex_);
  const auto range = at(offset(memory));
  return range != ranges_.end() && range->second.taken && size <= range->first + range->second.size - offset(memory);
}

void LentMemory::lend(size_t where, Borrower to) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto range = at(where);
  if (range != ranges_.end()) range->second.loans.push_back({to, Came::PresentLink});
}

void LentMemory::returned(size_t where, Borrower by, bool earlier_link) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto range = at(where);
  if (range == ranges_.end()) return;
  auto& loans = range->second.loans;
  const Lent over{by, earlier_link ? Came::EarlierLink : Came::PresentLink};
  const auto loan = std::find(loans.begin(), loans.end(), over);
  if (loan == loans.end()) return;
  loans.erase(loan);
  merge(range);
}

void LentMemory::doubt(Borrower of) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto& [offset, range] : ranges_) {
    for (Lent& loan : range.loans) {
      if (loan.to == of) loan.came = Came::Doubtful;
    }
  }
}

void LentMemory::confirmed(size_t where, Borrower by) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto range = at(where);
  if (range == ranges_.end()) return;
  auto& loans = range->second.loans;
  const auto loan = std::find(loans.begin(), loans.end(), Lent{by, Came::Doubtful});
  if (loan != loans.end()) loan->came = Came::EarlierLink;
}

void LentMemory::end_doubtful(Borrower by) {
  end_where([&](const Lent& loan) { return loan == Lent{by, Came::Doubtful}; });
}

bool LentMemory::on_loan(const char* memory) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto range = at(offset(memory));
  return range != ranges_.end() && !range->second.loans.empty();
}

void LentMemory::keep_only(const std::function<bool(const Borrower&)>& lives) {
  end_where([&](const Lent& loan) { return !lives(loan.to); });
}

void LentMemory::end_where(const std::function<bool(const Lent&)>& over) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto it = ranges_.begin(); it != ranges_.end();) {
    auto& loans = it->second.loans;
    loans.erase(std::remove_if(loans.begin(), loans.end(), over), loans.end());
    const size_t next = it->first + it->second.size;
    merge(it);
    it = ranges_.lower_bound(next);
  }
}

LentMemory::Ranges::iterator LentMemory::at(size_t where) {
  const auto behind = ranges_.upper_bound(where);
  if (behind == ranges_.begin()) return ranges_.end();
  const auto range = std::prev(behind);
  return where - range->first < range->second.size ? range : ranges_.end();
}

// Joins a range that nothing uses with its neighbours of the same kind.
void LentMemory::merge(Ranges::iterator range) {
  const auto unused = [](const Range& one) { return !one.taken && one.loans.empty(); };
  if (!unused(range->second)) return;
  const auto next = std::next(range);
  if (next != ranges_.end() && unused(next->second)) {
    range->second.size += next->second.size;
    ranges_.erase(next);
  }
  if (range == ranges_.begin()) return;
  const auto before = std::prev(range);
  if (!unused(before->second)) return;
  before->second.size += range->second.size;
  ranges_.erase(range);
}

}  // namespace elastic::comm
