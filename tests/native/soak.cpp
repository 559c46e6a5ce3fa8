// Random lives of forked ranks: collectives, kills, stops and broken links in the middle of them, rejoins.
//
//   soak ROUNDS SEED [shm|tcp]
//
// The parent is launcher and control plane: it freezes, hands out members, kills (or stops, then kills), breaks links
// between ranks that live on, starts new incarnations. Every collective is checked; a rank that retires must hold
// no more descriptors, threads or mapped segments than before it began. A round is one sequence: edit, work,
// disturbance. Prints the seed; exits by abort() at the first wrong sum, unexpected error, hang or leak.
#include <dirent.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <fstream>
#include <random>
#include <string>

#include "../../csrc/comm/collectives.hpp"
#include "../../csrc/comm/hub.hpp"
#include "../../csrc/comm/p2p.hpp"
#include "check.hpp"

using namespace elastic::comm;

namespace {

constexpr int kRanks = 5;
constexpr int kPatience = 60;  // seconds for an answer: longer is a hang

enum class Order : int { Freeze, Sever, Report, Edit, Work, Retire };
enum class Answer : int { Here, Edited, Done, PeerLost, Changed, Wrong, Other, Retired };

struct WirePeer {
  int rank;
  uint64_t incarnation;
  int port;
  char unix_name[64];
  char machine[128];
  int broken_count;
  std::array<std::pair<int, uint64_t>, kRanks> broken;
};

struct Command {
  Order order;
  uint64_t generation;
  uint32_t living;  // mask
  unsigned seed;
  int peer;
  bool quietly;
  std::array<WirePeer, kRanks> peers;
};

struct Held {
  int descriptors, threads, segments;
};

struct Reply {
  Answer answer;
  WirePeer self;
  Held before, after;
  char text[160];
};

int entries(const char* folder) {
  DIR* open = opendir(folder);
  int n = 0;
  while (readdir(open) != nullptr) ++n;
  closedir(open);
  return n;
}

Held held() {
  Held h{entries("/proc/self/fd"), entries("/proc/self/task"), 0};
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) h.segments += line.find("memfd:elastic") != std::string::npos;
  return h;
}

std::vector<int> ranks_in(uint32_t mask) {
  std::vector<int> out;
  for (int r = 0; r < kRanks; ++r) {
    if ((mask >> r & 1u) != 0) out.push_back(r);
  }
  return out;
}

// ---------------------------------------------------------------- a rank

struct Rank {
  int rank;
  int channel;
  std::unique_ptr<Hub> hub;
  std::mutex mutex;
  std::condition_variable came;
  std::deque<Command> orders;

  void answer(Answer what, const std::string& text = "", Held before = {}, Held after = {}) {
    Reply reply{};
    reply.answer = what;
    reply.before = before;
    reply.after = after;
    std::snprintf(reply.text, sizeof reply.text, "%s", text.c_str());
    if (hub) {
      const Peer& own = *hub->self();
      reply.self.rank = own.rank;
      reply.self.incarnation = own.incarnation;
      reply.self.port = own.port;
      std::snprintf(reply.self.unix_name, sizeof reply.self.unix_name, "%s", own.unix_name.c_str());
      std::snprintf(reply.self.machine, sizeof reply.self.machine, "%s", own.machine.c_str());
      for (const auto& end : hub->broken()) reply.self.broken[size_t(reply.self.broken_count++)] = end;
    }
    CHECK(send(channel, &reply, sizeof reply, MSG_NOSIGNAL) == ssize_t(sizeof reply));
  }

  // What the control plane may say at any time is obeyed at once.
  void listen() {
    for (;;) {
      Command c;
      if (recv(channel, &c, sizeof c, MSG_WAITALL) != ssize_t(sizeof c)) _exit(0);
      if (c.order == Order::Freeze) {
        hub->interrupt(c.generation);
      } else if (c.order == Order::Sever) {
        try {
          hub->sever(c.peer, c.quietly);
        } catch (const CommError&) {
          // An edit has dropped it.
        }
      } else {
        std::lock_guard<std::mutex> lock(mutex);
        orders.push_back(c);
        came.notify_one();
        if (c.order == Order::Retire) return;
      }
    }
  }

  void edit(const Command& c) {
    Members members;
    for (int r : ranks_in(c.living)) {
      const WirePeer& w = c.peers[size_t(r)];
      members.push_back(std::make_shared<Peer>(Peer{w.rank,
                                                    w.incarnation,
                                                    "127.0.0.1",
                                                    w.port,
                                                    w.unix_name,
                                                    w.machine,
                                                    {w.broken.begin(), w.broken.begin() + w.broken_count}}));
    }
    hub->edit(c.generation, members, kPatience / 2);
    answer(Answer::Edited);
  }

