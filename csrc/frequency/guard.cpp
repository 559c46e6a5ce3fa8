// See guard.h. Signals that end a job do not end the guard: it ends with its owner.
#include "guard.h"

#include <poll.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <system_error>

#include "driver.h"

namespace megatron_elastic::frequency {

bool guard(int owner, const std::string& kind, const std::string& device, const std::string& path,
           const std::string& snapshot) {
  for (const int signal : {SIGTERM, SIGINT, SIGHUP, SIGPIPE}) std::signal(signal, SIG_IGN);
  std::unique_ptr<Driver> driver;
  std::string said = "ready";
  try {
    driver = open_driver(kind, device, path);
    driver->claim();
    if (driver->snapshot() != snapshot) said = "another process set these clocks meanwhile";
  } catch (const std::exception& error) {
    said = error.what();
  }
  const std::string line = said + "\n";
  if (write(STDOUT_FILENO, line.data(), line.size()) != static_cast<ssize_t>(line.size())) return false;
  if (said != "ready") return false;  // nothing will be set
  bool listening = true;
  for (;;) {
    // A closed standard input is no evidence of the owner's end: only the pidfd is.
    pollfd watched[2] = {{owner, POLLIN, 0}, {listening ? STDIN_FILENO : -1, POLLIN, 0}};
    if (poll(watched, 2, -1) < 0) {
      if (errno == EINTR) continue;
      throw std::system_error(errno, std::generic_category(), "poll");
    }
    if (watched[1].revents) {
      char byte;
      if (read(STDIN_FILENO, &byte, 1) > 0) return false;
      listening = false;
    }
    if (watched[0].revents) {
      driver->restore(snapshot);
      return true;
    }
  }
}

}  // namespace megatron_elastic::frequency
