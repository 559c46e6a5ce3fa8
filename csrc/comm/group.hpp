// An ordered member list over the links, edited in place.
//
// `members` never change; `living` are those of the present generation in the
// same order. Work on one group runs in the order it was asked for: at once in
// the caller's thread when nothing is queued, else behind what is. Queued work is
// run by a worker or by the thread that waits for it, whichever comes first. What
// a piece of work leaves to do (callbacks of its user) is out of turn: it may wait
// for work that is queued behind, or that it queues itself.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace elastic::comm {

class Workers;

// What a piece of work leaves to do; empty: nothing.
using Rest = std::function<void()>;

struct Group {
  uint64_t id = 0;
  std::string name;
  std::vector<int> members;  // global ranks
  std::vector<int> living;   // of generation `counted`; both are written under the hub's exclusive lock
  uint64_t counted = 0;      // an older one: the group was released, and edits do not count its living members
  std::atomic<int> me{-1};   // this process's position in `living`
  std::atomic<int> count{0}; // living.size(), readable without the topology
  std::atomic<uint32_t> sequence{0};   // collectives begun in this generation
  std::atomic<int> lost{-1};           // a member another one found lost (Abort frame)
  std::atomic<bool> aborted{false};    // by abort(): all work on this group fails until the next edit
  std::atomic<bool> broken{false};     // a collective failed half-way: later ones of the generation do too

  // Throws CommError if the group was released before `generation` began. With the topology held.
  void check_counted(uint64_t generation) const;
  // Runs `work` after everything asked for earlier; returns when it has run. Rethrows.
  void run(Workers& workers, const std::function<void()>& work);
  // Queues `work` (which must not throw) and returns at once.
  void enqueue(Workers& workers, std::function<Rest()> work);
  // Runs queued work, or waits for the thread that does, until done() or the deadline; whether it is done.
  bool help(Workers& workers, const std::function<bool()>& done, std::chrono::steady_clock::time_point deadline);

 private:
  void run_front(Workers& workers, std::unique_lock<std::mutex>& lock);
  // Gives what is queued to a worker unless another thread runs it already. Unlocks.
  void hand_on(Workers& workers, std::unique_lock<std::mutex>& lock);
  void drain(Workers& workers);
  std::mutex mutex_;
  std::condition_variable ran_;
  int waiting_ = 0;
  bool busy_ = false;       // a thread runs work of this group
  bool scheduled_ = false;  // a worker is about to look
  std::deque<std::function<Rest()>> queue_;
  std::weak_ptr<Group> self_;
  friend class Hub;
};

using GroupPtr = std::shared_ptr<Group>;

// Threads made when needed, gone when idle for a while.
class Workers {
 public:
  ~Workers();
  // Runs `task` in a worker; after stop() in the calling thread. Callers hold no lock that the task takes.
  void submit(std::function<void()> task);
  void stop();  // Runs what is queued, then waits for all workers. Not from one of them.
  bool contain_this_thread() const;

 private:
  void loop();
  std::mutex mutex_;
  std::condition_variable ready_;
  std::condition_variable gone_;
  std::deque<std::function<void()>> tasks_;
  size_t idle_ = 0;
  size_t threads_ = 0;
  bool stopping_ = false;
};

}  // namespace elastic::comm
