// Frames of a link: a 64-byte header and up to `length` bytes of payload.
//
// A message is one or more frames with the same key, in order; `offset` and
// `total` place each. A Reference frame carries no payload: it names a block of
// the sender's outbox, which the receiver reads in place and hands back with an
// Ack. A Lend frame names memory that the sender lends (lent_memory.hpp), which
// the receiver has until its Return, whatever the generation. When a link takes
// over from one that broke, the borrower names each loan that goes on (Held), then
// says that these were all (AllHeld): other loans are over, and what was on its way
// when the link broke does not matter. These frames are of no generation. Others of
// an older generation than the receiver's are discarded; frames of a newer one wait
// in the link.
//
// The receiver keeps at most kEagerBytes of messages that it has not asked for.
// A sender counts what it has sent against that; the receiver returns the cost
// of a message (Credit) once a receive has taken it. A message that the credit
// does not cover is offered: Offer takes its place in the order, and its bytes
// follow when a receive has taken the offer (Take). Withdraw ends a message that
// the sender gave up: the receive that had taken it waits for the next one.
#pragma once

#include <cstddef>
#include <cstdint>

namespace elastic::comm {

enum class FrameKind : uint16_t {
  Data = 1,
  Reference,
  Ack,
  Abort,
  Pad,
  Offer,
  Take,
  Withdraw,
  Credit,
  Lend,
  Return,
  Held,
  AllHeld
};

// Which message: the group's identity, and either (sequence, phase) of a
// collective (top bit set) or the tag of a point-to-point message.
struct Key {
  uint64_t group = 0;
  uint64_t tag = 0;
  bool operator==(const Key& o) const { return group == o.group && tag == o.tag; }
};

struct KeyHash {
  size_t operator()(const Key& k) const {
    return size_t((k.group ^ (k.tag * 0x9e3779b97f4a7c15ull)) * 0xd6e8feb86659fd93ull >> 7);
  }
};

constexpr uint64_t kCollectiveBit = 1ull << 63;
constexpr int kPhaseBits = 24;

inline uint64_t collective_tag(uint32_t sequence, uint32_t phase) {
  return kCollectiveBit | uint64_t(sequence) << kPhaseBits | phase;
}

constexpr uint16_t kEarlierLink = 1;  // the loan came over an earlier link

constexpr uint32_t kFrameMagic = 0x45464d32;

constexpr size_t kEagerBytes = 4 << 20;  // not asked for, a link and direction
constexpr size_t kMessageCost = 256;     // of that, what keeping a message takes besides its bytes
constexpr size_t kMostOffers = 4096;     // of one sender, at once
constexpr size_t kMostReferences = 64 << 10;

struct alignas(64) FrameHeader {
  uint32_t magic = kFrameMagic;
  FrameKind kind = FrameKind::Data;
  uint16_t flags = 0;   // Return: kEarlierLink
  uint64_t generation = 0;
  Key key;
  uint64_t offset = 0;  // within the message; Reference: in the outbox; Lend, Return, Held: in the lender's memory
  uint64_t total = 0;
  uint64_t length = 0;   // payload bytes; Reference: bytes in the block; Abort: the lost rank + 1; Credit: bytes
  uint32_t block = 0;    // Reference, Ack
  uint32_t message = 0;  // Offer, Take, Withdraw, Data: the offer; 0: none was made
};
static_assert(sizeof(FrameHeader) == 64, "frames are cache-line sized");

}  // namespace elastic::comm
