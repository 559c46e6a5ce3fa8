// megatron.elastic._comm: the communicator as Python sees it. See _comm.pyi.
#include <pybind11/chrono.h>
#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>
#include <unistd.h>

#include "../limbs.hpp"
#include "../reduce.hpp"
#include "../side_channel.hpp"
#include "../transfers.hpp"
#include "device_event.hpp"
#include "process_group.hpp"

namespace py = pybind11;
using elastic::comm::DeviceEvent;
using elastic::comm::EditStats;
using elastic::comm::ElasticProcessGroup;
using elastic::comm::Hub;
using elastic::comm::HubConfig;
using elastic::comm::Loan;
using elastic::comm::Peer;
using elastic::comm::SideChannel;
using elastic::comm::Transfers;

namespace {

// Raises the Python twin of a C++ error: megatron.elastic.comm.errors.<name>(*args).
template <typename... Args>
void raise(const char* name, Args&&... args) {
  const py::object type = py::module_::import("megatron.elastic.comm.errors").attr(name);
  PyErr_SetObject(type.ptr(), type(std::forward<Args>(args)...).ptr());
}

void translate(std::exception_ptr p) {
  if (!p) return;
  try {
    std::rethrow_exception(p);
  } catch (const elastic::comm::PeerLost& e) {
    raise("PeerLost", e.rank, e.why, e.heard, py::tuple(py::cast(e.silent)));
  } catch (const elastic::comm::GenerationChanged& e) {
    raise("GenerationChanged", e.generation);
  } catch (const elastic::comm::Timeout& e) {
    raise("CommTimeout", e.seconds, py::tuple(py::cast(e.ranks)));
  } catch (const elastic::comm::CommError& e) {
    raise("CommError", std::string(e.what()));
  }
}

std::shared_ptr<Hub> make_hub(int rank, int slots, uint64_t incarnation, const std::string& run_id,
                              const py::bytes& secret, const std::string& bind, bool shared_memory,
                              double handshake_seconds, double silent_seconds, size_t outbox_bytes, size_t ring_bytes) {
  HubConfig config;
  config.rank = rank;
  config.slots = slots;
  config.incarnation = incarnation;
  config.run_id = run_id;
  config.secret = secret;
  config.bind = bind;
  config.shared_memory = shared_memory;
  config.handshake_seconds = handshake_seconds;
  config.silent_seconds = silent_seconds;
  config.outbox_bytes = outbox_bytes;
  config.ring_bytes = ring_bytes;
  py::gil_scoped_release nogil;
  auto hub = Hub::make(config);
  Hub* const raw = hub.get();
  return {raw, [hub = std::move(hub)](Hub*) mutable {
            if (PyGILState_Check()) {
              py::gil_scoped_release release;
              hub.reset();
            } else {
              hub.reset();
            }
          }};
}

// Address and size of a tensor that is sent or received as it lies.
std::pair<char*, size_t> memory_of(const at::Tensor& tensor) {
  TORCH_CHECK_VALUE(tensor.is_cpu() && tensor.is_contiguous(), "elastic: a contiguous host tensor is needed");
  return {static_cast<char*>(tensor.data_ptr()), elastic::comm::bytes_of(tensor)};
}

// Memory for `count` fp32 values that may be lent; none where there is no room, or no shared memory. A forked process
// that collects its parent's garbage gives nothing back (as with Loan).
std::optional<at::Tensor> lendable(Hub& hub, size_t count) {
  const auto& outbox = hub.shared_outbox();
  char* const memory = outbox ? outbox->lent().take(count * sizeof(float)) : nullptr;
  if (memory == nullptr) return std::nullopt;
  const auto free = [outbox, process = getpid()](void* at) {
    if (getpid() == process) outbox->lent().give_back(static_cast<char*>(at));
  };
  return at::from_blob(memory, {int64_t(count)}, free, at::kFloat);
}

// Appends the limbs of a Python integer. Raises ValueError for one below 0.
void append_limbs_of(std::vector<double>& values, const py::int_& number) {
  uint64_t lower = PyLong_AsUnsignedLongLong(number.ptr());
  py::object above = py::none();
  if (PyErr_Occurred()) {
    PyErr_Clear();
    if (number < py::int_(0)) throw py::value_error("elastic: a count below 0 cannot be added");
    lower = PyLong_AsUnsignedLongLongMask(number.ptr());
    above = number >> py::int_(64);
  }
  elastic::comm::append_limbs(values, lower, above.is_none() ? 0.0 : above.cast<double>());
}

// Sums over all members, in member order: of `values`, and of `counts`, exactly.
std::pair<std::vector<double>, py::list> sums(ElasticProcessGroup& group, std::vector<double> values,
                                              const std::vector<py::int_>& counts) {
  const size_t others = values.size();
  values.reserve(others + elastic::comm::kLimbs * counts.size());
  for (const py::int_& count : counts) append_limbs_of(values, count);
  {
    py::gil_scoped_release nogil;
    values = group.sum(std::move(values));
  }
  py::list exact(counts.size());
  for (size_t i = 0; i < counts.size(); ++i) {
    const auto [lower, above] = elastic::comm::of_limbs(&values[others + elastic::comm::kLimbs * i]);
    const py::int_ sum(lower);
    exact[i] = above == 0 ? py::object(sum) : sum | py::int_(above) << py::int_(64);
  }
  values.resize(others);
  return {std::move(values), std::move(exact)};
}

py::bytes hmac(const py::bytes& key, const py::bytes& data) {
  const std::string text = data;
  const auto digest = elastic::comm::hmac_sha256(key, text.data(), text.size());
  return {reinterpret_cast<const char*>(digest.data()), digest.size()};
}

}  // namespace

