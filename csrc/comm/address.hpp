// A numeric address and port, of IPv4 or IPv6, as the socket calls take it.
#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <cstring>
#include <string>

#include "errors.hpp"

namespace elastic::comm {

class SocketAddress {
 public:
  // Throws CommError when `text` is neither an IPv4 nor an IPv6 address.
  SocketAddress(const std::string& text, int port) {
    auto* v4 = reinterpret_cast<sockaddr_in*>(&name_);
    auto* v6 = reinterpret_cast<sockaddr_in6*>(&name_);
    if (inet_pton(AF_INET, text.c_str(), &v4->sin_addr) == 1) {
      v4->sin_family = AF_INET;
      v4->sin_port = htons(uint16_t(port));
    } else if (inet_pton(AF_INET6, text.c_str(), &v6->sin6_addr) == 1) {
      v6->sin6_family = AF_INET6;
      v6->sin6_port = htons(uint16_t(port));
    } else {
      throw CommError("neither an IPv4 nor an IPv6 address: " + text);
    }
  }

  // For accept() to fill.
  SocketAddress() = default;

  sockaddr* get() { return reinterpret_cast<sockaddr*>(&name_); }
  socklen_t size() const { return family() == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6); }
  socklen_t capacity() const { return sizeof name_; }
  int family() const { return name_.ss_family; }
  // The address without the port, in the kernel's form; empty unless it is IPv4 or IPv6.
  std::string host() const {
    if (family() == AF_INET) return bytes(reinterpret_cast<const sockaddr_in*>(&name_)->sin_addr);
    if (family() == AF_INET6) return bytes(reinterpret_cast<const sockaddr_in6*>(&name_)->sin6_addr);
    return {};
  }
  int port() const {
    return ntohs(family() == AF_INET ? reinterpret_cast<const sockaddr_in*>(&name_)->sin_port
                                     : reinterpret_cast<const sockaddr_in6*>(&name_)->sin6_port);
  }

 private:
  template <typename T>
  static std::string bytes(const T& value) {
    return {reinterpret_cast<const char*>(&value), sizeof value};
  }

  sockaddr_storage name_{};
};

}  // namespace elastic::comm