  void work(const Command& c);
  bool collective(std::mt19937& dice, const Call& call, const std::vector<int>& living);
  [[noreturn]] void live(bool shared, uint64_t incarnation, const std::string& run);
};

Part part(std::vector<float>& v, size_t from, size_t count) {
  return {Span{reinterpret_cast<char*>(v.data() + from), count * 4}};
}

bool all_are(const std::vector<float>& v, size_t from, size_t count, float wanted) {
  for (size_t i = from; i < from + count; ++i) {
    if (v[i] != wanted) return false;
  }
  return true;
}

bool Rank::collective(std::mt19937& dice, const Call& call, const std::vector<int>& living) {
  const size_t sizes[] = {1, 100, 5000, 60000};
  size_t count = sizes[dice() % 4];
  const size_t n = living.size();
  const size_t me = size_t(std::find(living.begin(), living.end(), rank) - living.begin());
  const size_t root = dice() % n;
  float total = 0;
  for (int r : living) total += float(r + 1);
  std::vector<float> own(count, float(rank + 1));
  std::vector<float> table(count * n, float(rank + 1));
  std::vector<Part> parts;
  for (size_t j = 0; j < n; ++j) parts.push_back(part(table, j * count, count));
  switch (dice() % 6) {
    case 0:
      all_reduce(call, part(own, 0, count), DType::F32, ReduceOp::Sum);
      return all_are(own, 0, count, total);
    case 1:
      broadcast(call, own.data(), count * 4, int(root));
      return all_are(own, 0, count, float(living[root] + 1));
    case 2: {
      all_gather(call, parts);
      bool right = true;
      for (size_t j = 0; j < n; ++j) right = right && all_are(table, j * count, count, float(living[j] + 1));
      return right;
    }
    case 3:
      reduce_scatter(call, parts, part(own, 0, count), DType::F32, ReduceOp::Sum);
      return all_are(own, 0, count, total);
    case 4: {
      if (n == 1) return true;
      const uint64_t tag = dice() % 3;
      // Now and then one that a receiver does not keep without having asked for it.
      if (dice() % 4 == 0) count = (kEagerBytes + kEagerBytes / 8) / 4;
      own.assign(count, float(rank + 1));
      std::vector<float> got(count, -1);
      const auto in = receive_from(call, living[(me + n - 1) % n], tag, got.data(), count * 4);
      const auto out = send_to(call, living[(me + 1) % n], tag, own.data(), count * 4);
      in->wait(call.timeout);
      out->wait(call.timeout);
      return all_are(got, 0, count, float(living[(me + n - 1) % n] + 1));
    }
    default:
      barrier(call);
      return true;
  }
}

void Rank::work(const Command& c) {
  const std::vector<int> living = ranks_in(c.living);
  const std::vector<int> all = ranks_in((1u << kRanks) - 1);
  std::mt19937 dice(c.seed);
  try {
    for (unsigned i = 1 + dice() % 12; i > 0; --i) {
      const GroupPtr group = hub->group(dice() % 2 == 0 ? "a" : "b", all);
      if (!collective(dice, Call{*hub, *group, c.generation, kPatience / 2}, living)) return answer(Answer::Wrong);
    }
    answer(Answer::Done);
  } catch (const GenerationChanged& e) {
    answer(Answer::Changed, e.what());
  } catch (const PeerLost& e) {
    answer(Answer::PeerLost, e.what());
  } catch (const std::exception& e) {
    answer(Answer::Other, e.what());
  }
}

void Rank::live(bool shared, uint64_t incarnation, const std::string& run) {
#if defined(__SANITIZE_THREAD__)
  std::thread([] {}).join();  // with the first thread of a process the tool starts one of its own
  usleep(10000);
#endif
  const Held before = held();
  HubConfig config;
  config.rank = rank;
  config.slots = kRanks;
  config.incarnation = incarnation;
  config.run_id = run;
  config.secret = "soak";
  config.shared_memory = shared;
  config.outbox_bytes = 1 << 20;
  config.ring_bytes = 64 << 10;
  hub = std::make_unique<Hub>(config);
  std::thread listener([this] { listen(); });
  answer(Answer::Here);
  for (;;) {
    std::unique_lock<std::mutex> lock(mutex);
    came.wait(lock, [this] { return !orders.empty(); });
    const Command c = orders.front();
    orders.pop_front();
    lock.unlock();
    if (c.order == Order::Retire) break;
    if (c.order == Order::Work) work(c);
    if (c.order == Order::Report) answer(Answer::Here);
    if (c.order != Order::Edit) continue;
    try {
      edit(c);
    } catch (const GenerationChanged&) {
      answer(Answer::Changed);
    } catch (const PeerLost&) {
      answer(Answer::PeerLost);
    } catch (const std::exception& e) {
      answer(Answer::Other, e.what());
    }
  }
  listener.join();
  hub.reset();
  Held after = held();
  for (int i = 0; i < 2000 && after.threads > before.threads; ++i) {  // joined, but still in the kernel's table
    usleep(1000);
    after = held();
  }
  answer(Answer::Retired, "", before, after);
  _exit(0);
}

