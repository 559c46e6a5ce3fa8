#include "handshake.hpp"

#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "errors.hpp"

namespace elastic::comm {
namespace {

constexpr uint32_t kMagic = 0x454c4b31;
constexpr uint32_t kVersion = 1;
constexpr size_t kDescriptors = 3;
constexpr uint64_t kSmallestRing = 4 << 10;
constexpr uint64_t kLargestRing = 16 << 20;  // what a dialer can make its listener allocate

template <typename T>
T parse(const std::string& bytes) {
  T value;
  std::memcpy(&value, bytes.data(), sizeof value);
  return value;
}

}  // namespace

void random_bytes(void* into, size_t size) {
  auto* p = static_cast<char*>(into);
  while (size > 0) {
    const ssize_t n = getrandom(p, size, 0);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) throw CommError("the system gave no random numbers");
    p += n;
    size -= size_t(n);
  }
}

Handshake::Handshake(int socket, const Secrets& secrets, Identity self)
    : socket_(socket), secrets_(secrets), self_(self) {}

Handshake::Handshake(Handshake&& o) noexcept
    : socket_(std::exchange(o.socket_, -1)),
      secrets_(std::move(o.secrets_)),
      self_(o.self_),
      peer_(o.peer_),
      dialer_(o.dialer_),
      unix_socket_(o.unix_socket_),
      step_(o.step_),
      refusal_(o.refusal_),
      admit_(std::move(o.admit_)),
      own_fn_(std::move(o.own_fn_)),
      transcript_(std::move(o.transcript_)),
      in_(std::move(o.in_)),
      out_(std::move(o.out_)),
      out_at_(o.out_at_),
      out_descriptors_(std::move(o.out_descriptors_)),
      own_parts_(std::move(o.own_parts_)),
      peer_parts_(std::move(o.peer_parts_)) {
  o.peer_parts_.descriptors.clear();
}

Handshake::~Handshake() {
  if (socket_ >= 0) close(socket_);
  for (int fd : peer_parts_.descriptors) close(fd);
}

int Handshake::take_socket() {
  return std::exchange(socket_, -1);
}
Parts Handshake::take_peer_parts() {
  return std::exchange(peer_parts_, Parts{});
}
Parts Handshake::take_own_parts() {
  return std::exchange(own_parts_, Parts{});
}

Handshake Handshake::dial(int socket, const Secrets& secrets, Identity self, Identity peer,
                          std::function<Parts()> own) {
  Handshake h(socket, secrets, self);
  h.dialer_ = true;
  h.peer_ = peer;
  h.own_fn_ = [own = std::move(own)](uint64_t) { return own(); };
  WireHello hello{};
  hello.magic = kMagic;
  hello.version = kVersion;
  std::memcpy(hello.run, secrets.run.data(), 32);
  hello.from_rank = self.rank;
  hello.to_rank = peer.rank;
  hello.from_incarnation = self.incarnation;
  hello.to_incarnation = peer.incarnation;
  random_bytes(hello.nonce, sizeof hello.nonce);
  h.queue(&hello, sizeof hello);
  h.step_ = Step::Challenge;
  return h;
}

Handshake Handshake::accept(int socket, const Secrets& secrets, Identity self, bool unix_socket,
                            std::function<Refusal(Identity)> admit, std::function<Parts(uint64_t)> own) {
  Handshake h(socket, secrets, self);
  h.unix_socket_ = unix_socket;
  h.admit_ = std::move(admit);
  h.own_fn_ = std::move(own);
  return h;
}

Digest Handshake::prove(const char* label) const {
  const std::string said = std::string(label) + transcript_;
  return hmac_sha256(secrets_.secret, said.data(), said.size());
}

void Handshake::queue(const void* data, size_t size, const std::vector<int>* descriptors) {
  out_.assign(static_cast<const char*>(data), size);
  out_at_ = 0;
  transcript_.append(out_);
  if (descriptors != nullptr) out_descriptors_ = *descriptors;
}

