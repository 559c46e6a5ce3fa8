// Reports a process's exit at its beginning, not at its end.
//
// A killed process stops long before its parent or a pidfd is told: first every thread has to have its
// turn on a processor, then the kernel frees the memory, and only then reports the exit. The first action of the kernel
// for a thread that ends is to release the robust futexes that it holds (exit_mm_release in kernel/exit.c, before
// the address space goes), and to wake the waiters. So the watched thread holds a robust lock in memory that it
// shares with its watcher, for life, and the watcher waits for that lock.
//
// Invariant: a number is taken at most once, and only after the thread that held its lock has ended. That says nothing
// yet of the process's other threads: a caller kills the process before it acts. A process without robust futexes
// (or that ended before it held its lock) is never reported here; a pidfd always is, but later.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace elastic::process {

// Shared memory that a lock takes, 8-byte aligned.
inline constexpr std::size_t kLockBytes = 64;

// The calling thread holds the lock at `where` (zeroed memory) from here to its end. Throws std::system_error.
void hold(void* where);

class Deathwatch {
 public:
  Deathwatch();
  ~Deathwatch();
  Deathwatch(const Deathwatch&) = delete;
  Deathwatch& operator=(const Deathwatch&) = delete;

  // Readable when there is something to take.
  int descriptor() const { return event_; }
  // Begins to wait for the lock at `where`, which a thread holds already; false if none does. `where` has to stay
  // mapped until forget() or the end of this.
  bool watch(std::uint64_t number, void* where);
  // Waits for it no longer; silent if it is not watched.
  void forget(std::uint64_t number);
  // Numbers whose holders ended since the last call.
  std::vector<std::uint64_t> take();

 private:
  using Word = std::atomic<std::uint32_t>;
  struct Watch {
    Word* word = nullptr;
    std::atomic<bool> over{false};
    std::atomic<bool> ended{false};
    std::thread thread;
  };
  void wait_for(Watch& watch, std::uint64_t number);
  static void end(Watch& watch);

  int event_ = -1;
  std::map<std::uint64_t, std::unique_ptr<Watch>> watches_;  // the owner's thread alone
  std::mutex dead_mutex_;
  std::vector<std::uint64_t> dead_;
};

}  // namespace elastic::process