// ---------------------------------------------------------------- the parent

struct Soak {
  const bool shared;
  std::mt19937 dice;
  std::string where;
  std::array<pid_t, kRanks> pids{};
  std::array<int, kRanks> channels{};
  std::array<uint64_t, kRanks> incarnations{};
  std::array<WirePeer, kRanks> peers{};
  uint32_t living = 0;
  uint64_t generation = 0;
  long kills = 0, stops = 0, breaks = 0, retired = 0, disturbed_edits = 0;
  std::array<long, 8> answers{};

  bool chance(int percent) { return int(dice() % 100) < percent; }

  [[noreturn]] void fail(const std::string& what) {
    std::fprintf(stderr, "%s, generation %llu: %s\n", where.c_str(), static_cast<unsigned long long>(generation),
                 what.c_str());
    for (int r : ranks_in(living)) kill(pids[size_t(r)], SIGKILL);
    std::abort();
  }

  void start(int r) {
    int pair[2];
    CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) == 0);
    const pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
      for (int other : ranks_in(living)) close(channels[size_t(other)]);
      close(pair[0]);
      Rank one{r, pair[1], nullptr, {}, {}, {}};
      one.live(shared, incarnations[size_t(r)]++, where);
    }
    close(pair[1]);
    ++incarnations[size_t(r)];
    pids[size_t(r)] = pid;
    channels[size_t(r)] = pair[0];
    living |= 1u << r;
    peers[size_t(r)] = hear(r).self;
  }

  void say(int r, Command c) {
    c.generation = generation;
    c.living = living;
    c.peers = peers;
    (void)!send(channels[size_t(r)], &c, sizeof c, MSG_NOSIGNAL);
  }

  Reply hear(int r) {
    pollfd one{channels[size_t(r)], POLLIN, 0};
    Reply reply;
    if (poll(&one, 1, kPatience * 1000) != 1) fail("rank " + std::to_string(r) + " hangs");
    if (recv(channels[size_t(r)], &reply, sizeof reply, MSG_WAITALL) != ssize_t(sizeof reply)) {
      int status = 0;
      waitpid(pids[size_t(r)], &status, 0);
      living &= ~(1u << r);
      const std::string how = WIFSIGNALED(status) ? "signal " + std::to_string(WTERMSIG(status))
                                                  : "exit code " + std::to_string(WEXITSTATUS(status));
      fail("rank " + std::to_string(r) + " died by itself: " + how);
    }
    ++answers[size_t(reply.answer)];
    if (reply.answer == Answer::Wrong) fail("rank " + std::to_string(r) + ": a wrong result");
    if (reply.answer == Answer::Other) fail("rank " + std::to_string(r) + ": " + reply.text);
    return reply;
  }

  void bury(int r) {
    waitpid(pids[size_t(r)], nullptr, 0);
    close(channels[size_t(r)]);
    living &= ~(1u << r);
  }

  // Some of the living die: at once, or stopped first and executed a little later.
  std::vector<int> strike(int most) {
    std::vector<int> victims = ranks_in(living);
    std::shuffle(victims.begin(), victims.end(), dice);
    victims.resize(std::min<size_t>(victims.size() > 2 ? dice() % unsigned(most + 1) : 0, victims.size() - 1));
    bool stopped = false;
    for (int r : victims) {
      const bool stop = chance(30);
      kill(pids[size_t(r)], stop ? SIGSTOP : SIGKILL);
      stop ? ++stops : ++kills;
      stopped = stopped || stop;
    }
    if (stopped) usleep(dice() % 3000);
    for (int r : victims) {
      kill(pids[size_t(r)], SIGKILL);
      bury(r);
    }
    return victims;
  }

  void freeze() {
    ++generation;
    for (int r : ranks_in(living)) say(r, {Order::Freeze, 0, 0, 0, 0, false, {}});
  }

  // Freezes, collects reports, edits; sometimes loses a rank in the middle and begins again.
  void form() {
    for (;;) {
      freeze();
      for (int r : ranks_in(living)) say(r, {Order::Report, 0, 0, 0, 0, false, {}});
      for (int r : ranks_in(living)) peers[size_t(r)] = hear(r).self;
      for (int r : ranks_in(living)) say(r, {Order::Edit, 0, 0, 0, 0, false, {}});
      bool lost = false;
      if (chance(5)) {
        usleep(dice() % 500);
        lost = !strike(1).empty();
        if (lost) {
          ++disturbed_edits;
          const uint64_t now = ++generation;
          for (int r : ranks_in(living)) say(r, {Order::Freeze, 0, 0, 0, 0, false, {}});
          generation = now;
        }
      }
      for (int r : ranks_in(living)) {
        const Answer a = hear(r).answer;
        if (a != Answer::Edited && !lost) fail("rank " + std::to_string(r) + ": an edit nobody disturbed failed");
      }
      if (!lost) return;
    }
  }

  void round() {
    form();
    const unsigned run = dice();
    for (int r : ranks_in(living)) say(r, {Order::Work, 0, 0, run, 0, false, {}});
    usleep(dice() % 4000);
    bool disturbed = false;
    if (chance(40)) {
      disturbed = !strike(2).empty();
    } else if (chance(30) && ranks_in(living).size() > 1) {
      auto pair = ranks_in(living);
      std::shuffle(pair.begin(), pair.end(), dice);
      say(pair[0], {Order::Sever, 0, 0, 0, pair[1], chance(50), {}});
      disturbed = true;
      ++breaks;
    }
    if (disturbed) {
      // The next generation, as the control plane would begin it.
      ++generation;
      for (int r : ranks_in(living)) say(r, {Order::Freeze, 0, 0, 0, 0, false, {}});
    }
    for (int r : ranks_in(living)) {
      const Reply reply = hear(r);
      if (reply.answer != Answer::Done && !disturbed) {
        fail("rank " + std::to_string(r) + ": work nobody disturbed failed: " + reply.text);
      }
    }
    if (chance(3)) retire(ranks_in(living)[dice() % ranks_in(living).size()]);
    for (int r = 0; r < kRanks; ++r) {
      if ((living >> r & 1u) == 0 && chance(50)) start(r);
    }
    if (living == 0) start(0);
  }

  void retire(int r) {
    say(r, {Order::Retire, 0, 0, 0, 0, false, {}});
    const Reply reply = hear(r);
    const Held& a = reply.before;
    const Held& b = reply.after;
    if (b.descriptors > a.descriptors || b.threads > a.threads || b.segments > a.segments) {
      fail("rank " + std::to_string(r) + " leaks: " + std::to_string(b.descriptors - a.descriptors) + " descriptors, " +
           std::to_string(b.threads - a.threads) + " threads, " + std::to_string(b.segments - a.segments) +
           " segments");
    }
    ++retired;
    bury(r);
  }
};

}  // namespace