bool Handshake::write_out() {
  while (out_at_ < out_.size()) {
    iovec part{out_.data() + out_at_, out_.size() - out_at_};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * kDescriptors)] = {};
    if (!out_descriptors_.empty()) {
      message.msg_control = control;
      message.msg_controllen = CMSG_SPACE(sizeof(int) * out_descriptors_.size());
      cmsghdr* c = CMSG_FIRSTHDR(&message);
      c->cmsg_level = SOL_SOCKET;
      c->cmsg_type = SCM_RIGHTS;
      c->cmsg_len = CMSG_LEN(sizeof(int) * out_descriptors_.size());
      std::memcpy(CMSG_DATA(c), out_descriptors_.data(), sizeof(int) * out_descriptors_.size());
    }
    const ssize_t n = sendmsg(socket_, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n < 0) {
      if (errno == EINTR) continue;
      if (errno == EAGAIN || errno == EWOULDBLOCK) return true;
      return false;
    }
    out_descriptors_.clear();
    out_at_ += size_t(n);
  }
  return true;
}

// Fills in_ up to `size`; descriptors that come along are kept (and closed with us).
bool Handshake::read_in(size_t size, bool* closed) {
  while (in_.size() < size) {
    char buffer[256];
    iovec part{buffer, std::min(sizeof buffer, size - in_.size())};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * kDescriptors)];
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    const ssize_t n = recvmsg(socket_, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return false;
    if (n <= 0) {
      *closed = true;
      return false;
    }
    for (cmsghdr* c = CMSG_FIRSTHDR(&message); c != nullptr; c = CMSG_NXTHDR(&message, c)) {
      if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS) continue;
      const size_t count = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
      for (size_t i = 0; i < count; ++i) {
        int fd;
        std::memcpy(&fd, CMSG_DATA(c) + i * sizeof(int), sizeof fd);
        peer_parts_.descriptors.push_back(fd);
      }
    }
    if (peer_parts_.descriptors.size() > kDescriptors) {
      *closed = true;
      return false;
    }
    in_.append(buffer, size_t(n));
  }
  return true;
}

Handshake::Progress Handshake::fail(Refusal why) {
  if (refusal_ == Refusal::None) refusal_ = why;
  return Progress::Failed;
}

Handshake::Progress Handshake::on_hello() {
  const auto hello = parse<WireHello>(in_);
  if (hello.magic != kMagic || hello.version != kVersion) return fail(Refusal::Garbage);
  if (std::memcmp(hello.run, secrets_.run.data(), 32) != 0) return fail(Refusal::WrongRun);
  if (hello.to_rank != self_.rank || hello.to_incarnation != self_.incarnation) return fail(Refusal::WrongTarget);
  peer_ = {hello.from_rank, hello.from_incarnation};
  const Refusal judged = admit_(peer_);
  if (judged != Refusal::None) return fail(judged);
  transcript_.append(in_);
  WireChallenge challenge{};
  random_bytes(challenge.nonce, sizeof challenge.nonce);
  transcript_.append(reinterpret_cast<const char*>(challenge.nonce), sizeof challenge.nonce);
  const Digest proof = prove("challenge");
  transcript_.resize(transcript_.size() - sizeof challenge.nonce);
  std::memcpy(challenge.proof, proof.data(), proof.size());
  queue(&challenge, sizeof challenge);
  step_ = Step::Proof;
  return Progress::Again;
}

