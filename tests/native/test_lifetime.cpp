// The end of a hub and of its connections: with calls under way, by a thread of its own, beside a forked process.
#include <arpa/inet.h>
#include <dirent.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <ctime>
#include <future>

#include "../../csrc/comm/handshake.hpp"
#include "../../csrc/comm/ring.hpp"
#include "ranks.hpp"

namespace {

constexpr auto kPatience = std::chrono::seconds(60);  // longer is a hang

template <typename Future>
bool ends(Future& future) {
  return future.wait_for(kPatience) == std::future_status::ready;
}

int dial(int port) {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in name{};
  name.sin_family = AF_INET;
  name.sin_port = htons(uint16_t(port));
  name.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (connect(fd, reinterpret_cast<sockaddr*>(&name), sizeof name) == 0) return fd;
  close(fd);
  return -1;
}

bool listens(int port) {
  const int fd = dial(port);
  if (fd >= 0) close(fd);
  return fd >= 0;
}

HubConfig alone() {
  HubConfig config;
  config.run_id = "native tests";
  config.secret = "secret";
  return config;
}

}  // namespace

// One call waits for a member that never comes, one is queued behind it with a thread that waits for it, one without.
TEST(close_ends_the_call_that_runs_and_those_queued_behind_it) {
  Ranks ranks(2, true);
  ranks.edit(1, ranks.all());
  Hub& hub = *ranks.hubs[0];
  const GroupPtr group = hub.group("g", ranks.all());
  const Call call = ranks.call(0, *group, 600);
  std::atomic<int> failed{0};
  const auto fails = [&] {
    try {
      barrier(call);
    } catch (const CommError&) {
      ++failed;
    }
  };
  auto running = std::async(std::launch::async, [&] {
    group->run(hub.workers(), [&] {
      fails();
      std::this_thread::sleep_for(std::chrono::milliseconds(100));  // close() has stopped the workers by now
    });
  });
  while (hub.waiting_for().empty()) std::this_thread::yield();
  std::atomic<bool> first{false}, second{false};
  group->enqueue(hub.workers(), [&] {
    fails();
    first = true;
    return Rest();
  });
  group->enqueue(hub.workers(), [&] {
    fails();
    second = true;
    return Rest();
  });
  auto waiting = std::async(std::launch::async, [&] {
    group->help(hub.workers(), [&] { return first.load(); }, std::chrono::steady_clock::time_point::max());
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  auto closing = std::async(std::launch::async, [&] { hub.close(); });
  CHECK(ends(running) && ends(waiting) && ends(closing));
  for (int i = 0; i < 60000 && !second; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  CHECK(first && second && failed == 3);
}

// Callbacks of futures are such rests, and a user's may wait for any later operation.
TEST(what_work_leaves_to_do_may_wait_for_work_behind_it_and_for_its_own) {
  auto hub = Hub::make(alone());
  const GroupPtr group = hub->group("g", {0});
  std::promise<void> behind, own, all;
  std::shared_future<void> behind_ran = behind.get_future(), own_ran = own.get_future();
  group->enqueue(hub->workers(), [&]() -> Rest {
    return [&] {
      group->enqueue(hub->workers(), [&] {
        own.set_value();
        return Rest();
      });
      behind_ran.wait();
      own_ran.wait();
      all.set_value();
    };
  });
  group->enqueue(hub->workers(), [&] {
    behind.set_value();
    return Rest();
  });
  auto done = all.get_future();
  CHECK(ends(done));
  hub->close();
}

// As the task of an asynchronous collective does, when the caller forgets everything else.
TEST(a_worker_may_let_go_of_the_last_reference) {
  for (int turn = 0; turn < 20; ++turn) {
    auto hub = Hub::make(alone());
    const std::weak_ptr<Hub> still = hub;
    const GroupPtr group = hub->group("g", {0});
    std::promise<void> go;
    std::promise<void> gone;
    hub->workers().submit([hub, &go, &gone]() mutable {
      go.get_future().wait();
      hub.reset();
      gone.set_value();
    });
    hub.reset();
    go.set_value();
    auto done = gone.get_future();
    CHECK(ends(done));
    CHECK(still.expired());
  }
}

// Its address is free again: nothing of it is left, whichever thread ended it.
TEST(a_hub_that_a_worker_let_go_gives_its_port_back) {
  auto hub = Hub::make(alone());
  const int port = hub->self()->port;
  std::promise<void> go;
  hub->workers().submit([hub, wait = go.get_future().share()]() mutable {
    wait.wait();
    hub.reset();
  });
  hub.reset();
  go.set_value();
  bool refused = false;
  for (int i = 0; i < 60000 && !refused; ++i) {
    refused = !listens(port);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  CHECK(refused);
}

TEST(close_in_a_thread_of_its_own_is_refused) {
  auto hub = Hub::make(alone());
  std::promise<bool> answer;
  hub->workers().submit([&] {
    bool refused = false;
    try {
      hub->close();
    } catch (const CommError&) {
      refused = true;
    }
    answer.set_value(refused);
  });
  auto refused = answer.get_future();
  CHECK(ends(refused) && refused.get());
  hub->close();
}

// As a data loader is forked while a port scan is half-way: the child holds the connection that is dropped here.
TEST(a_connection_that_a_forked_process_holds_too_leaves_the_listener_alone) {
  auto hub = Hub::make(alone());
  const int stranger = dial(hub->self()->port);
  while (hub->counters()["half_way"] == 0) std::this_thread::yield();
  int wake[2];
  CHECK(pipe2(wake, O_CLOEXEC) == 0);
  const pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) {
    close(stranger);
    close(wake[1]);
    char byte;
    (void)!read(wake[0], &byte, 1);  // until the parent has looked
    _exit(0);
  }
  close(stranger);
  while (hub->counters()["half_way"] != 0) std::this_thread::yield();
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  const auto began = std::chrono::steady_clock::now();
  const std::clock_t used_before = std::clock();
  std::this_thread::sleep_for(std::chrono::milliseconds(400));
  const double used = double(std::clock() - used_before) / CLOCKS_PER_SEC;
  const double took = std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
  close(wake[1]);
  CHECK(waitpid(child, nullptr, 0) == child);
  CHECK(used < took / 8);  // asleep
}

int count_descriptors() {
  DIR* folder = opendir("/proc/self/fd");
  int n = 0;
  while (readdir(folder) != nullptr) ++n;
  closedir(folder);
  return n;
}

// A peer with the job's secret whose shared memory cannot be used: what came with it is closed.
TEST(what_a_peer_hands_over_is_closed_when_no_link_comes_of_it) {
  HubConfig config = alone();
  config.slots = 2;
  auto hub = Hub::make(config);
  const Secrets secrets{sha256(config.run_id.data(), config.run_id.size()), config.secret};
  const int before = count_descriptors();
  for (int turn = 0; turn < 20; ++turn) {
    const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_un name{};
    name.sun_family = AF_UNIX;
    const std::string& unix_name = hub->self()->unix_name;
    std::memcpy(name.sun_path + 1, unix_name.data(), unix_name.size());
    const auto length = socklen_t(offsetof(sockaddr_un, sun_path) + 1 + unix_name.size());
    CHECK(connect(fd, reinterpret_cast<sockaddr*>(&name), length) == 0);
    fcntl(fd, F_SETFL, O_NONBLOCK);
    // Neither segment is sealed, or the first is as it should be.
    auto ring = SharedMemory::create("test", ring_segment_bytes(64 << 10));
    const int file = memfd_create("test", MFD_CLOEXEC);
    Parts parts;
    parts.ring_bytes = 64 << 10;
    parts.descriptors = {turn % 2 == 0 ? file : ring.fd(), file, file};
    auto handshake = Handshake::dial(fd, secrets, {1, uint64_t(turn)}, {0, 0}, [&] { return parts; });
    while (handshake.advance() == Handshake::Progress::Again) std::this_thread::yield();
    close(file);
  }
  // The hub closes a connection before it counts it.
  for (int i = 0; i < 60000 && (count_descriptors() > before || hub->counters()["garbage"] < 20); ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  CHECK(count_descriptors() <= before);
  CHECK(hub->counters()["garbage"] == 20);
}

int main(int argc, char** argv) {
  return run_tests(argc, argv);
}
