// Walks the runs of a slice: stretches that are contiguous in memory and in
// coordinate. Each run is masked in chunks that stay in the first-level cache.
#include "dropout.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "keep_bits.h"

namespace megatron_elastic::random {
namespace {

constexpr size_t kChunkGroups = 64;  // 4,096 elements, 512 bytes of mask

struct Kernel {
  Isa isa;
  Dtype dtype;
  uint32_t drop_below;
  double scale;

  // `n` elements at coordinates coord ... coord + n - 1 of `stream`.
  void run(const Stream& stream, uint64_t coord, size_t n, const char* src, const char* residual, char* dst) const {
    const size_t item = item_size(dtype);
    const unsigned shift = static_cast<unsigned>(coord % 64);
    uint64_t bits[kChunkGroups + 1];
    for (size_t done = 0; done < n;) {
      const size_t take = std::min(n - done, kChunkGroups * 64);
      const size_t groups = (shift + take + 63) / 64;
      keep_bits(isa, stream, (coord + done) / 64, groups, drop_below, bits);
      if (shift) {
        for (size_t w = 0; w + 1 < groups; ++w) bits[w] = bits[w] >> shift | bits[w + 1] << (64 - shift);
        bits[groups - 1] >>= shift;
      }
      const size_t at = done * item;
      apply_bits(isa, dtype, bits, take, src + at, residual ? residual + at : nullptr, dst + at, scale);
      done += take;
    }
  }
};

// The layout reduced to [outer, samples, inner, run]: `run` is the longest tail of
// dimensions that is whole in every dimension but its first.
struct Runs {
  std::vector<int64_t> sizes, extent, offset;  // non-sample dimensions, the last one the run
  size_t outer_dims;                           // how many of them precede the sample dimension
};

Runs merge(const Layout& layout) {
  Runs r{layout.sizes, layout.extent, layout.offset, static_cast<size_t>(layout.sample_dim)};
  r.sizes.erase(r.sizes.begin() + layout.sample_dim);
  if (r.outer_dims == r.sizes.size()) {  // samples are innermost: runs of one element
    r.sizes.push_back(1);
    r.extent.push_back(1);
    r.offset.push_back(0);
  }
  // With one sample nothing lies between the outer dimensions and the inner ones.
  if (layout.sizes[static_cast<size_t>(layout.sample_dim)] == 1) r.outer_dims = 0;
  while (r.sizes.size() > r.outer_dims + 1 && r.sizes.back() == r.extent.back()) {
    const int64_t whole = r.extent.back();
    for (auto* dims : {&r.sizes, &r.extent, &r.offset}) {
      dims->pop_back();
      dims->back() *= whole;
    }
  }
  return r;
}

// Global coordinate of the first element of each combination of dims [from, to), in order.
std::vector<uint64_t> starts(const Runs& r, size_t from, size_t to) {
  std::vector<uint64_t> out{0};
  for (size_t d = from; d < to; ++d) {
    uint64_t stride = 1;
    for (size_t k = d + 1; k < r.extent.size(); ++k) stride *= static_cast<uint64_t>(r.extent[k]);
    std::vector<uint64_t> next;
    next.reserve(out.size() * static_cast<size_t>(r.sizes[d]));
    for (const uint64_t base : out)
      for (int64_t i = 0; i < r.sizes[d]; ++i) next.push_back(base + static_cast<uint64_t>(r.offset[d] + i) * stride);
    out.swap(next);
  }
  return out;
}

}  // namespace

void check_layout(const Layout& layout, size_t samples) {
  const auto dims = static_cast<int64_t>(layout.sizes.size());
  if (layout.sample_dim < 0 || layout.sample_dim >= dims) throw std::invalid_argument("sample_dim is not a dimension");
  if (static_cast<int64_t>(layout.extent.size()) != dims - 1 || layout.offset.size() != layout.extent.size())
    throw std::invalid_argument("extent and offset need one entry for each dimension but sample_dim");
  if (layout.sizes[static_cast<size_t>(layout.sample_dim)] != static_cast<int64_t>(samples))
    throw std::invalid_argument("the key names " + std::to_string(samples) + " samples, the tensor holds " +
                                std::to_string(layout.sizes[static_cast<size_t>(layout.sample_dim)]));
  for (int64_t d = 0, k = 0; d < dims; ++d) {
    if (d == layout.sample_dim) continue;
    const auto i = static_cast<size_t>(k++);
    if (layout.offset[i] < 0 || layout.offset[i] + layout.sizes[static_cast<size_t>(d)] > layout.extent[i])
      throw std::invalid_argument("the slice of dimension " + std::to_string(d) + " exceeds its extent");
  }
}

void dropout(Isa isa, Dtype dtype, const Layout& layout, const Site& at, const std::vector<uint64_t>& samples,
             uint32_t drop_below, double scale, const void* src, const void* residual, void* dst) {
  const Runs runs = merge(layout);
  const size_t last = runs.sizes.size() - 1;
  const auto length = static_cast<size_t>(runs.sizes[last]);
  const std::vector<uint64_t> outer = starts(runs, 0, runs.outer_dims);
  const std::vector<uint64_t> inner = starts(runs, runs.outer_dims, last);
  std::vector<Stream> streams;
  streams.reserve(samples.size());
  for (const uint64_t sample : samples) streams.push_back(stream_of(at, sample));

  const Kernel kernel{isa, dtype, drop_below, scale};
  const size_t step = length * item_size(dtype);
  size_t position = 0;
  for (const uint64_t out_base : outer)
    for (const Stream& stream : streams)
      for (const uint64_t in_base : inner) {
        const uint64_t coord = out_base + in_base + static_cast<uint64_t>(runs.offset[last]);
        kernel.run(stream, coord, length, static_cast<const char*>(src) + position,
                   residual ? static_cast<const char*>(residual) + position : nullptr,
                   static_cast<char*>(dst) + position);
        position += step;
      }
}

}  // namespace megatron_elastic::random
