// One pair of incarnations: an ordered stream of frames each way.
//
// Matching, ordering and failure are here; how bytes travel is the transport's
// (link_shm, link_tcp). A link is used by many threads: `tx` serialises what is
// sent, `rx` what arrives. Lock order: rx → tx → leaves (outbox, wake-up).
//
// Data from a peer is bounded here: bytes that no receive has asked for by
// kEagerBytes, other messages by number (frame.hpp). A peer that breaks these
// rules, or the format, breaks the link: what is pending ends with PeerLost.
//
// A broken link stays readable until what had arrived is consumed; then all that
// is pending on it ends with PeerLost.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "buffers.hpp"
#include "frame.hpp"
#include "lent_memory.hpp"
#include "message.hpp"

namespace elastic::comm {

// The services that a link needs from its process.
class LinkHost {
 public:
  virtual ~LinkHost() = default;
  virtual uint64_t generation() const = 0;
  virtual void block_returned(uint32_t block) = 0;
  virtual LentMemory* lent_memory() = 0;         // null: none is lent
  virtual void group_aborted(uint64_t group, int lost) = 0;
  virtual BufferPool& buffers() = 0;
  virtual void wake_local() = 0;                 // some message ended: threads asleep look again
  virtual void background_changed(int by) = 0;   // messages the progress thread looks after
};

class Link;

// The loans of one peer process to this one that are not over, whichever link they came over.
struct HeldLoans {
  std::mutex mutex;  // lock order: rx → this → tx
  std::vector<size_t> offsets;  // in the peer's memory
  std::weak_ptr<Link> latest;   // the link that took over last; empty if none has
};

class Link : public std::enable_shared_from_this<Link> {
 public:
  Link(LinkHost& host, int rank, uint64_t incarnation);
  virtual ~Link();
  Link(const Link&) = delete;
  Link& operator=(const Link&) = delete;

  const int rank;
  const uint64_t incarnation;

  virtual const char* transport() const = 0;
  virtual int socket() const = 0;
  virtual bool talks_on_socket() const = 0;        // else anything to read there is an end or garbage
  virtual bool has_input() const = 0;              // without a lock; may err towards false on sockets
  virtual bool reads_in_place() const { return false; }  // Reference frames work
  virtual bool still(uint64_t generation) const = 0;     // see outbox.hpp
  virtual void doorbell() = 0;                     // wakes the peer if it sleeps
  virtual void watch(int epoll) = 0;               // registers the socket, data = rank
  virtual void unwatch() = 0;
  virtual bool watched() = 0;                      // an end shows in the poll; else ask with probe()
  virtual void socket_event(uint32_t events) = 0;

  // Queues `send` behind what is queued and pushes what fits. The doorbell is the caller's.
  void send(const SendPtr& send);
  // One small frame with nothing to wait for, pushed or queued with a copy of its payload.
  void send_small(const Key& key, const void* data, size_t size);
  // Block `block` of this process's outbox, which begins at `offset`.
  void send_reference(const Key& key, uint32_t block, size_t offset, size_t size);
  void send_ack(uint32_t block);
  // A message that lies in memory to be lent; whether it was sent so. It ends at once, while the loan goes on.
  bool lend(const SendPtr& send);
  // A loan that came over this link is over. The lender is told by the link that has taken over since, if one has.
  void return_loan(size_t offset);
  const std::shared_ptr<HeldLoans>& loans() const { return loans_; }
  // Before anything is received here: loans that came over the links before this one go on.
  void take_over(const std::shared_ptr<HeldLoans>& loans);
  // From now on nothing is sent, and the host is left alone: for links that their hub lets go.
  void leave();
  void send_abort(uint64_t group, int lost);
  void post(const RecvPtr& recv);
  // The memory is the caller's again. A message that had begun to arrive there is dropped with it.
  void cancel(const RecvPtr& recv, const std::exception_ptr& error);
  void cancel(const SendPtr& send, const std::exception_ptr& error);
  // For a receive from any source that another link has released: a message may have come meanwhile.
  void look_again(const RecvPtr& recv);

  bool pump();   // Takes in what has arrived, up to some megabytes; whether there was anything.
  bool flush();  // Pushes what is queued; whether anything moved.
  // Broken, and everything that had arrived was taken in.
  bool finished() const { return failed_all_.load(std::memory_order_acquire); }
  bool needs_flush() const { return queued_.load(std::memory_order_acquire); }
  bool dead() const { return dead_.load(std::memory_order_acquire); }
  void mark_dead(const std::string& why);
  // Likewise, for the error of a socket: after some, the peer's host was silent.
  void mark_dead(int error, const std::string& why);
  void mark_silent();
  bool silent() const { return silent_.load(std::memory_order_acquire); }
  // Asks the socket, which no thread may have read for a while.
  void probe();
  // Ends everything pending with `error`; frames of older generations are void from now on.
  void purge(const std::exception_ptr& error);

