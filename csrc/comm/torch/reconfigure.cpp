// ElasticProcessGroup under torch's own protocol for groups that change: compiled in where torch has it.
#include "process_group.hpp"

#ifdef C10D_BACKEND_HAS_RECONFIGURE

namespace elastic::comm {

c10d::ReconfigureHandle ElasticProcessGroup::get_reconfigure_handle() const {
  TORCH_CHECK(reconfiguration_.handle, "elastic: group ", name_, " belongs to no fabric");
  return reconfiguration_.handle();
}

ElasticProcessGroup::WorkPtr ElasticProcessGroup::reconfigure(const c10d::ReconfigureOptions& o) {
  TORCH_CHECK(reconfiguration_.edit, "elastic: group ", name_, " belongs to no fabric");
  const auto* ordered = std::get_if<std::vector<c10d::ReconfigureHandle>>(&o.handles);
  std::vector<std::string> handles;
  if (ordered != nullptr) {
    handles = *ordered;
  } else {
    const auto& any = std::get<std::unordered_set<c10d::ReconfigureHandle>>(o.handles);
    handles.assign(any.begin(), any.end());
  }
  const double seconds = o.timeout ? std::chrono::duration<double>(*o.timeout).count() : -1;
  reconfiguration_.edit(o.uuid, handles, ordered != nullptr, seconds);
  auto work = c10::make_intrusive<ElasticWork>(c10d::OpType::UNKNOWN, Tensors{}, Tensors{});
  work->end(nullptr);
  return work;
}

}  // namespace elastic::comm

#endif
