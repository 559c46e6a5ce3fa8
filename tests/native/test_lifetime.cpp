// The end of a hub: with calls under way, let go by one of its own threads.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <future>

#include "ranks.hpp"

namespace {

constexpr auto kPatience = std::chrono::seconds(60);  // longer is a hang

template <typename Future>
bool ends(Future& future) {
  return future.wait_for(kPatience) == std::future_status::ready;
}

bool listens(int port) {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in name{};
  name.sin_family = AF_INET;
  name.sin_port = htons(uint16_t(port));
  name.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  const bool connected = connect(fd, reinterpret_cast<sockaddr*>(&name), sizeof name) == 0;
  close(fd);
  return connected;
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
  });
  group->enqueue(hub.workers(), [&] {
    fails();
    second = true;
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

int main(int argc, char** argv) {
  return run_tests(argc, argv);
}