 protected:
  enum class Gate { Open, Shut };
  // --- for transports; under the tx lock ---
  virtual bool push_frame(const FrameHeader& header, const char* payload, size_t size) = 0;
  virtual size_t largest_payload() const = 0;
  virtual bool drained() { return true; }           // nothing of the last frame refers to user memory
  virtual void detach() {}                           // copies what is left of the last frame
  virtual void waiting_for_room(bool) {}
  // --- for transports; under the rx lock ---
  virtual bool pump_frames() = 0;                    // calls gate / begin / end for each frame
  virtual const char* peer_data(size_t, size_t) const { return nullptr; }  // in its outbox
  virtual void redirect() {}                         // the memory begin() returned is gone: discard the rest
  static constexpr size_t kPumpBytes = 2 << 20;  // one call takes in no more: its caller has a time-out to look at
  Gate gate(const FrameHeader& header) const;
  char* begin(const FrameHeader& header);  // where the payload goes; null: discard
  void end(const FrameHeader& header);
  void malformed(const char* what);  // Breaks the link; nothing more is taken in.
  bool rejected() const { return rejected_; }

  LinkHost& host_;

 private:
  struct Arrived {
    BufferPool::Buffer heap;
    size_t total = 0;
    size_t got = 0;
    int block = -1;
    bool lent = false;   // until it is received, or handed back
    size_t offset = 0;   // of that block, or of what is lent
    uint32_t offer = 0;  // its bytes are still with the sender
    RecvPtr claimed;  // posted while the rest was still coming
    bool complete() const { return offer == 0 && got == total; }
    bool bodiless() const { return block >= 0 || lent || offer != 0; }
  };
  using ArrivedPtr = std::shared_ptr<Arrived>;

  // --- sending; under tx ---
  void send_control(const FrameHeader& header);
  void send_copied(const FrameHeader& header, const void* payload, size_t size);
  SendPtr queue_control(const FrameHeader& header, std::deque<SendPtr>::iterator before);
  void withdraw(const SendPtr& send);
  void queue_message(const SendPtr& send);
  bool admit(const SendPtr& send);
  void admit_waiting();
  bool push_message(Send& send, bool* moved);
  bool flush_locked();
  void taken(uint32_t offer);
  void drop_sends(const std::exception_ptr& error, bool for_good);

  // --- receiving; under rx ---
  void acknowledge(uint32_t block);
  void hand_back(size_t offset, uint16_t flags = 0);
  RecvPtr take_posted(const Key& key);
  bool claim(const RecvPtr& recv);
  void grant(const RecvPtr& recv, uint32_t offer, size_t total);
  void give_back(const RecvPtr& recv);
  void return_credit(size_t total);
  void asked_for(size_t total);
  void forget(const Key& key, const ArrivedPtr& message);
  void complete(const RecvPtr& recv);
  void keep(const Key& key, ArrivedPtr message);
  void begin_message(const FrameHeader& header);
  void end_data(const FrameHeader& header);
  void end_lent(const FrameHeader& header);
  void withdrawn(const FrameHeader& header);
  void order_after_sends();
  void hand_over(const RecvPtr& recv, Arrived& arrived);
  void complete_view(const RecvPtr& recv, uint32_t block, size_t offset, size_t size);
  void complete_loan(const RecvPtr& recv, size_t offset, size_t size);
  void misfit(const RecvPtr& recv, size_t size);
  void drop_receives(const std::exception_ptr& error);

  void finish(const std::shared_ptr<Message>& message, std::exception_ptr error);
  void fail(const RecvPtr& recv, const std::exception_ptr& error);
  void release(const RecvPtr& recv);
  void look_after(Message& message);
  void run_ended();
  void ring_if_asked();
  std::exception_ptr lost();
  void fail_if_dead_locked();

  std::mutex tx_;
  std::deque<SendPtr> queue_;  // flows whatever the peer's receives are
  std::atomic<bool> queued_{false};
  std::unordered_map<uint32_t, SendPtr> offered_;
  std::deque<SendPtr> waiting_;  // no credit, and too many offers already
  size_t credit_ = kEagerBytes;
  uint32_t last_offer_ = 0;

  std::mutex rx_;
  std::unordered_map<Key, std::deque<RecvPtr>, KeyHash> posted_;
  std::unordered_map<Key, std::deque<ArrivedPtr>, KeyHash> arrived_;
  std::unordered_map<uint32_t, RecvPtr> granted_;  // by offer: their bytes are asked for
  RecvPtr current_recv_;  // of the message without an offer that is arriving
  ArrivedPtr current_arrived_;
  Key current_key_;
  const Recv* filling_ = nullptr;  // whose memory the present frame goes to
  size_t unasked_ = 0;  // cost of what is kept with its bytes
  size_t bodiless_ = 0;  // messages kept without
  size_t owed_ = 0;  // credit not returned yet
  bool rejected_ = false;

  std::shared_ptr<HeldLoans> loans_ = std::make_shared<HeldLoans>();

  std::atomic<bool> ring_{false};  // a frame was pushed under rx: the doorbell is due
  std::atomic<bool> dead_{false};
  std::atomic<bool> silent_{false};
  std::atomic<bool> failed_all_{false};
  std::mutex why_mutex_;
  std::string why_;

  std::mutex ended_mutex_;
  std::vector<std::function<void()>> ended_;
};

using LinkPtr = std::shared_ptr<Link>;

}  // namespace elastic::comm
