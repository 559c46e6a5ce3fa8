// Hashes against published vectors, reductions against plain loops, rings against a model.
#include <sys/mman.h>
#include <unistd.h>

#include <cmath>
#include <cstring>
#include <random>
#include <string>

#include "../../csrc/comm/errors.hpp"
#include "../../csrc/comm/limbs.hpp"
#include "../../csrc/comm/outbox.hpp"
#include "../../csrc/comm/reduce.hpp"
#include "../../csrc/comm/ring.hpp"
#include "../../csrc/comm/sha256.hpp"
#include "../../csrc/comm/shared_memory.hpp"
#include "../../csrc/comm/sizes.hpp"
#include "check.hpp"

using namespace elastic::comm;

namespace {

std::string hex(const Digest& d) {
  std::string out;
  for (uint8_t b : d) {
    out += "0123456789abcdef"[b >> 4];
    out += "0123456789abcdef"[b & 15];
  }
  return out;
}

}  // namespace

TEST(sha256_matches_fips_180_4) {
  CHECK(hex(sha256("", 0)) == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  CHECK(hex(sha256("abc", 3)) == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  const std::string million(1000000, 'a');
  CHECK(hex(sha256(million.data(), million.size())) ==
        "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

TEST(hmac_matches_rfc_4231) {
  CHECK(hex(hmac_sha256("Jefe", "what do ya want for nothing?", 28)) ==
        "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  const std::string key(131, char(0xaa));
  const std::string text = "Test Using Larger Than Block-Size Key - Hash Key First";
  CHECK(hex(hmac_sha256(key, text.data(), text.size())) ==
        "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
}

TEST(sums_are_in_source_order_whatever_the_count) {
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  for (size_t n : {1, 2, 3, 5, 8}) {
    for (size_t count : {1, 7, 64, 1023, 1025, 5000}) {
      std::vector<std::vector<float>> rows(n, std::vector<float>(count));
      for (auto& row : rows) {
        for (float& x : row) x = normal(random) * std::pow(10.f, float(random() % 7) - 3);
      }
      std::vector<float> wanted = rows[0];
      for (size_t k = 1; k < n; ++k) {
        for (size_t i = 0; i < count; ++i) wanted[i] += rows[k][i];
      }
      for (auto kernel :
           {detail::kernel_baseline(DType::F32, ReduceOp::Sum), detail::kernel_avx2(DType::F32, ReduceOp::Sum),
            detail::kernel_avx512(DType::F32, ReduceOp::Sum)}) {
        if (kernel == nullptr) continue;
#if defined(__x86_64__)
        if (kernel == detail::kernel_avx2(DType::F32, ReduceOp::Sum) && !__builtin_cpu_supports("avx2")) continue;
        if (kernel == detail::kernel_avx512(DType::F32, ReduceOp::Sum) && !__builtin_cpu_supports("avx512bw")) continue;
#endif
        for (size_t into = 0; into < n; ++into) {  // in place of any source
          auto copy = rows;
          std::vector<const void*> sources;
          for (auto& row : copy) sources.push_back(row.data());
          kernel(copy[into].data(), sources.data(), n, count);
          CHECK(std::memcmp(copy[into].data(), wanted.data(), count * 4) == 0);
        }
      }
    }
  }
}

TEST(half_and_brain_floats_round_once_to_nearest_even) {
  // Every half value survives a round trip, and one + 2^-11 rounds to even.
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const auto value = uint16_t(bits);
    uint16_t out = 0;
    const void* one[] = {&value};
    reduce(DType::F16, ReduceOp::Sum, &out, one, 1, 1);
    const bool nan = (bits & 0x7c00) == 0x7c00 && (bits & 0x3ff) != 0;
    CHECK(nan ? (out & 0x7c00) == 0x7c00 && (out & 0x3ff) != 0 : out == value);
    reduce(DType::BF16, ReduceOp::Sum, &out, one, 1, 1);
    const bool brain_nan = (bits & 0x7f80) == 0x7f80 && (bits & 0x7f) != 0;
    CHECK(brain_nan ? (out & 0x7f80) == 0x7f80 && (out & 0x7f) != 0 : out == value);
  }
  const uint16_t a = 0x3c00, b = 0x1000, c = 0x3c01;  // 1, 2^-11, 1 + 2^-10
  uint16_t out = 0;
  const void* tie[] = {&a, &b};
  reduce(DType::F16, ReduceOp::Sum, &out, tie, 2, 1);
  CHECK(out == 0x3c00);
  const void* up[] = {&c, &b};
  reduce(DType::F16, ReduceOp::Sum, &out, up, 2, 1);
  CHECK(out == 0x3c02);
  const void* kept[] = {&a, &b, &b};  // accumulated in fp32: the two halves of an ulp add up
  reduce(DType::F16, ReduceOp::Sum, &out, kept, 3, 1);
  CHECK(out == 0x3c01);
  const uint16_t most = 0x7bff;
  const void* over[] = {&most, &most};
  reduce(DType::F16, ReduceOp::Sum, &out, over, 2, 1);
  CHECK(out == 0x7c00);
}

TEST(undefined_reductions_are_refused) {
  float x = 1;
  const void* sources[] = {&x};
  bool refused = false;
  try {
    reduce(DType::F32, ReduceOp::Bxor, &x, sources, 1, 1);
  } catch (const CommError&) {
    refused = true;
  }
  CHECK(refused);
}

TEST(rings_keep_order_across_the_end_and_refuse_when_full) {
  const size_t capacity = 4096;
  auto a = SharedMemory::create("test", ring_segment_bytes(capacity));
  auto b = SharedMemory::create("test", ring_segment_bytes(capacity));
  RingWriter writer(a.data(), b.data(), capacity);
  RingReader reader(b.data(), a.data(), capacity);
  std::mt19937 random(11);
  uint64_t sent = 0, received = 0;
  std::vector<char> payload(capacity);
  bool was_full = false;
  while (received < 20000) {
    const size_t size = random() % (writer.largest_payload() + 1);
    std::memset(payload.data(), int(sent % 251), size);
    FrameHeader h;
    h.key.tag = sent;
    h.length = size;
    if (random() % 2 == 0) {
      if (writer.push(h, payload.data(), size)) {
        ++sent;
      } else {
        was_full = true;
      }
    } else {
      const char* data;
      bool sane;
      const FrameHeader* front = reader.front(&data, &sane);
      CHECK(sane);
      CHECK((front == nullptr) == (sent == received));
      if (front == nullptr) continue;
      CHECK(front->key.tag == received);
      for (size_t i = 0; i < front->length; ++i) CHECK(uint8_t(data[i]) == received % 251);
      reader.pop();
      ++received;
    }
  }
  CHECK(was_full);
}

TEST(a_ring_with_garbage_is_not_sane) {
  std::mt19937 random(13);
  for (int round = 0; round < 2000; ++round) {
    auto a = SharedMemory::create("test", ring_segment_bytes(4096));
    auto b = SharedMemory::create("test", ring_segment_bytes(4096));
    auto* words = reinterpret_cast<uint32_t*>(a.data() + kRingDataOffset);
    for (int i = 0; i < 1024; ++i) words[i] = uint32_t(random());
    if (round % 2) words[0] = kFrameMagic;
    if (round % 4 == 3) reinterpret_cast<uint16_t*>(words)[2] = uint16_t(random() % 6);
    reinterpret_cast<RingControl*>(a.data())->head.store(random() % 8192);
    RingReader reader(b.data(), a.data(), 4096);
    const char* data;
    bool sane = true;
    for (int i = 0; i < 100 && sane; ++i) {
      if (reader.front(&data, &sane) == nullptr) break;
      reader.pop();
    }
  }
}

TEST(a_peer_cannot_write_to_or_shrink_a_segment) {
  auto own = SharedMemory::create("test", 8192);
  const int copy = dup(own.fd());
  CHECK(ftruncate(copy, 4096) != 0);
  CHECK(mmap(nullptr, 8192, PROT_READ | PROT_WRITE, MAP_SHARED, copy, 0) == MAP_FAILED);
  auto theirs = SharedMemory::open(copy, 8192);
  own.data()[100] = 42;
  CHECK(theirs.data()[100] == 42);
}

TEST(outbox_blocks_come_back_after_all_readers) {
  Outbox outbox(8192, 8192);
  outbox.start(0, 4096);
  const int a = outbox.acquire(2);
  const int b = outbox.acquire(1);
  CHECK(a >= 0 && b >= 0 && outbox.acquire(1) < 0);
  outbox.release(uint32_t(a));
  CHECK(outbox.acquire(1) < 0);
  outbox.release(uint32_t(a));
  CHECK(outbox.acquire(1) == a);
  outbox.release(uint32_t(a));
  outbox.release(uint32_t(a));  // one too many is ignored
  outbox.start(5, 4096);
  CHECK(outbox.acquire(1) >= 0 && outbox.acquire(1) >= 0 && outbox.acquire(1) < 0);
}

TEST(an_outbox_grows_beside_its_use_and_is_cut_anew_by_a_generation) {
  Outbox outbox(1 << 20, 16 << 10);
  outbox.start(1, 8 << 10);
  const int a = outbox.acquire(1);
  const int b = outbox.acquire(1);
  CHECK(a >= 0 && b >= 0 && outbox.acquire(1) < 0);
  std::memset(outbox.block(b), 7, 8 << 10);
  outbox.grow(32 << 10);
  CHECK(outbox.allocated() == 32 << 10);
  const int c = outbox.acquire(1), d = outbox.acquire(1);
  CHECK(c >= 0 && d >= 0 && outbox.acquire(1) < 0 && outbox.offset(d) + (8 << 10) <= outbox.allocated());
  CHECK(outbox.block(b)[(8 << 10) - 1] == 7);
  outbox.release(uint32_t(b));
  CHECK(outbox.acquire(1) == b);
  outbox.grow(1 << 30);  // not beyond its capacity
  CHECK(outbox.allocated() == 1 << 20);
  outbox.start(2, 512 << 10);
  const int first = outbox.acquire(1), second = outbox.acquire(1);
  CHECK(first == 0 && outbox.offset(second) == 512 << 10 && outbox.acquire(1) < 0);
}

TEST(chunks_fit_twice_for_each_rank_of_a_host_into_its_outbox) {
  for (size_t local = 1; local <= 512; ++local) {
    const size_t outbox = outbox_bytes_for(local);
    const size_t chunk = chunk_bytes_for(outbox, local);
    CHECK(chunk >= kSmallestChunk && chunk <= kLargestChunk);
    CHECK(2 * local * chunk <= outbox || chunk == kSmallestChunk);
    CHECK(outbox * local <= size_t(128) << 20 || outbox == 1 << 20);
    const size_t over_sockets = socket_chunk_bytes_for(local);
    CHECK(over_sockets * local <= 4 << 20 || over_sockets == kSmallestChunk);
  }
}

TEST(limbs_added_in_fp64_are_the_sum_of_the_numbers) {
  std::mt19937_64 random(7);
  std::vector<double> total(kLimbs);
  __extension__ unsigned __int128 wanted = 0;
  for (int i = 0; i < 4096; ++i) {
    const uint64_t lower = random() >> i % 64, above = random() % 512;
    std::vector<double> limbs;
    append_limbs(limbs, lower, double(above));
    for (size_t at = 0; at < kLimbs; ++at) total[at] += limbs[at];
    wanted += lower;
    wanted += static_cast<decltype(wanted)>(above) << 64;
  }
  CHECK(of_limbs(total.data()) == std::make_pair(uint64_t(wanted), uint64_t(wanted >> 64)));
}

TEST(what_no_sum_of_limbs_can_be_is_refused) {
  for (double wrong : {-1.0, 0x1p63, std::nan("")}) {
    const double limbs[kLimbs] = {0, wrong, 0};
    bool refused = false;
    try {
      of_limbs(limbs);
    } catch (const std::domain_error&) {
      refused = true;
    }
    CHECK(refused);
  }
}

int main(int argc, char** argv) {
  return run_tests(argc, argv);
}
