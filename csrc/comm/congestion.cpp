#include "congestion.hpp"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <cstring>

namespace elastic::comm {

std::string congestion_control(int socket) {
  char name[64] = {};
  socklen_t size = sizeof name - 1;
  return getsockopt(socket, IPPROTO_TCP, TCP_CONGESTION, name, &size) == 0 ? std::string(name) : std::string();
}

bool set_congestion_control(int socket, const std::string& name) {
  return setsockopt(socket, IPPROTO_TCP, TCP_CONGESTION, name.data(), socklen_t(name.size())) == 0;
}

bool use_plain_congestion_control(int socket) {
  return set_congestion_control(socket, "reno");
}

bool stays_on_host(int socket) {
  sockaddr_storage here{}, there{};
  socklen_t size = sizeof here;
  if (getsockname(socket, reinterpret_cast<sockaddr*>(&here), &size) != 0) return false;
  size = sizeof there;
  if (getpeername(socket, reinterpret_cast<sockaddr*>(&there), &size) != 0) return false;
  if (here.ss_family == AF_INET6) {
    const auto& from = reinterpret_cast<const sockaddr_in6&>(here).sin6_addr;
    const auto& to = reinterpret_cast<const sockaddr_in6&>(there).sin6_addr;
    return std::memcmp(&from, &to, sizeof to) == 0;
  }
  const auto from = reinterpret_cast<const sockaddr_in&>(here).sin_addr.s_addr;
  const auto to = reinterpret_cast<const sockaddr_in&>(there).sin_addr.s_addr;
  return from == to || ntohl(to) >> 24 == IN_LOOPBACKNET;
}

}  // namespace elastic::comm
