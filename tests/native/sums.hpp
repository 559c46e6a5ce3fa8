// Numbers that each rank makes for itself, and their sums in member order, to be compared bit by bit.
#pragma once

#include <cstring>
#include <functional>
#include <random>
#include <vector>

#include "ranks.hpp"

inline std::vector<float> values(int rank, size_t count) {
  std::vector<float> out(count);
  std::mt19937 random(unsigned(rank) * 7919 + 17);
  for (float& x : out) x = float(int(random() % 2001) - 1000) * 0.37f;
  return out;
}

inline std::vector<float> sum_in_order(const std::vector<int>& ranks, size_t count) {
  std::vector<float> out = values(ranks[0], count);
  for (size_t k = 1; k < ranks.size(); ++k) {
    const auto row = values(ranks[k], count);
    for (size_t i = 0; i < count; ++i) out[i] += row[i];
  }
  return out;
}

inline Part part_of(std::vector<float>& v) {
  return {Span{reinterpret_cast<char*>(v.data()), v.size() * 4}};
}

inline bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * 4) == 0);
}

inline void both(const std::function<void(bool)>& body) {
  body(true);
  body(false);
}

inline void all_reduce_everywhere(Ranks& ranks, const std::vector<int>& living, const std::vector<int>& members,
                                  size_t count) {
  std::vector<int> taking;
  for (int r : members) {
    if (std::find(living.begin(), living.end(), r) != living.end()) taking.push_back(r);
  }
  const auto wanted = sum_in_order(taking, count);
  ranks.each(taking, [&](int r) {
    const GroupPtr group = ranks.hubs[size_t(r)]->group("g", members);
    auto data = values(r, count);
    all_reduce(ranks.call(r, *group), part_of(data), DType::F32, ReduceOp::Sum);
    CHECK(same_bits(data, wanted));
  });
}
