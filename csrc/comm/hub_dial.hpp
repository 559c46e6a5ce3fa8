// One attempt to open a link from this side: a socket that connects, then a handshake.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <utility>

#include "hub.hpp"

namespace elastic::comm {

struct Hub::Dial {
  Hub& hub;
  Peer peer;
  std::unique_ptr<Negotiation> negotiation;
  int connecting = -1;         // socket not connected yet
  Clock::time_point again{};   // when to try next, while neither of the two
  std::chrono::milliseconds pause{3};
  // Turned away, or the other side's backlog is full. Twice as late each time, up to a limit.
  void later() {
    constexpr std::chrono::milliseconds kLongest{50};
    again = Clock::now() + pause;
    pause = std::min(2 * pause, kLongest);
  }
  Clock::time_point asked = Clock::now();  // for the first time since its host has answered
  bool silent(double seconds) const {
    return !over && !negotiation && Clock::now() - asked >= std::chrono::duration<double>(seconds);
  }
  bool ready = false;
  int fd() const { return connecting >= 0 ? connecting : (negotiation ? negotiation->handshake.socket() : -1); }
  bool over = false;  // kept to the end of the edit: dialing_ names the ranks that must not dial us
  void end() {
    over = true;
    if (connecting >= 0) ::close(std::exchange(connecting, -1));
    negotiation.reset();
  }
  // With may_dial's leave, which counted it in dialing_.
  Dial(Hub& h, Peer p) : hub(h), peer(std::move(p)) {}
  ~Dial() {
    if (connecting >= 0) ::close(connecting);
    std::lock_guard<std::mutex> lock(hub.parked_mutex_);
    if (--hub.dialing_[peer.rank] == 0) hub.dialing_.erase(peer.rank);
  }
};

}  // namespace elastic::comm
