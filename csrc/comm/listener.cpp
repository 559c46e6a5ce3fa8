#include "listener.hpp"

#include <fcntl.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <map>

#include "address.hpp"
#include "congestion.hpp"
#include "errors.hpp"
#include "silence.hpp"

namespace elastic::comm {
namespace {

constexpr size_t kMostHalfWay = 64;
constexpr size_t kShareOfFiles = 16;  // of the descriptors, at most one in so many is a stranger's
// A connection stays at least so long. The ranks of a large job dial at once, and each needs two round trips.
constexpr auto kLeastTime = std::chrono::milliseconds(100);
constexpr int kBacklog = 1024;
constexpr int kLookMilliseconds = 50;  // between checks for handshakes that take too long

size_t most_half_way() {
  rlimit files{};
  if (getrlimit(RLIMIT_NOFILE, &files) != 0) return kMostHalfWay;
  return std::clamp<size_t>(size_t(files.rlim_cur) / kShareOfFiles, 1, kMostHalfWay);
}

[[noreturn]] void raise(const std::string& what) {
  throw CommError(what + ": " + std::strerror(errno));
}

void add(int epoll, int fd, uint32_t events, void* data) {
  epoll_event event{};
  event.events = events;
  event.data.ptr = data;
  epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event);
}

int listen_tcp(const std::string& address, int* port) {
  SocketAddress name(address, 0);
  const int fd = socket(name.family(), SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (fd < 0) raise("socket");
  socklen_t length = name.size();
  if (bind(fd, name.get(), length) != 0 || listen(fd, kBacklog) != 0 || getsockname(fd, name.get(), &length) != 0) {
    const int reason = errno;
    close(fd);
    errno = reason;
    raise("listening on " + address);
  }
  *port = name.port();
  return fd;
}

int listen_unix(const std::string& abstract_name) {
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (fd < 0) raise("socket");
  sockaddr_un name{};
  name.sun_family = AF_UNIX;
  std::memcpy(name.sun_path + 1, abstract_name.data(), abstract_name.size());
  const auto length = socklen_t(offsetof(sockaddr_un, sun_path) + 1 + abstract_name.size());
  if (bind(fd, reinterpret_cast<sockaddr*>(&name), length) != 0 || listen(fd, kBacklog) != 0) {
    close(fd);
    raise("listening on a Unix socket");
  }
  return fd;
}

}  // namespace

Listener::Listener(const std::string& address, const std::string& unix_name, double handshake_seconds,
                   double silent_seconds, Callbacks callbacks)
    : callbacks_(std::move(callbacks)),
      patience_(handshake_seconds),
      silent_seconds_(silent_seconds),
      most_half_way_(most_half_way()) {
  tcp_ = listen_tcp(address, &port_);
  congestion_control_ = congestion_control(tcp_);
  use_plain_congestion_control(tcp_);  // what is accepted has it from its first packet on
  if (!unix_name.empty()) unix_ = listen_unix(unix_name);
  epoll_ = epoll_create1(EPOLL_CLOEXEC);
  wake_ = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  timer_ = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC);
  reserve_ = open("/dev/null", O_RDONLY | O_CLOEXEC);
  add(epoll_, tcp_, EPOLLIN, &tcp_);
  if (unix_ >= 0) add(epoll_, unix_, EPOLLIN, &unix_);
  add(epoll_, wake_, EPOLLIN, &wake_);
  add(epoll_, timer_, EPOLLIN, &timer_);
  thread_ = std::thread([this] { loop(); });
}

Listener::~Listener() {
  stop_.store(true);
  eventfd_write(wake_, 1);
  thread_.join();
  run_due(true);
  pending_.clear();
  for (int fd : {tcp_, unix_, epoll_, wake_, timer_, reserve_}) {
    if (fd >= 0) close(fd);
  }
}

std::array<uint64_t, 9> Listener::refused() const {
  std::array<uint64_t, 9> out{};
  for (size_t i = 0; i < out.size(); ++i) out[i] = refused_[i].load(std::memory_order_relaxed);
  return out;
}

void Listener::listen_on(bool yes) {
  paused_ = !yes;
  for (int* listening : {&tcp_, &unix_}) {
    if (*listening < 0) continue;
    epoll_event event{};
    event.events = yes ? EPOLLIN : 0u;
    event.data.ptr = listening;
    epoll_ctl(epoll_, EPOLL_CTL_MOD, *listening, &event);
  }
}

// Returns true if one more may be half-way. A host cannot keep others out: of the address that has most of them, the
// oldest makes way.
bool Listener::make_room() {
  if (pending_.size() < most_half_way_) return true;
  std::map<std::string, size_t> counts;
  for (const auto& n : pending_) ++counts[n->address];
  const auto fewer = [](const auto& a, const auto& b) { return a.second < b.second; };
  const std::string& crowded = std::max_element(counts.begin(), counts.end(), fewer)->first;
  const auto oldest =
      std::find_if(pending_.begin(), pending_.end(), [&](const auto& n) { return n->address == crowded; });
  if (std::chrono::steady_clock::now() < (*oldest)->came + kLeastTime) return false;
  drop(oldest, Refusal::Slow);
  return true;
}