PYBIND11_MODULE(_comm, m) {
  m.doc() = "Dynamic communicator: process groups edited in place over links (native part).";
  py::module_::import("torch.distributed");
  py::register_exception_translator(&translate);
  m.def("hmac_sha256", &hmac, py::arg("key"), py::arg("data"));
  m.def("reduce_instruction_set", &elastic::comm::reduce_instruction_set);

  py::class_<Peer, std::shared_ptr<Peer>>(m, "Peer")
      .def(py::init([](int rank, uint64_t incarnation, std::string ip, int port, std::string unix_name,
                       std::string machine, std::vector<std::pair<int, uint64_t>> broken) {
             return std::make_shared<Peer>(Peer{rank, incarnation, std::move(ip), port, std::move(unix_name),
                                                std::move(machine), std::move(broken)});
           }),
           py::arg("rank"), py::arg("incarnation"), py::arg("ip"), py::arg("port"), py::arg("unix_name"),
           py::arg("machine"), py::arg("broken") = std::vector<std::pair<int, uint64_t>>{})
      .def_readonly("rank", &Peer::rank)
      .def_readonly("incarnation", &Peer::incarnation)
      .def_readonly("ip", &Peer::ip)
      .def_readonly("port", &Peer::port)
      .def_readonly("unix_name", &Peer::unix_name)
      .def_readonly("machine", &Peer::machine);

  py::class_<EditStats>(m, "EditStats")
      .def_readonly("quiesce", &EditStats::quiesce)
      .def_readonly("drop", &EditStats::drop)
      .def_readonly("connect", &EditStats::connect)
      .def_readonly("publish", &EditStats::publish)
      .def_readonly("opened", &EditStats::opened)
      .def_readonly("ahead", &EditStats::ahead)
      .def_readonly("dropped", &EditStats::dropped)
      .def_readonly("groups", &EditStats::groups);

  const auto nogil = py::call_guard<py::gil_scoped_release>();
  py::class_<Hub, std::shared_ptr<Hub>>(m, "Hub")
      .def(py::init(&make_hub), py::kw_only(), py::arg("rank"), py::arg("slots"), py::arg("incarnation"),
           py::arg("run_id"), py::arg("secret"), py::arg("bind") = "127.0.0.1", py::arg("shared_memory") = true,
           py::arg("handshake_seconds") = 3.0, py::arg("silent_seconds") = 20.0, py::arg("outbox_bytes") = 0,
           py::arg("ring_bytes") = 0)
      .def("self", &Hub::self)
      .def("notice", &Hub::notice)
      .def("edit", &Hub::edit, py::arg("generation"), py::arg("members"), py::arg("timeout"), nogil)
      .def("prepare", &Hub::prepare, py::arg("members"), py::arg("timeout"), nogil)
      .def("interrupt", &Hub::interrupt, py::arg("generation"), nogil)
      .def("close", &Hub::close, nogil)
      .def("generation", &Hub::generation)
      .def("frozen", &Hub::frozen)
      .def("alive", &Hub::alive, nogil)
      .def("waiting_for", &Hub::waiting_for, nogil)
      .def("counters", &Hub::counters)
      .def("broken", &Hub::broken, nogil)
      .def("sever", &Hub::sever, py::arg("rank"), py::arg("quietly") = false, nogil)
      .def("transport", &Hub::transport, py::arg("rank"), nogil)
      .def("lendable", &lendable, py::arg("count"), nogil)
      .def(
          "on_loan",
          [](Hub& hub, std::uintptr_t address) {
            return hub.lent_memory() != nullptr && hub.lent_memory()->on_loan(reinterpret_cast<const char*>(address));
          },
          py::arg("address"));

  py::class_<ElasticProcessGroup, c10d::ProcessGroup, c10::intrusive_ptr<ElasticProcessGroup>>(m, "ElasticProcessGroup")
      .def(py::init([](const std::shared_ptr<Hub>& hub, const std::string& name, const std::vector<int>& members,
                       bool slot_space, double timeout) {
             py::gil_scoped_release release;
             return c10::make_intrusive<ElasticProcessGroup>(hub, hub->group(name, members), slot_space, timeout);
           }),
           py::kw_only(), py::arg("hub"), py::arg("name"), py::arg("members"), py::arg("slot_space"),
           py::arg("timeout"))
      .def("sum", &sums, py::arg("values"), py::arg("counts"))
      .def("reduce_scatter_blocks", &ElasticProcessGroup::reduce_scatter_blocks, py::arg("flat"), py::arg("blocks"),
           nogil)
      .def("all_gather_blocks", &ElasticProcessGroup::all_gather_blocks, py::arg("flat"), py::arg("blocks"), nogil)
      .def("begin_reduce_scatter_blocks", &ElasticProcessGroup::begin_reduce_scatter_blocks, py::arg("flat"),
           py::arg("blocks"), nogil)
      .def("begin_all_gather_blocks", &ElasticProcessGroup::begin_all_gather_blocks, py::arg("flat"), py::arg("blocks"),
           nogil)
      .def(
          "on_reconfigure",
          [](ElasticProcessGroup& g, std::function<std::string()> handle,
             std::function<void(int64_t, const std::vector<std::string>&, bool, double)> edit) {
            g.on_reconfigure({std::move(handle), std::move(edit)});
          },
          py::arg("handle").none(true), py::arg("edit").none(true))
      .def("release", &ElasticProcessGroup::release, nogil)
      .def("living", &ElasticProcessGroup::living, nogil)
      .def("failed", &ElasticProcessGroup::failed)
      .def("members", [](const ElasticProcessGroup& g) { return g.group()->members; })
      .def(
          "side_channel",
          [](ElasticProcessGroup& g, uint32_t number, size_t piece_bytes, int beside, int hurried) {
            return std::make_shared<SideChannel>(*g.hub(), g.group(), number, piece_bytes, beside, hurried);
          },
          py::arg("number"), py::arg("piece_bytes"), py::arg("beside"), py::arg("hurried"), py::keep_alive<0, 1>())
      .def("transfers", &ElasticProcessGroup::transfers, py::arg("tag"), py::keep_alive<0, 1>());

  py::class_<Transfers>(m, "Transfers")
      .def(
          "receive",
          [](Transfers& t, const std::vector<at::Tensor>& into, const std::vector<int>& sources) {
            TORCH_CHECK_VALUE(into.size() == sources.size(), "elastic: one source a tensor is needed");
            for (size_t i = 0; i < into.size(); ++i) {
              const auto [data, size] = memory_of(into[i]);
              t.receive(sources[i], data, size, std::make_shared<at::Tensor>(into[i]));
            }
          },
          py::arg("into"), py::arg("sources"), nogil)
      .def(
          "send",
          [](Transfers& t, const at::Tensor& values, int to) {
            const auto [data, size] = memory_of(values);
            t.send(to, data, size, std::make_shared<at::Tensor>(values));
          },
          py::arg("values"), py::arg("to"), nogil)
      .def("come", &Transfers::come, nogil)
      .def("wait", &Transfers::wait, nogil)
      .def("loan", &Transfers::loan, py::arg("number"));

  py::class_<Loan, std::shared_ptr<Loan>>(m, "Loan")
      .def_property_readonly("address", [](const Loan& loan) { return std::uintptr_t(loan.data()); })
      .def("values",
           [](const Loan& loan) {
             return at::from_blob(
                 const_cast<char*>(loan.data()), {int64_t(loan.size() / sizeof(float))},
                 [mapping = loan.mapping()](void*) mutable { mapping.reset(); }, at::kFloat);
           })
      .def("give_back", &Loan::give_back, nogil);

  py::class_<DeviceEvent>(m, "DeviceEvent")
      .def(py::init<const c10::Device&, bool>(), py::arg("device"), py::arg("timing") = false)
      .def("record", &DeviceEvent::record, nogil)
      .def("block", &DeviceEvent::block, nogil)
      .def("query", &DeviceEvent::query, nogil)
      .def("synchronize", &DeviceEvent::synchronize, nogil)
      .def("elapsed_time", &DeviceEvent::elapsed_time, py::arg("end"), nogil);

  py::class_<SideChannel, std::shared_ptr<SideChannel>>(m, "SideChannel")
      .def(
          "send",
          [](SideChannel& c, int peer, const at::Tensor& payload) {
            const at::Tensor data = elastic::comm::readable(payload);
            c.send(peer, static_cast<const char*>(data.data_ptr()), elastic::comm::bytes_of(data),
                   std::make_shared<at::Tensor>(data));
          },
          py::arg("peer"), py::arg("payload"), nogil)
      .def(
          "recv",
          [](SideChannel& c, int peer, const at::Tensor& out) {
            const elastic::comm::Written w = elastic::comm::writable(out, false);
            c.receive(peer, static_cast<char*>(w.flat.data_ptr()), elastic::comm::bytes_of(w.flat),
                      std::make_shared<at::Tensor>(w.flat));
            w.store();
          },
          py::arg("peer"), py::arg("out"), nogil)
      .def("drain", &SideChannel::drain, py::arg("peer"), nogil)
      .def("hurry", &SideChannel::hurry, nogil)
      .def("give_up", &SideChannel::give_up, nogil)
      .def("under_way", &SideChannel::under_way, py::arg("peer"), nogil);
}
