// Long messages beside the steps of a job: in pieces, the next one when the receiver has confirmed the last.
//
// A link is one queue: a message of a step waits until all data before it has been sent, so of a long message one
// piece at most lies there. No thread runs for a piece: the thread that takes in messages, a step's wait or the
// progress thread, hears of a confirmation and hands the next piece over. The caller sleeps meanwhile, and is not
// counted in what this process waits for.
//
// Within one generation. A message of one piece needs no confirmation. Memory handed in is kept by whatever still
// refers to it, so a channel may be given up at any time.
#pragma once

#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>

#include "hub.hpp"
#include "p2p.hpp"

namespace elastic::comm {

class SideChannel : public std::enable_shared_from_this<SideChannel> {
 public:
  // `group`: whose living members talk here; `number` tells channels of one generation apart. `beside`, `hurried`:
  // unconfirmed pieces to one receiver, beside a step and where all ranks wait. The hub must outlive all calls.
  SideChannel(Hub& hub, GroupPtr group, uint32_t number, size_t piece_bytes, int beside, int hurried);

  // One thread at a time for each peer and direction. Until the memory may be written again (send) or read (receive);
  // throws what the links throw, and CommError once the channel is given up.
  void send(int to, const char* data, size_t size, const Keep& keep);
  void receive(int from, char* into, size_t size, const Keep& keep);
  // Until `to` has confirmed everything: nothing of this channel is left on the way there.
  void drain(int to);
  // From now on all ranks wait for these messages.
  void hurry();
  // Ends every wait, from any thread.
  void give_up();
  // Pieces handed over that `to` has not confirmed.
  int under_way(int to) const;

 private:
  struct Piece {
    const char* data = nullptr;
    size_t size = 0;
    bool confirmed = false;  // whether a confirmation is to come
    Keep keep;
  };
  struct Outgoing {
    std::deque<Piece> queue;
    int unsent = 0;  // handed over, and their memory still being read
    int unconfirmed = 0;
    bool pushing = false;  // one thread hands pieces over, in their order
  };

  Key key(bool confirmation) const;
  Link& link_to(int rank) const;
  void push(int to);
  bool next(int to, Piece* piece);
  void hand_over(int to, const Piece& piece);
  void expect_confirmation(int to);
  void confirm(int from);
  void expect_piece(int from, char* into, size_t size, bool confirm, const Keep& keep);
  void fail(const std::exception_ptr& error);
  void await(const std::function<bool()>& done);

  Hub& hub_;  // alive during every call, and whenever a message ends
  const GroupPtr group_;
  const uint64_t generation_;
  const uint32_t number_;
  const size_t piece_bytes_;
  const int hurried_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  int allowed_;
  bool given_up_ = false;
  std::exception_ptr error_;  // the first: the channel is of no use any more
  std::map<int, Outgoing> outgoing_;
  std::map<int, size_t> incoming_;  // pieces of the present message that are still to come
};

}  // namespace elastic::comm
