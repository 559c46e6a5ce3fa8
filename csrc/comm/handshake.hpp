// Handshake: the four messages that open a link.
//
//   Hello      dialer → listener   run, (rank, incarnation) of both, nonce
//   Challenge  listener → dialer   nonce, proof of the secret over both messages
//   Proof      dialer → listener   proof over both, ring size; Unix: its descriptors
//   Welcome    listener → dialer   proof over all;              Unix: its descriptors
//
// Each proof is HMAC-SHA256 with the job's secret over everything said so far,
// so a recorded exchange is worthless (fresh nonces), and neither side learns
// more than that the other knows the secret. All messages have fixed sizes: a
// stranger can make us read at most a few hundred bytes. A state machine driven
// by the thread that polls the socket; never blocks.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "sha256.hpp"

namespace elastic::comm {

struct Identity {
  int32_t rank = 0;
  uint64_t incarnation = 0;
};

struct Secrets {
  Digest run;          // SHA-256 of the run's id
  std::string secret;  // shared by the processes of the job
};

// Why a connection was turned away; counted by the listener.
enum class Refusal { None, Garbage, WrongRun, WrongTarget, Stale, BadProof, Duplicate, Closed, Slow };

struct WireHello {
  uint32_t magic, version;
  uint8_t run[32];
  int32_t from_rank, to_rank;
  uint64_t from_incarnation, to_incarnation;
  uint8_t nonce[16];
};
struct WireChallenge {
  uint8_t nonce[16];
  uint8_t proof[32];
};
struct WireProof {
  uint64_t ring_bytes;  // 0 on TCP
  uint8_t proof[32];
};
using WireWelcome = WireProof;

// The attachment of Proof and Welcome on a Unix socket.
struct Parts {
  uint64_t ring_bytes = 0;
  std::vector<int> descriptors;
};

class Handshake {
 public:
  enum class Progress { Again, Done, Failed };

  // Dialer's side. `own` is called once the listener has proved itself.
  static Handshake dial(int socket, const Secrets& secrets, Identity self, Identity peer, std::function<Parts()> own);
  // Listener's side. `admit` judges the claimed identity before any proof is given.
  static Handshake accept(int socket, const Secrets& secrets, Identity self, bool unix_socket,
                          std::function<Refusal(Identity)> admit, std::function<Parts(uint64_t ring_bytes)> own);
  Handshake(Handshake&&) noexcept;
  Handshake& operator=(Handshake&&) = delete;
  ~Handshake();  // closes the socket and received descriptors unless taken

  Progress advance();  // Does what the socket allows now.
  bool wants_write() const { return out_at_ < out_.size(); }
  int socket() const { return socket_; }
  int take_socket();
  Identity peer() const { return peer_; }
  Refusal refusal() const { return refusal_; }
  Parts take_peer_parts();
  Parts take_own_parts();

 private:
  enum class Step { Hello, Challenge, Proof, Welcome, Sending, Done };
  Handshake(int socket, const Secrets& secrets, Identity self);
  void queue(const void* data, size_t size, const std::vector<int>* descriptors = nullptr);
  bool write_out();
  bool read_in(size_t size, bool* closed);
  Progress fail(Refusal why);
  Progress consume();
  Progress on_hello();
  Progress on_challenge();
  Progress on_proof();
  Progress on_welcome();
  Digest prove(const char* label) const;

  int socket_;
  Secrets secrets_;
  Identity self_;
  Identity peer_;
  bool dialer_ = false;
  bool unix_socket_ = false;
  Step step_ = Step::Hello;
  Refusal refusal_ = Refusal::None;
  std::function<Refusal(Identity)> admit_;
  std::function<Parts(uint64_t)> own_fn_;
  std::string transcript_;
  std::string in_;
  std::string out_;
  size_t out_at_ = 0;
  std::vector<int> out_descriptors_;
  Parts own_parts_;
  Parts peer_parts_;
};

void random_bytes(void* into, size_t size);

}  // namespace elastic::comm
