#include "deathwatch.hpp"

#include <linux/futex.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <climits>
#include <system_error>
#include <utility>

namespace elastic::process {

static_assert(sizeof(pthread_mutex_t) <= kLockBytes, "kLockBytes is too small for a pthread mutex");
static_assert(sizeof(std::atomic<std::uint32_t>) == sizeof(int) && std::atomic<std::uint32_t>::is_always_lock_free);

namespace {

void check(int error, const char* what) {
  if (error != 0) throw std::system_error(error, std::generic_category(), what);
}

// Not the private kind: holder and waiter are different processes.
long futex(const void* word, int operation, std::uint32_t value) {
  return syscall(SYS_futex, word, operation, value, nullptr, nullptr, 0);
}

}  // namespace

void hold(void* where) {
  pthread_mutexattr_t attributes;
  check(pthread_mutexattr_init(&attributes), "pthread_mutexattr_init");
  check(pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST), "pthread_mutexattr_setrobust");
  check(pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED), "pthread_mutexattr_setpshared");
  auto* mutex = static_cast<pthread_mutex_t*>(where);
  check(pthread_mutex_init(mutex, &attributes), "pthread_mutex_init");
  pthread_mutexattr_destroy(&attributes);
  check(pthread_mutex_lock(mutex), "pthread_mutex_lock");
}

Deathwatch::Deathwatch() : event_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
  check(event_ < 0 ? errno : 0, "eventfd");
}

Deathwatch::~Deathwatch() {
  for (auto& [number, watch] : watches_) end(*watch);
  close(event_);
}

bool Deathwatch::watch(std::uint64_t number, void* where) {
  forget(number);
  auto watch = std::make_unique<Watch>();
  // The word of a lock that the kernel knows: holder's thread id, a flag for a waiting thread, a flag for a dead
  // holder.
  watch->word = reinterpret_cast<Word*>(&static_cast<pthread_mutex_t*>(where)->__data.__lock);
  if (watch->word->load() == 0) return false;
  watch->thread = std::thread([this, number, it = watch.get()] { wait_for(*it, number); });
  watches_[number] = std::move(watch);
  return true;
}

void Deathwatch::wait_for(Watch& watch, std::uint64_t number) {
  std::uint32_t seen = watch.word->load();
  while (!watch.over && !(seen & FUTEX_OWNER_DIED)) {
    // The kernel wakes a waiter only if the word has the flag for a waiting thread.
    if (!(seen & FUTEX_WAITERS)) {
      if (!watch.word->compare_exchange_weak(seen, seen | FUTEX_WAITERS)) continue;
      seen |= FUTEX_WAITERS;
    }
    futex(watch.word, FUTEX_WAIT, seen);
    seen = watch.word->load();
  }
  if (!watch.over) {
    {
      std::lock_guard<std::mutex> lock(dead_mutex_);
      dead_.push_back(number);
    }
    eventfd_write(event_, 1);
  }
  watch.ended = true;
}

void Deathwatch::end(Watch& watch) {
  watch.over = true;
  // It may be about to wait, having seen that it is not over yet: woken until it has ended.
  while (!watch.ended) {
    futex(watch.word, FUTEX_WAKE, INT_MAX);
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  watch.thread.join();
}

void Deathwatch::forget(std::uint64_t number) {
  const auto found = watches_.find(number);
  if (found == watches_.end()) return;
  end(*found->second);
  watches_.erase(found);
}

std::vector<std::uint64_t> Deathwatch::take() {
  eventfd_t count;
  eventfd_read(event_, &count);
  std::lock_guard<std::mutex> lock(dead_mutex_);
  return std::exchange(dead_, {});
}

}  // namespace elastic::process
