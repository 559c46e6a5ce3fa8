#include "pipeline.hpp"

#include <algorithm>
#include <cstring>

#include "reduce.hpp"
#include "stream.hpp"

namespace elastic::comm {
namespace {

constexpr size_t kInline = 4 << 10;  // up to here a frame carries the bytes itself

// Chunks between a member's contribution and the sum it takes part in: with two, over sockets, a member that has to
// wait for its turn holds the others up half as often. Shared blocks are too few for that, and the cache too small.
constexpr uint32_t kLeadInPlace = 1;
constexpr uint32_t kLeadOverSockets = 2;

// Receives are posted one chunk ahead. A peer with a part as long as ours is at most that far ahead
// of us, so what it sends finds its place and is not put by first.
constexpr uint32_t kLandings = 2 * (kLeadOverSockets + 1);

constexpr size_t kPastCache = 4 << 20;  // results of that many bytes and more do not stay in the cache anyway

// One chunk of one part from this member to `to`: through a shared block where
// that works, else inline. Bytes must stay until finish(), as in Operation::send.
void send_chunk(Operation& op, int to, uint32_t phase, const Part& part, size_t offset, size_t size) {
  Outbox* outbox = op.hub().outbox();
  if (size > kInline && op.in_place(to)) {
    const int block = outbox->acquire(1);
    if (block >= 0) {
      char* at = outbox->block(block);
      for_pieces(part, offset, size, [&](const char* p, size_t n) {
        std::memcpy(at, p, n);
        at += n;
      });
      op.share(to, phase, block, size);
      return;
    }
  }
  const char* data = contiguous(part, offset, size);
  if (data == nullptr) {
    char* copy = op.scratch(size);
    data = copy;
    for_pieces(part, offset, size, [&](const char* p, size_t n) {
      std::memcpy(copy, p, n);
      copy += n;
    });
  }
  op.send(to, phase, data, size);
}

// The same bytes to several members: written once for those that read in place.
void publish_chunk(Operation& op, const std::vector<int>& to, uint32_t phase, const Part& part, size_t offset,
                   size_t size) {
  Outbox* outbox = op.hub().outbox();
  std::vector<int> readers;
  if (size > kInline) {
    for (int j : to) {
      if (op.in_place(j)) readers.push_back(j);
    }
  }
  int block = readers.empty() ? -1 : outbox->acquire(int(readers.size()));
  if (block >= 0) {
    char* at = outbox->block(block);
    for_pieces(part, offset, size, [&](const char* p, size_t n) {
      std::memcpy(at, p, n);
      at += n;
    });
    for (int j : readers) op.share(j, phase, block, size);
  }
  for (int j : to) {
    const bool shared = block >= 0 && op.in_place(j);
    if (!shared) send_chunk(op, j, phase, part, offset, size);
  }
}

void copy_out(const Part& part, size_t offset, const char* from, size_t size, bool past_cache = false) {
  for_pieces(part, offset, size, [&](char* p, size_t n) {
    if (p != from) past_cache ? copy_past_cache(p, from, n) : void(std::memcpy(p, from, n));
    from += n;
  });
}

class Pipeline {
 public:
  Pipeline(Operation& op, const PipelineJob& job) : op_(op), job_(job), n_(op.size()), me_(op.me()) {
    const auto& parts = job.inputs != nullptr ? *job.inputs : *job.outputs;
    size_t total = 0;
    for (const Part& part : parts) {
      sizes_.push_back(bytes_of(part));
      largest_ = std::max(largest_, sizes_.back());
      total += sizes_.back();
    }
    past_cache_ = total >= kPastCache;
    chunk_ = op.hub().chunk_bytes(op.size());
    for (int j = 0; j < n_; ++j) {
      if (j == me_) continue;
      peers_.push_back(j);
      if (job.only < 0 || job.only == j) receivers_.push_back(j);
    }
    all_in_place_ = std::all_of(receivers_.begin(), receivers_.end(), [&](int j) { return op_.in_place(j); });
    const bool any_in_place = std::any_of(peers_.begin(), peers_.end(), [&](int j) { return op_.in_place(j); });
    lead_ = any_in_place ? kLeadInPlace : kLeadOverSockets;
    chunks_ = uint32_t((largest_ + chunk_ - 1) / chunk_);
    gathers_ = job.outputs != nullptr && (job.only < 0 || job.only == me_);
    for (auto& slot : landing_) slot.resize(size_t(n_));
    arriving_.resize(chunks_);
    results_.resize(chunks_);
  }

