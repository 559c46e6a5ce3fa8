// Random, truncated, mutated and replayed handshakes at a listening port.
//
//   fuzz_listener INPUTS SEED
//
// A recorded honest exchange is the corpus. Throughout, and at the end, honest
// peers must still get in, nothing may be admitted without the secret, and no
// descriptor or half-open connection may be left behind.
#include <arpa/inet.h>
#include <dirent.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <random>
#include <string>

#include "../../csrc/comm/handshake.hpp"
#include "ranks.hpp"

namespace {

int count_descriptors() {
  DIR* folder = opendir("/proc/self/fd");
  int n = 0;
  while (readdir(folder) != nullptr) ++n;
  closedir(folder);
  return n;
}

int dial(const Peer& peer, bool unix_socket) {
  const int fd = socket(unix_socket ? AF_UNIX : AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  int rc;
  if (unix_socket) {
    sockaddr_un name{};
    name.sun_family = AF_UNIX;
    std::memcpy(name.sun_path + 1, peer.unix_name.data(), peer.unix_name.size());
    rc = connect(fd, reinterpret_cast<sockaddr*>(&name),
                 socklen_t(offsetof(sockaddr_un, sun_path) + 1 + peer.unix_name.size()));
  } else {
    sockaddr_in name{};
    name.sin_family = AF_INET;
    name.sin_port = htons(uint16_t(peer.port));
    inet_pton(AF_INET, peer.ip.c_str(), &name.sin_addr);
    rc = connect(fd, reinterpret_cast<sockaddr*>(&name), sizeof name);
    const linger hard{1, 0};  // no TIME_WAIT: a million connections from one port range
    setsockopt(fd, SOL_SOCKET, SO_LINGER, &hard, sizeof hard);
  }
  if (rc != 0) {
    close(fd);
    return -1;
  }
  return fd;
}

void write_some(int fd, const std::string& bytes) {
  (void)!send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
}

// What an honest dialer says, with the listener's answers in between: one relayed exchange.
struct Recording {
  std::string hello;
  std::string proof;
};

Recording record(const Peer& target, const HubConfig& as) {
  const int fd = dial(target, false);
  CHECK(fd >= 0);
  int pair[2];
  CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) == 0);
  fcntl(pair[0], F_SETFL, O_NONBLOCK);
  const Secrets secrets{sha256(as.run_id.data(), as.run_id.size()), as.secret};
  Recording out;
  {
    Handshake honest = Handshake::dial(pair[0], secrets, {as.rank, as.incarnation}, {target.rank, target.incarnation},
                                       [] { return Parts{}; });
    const auto relay = [&](int from, int to, size_t size) {
      std::string bytes(size, 0);
      size_t got = 0;
      while (got < size) {
        const ssize_t n = recv(from, &bytes[got], size - got, 0);
        CHECK(n > 0);
        got += size_t(n);
      }
      if (to >= 0) write_some(to, bytes);
      return bytes;
    };
    honest.advance();
    out.hello = relay(pair[1], fd, sizeof(WireHello));
    relay(fd, pair[1], sizeof(WireChallenge));
    honest.advance();
    out.proof = relay(pair[1], -1, sizeof(WireProof));  // kept, not delivered
  }
  close(pair[1]);
  close(fd);
  return out;
}

std::string mutated(std::string bytes, std::mt19937& random) {
  const int edits = 1 + int(random() % 4);
  for (int i = 0; i < edits && !bytes.empty(); ++i) bytes[random() % bytes.size()] = char(random());
  return bytes;
}

std::string input(const Recording& r, std::mt19937& random) {
  std::string noise(random() % 300, 0);
  for (char& c : noise) c = char(random());
  switch (random() % 8) {
    case 0:
      return noise;
    case 1:
      return r.hello.substr(0, random() % r.hello.size());  // truncated
    case 2:
      return r.hello + r.proof;  // replayed whole
    case 3:
      return mutated(r.hello, random);
    case 4:
      return r.hello + mutated(r.proof, random);
    case 5:
      return r.hello + noise;
    case 6:
      return mutated(r.hello, random) + r.proof;
    default:
      return r.proof + r.hello;
  }
}

void honest_peers_get_in(Ranks& ranks, uint64_t generation) {
  ranks.hubs[1].reset();
  ranks.hubs[1] = ranks.make(1, 4, generation);
  ranks.edit(generation, {0, 1});
  ranks.each({0, 1}, [&](int r) {
    const GroupPtr g = ranks.hubs[size_t(r)]->group("g", {0, 1});
    barrier(ranks.call(r, *g));
  });
}

}  // namespace

int main(int argc, char** argv) {
  const long inputs = argc > 1 ? std::atol(argv[1]) : 20000;
  const unsigned seed = argc > 2 ? unsigned(std::atoi(argv[2])) : 1;
  std::printf("fuzzing the listener: %ld inputs, seed %u\n", inputs, seed);
  Ranks ranks(4, true);
  uint64_t generation = 1;
  honest_peers_get_in(ranks, generation);
  const Peer target = *ranks.hubs[0]->self();
  HubConfig as = ranks.hubs[1]->config();
  as.rank = 2;
  as.incarnation = 1000000;
  const Recording recording = record(target, as);
  std::mt19937 random(seed);
  const int before = count_descriptors();
  std::vector<int> slow;  // connections that say nothing, or half of something, for a while
  for (long i = 0; i < inputs; ++i) {
    const int fd = dial(target, random() % 2 == 0);
    if (fd < 0) continue;  // backlog full for a moment: that is what a port does
    write_some(fd, input(recording, random));
    if (random() % 64 == 0 && slow.size() < 200) {
      slow.push_back(fd);
    } else {
      close(fd);
    }
    if (slow.size() == 200) {
      for (int s : slow) close(s);
      slow.clear();
    }
    if (i % std::max(inputs / 10, 1l) == 0) honest_peers_get_in(ranks, ++generation);
  }
  for (int s : slow) close(s);
  honest_peers_get_in(ranks, ++generation);
  const auto patience = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  while ((ranks.hubs[0]->counters()["half_way"] > 0 || count_descriptors() > before) &&
         std::chrono::steady_clock::now() < patience) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  const auto counters = ranks.hubs[0]->counters();
  for (const auto& [name, n] : counters) std::printf("  %s %llu\n", name.c_str(), static_cast<unsigned long long>(n));
  CHECK(counters.at("half_way") == 0);
  CHECK(count_descriptors() <= before);
  CHECK(ranks.hubs[0]->transport(2) == "none");  // nobody got in as rank 2
  uint64_t refused = 0;
  for (const auto& [name, n] : counters) refused += name == "half_way" ? 0 : n;
  CHECK(refused > uint64_t(inputs) / 2);
  std::printf("nothing got in, nothing was left\n");
  return 0;
}