int main(int argc, char** argv) {
  const long rounds = argc > 1 ? std::atol(argv[1]) : 200;
  const unsigned seed = argc > 2 ? unsigned(std::atoi(argv[2])) : 1;
  const bool shared = argc <= 3 || std::strcmp(argv[3], "tcp") != 0;
  signal(SIGPIPE, SIG_IGN);
  Soak soak{shared, std::mt19937(seed), {}, {}, {}, {}, {}};
  soak.where = std::string("soak ") + (shared ? "shm" : "tcp") + ", seed " + std::to_string(seed);
  std::printf("%s: %ld sequences of %d ranks\n", soak.where.c_str(), rounds, kRanks);
  std::fflush(stdout);
  for (int r = 0; r < kRanks; ++r) soak.start(r);
  const auto began = std::chrono::steady_clock::now();
  for (long i = 0; i < rounds; ++i) soak.round();
  for (int r : ranks_in(soak.living)) soak.retire(r);
  const double took = std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
  const auto count = [&](Answer a) { return soak.answers[size_t(a)]; };
  std::printf(
      "%ld sequences in %.0f s: %ld killed, %ld stopped, %ld links broken, %ld edits disturbed, %ld retired without a "
      "leak;"
      " works: %ld done, %ld interrupted, %ld saw a peer lost\n",
      rounds, took, soak.kills, soak.stops, soak.breaks, soak.disturbed_edits, soak.retired, count(Answer::Done),
      count(Answer::Changed), count(Answer::PeerLost));
  return 0;
}
