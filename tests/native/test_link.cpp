// One link by itself, over a socket pair: what its callers are told, and when.
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "../../csrc/comm/errors.hpp"
#include "../../csrc/comm/link_shm.hpp"
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
  LentMemory* lent_memory() override { return nullptr; }
  void group_aborted(uint64_t, int) override {}
  BufferPool& buffers() override { return pool; }
  void wake_local() override {}
  void background_changed(int by) override { on_background(by); }
};

struct Sockets {
  int ends[2];
  Sockets() { CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends) == 0); }
};

// Both ends of one link, driven by the test's own thread.
struct Both {
  Sockets sockets;
  Host here, there;
  TcpLink sender{here, 1, 0, sockets.ends[0]};
  TcpLink receiver{there, 0, 0, sockets.ends[1]};

  void settle() {
    for (bool moved = true; moved;) {
      sender.socket_event(EPOLLIN);
      receiver.socket_event(EPOLLIN);
      moved = false;
      for (TcpLink* link : {&sender, &receiver}) {
        moved |= link->flush();
        moved |= link->pump();
      }
    }
  }
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

SendPtr message(uint64_t tag, const std::vector<char>& data) {
  auto s = std::make_shared<Send>();
  s->header.key = {1, tag};
  s->header.generation = 1;
  s->data = data.data();
  s->size = data.size();
  s->detached = true;
  return s;
}

bool done(const Message& m) {
  return m.state.load() == MessageState::Done;
}

bool failed(const Message& m) {
  return m.state.load() == MessageState::Failed;
}

std::string reason(const Message& m) {
  try {
    m.rethrow();
  } catch (const CommError& error) {
    return error.what();
  }
  return "";
}

std::exception_ptr given_up() {
  return std::make_exception_ptr(CommError("given up"));
}

constexpr size_t kMiB = 1 << 20;

}  // namespace