  void run() {
    const uint32_t ahead = lead_ + 1;
    for (uint32_t c = 0; c < std::min(ahead, chunks_); ++c) post(c);
    for (uint32_t c = 0; c < chunks_ + 2 * lead_; ++c) {
      if (c + ahead < chunks_) post(c + ahead);
      if (c < chunks_) contribute(c);
      if (c >= lead_ && c - lead_ < chunks_) reduce_and_publish(c - lead_);
      if (c >= 2 * lead_) collect(c - 2 * lead_);
    }
  }

 private:
  size_t length(int part, uint32_t c) const {
    const size_t at = size_t(c) * chunk_;
    return at >= sizes_[size_t(part)] ? 0 : std::min(chunk_, sizes_[size_t(part)] - at);
  }

  // Where a contribution that cannot be read in place lands: free again when chunk c - kLandings was reduced.
  char* landing(int j, uint32_t c) {
    if (op_.in_place(j)) return nullptr;
    char*& at = landing_[c % kLandings][size_t(j)];
    if (at == nullptr) at = op_.scratch(std::min(chunk_, sizes_[size_t(me_)]));
    return at;
  }

  // Posts the receives of chunk c. A result cannot arrive before this member's contribution to it has left.
  void post(uint32_t c) {
    const size_t at = size_t(c) * chunk_;
    if (job_.inputs != nullptr) {
      if (const size_t mine = length(me_, c)) {
        for (int j : peers_) arriving_[c].push_back(op_.post(j, 2 * c, landing(j, c), mine));
      }
    }
    if (!gathers_) return;
    results_[c].resize(size_t(n_));
    for (int j : peers_) {
      const size_t size = length(j, c);
      if (size == 0) continue;
      results_[c][size_t(j)] = op_.post(j, 2 * c + 1, contiguous((*job_.outputs)[size_t(j)], at, size), size);
    }
  }

  // Contributions to every member's chunk c go out.
  void contribute(uint32_t c) {
    if (job_.inputs == nullptr) return;
    for (int step = 1; step < n_; ++step) {
      const int j = (me_ + step) % n_;  // each starts elsewhere
      const size_t size = length(j, c);
      if (size > 0) send_chunk(op_, j, 2 * c, (*job_.inputs)[size_t(j)], size_t(c) * chunk_, size);
    }
  }

  void reduce_and_publish(uint32_t c) {
    const size_t size = length(me_, c);
    if (size == 0) return;
    const size_t at = size_t(c) * chunk_;
    const bool publishes = job_.outputs != nullptr && !receivers_.empty();
    if (job_.inputs == nullptr) {
      publish_chunk(op_, receivers_, 2 * c + 1, (*job_.outputs)[size_t(me_)], at, size);
      return;
    }
    // Reduced where the others will read it, then copied once to where this member wants it.
    Outbox* outbox = op_.hub().outbox();
    const int readers = int(receivers_.size()) + 1;  // we are one of them
    const int block = publishes && size > kInline && all_in_place_ ? outbox->acquire(readers) : -1;
    if (block < 0) {
      reduce_chunk(c, *job_.target, at, at, size);
      if (publishes) publish_chunk(op_, receivers_, 2 * c + 1, *job_.target, at, size);
      return;
    }
    char* shared = outbox->block(block);
    try {
      reduce_chunk(c, {Span{shared, size}}, 0, at, size);
    } catch (...) {
      for (int k = 0; k < readers; ++k) outbox->release(uint32_t(block));
      throw;
    }
    for (int j : receivers_) op_.share(j, 2 * c + 1, block, size);
    copy_out(*job_.target, at, shared, size, past_cache_);
    outbox->release(uint32_t(block));
  }