void Listener::accept_all(int listening, bool unix_socket) {
  for (;;) {
    if (!make_room()) return listen_on(false);
    SocketAddress from;
    socklen_t size = from.capacity();
    const int fd = accept4(listening, from.get(), &size, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd < 0) {
      if (errno == EINTR || errno == ECONNABORTED) continue;
      if (errno == EMFILE || errno == ENFILE) {
        close(reserve_);
        const int unwanted = accept(listening, nullptr, nullptr);
        if (unwanted >= 0) close(unwanted);
        reserve_ = open("/dev/null", O_RDONLY | O_CLOEXEC);
        ++refused_[size_t(Refusal::Slow)];
        if (unwanted >= 0) continue;
      }
      return;
    }
    if (!unix_socket) {
      const int one = 1;
      setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
      ask_when_idle(fd, silent_seconds_);
      if (!stays_on_host(fd)) set_congestion_control(fd, congestion_control_);
    }
    auto negotiation = callbacks_.accept(fd, unix_socket);
    negotiation->came = std::chrono::steady_clock::now();
    negotiation->address = from.host();
    pending_.push_back(std::move(negotiation));
    half_way_.store(pending_.size(), std::memory_order_relaxed);
    add(epoll_, fd, EPOLLIN | EPOLLRDHUP, pending_.back().get());
    advance(std::prev(pending_.end()));
  }
}

void Listener::drop(std::list<std::unique_ptr<Negotiation>>::iterator it, Refusal why) {
  refused_[size_t(why)].fetch_add(1, std::memory_order_relaxed);
  // Closing it would not take it out of the set where a forked process holds it too.
  epoll_ctl(epoll_, EPOLL_CTL_DEL, (*it)->handshake.socket(), nullptr);
  pending_.erase(it);
  half_way_.store(pending_.size(), std::memory_order_relaxed);
}

void Listener::advance(std::list<std::unique_ptr<Negotiation>>::iterator it) {
  Negotiation& n = **it;
  Handshake::Progress progress = Handshake::Progress::Failed;
  Refusal why = Refusal::Garbage;
  try {
    progress = n.handshake.advance();
    why = n.handshake.refusal();
  } catch (const CommError&) {
  }
  if (progress == Handshake::Progress::Failed) return drop(it, why);
  if (progress == Handshake::Progress::Again) {
    if (n.handshake.wants_write()) {
      epoll_event event{};
      event.events = EPOLLIN | EPOLLOUT | EPOLLRDHUP;
      event.data.ptr = &n;
      epoll_ctl(epoll_, EPOLL_CTL_MOD, n.handshake.socket(), &event);
    }
    return;
  }
  epoll_ctl(epoll_, EPOLL_CTL_DEL, n.handshake.socket(), nullptr);
  std::unique_ptr<Negotiation> done = std::move(*it);
  pending_.erase(it);
  half_way_.store(pending_.size(), std::memory_order_relaxed);
  try {
    callbacks_.established(std::move(done));
  } catch (const CommError&) {
    refused_[size_t(Refusal::Garbage)].fetch_add(1, std::memory_order_relaxed);
  }
}

void Listener::drop_late() {
  const auto now = std::chrono::steady_clock::now();
  while (!pending_.empty() && pending_.front()->came + patience_ <= now) drop(pending_.begin(), Refusal::Slow);
}

void Listener::later(std::chrono::milliseconds delay, std::function<void()> task) {
  std::lock_guard<std::mutex> lock(tasks_mutex_);
  const auto due = std::chrono::steady_clock::now() + delay;
  const bool next = std::all_of(tasks_.begin(), tasks_.end(), [&](const Task& t) { return t.due > due; });
  tasks_.push_back({due, std::move(task)});
  if (next) wake_after(delay);
}

// A timer, not the thread, which would have to wake only to find out how long it may sleep.
void Listener::wake_after(std::chrono::nanoseconds delay) {
  itimerspec when{};
  const auto whole = std::chrono::duration_cast<std::chrono::seconds>(delay);
  when.it_value.tv_sec = time_t(whole.count());
  when.it_value.tv_nsec = std::max(long((delay - whole).count()), 1L);  // all zero would disarm it
  timerfd_settime(timer_, 0, &when, nullptr);
}

void Listener::run_due(bool all) {
  std::vector<Task> due;
  {
    std::lock_guard<std::mutex> lock(tasks_mutex_);
    const auto now = std::chrono::steady_clock::now();
    const auto first = std::partition(tasks_.begin(), tasks_.end(), [&](auto& t) { return !all && t.due > now; });
    std::move(first, tasks_.end(), std::back_inserter(due));
    tasks_.erase(first, tasks_.end());
    const auto earlier = [](const Task& a, const Task& b) { return a.due < b.due; };
    const auto next = std::min_element(tasks_.begin(), tasks_.end(), earlier);
    if (!due.empty() && next != tasks_.end()) wake_after(next->due - now);
  }
  for (auto& task : due) task.run();
}

void Listener::loop() {
  epoll_event events[64];
  while (!stop_.load()) {
    const int n = epoll_wait(epoll_, events, 64, pending_.empty() ? -1 : kLookMilliseconds);
    for (int i = 0; i < n; ++i) {
      void* what = events[i].data.ptr;
      if (what == &tcp_) {
        accept_all(tcp_, false);
      } else if (what == &unix_) {
        accept_all(unix_, true);
      } else if (what == &wake_) {
        eventfd_t count;
        eventfd_read(wake_, &count);
      } else if (what == &timer_) {
        uint64_t expired;
        if (read(timer_, &expired, sizeof expired) < 0) continue;
      } else {
        for (auto it = pending_.begin(); it != pending_.end(); ++it) {
          if (it->get() == what) {
            advance(it);
            break;
          }
        }
      }
    }
    drop_late();
    if (paused_ && make_room()) listen_on(true);
    run_due(false);
  }
}

}  // namespace elastic::comm