Handshake::Progress Handshake::on_challenge() {
  const auto challenge = parse<WireChallenge>(in_);
  transcript_.append(in_, 0, sizeof challenge.nonce);
  Digest given;
  std::memcpy(given.data(), challenge.proof, given.size());
  if (!equal_constant_time(given, prove("challenge"))) return fail(Refusal::BadProof);
  transcript_.append(in_, sizeof challenge.nonce, sizeof challenge.proof);
  own_parts_ = own_fn_(0);
  WireProof answer{};
  answer.ring_bytes = own_parts_.ring_bytes;
  transcript_.append(reinterpret_cast<const char*>(&answer.ring_bytes), sizeof answer.ring_bytes);
  const Digest proof = prove("proof");
  transcript_.resize(transcript_.size() - sizeof answer.ring_bytes);
  std::memcpy(answer.proof, proof.data(), proof.size());
  queue(&answer, sizeof answer, &own_parts_.descriptors);
  step_ = Step::Welcome;
  return Progress::Again;
}

Handshake::Progress Handshake::on_proof() {
  const auto answer = parse<WireProof>(in_);
  transcript_.append(in_, 0, sizeof answer.ring_bytes);
  Digest given;
  std::memcpy(given.data(), answer.proof, given.size());
  if (!equal_constant_time(given, prove("proof"))) return fail(Refusal::BadProof);
  transcript_.append(in_, sizeof answer.ring_bytes, sizeof answer.proof);
  const bool shared = answer.ring_bytes != 0;
  if (shared && (!unix_socket_ || peer_parts_.descriptors.size() != kDescriptors || answer.ring_bytes > kLargestRing ||
                 answer.ring_bytes < kSmallestRing || answer.ring_bytes < kSmallestRing ||
                 (answer.ring_bytes & (answer.ring_bytes - 1)) != 0)) {
    return fail(Refusal::Garbage);
  }
  peer_parts_.ring_bytes = answer.ring_bytes;
  own_parts_ = own_fn_(answer.ring_bytes);
  WireWelcome welcome{};
  welcome.ring_bytes = own_parts_.ring_bytes;
  transcript_.append(reinterpret_cast<const char*>(&welcome.ring_bytes), sizeof welcome.ring_bytes);
  const Digest proof = prove("welcome");
  transcript_.resize(transcript_.size() - sizeof welcome.ring_bytes);
  std::memcpy(welcome.proof, proof.data(), proof.size());
  queue(&welcome, sizeof welcome, &own_parts_.descriptors);
  step_ = Step::Sending;
  return Progress::Again;
}

Handshake::Progress Handshake::on_welcome() {
  const auto welcome = parse<WireWelcome>(in_);
  transcript_.append(in_, 0, sizeof welcome.ring_bytes);
  Digest given;
  std::memcpy(given.data(), welcome.proof, given.size());
  if (!equal_constant_time(given, prove("welcome"))) return fail(Refusal::BadProof);
  // The peer has no shared memory left: both sides use the socket itself.
  if (welcome.ring_bytes != 0 && welcome.ring_bytes != own_parts_.ring_bytes) return fail(Refusal::Garbage);
  if (welcome.ring_bytes != 0 && peer_parts_.descriptors.size() != kDescriptors) return fail(Refusal::Garbage);
  peer_parts_.ring_bytes = welcome.ring_bytes;
  step_ = Step::Done;
  return Progress::Done;
}

Handshake::Progress Handshake::consume() {
  switch (step_) {
    case Step::Hello:
      return on_hello();
    case Step::Challenge:
      return on_challenge();
    case Step::Proof:
      return on_proof();
    default:
      return on_welcome();
  }
}

Handshake::Progress Handshake::advance() {
  for (;;) {
    if (!write_out()) return fail(Refusal::Closed);
    if (wants_write()) return Progress::Again;
    if (step_ == Step::Sending) step_ = Step::Done;
    if (step_ == Step::Done) return Progress::Done;
    const size_t expected = step_ == Step::Hello       ? sizeof(WireHello)
                            : step_ == Step::Challenge ? sizeof(WireChallenge)
                                                       : sizeof(WireProof);
    bool closed = false;
    if (!read_in(expected, &closed)) return closed ? fail(Refusal::Closed) : Progress::Again;
    const Progress progress = consume();
    in_.clear();
    if (progress != Progress::Again) return progress;
  }
}

}  // namespace elastic::comm