// Another thread that uses the link runs the callbacks of what has ended. The time between a message's end and its
// announcement holds background_changed(), which is made long here.
TEST(a_callback_finds_the_state_its_message_ended_in) {
  Sockets sockets;
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

// ---------------------------------------------------------------- messages that no receive has asked for

TEST(a_receiver_keeps_a_bounded_amount_that_it_has_not_asked_for) {
  Both link;
  std::vector<std::vector<char>> data;
  std::vector<SendPtr> sends;
  for (int i = 0; i < 24; ++i) data.emplace_back(kMiB, char(i));
  for (int i = 0; i < 24; ++i) {
    sends.push_back(message(uint64_t(i % 2), data[size_t(i)]));
    link.sender.send(sends.back());
  }
  link.settle();
  size_t kept = 0;
  for (const SendPtr& s : sends) kept += done(*s) ? s->size : 0;
  CHECK(kept > 0 && kept <= kEagerBytes);
  // They all come, in their order for each tag.
  std::vector<char> into(kMiB);
  for (int tag : {1, 0}) {
    for (int i = tag; i < 24; i += 2) {
      const RecvPtr r = receive(uint64_t(tag), into.data(), into.size());
      link.receiver.post(r);
      link.settle();
      CHECK(done(*r) && done(*sends[size_t(i)]) && into == data[size_t(i)]);
    }
  }
}

TEST(many_small_messages_are_bounded_too) {
  Both link;
  const std::vector<char> one(1, 'x');
  std::vector<SendPtr> sends;
  const size_t count = kEagerBytes / kMessageCost + 2 * kMostOffers;
  for (size_t i = 0; i < count; ++i) {
    sends.push_back(message(7, one));
    link.sender.send(sends.back());
  }
  link.settle();
  CHECK(!done(*sends.back()));
  char into = 0;
  for (size_t i = 0; i < count; ++i) {
    const RecvPtr r = receive(7, &into, 1);
    link.receiver.post(r);
    link.settle();
    CHECK(done(*r));
  }
  for (const SendPtr& s : sends) CHECK(done(*s));
}

TEST(what_a_receive_waits_for_passes_what_none_does) {
  Both link;
  const std::vector<char> large(8 * kMiB, 'l'), small(100, 's');
  const SendPtr unwanted = message(1, large), wanted = message(2, large), last = message(3, small);
  std::vector<char> into(large.size());
  const RecvPtr r = receive(2, into.data(), into.size());
  link.receiver.post(r);
  for (const SendPtr& s : {unwanted, wanted, last}) link.sender.send(s);
  link.settle();
  CHECK(done(*r) && done(*wanted) && done(*last) && !done(*unwanted) && into == large);
}

// ---------------------------------------------------------------- a sender that gives up

// Whether the receive was there first or not, and however much had left: no half message stays, the living sender is
// not taken for lost, and the receive gets the next message.
TEST(a_send_that_is_given_up_leaves_nothing_behind) {
  for (const size_t size : {2 * kMiB, 8 * kMiB}) {  // sent at once, and offered
    for (const char* when : {"before", "between", "after"}) {
      Both link;
      const std::vector<char> first(size, '1'), second(size, '2');
      std::vector<char> into(size);
      const SendPtr cancelled = message(1, first), next = message(1, second);
      const RecvPtr r = receive(1, into.data(), into.size());
      const std::string posted = when;
      if (posted == "before") link.receiver.post(r);
      link.sender.send(cancelled);
      link.receiver.socket_event(EPOLLIN);
      link.receiver.pump();
      if (posted == "between") link.receiver.post(r);
      link.sender.socket_event(EPOLLIN);
      link.sender.pump();  // an offer that was taken begins to leave
      CHECK(cancelled->pending());
      link.sender.cancel(cancelled, given_up());
      CHECK(failed(*cancelled));
      link.settle();
      if (posted == "after") link.receiver.post(r);
      CHECK(r->pending());
      link.sender.send(next);
      link.settle();
      CHECK(done(*next) && done(*r) && into == second);
    }
  }
}

TEST(a_receive_that_is_given_up_while_its_message_arrives_takes_the_message_along) {
  for (const size_t size : {2 * kMiB, 8 * kMiB}) {
    Both link;
    const std::vector<char> first(size, '1'), second(size, '2');
    std::vector<char> into(size), later(size);
    const RecvPtr gone = receive(1, into.data(), into.size()), next = receive(1, later.data(), later.size());
    link.receiver.post(gone);
    const SendPtr sent = message(1, first);
    link.sender.send(sent);
    for (TcpLink* end : {&link.receiver, &link.sender, &link.receiver}) {
      end->socket_event(EPOLLIN);
      end->pump();
    }
    link.receiver.cancel(gone, given_up());
    const std::vector<char> as_it_was = into;
    link.receiver.post(next);
    link.sender.send(message(1, second));
    link.settle();
    CHECK(done(*sent) && done(*next) && later == second && into == as_it_was);
  }
}

// It had begun to arrive before there was a receive, and is kept by itself: the next receive gets it.
TEST(a_receive_that_is_given_up_leaves_a_message_that_came_before_it) {
  Both link;
  const std::vector<char> data(2 * kMiB, '1');
  std::vector<char> into(data.size());
  for (int turn = 0; turn < 20; ++turn) {  // the credit for each comes back, once
    const RecvPtr gone = receive(1, into.data(), into.size()), next = receive(1, into.data(), into.size());
    const SendPtr sent = message(1, data);
    link.sender.send(sent);
    link.receiver.socket_event(EPOLLIN);
    link.receiver.pump();
    CHECK(sent->pending());
    link.receiver.post(gone);
    link.receiver.cancel(gone, given_up());
    link.settle();
    CHECK(done(*sent) && failed(*gone));
    link.receiver.post(next);
    CHECK(done(*next) && into == data);
    link.settle();  // the sender has its credit again
  }
  CHECK(!link.receiver.dead());
}

// ---------------------------------------------------------------- from any source

struct FromAny {
  Both first, second;
  std::vector<char> into = std::vector<char>(2 * kMiB);
  RecvPtr of_first = receive(1, into.data(), into.size()), of_second = receive(1, into.data(), into.size());
  FromAny() {
    auto any = std::make_shared<AnySource>();
    any->released = [this] {
      first.receiver.look_again(of_first);
      second.receiver.look_again(of_second);
    };
    of_first->any = of_second->any = any;
    first.receiver.post(of_first);
    second.receiver.post(of_second);
  }
};

TEST(a_receive_from_any_source_survives_a_source_that_is_lost_half_way) {
  for (const bool dies : {true, false}) {
    for (const bool early : {true, false}) {  // the other message comes before the first is lost
      FromAny from;
      const std::vector<char> half(from.into.size(), '1'), whole(from.into.size(), '2');
      const SendPtr lost = message(1, half);
      from.first.sender.send(lost);
      from.first.receiver.socket_event(EPOLLIN);
      from.first.receiver.pump();
      CHECK(from.of_first->pending() && lost->pending());
      if (early) from.second.sender.send(message(1, whole));
      from.second.settle();
      CHECK(from.of_second->pending());
      if (dies) {
        shutdown(from.first.sockets.ends[0], SHUT_RDWR);
      } else {
        from.first.sender.cancel(lost, given_up());
      }
      from.first.settle();
      CHECK(failed(*from.of_first) == dies);
      if (!early) from.second.sender.send(message(1, whole));
      from.second.settle();
      CHECK(done(*from.of_second) && from.into == whole);
    }
  }
}

TEST(what_another_source_took_leaves_the_other_message_where_it_is) {
  FromAny from;
  const std::vector<char> first(from.into.size(), '1'), second(from.into.size(), '2');
  from.first.sender.send(message(1, first));
  from.second.sender.send(message(1, second));
  from.first.settle();
  CHECK(done(*from.of_first) && from.into == first);
  from.second.settle();
  std::vector<char> next(second.size());
  const RecvPtr r = receive(1, next.data(), next.size());
  from.second.receiver.post(r);
  from.second.settle();
  CHECK(done(*r) && next == second);
}

// ---------------------------------------------------------------- what a peer must not send

FrameHeader frame(FrameKind kind) {
  FrameHeader h;
  h.kind = kind;
  h.generation = 1;
  h.key = {1, 1};
  return h;
}

// Each as the only thing a peer says: the link breaks, the receive ends with a reason, nothing else happens.
TEST(a_frame_that_breaks_the_rules_breaks_the_link) {
  std::vector<std::vector<FrameHeader>> bad;
  FrameHeader h = frame(FrameKind::Data);
  h.total = UINT64_MAX - 100;  // as many bytes as there are addresses
  bad.push_back({h});
  h.total = 1ull << 40;
  bad.push_back({h});
  h.total = kEagerBytes;  // with its cost more than was granted
  bad.push_back({h});
  h.length = h.total = 1ull << 40;
  bad.push_back({h});
  h = frame(FrameKind::Data);
  h.total = 1000;
  bad.push_back({h, h});  // begins before the first has ended
  bad.push_back({frame(FrameKind::Reference)});
  bad.push_back({frame(FrameKind::Offer)});
  bad.push_back({frame(FrameKind(77))});
  bad.push_back({frame(FrameKind::Abort)});
  h = frame(FrameKind::Ack);
  h.magic = 1;
  bad.push_back({h});
  bad.push_back({frame(FrameKind::Return)});  // nothing was lent
  bad.push_back({frame(FrameKind::Held)});
  h = frame(FrameKind::Lend);  // of memory that is not shared
  h.total = 64;
  bad.push_back({h});
  h = frame(FrameKind::Offer);
  std::vector<FrameHeader> offers;
  for (size_t i = 0; i < kMostOffers + kMostReferences + 1; ++i) {
    h.message = uint32_t(i + 1);
    offers.push_back(h);
  }
  bad.push_back(offers);
  for (const auto& frames : bad) {
    Sockets sockets;
    Host host;
    TcpLink link(host, 1, 0, sockets.ends[0]);
    char into[8];
    const RecvPtr waiting = receive(99, into, sizeof into);
    link.post(waiting);
    for (const FrameHeader& each : frames) {
      while (send(sockets.ends[1], &each, sizeof each, MSG_NOSIGNAL) < 0) {
        link.socket_event(EPOLLIN);
        link.pump();
      }
    }
    for (int i = 0; i < 100 && !link.finished(); ++i) {
      link.socket_event(EPOLLIN);
      link.pump();
    }
    CHECK(failed(*waiting) && reason(*waiting).find("malformed") != std::string::npos);
    close(sockets.ends[1]);
  }
}

// Any sequence of frames, by a peer that knows the format: it ends, and within the memory that the rules allow.
TEST(random_frames_are_taken_in_or_break_the_link) {
  const unsigned seed = 20261122;
  std::printf("  seed %u\n", seed);
  std::mt19937_64 random(seed);
  const auto some = [&](std::initializer_list<uint64_t> values) {
    return *(values.begin() + random() % values.size());
  };
  size_t broken = 0;
  for (int round = 0; round < 3000; ++round) {
    Sockets sockets;
    Host host;
    TcpLink link(host, 1, 0, sockets.ends[0]);
    std::vector<char> memory(4096);
    std::vector<RecvPtr> recvs;
    for (uint64_t tag = 0; tag < 3; ++tag) {
      recvs.push_back(receive(tag, tag == 0 ? nullptr : memory.data() + tag * 1024, some({0, 64, 1000})));
      link.post(recvs.back());
    }
    for (int i = 0; i < 40 && !link.dead(); ++i) {
      FrameHeader h = frame(FrameKind(1 + random() % 14));
      h.generation = some({0, 1, 1, 1, 1, 1});
      h.key = {1, random() % 4};
      h.message = uint32_t(some({0, 0, 0, 1, 2}));
      h.total = some({0, 64, 64, 1000, 1000, 2 * kMiB, 8 * kMiB, UINT64_MAX});
      h.length = some({0, 64, h.total, h.total, 1000, UINT64_MAX});
      h.offset = some({0, 0, 0, 64, UINT64_MAX - 63});
      h.block = uint32_t(random());
      (void)!send(sockets.ends[1], &h, sizeof h, MSG_NOSIGNAL | MSG_DONTWAIT);
      if (h.kind == FrameKind::Data && h.length <= 1000) {
        (void)!send(sockets.ends[1], memory.data(), h.length, MSG_NOSIGNAL | MSG_DONTWAIT);
      }
      if (random() % 8 == 0) link.cancel(recvs[random() % 3], given_up());
      link.socket_event(EPOLLIN);
      link.pump();
    }
    broken += link.dead();
    close(sockets.ends[1]);
    for (int i = 0; i < 100 && !link.finished(); ++i) {
      link.socket_event(EPOLLIN);
      link.pump();
    }
    CHECK(link.finished());
    for (const RecvPtr& r : recvs) CHECK(!r->pending());
  }
  CHECK(broken > 1000);
}

int main(int argc, char** argv) {
  return run_tests(argc, argv);
}
