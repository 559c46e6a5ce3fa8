#include "silence.hpp"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>
#include <cmath>

namespace elastic::comm {
namespace {

constexpr int kQuestions = 3;  // without an answer; with the idle time before the first, four equal parts

void set(int socket, int level, int name, int value) {
  setsockopt(socket, level, name, &value, sizeof value);
}

}  // namespace

void ask_when_idle(int socket, double seconds) {
  const int part = std::max(1, int(std::lround(seconds / (kQuestions + 1))));
  set(socket, IPPROTO_TCP, TCP_KEEPIDLE, part);
  set(socket, IPPROTO_TCP, TCP_KEEPINTVL, part);
  set(socket, IPPROTO_TCP, TCP_KEEPCNT, kQuestions);
  set(socket, SOL_SOCKET, SO_KEEPALIVE, 1);
}

void limit_unacknowledged(int socket, double seconds) {
  set(socket, IPPROTO_TCP, TCP_USER_TIMEOUT, int(seconds * 1000));
}

bool is_silent(int socket, double seconds) {
  tcp_info info{};
  socklen_t size = sizeof info;
  if (getsockopt(socket, IPPROTO_TCP, TCP_INFO, &info, &size) != 0) return false;
  return info.tcpi_unacked > 0 && info.tcpi_last_ack_recv >= seconds * 1000;
}

}  // namespace elastic::comm