  // Chunk c of the sum, from `offset` of `out` on.
  void reduce_chunk(uint32_t c, const Part& out_part, size_t offset, size_t at, size_t size) {
    std::vector<const void*> sources(size_t(n_), nullptr);
    auto& arriving = arriving_[c];
    for (size_t k = 0; k < peers_.size(); ++k) sources[size_t(peers_[k])] = op_.await(arriving[k]);
    size_t done = 0;
    // Own input and target may be cut differently: pieces of both are walked together.
    for_pieces((*job_.inputs)[size_t(me_)], at, size, [&](const char* own, size_t n) {
      for_pieces(out_part, offset + done, n, [&](char* out, size_t m) {
        std::vector<const void*> here(sources);
        for (int j : peers_) here[size_t(j)] = static_cast<const char*>(sources[size_t(j)]) + done;
        here[size_t(me_)] = own;
        reduce(job_.type, job_.op, out, here.data(), here.size(), m / size_of(job_.type));
        own += m;
        done += m;
      });
    });
    for (auto& recv : arriving) op_.release(recv);
    arriving.clear();
  }

  void collect(uint32_t c) {
    if (!gathers_) return;
    for (int step = 1; step < n_; ++step) {
      const int j = (me_ + step) % n_;
      RecvPtr& recv = results_[c][size_t(j)];
      if (!recv) continue;
      const char* data = op_.await(recv);
      copy_out((*job_.outputs)[size_t(j)], size_t(c) * chunk_, data, recv->size, past_cache_);
      op_.release(recv);
      recv.reset();
    }
  }

  Operation& op_;
  const PipelineJob& job_;
  const int n_;
  const int me_;
  std::vector<size_t> sizes_;
  size_t largest_ = 0;
  size_t chunk_ = 0;
  uint32_t chunks_ = 0;
  uint32_t lead_ = kLeadInPlace;
  bool gathers_ = false;
  bool past_cache_ = false;
  bool all_in_place_ = false;
  std::vector<char*> landing_[kLandings];
  std::vector<int> peers_;
  std::vector<int> receivers_;
  std::vector<std::vector<RecvPtr>> arriving_;
  std::vector<std::vector<RecvPtr>> results_;
};

}  // namespace

void run_pipeline(Operation& op, const PipelineJob& job) {
  Pipeline(op, job).run();
}

void exchange(Operation& op, const std::vector<Part>& send, const std::vector<Part>& receive) {
  const int n = op.size();
  const int me = op.me();
  const size_t chunk = op.hub().chunk_bytes(n);
  size_t done = 0;
  for_pieces(send[size_t(me)], 0, bytes_of(send[size_t(me)]), [&](const char* p, size_t size) {
    copy_out(receive[size_t(me)], done, p, size);
    done += size;
  });
  size_t largest = 0;
  for (int j = 0; j < n; ++j) {
    if (j != me) largest = std::max({largest, bytes_of(send[size_t(j)]), bytes_of(receive[size_t(j)])});
  }
  const auto length = [&](const Part& part, size_t at) {
    const size_t size = bytes_of(part);
    return at >= size ? size_t(0) : std::min(chunk, size - at);
  };
  std::vector<RecvPtr> before;
  std::vector<RecvPtr> now;
  for (size_t at = 0; at < largest + chunk; at += chunk) {
    const auto phase = uint32_t(at / chunk);
    now.assign(size_t(n), nullptr);
    for (int step = 1; step < n && at < largest; ++step) {
      const int from = (me + n - step) % n;
      const int to = (me + step) % n;
      if (const size_t size = length(receive[size_t(from)], at)) {
        now[size_t(from)] = op.post(from, phase, contiguous(receive[size_t(from)], at, size), size);
      }
      if (const size_t size = length(send[size_t(to)], at)) {
        send_chunk(op, to, phase, send[size_t(to)], at, size);
      }
    }
    for (int j = 0; j < int(before.size()); ++j) {
      if (!before[size_t(j)]) continue;
      const char* data = op.await(before[size_t(j)]);
      copy_out(receive[size_t(j)], at - chunk, data, before[size_t(j)]->size);
      op.release(before[size_t(j)]);
    }
    before.swap(now);
  }
}

std::vector<Part> split_evenly(const Part& whole, size_t element, int n) {
  const size_t total = bytes_of(whole);
  const size_t granule = std::max<size_t>(64, element);
  const size_t granules = (total + granule - 1) / granule;
  std::vector<Part> parts(static_cast<size_t>(n));
  size_t begin = 0;
  for (int j = 0; j < n; ++j) {
    const size_t end = std::min(total, granules * size_t(j + 1) / size_t(n) * granule);
    for_pieces(whole, begin, end - begin, [&](char* p, size_t size) { parts[size_t(j)].push_back({p, size}); });
    begin = end;
  }
  return parts;
}

}  // namespace elastic::comm
