// One link by itself, over a socket pair: what its callers are told, and when.
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <thread>

#include "../../csrc/comm/link_tcp.hpp"
#include "check.hpp"

using namespace elastic::comm;

namespace {

// A process with nothing but this link.
struct Host : LinkHost {
  BufferPool pool;
  std::function<void(int by)> on_background = [](int) {};
  uint64_t generation() const override { return 1; }
  void block_returned(uint32_t) override {}
  void group_aborted(uint64_t, int) override {}
  BufferPool& buffers() override { return pool; }
  void wake_local() override {}
  void background_changed(int by) override { on_background(by); }
};

struct Pair {
  int ends[2];
  Pair() { CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends) == 0); }
};

RecvPtr receive(uint64_t tag, void* into, size_t size) {
  auto r = std::make_shared<Recv>();
  r->key = {1, tag};
  r->into = static_cast<char*>(into);
  r->size = size;
  r->view_allowed = false;
  r->detached = true;
  return r;
}

}  // namespace

// Another thread that uses the link runs the callbacks of what has ended. The time between a message's end and its
// announcement holds background_changed(), which is made long here.
TEST(a_callback_finds_the_state_its_message_ended_in) {
  Pair sockets;
  Host host;
  std::atomic<bool> inside{false};
  host.on_background = [&](int by) {
    if (by > 0) return;
    inside = true;
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  };
  TcpLink link(host, 1, 0, sockets.ends[0]);
  char into[8] = {};
  const RecvPtr lost = receive(1, into, sizeof into);
  std::atomic<int> called{0};
  lost->ended = [&, r = lost.get()] {
    CHECK(r->state.load() == MessageState::Failed);
    ++called;
  };
  link.post(lost);
  close(sockets.ends[1]);
  std::thread pumper([&] {
    link.mark_dead("process ended");
    link.pump();
  });
  while (!inside) std::this_thread::yield();
  const char token = 0;
  link.send_small({1, 2}, &token, 1);
  pumper.join();
  CHECK(called == 1);
}

int main(int argc, char** argv) {
  return run_tests(argc, argv);
}
