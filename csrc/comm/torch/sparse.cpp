// ElasticProcessGroup: all-reduce of sparse (COO) tensors.
//
// Members hold different numbers of entries. So they first exchange shapes and counts, then the entries, and each
// member adds up all of them in the order of the members: all get the same bits.
#include <ATen/ATen.h>

#include <algorithm>
#include <array>

#include "process_group.hpp"

namespace elastic::comm {
namespace {

constexpr size_t kLongest = 16;  // dimensions
enum Field : size_t { kEntries, kType, kSparse, kDense, kSizes, kFields = kSizes + kLongest };
using Header = std::array<int64_t, kFields>;

Header header_of(const at::Tensor& t) {
  Header h{};
  h[kEntries] = t._nnz();
  h[kType] = int64_t(t.scalar_type());
  h[kSparse] = t.sparse_dim();
  h[kDense] = t.dense_dim();
  std::copy(t.sizes().begin(), t.sizes().end(), h.begin() + kSizes);
  return h;
}

// The entries of one member, with memory for as many as its header says.
struct Entries {
  at::Tensor indices;
  at::Tensor values;
  Part part() const { return {span_of(indices), span_of(values)}; }
};

Entries room_for(const at::Tensor& like, int64_t entries) {
  std::vector<int64_t> shape{entries};
  for (int64_t d = like.sparse_dim(); d < like.dim(); ++d) shape.push_back(like.size(d));
  return {at::empty({like.sparse_dim(), entries}, at::TensorOptions(at::kLong)),
          at::empty(shape, at::TensorOptions(like.scalar_type()))};
}

std::vector<Header> exchange(const Call& c, const Header& mine, size_t members, size_t me) {
  std::vector<Header> headers(members);
  headers[me] = mine;
  std::vector<Part> parts;
  for (Header& h : headers) parts.push_back({Span{reinterpret_cast<char*>(h.data()), sizeof(Header)}});
  all_gather(c, parts);
  for (const Header& h : headers) {
    if (!std::equal(h.begin() + kType, h.end(), mine.begin() + kType)) {
      throw CommError("sparse all-reduce: members disagree on type or shape");
    }
  }
  return headers;
}

}  // namespace

ElasticProcessGroup::WorkPtr ElasticProcessGroup::reduce_sparse(const at::Tensor& tensor,
                                                                const c10d::AllreduceOptions& o) {
  TORCH_CHECK_VALUE(tensor.layout() == at::kSparse && tensor.is_cpu(), "elastic: a sparse COO host tensor is needed");
  TORCH_CHECK_VALUE(size_t(tensor.dim()) <= kLongest, "elastic: sparse tensors may have ", kLongest, " dimensions");
  const bool average = o.reduceOp.op_ == c10d::ReduceOp::AVG;
  TORCH_CHECK_VALUE(average || o.reduceOp.op_ == c10d::ReduceOp::SUM,
                    "elastic: sparse tensors can be summed and averaged only");
  const View v = view();
  const at::Tensor own = tensor.detach().coalesce();
  return launch(c10d::OpType::_ALLREDUCE_SPARSE, o.asyncOp, {tensor}, {tensor},
                [c = call(v, o.timeout), tensor, own, average, n = v.living.size(), me = size_t(v.me)] {
                  const auto headers = exchange(c, header_of(own), n, me);
                  Tensors indices;
                  Tensors values;
                  std::vector<Part> parts;
                  for (size_t j = 0; j < n; ++j) {
                    const Entries e = room_for(own, headers[j][kEntries]);
                    if (j == me) {
                      e.indices.copy_(own._indices());
                      e.values.copy_(own._values());
                    }
                    parts.push_back(e.part());
                    indices.push_back(e.indices);
                    values.push_back(e.values);
                  }
                  all_gather(c, parts);
                  at::Tensor sum =
                      at::sparse_coo_tensor(at::cat(indices, 1), at::cat(values, 0), own.sizes()).coalesce();
                  if (average) sum.div_(double(n));
                  tensor.copy_(sum);  // not to tensor.detach(), which has entries of its own
                });
}

}  // namespace elastic::comm
