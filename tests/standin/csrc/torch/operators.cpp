// The kernels of the stand-in devices: the CPU's, run late by a stream on the bytes behind device addresses.
//
// torch decomposes or shapes most operators itself, so that an operator arrives here with its outputs made. Outputs of
// the others take their shapes from the operator's meta kernel, or from a rehearsal of its CPU kernel on zeros. An
// operator whose shapes depend on values makes the host wait, as it does on CUDA.
#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "backend.hpp"
#include "operators.hpp"

namespace standin {
namespace {

using c10::IValue;
using Stack = std::vector<IValue>;

std::atomic<std::int64_t> unpinned_copies{0}, waits{0};
std::mutex names_mutex;
std::set<std::string> waiting_names;

bool on_device(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == kType; }

// The tensor's bytes as a CPU tensor, for a kernel. It does not keep them alive: the order of the stream does.
at::Tensor bytes_of(const at::Tensor& tensor) {
  TORCH_CHECK(!tensor.is_conj() && !tensor.is_neg(), "the stand-in has no lazily conjugated or negated tensors");
  void* address = tensor.storage().mutable_data();
  auto* first = address ? static_cast<char*>(backing(address)) + tensor.storage_offset() * tensor.element_size() : nullptr;
  return at::from_blob(first, tensor.sizes(), tensor.strides(), [](void*) {}, tensor.options().device(at::kCPU),
                       c10::Device(at::kCPU));
}

at::Tensor same_flag(at::Tensor made, const at::Tensor& from) {
  if (from.unsafeGetTensorImpl()->is_wrapped_number()) made.unsafeGetTensorImpl()->set_wrapped_number(true);
  return made;
}

// A copy of `value` in which `change` has replaced each tensor.
template <typename Change>
IValue changed(const IValue& value, Change change) {
  if (value.isTensor()) return value.toTensor().defined() ? IValue(change(value.toTensor())) : value;
  if (value.isTensorList()) {
    c10::List<at::Tensor> made;
    for (const at::Tensor& tensor : value.toTensorVector()) made.push_back(tensor.defined() ? change(tensor) : tensor);
    return made;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> made;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector())
      made.push_back(tensor && tensor->defined() ? std::optional<at::Tensor>(change(*tensor)) : tensor);
    return made;
  }
  return value;
}

template <typename Change>
Stack changed(const Stack& values, Change change) {
  Stack made;
  for (const IValue& value : values) made.push_back(changed(value, change));
  return made;
}

void run_kernel(const c10::OperatorHandle& op, c10::DispatchKey key, Stack* stack) {
  const at::AutoDispatchBelowADInplaceOrView below;
  op.redispatchBoxed(c10::DispatchKeySet(key), stack);
}

// One call of an operator.
class Call {
 public:
  Call(const c10::OperatorHandle& op, Stack* stack)
      : op_(op), name_(c10::toString(op.operator_name())), stack_(*stack), count_(op.schema().arguments().size()) {
    const auto begin = stack->end() - static_cast<std::ptrdiff_t>(count_);
    arguments_.assign(begin, stack->end());
    stack->erase(begin, stack->end());
  }

  void perform() {
    const c10::OptionalDeviceGuard guard(find_device());
    if (!device_) return on_host();
    bring_indices();
    check_places();
    device(device_->index()).check();
    if (has_tag(at::Tag::dynamic_output_shape) || has_tag(at::Tag::data_dependent_output)) return wait_and_run();
    resize_empty_outputs();
    if (fresh_outputs()) shape_outputs();
    else if (is_view()) return as_view();
    launch();
  }

 private:
  bool has_tag(at::Tag tag) const {
    const auto& tags = op_.getTags();
    return std::find(tags.begin(), tags.end(), tag) != tags.end();
  }
  Stream& stream() const { return current_stream(device_->index()); }

  std::optional<c10::Device> find_device() {
    changed(arguments_, [&](const at::Tensor& tensor) {
      if (on_device(tensor) && !device_) device_ = tensor.device();
      return tensor;
    });
    return device_;
  }

  // An operator of no tensor (a factory without a kernel of its own): computed on the host, then copied.
  void on_host() {
    c10::Device target(kType, static_cast<c10::DeviceIndex>(current_device()));
    for (IValue& value : arguments_) {
      if (!value.isDevice()) continue;
      if (value.toDevice().has_index()) target = value.toDevice();
      value = c10::Device(at::kCPU);
    }
    run_kernel(op_, c10::DispatchKey::CPU, &arguments_);
    for (const IValue& value : arguments_)
      stack_.push_back(changed(value, [&](const at::Tensor& tensor) { return tensor.to(target); }));
  }

  // Indices may lie on the host, as with CUDA.
  void bring_indices() {
    for (IValue& value : arguments_)
      if (value.isOptionalTensorList())
        value = changed(value, [&](const at::Tensor& tensor) { return tensor.to(*device_); });
  }

  void check_places() const {
    changed(arguments_, [&](const at::Tensor& tensor) {
      const bool scalar = tensor.device().is_cpu() && tensor.dim() == 0;
      TORCH_CHECK(tensor.device() == *device_ || scalar, "Expected all tensors to be on the same device, but found ",
                  *device_, " and ", tensor.device(), " (", name_, ")");
      return tensor;
    });
  }

  bool written(std::size_t argument) const {
    const auto* alias = op_.schema().arguments()[argument].alias_info();
    return alias && alias->isWrite();
  }
  // The argument that return `index` is, -1 for a new tensor.
  int alias_of(std::size_t index) const {
    const auto* alias = op_.schema().returns()[index].alias_info();
    if (!alias) return -1;
    for (std::size_t i = 0; i < count_; ++i) {
      const auto* other = op_.schema().arguments()[i].alias_info();
      if (other && other->beforeSet() == alias->beforeSet()) return static_cast<int>(i);
    }
    return -1;
  }
  bool fresh_outputs() const {
    for (std::size_t i = 0; i < op_.schema().returns().size(); ++i)
      if (alias_of(i) < 0) return true;
    return false;
  }
  bool is_view() const {
    const auto& returns = op_.schema().returns();
    return returns.size() == 1 && returns[0].alias_info() && !returns[0].alias_info()->isWrite();
  }

  at::Tensor like(const at::Tensor& tensor, c10::Device place) const {
    auto made = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(place));
    if (place.is_cpu()) made.zero_();
    return same_flag(made, tensor);
  }
  Stack rehearsed(c10::Device place) const {
    Stack values = changed(arguments_, [&](const at::Tensor& tensor) {
      return on_device(tensor) ? like(tensor, place) : tensor;
    });
    for (IValue& value : values) {
      if (value.isDevice()) value = place;
      if (value.isGenerator()) value = IValue();
    }
    run_kernel(op_, place.is_cpu() ? c10::DispatchKey::CPU : c10::DispatchKey::Meta, &values);
    return values;
  }
  // The outputs' shapes, as tensors without the values.
  Stack shapes() const {
    if (op_.hasComputedKernelForDispatchKey(c10::DispatchKey::Meta)) {
      try {
        return rehearsed(at::kMeta);
      } catch (const c10::NotImplementedError&) {  // a composite of operators without meta kernels
      }
    }
    return rehearsed(at::kCPU);
  }

  void resize_empty_outputs() {
    bool empty = false;
    for (std::size_t i = 0; i < count_; ++i)
      if (op_.schema().arguments()[i].is_out() && arguments_[i].isTensor()) empty |= arguments_[i].toTensor().numel() == 0;
    if (!empty) return;
    const Stack made = shapes();
    for (std::size_t i = 0; i < made.size(); ++i)
      if (alias_of(i) >= 0 && made[i].isTensor())
        at::native::resize_output(arguments_[static_cast<std::size_t>(alias_of(i))].toTensor(), made[i].toTensor().sizes());
  }

  void shape_outputs() {
    const Stack made = shapes();
    for (std::size_t i = 0; i < made.size(); ++i) {
      if (alias_of(i) >= 0) {
        results_.push_back(arguments_[static_cast<std::size_t>(alias_of(i))]);
      } else {
        results_.push_back(changed(made[i], [&](const at::Tensor& tensor) {
          return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(*device_));
        }));
      }
    }
  }

  void as_view() {
    const at::Tensor& self = arguments_[static_cast<std::size_t>(alias_of(0))].toTensor();
    const at::Tensor shape = shapes()[0].toTensor();
    stack_.push_back(
        at::native::as_strided_tensorimpl(self, shape.sizes(), shape.strides(), self.storage_offset() + shape.storage_offset()));
  }

  // The arguments of the kernel. A number on the host is taken now, as the launch of a kernel would.
  Stack kernel_arguments() const {
    Stack values = changed(arguments_, [&](const at::Tensor& tensor) {
      return same_flag(on_device(tensor) ? bytes_of(tensor) : tensor.clone(), tensor);
    });
    bool seeded = !has_tag(at::Tag::nondeterministic_seeded);
    for (std::size_t i = 0; i < count_; ++i) {
      if (values[i].isDevice()) values[i] = c10::Device(at::kCPU);
      const auto& type = op_.schema().arguments()[i].real_type();
      const bool generator = *type == *c10::OptionalType::create(c10::GeneratorType::get()) || *type == *c10::GeneratorType::get();
      if (!generator) continue;
      values[i] = draw(values[i].isNone() ? default_generator(device_->index()) : values[i].toGenerator());
      seeded = true;
    }
    TORCH_CHECK(seeded, name_, " draws random numbers without a generator: the stand-in has no kernel for it");
    return values;
  }

  void launch() {
    if (results_.empty())
      for (std::size_t i = 0; i < op_.schema().returns().size(); ++i)
        results_.push_back(arguments_[static_cast<std::size_t>(alias_of(i))]);
    Stack places;
    for (std::size_t i = 0; i < results_.size(); ++i)
      places.push_back(alias_of(i) >= 0 ? IValue() : changed(results_[i], [&](const at::Tensor& t) { return bytes_of(t); }));
    stream().push([op = op_, values = kernel_arguments(), places, name = name_]() mutable {
      const at::NoGradGuard no_grad;
      run_kernel(op, c10::DispatchKey::CPU, &values);
      for (std::size_t i = 0; i < places.size(); ++i) fill(places[i], values[i], name);
    });
    for (IValue& result : results_) stack_.push_back(std::move(result));
  }

  static void fill(const IValue& place, const IValue& value, const std::string& name) {
    const auto one = [&](const at::Tensor& to, const at::Tensor& from) {
      if (!to.defined()) return;
      TORCH_CHECK(to.sizes() == from.sizes(), name, ": its rehearsal gave ", to.sizes(), ", its kernel ", from.sizes());
      to.copy_(from);
    };
    if (place.isTensor()) one(place.toTensor(), value.toTensor());
    if (!place.isTensorList()) return;
    const auto to = place.toTensorVector(), from = value.toTensorVector();
    for (std::size_t i = 0; i < to.size(); ++i) one(to[i], from[i]);
  }

  void wait_and_run() {
    ++waits;
    {
      std::lock_guard<std::mutex> lock(names_mutex);
      waiting_names.insert(name_);
    }
    Stream& queue = stream();
    auto values = std::make_shared<Stack>(kernel_arguments());
    queue.wait(queue.push([op = op_, values] {
      const at::NoGradGuard no_grad;
      run_kernel(op, c10::DispatchKey::CPU, values.get());
    }));
    device(device_->index()).check();
    for (std::size_t i = 0; i < values->size(); ++i) {
      if (alias_of(i) >= 0) stack_.push_back(arguments_[static_cast<std::size_t>(alias_of(i))]);
      else stack_.push_back(changed((*values)[i], [&](const at::Tensor& tensor) { return tensor.to(*device_); }));
    }
  }

  const c10::OperatorHandle& op_;
  const std::string name_;
  Stack& stack_;
  const std::size_t count_;
  Stack arguments_, results_;
  std::optional<c10::Device> device_;
};

void fallback(const c10::OperatorHandle& op, Stack* stack) {
  guarded([&] { Call(op, stack).perform(); });
}

// torch's composition of layer_norm returns mean and rstd in fp32 also for 16-bit tensors, as devices do; the CPU's
// kernel of its backward expects them in the type of the input unless the weight has another.
void layer_norm_backward(const c10::OperatorHandle& op, Stack* stack) {
  IValue* const arguments = stack->data() + stack->size() - op.schema().arguments().size();
  const auto type = arguments[1].toTensor().scalar_type();
  const bool mixed = arguments[5].isTensor() && arguments[5].toTensor().scalar_type() != type;
  for (int i = 3; i < 5 && !mixed; ++i) arguments[i] = arguments[i].toTensor().to(type);
  fallback(op, stack);
}

// ---- memory and views

at::Tensor empty(at::IntArrayRef sizes, std::optional<at::ScalarType> type, std::optional<at::Layout>,
                 std::optional<at::Device> place, std::optional<bool> pinned, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pinned.value_or(false), "only memory of the host can be pinned");
  const c10::DeviceGuard guard(place.value_or(c10::Device(kType)));
  return at::detail::empty_generic(sizes, allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(type), format);
}

at::Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides, std::optional<at::ScalarType> type,
                         std::optional<at::Layout>, std::optional<at::Device> place, std::optional<bool> pinned) {
  TORCH_CHECK(!pinned.value_or(false), "only memory of the host can be pinned");
  const c10::DeviceGuard guard(place.value_or(c10::Device(kType)));
  return at::detail::empty_strided_generic(sizes, strides, allocator(),
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(type));
}

const at::Tensor& resize_(const at::Tensor& self, at::IntArrayRef sizes, std::optional<at::MemoryFormat> format) {
  auto* tensor = self.unsafeGetTensorImpl();
  tensor->set_sizes_contiguous(sizes);
  const std::size_t needed = at::detail::computeStorageNbytesContiguous(
      sizes, tensor->itemsize(), static_cast<std::size_t>(tensor->storage_offset()));
  if (needed > self.storage().nbytes()) at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(self.storage(), needed);
  if (format && *format != at::MemoryFormat::Preserve) tensor->empty_tensor_restride(*format);
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef sizes, at::IntArrayRef strides) {
  return at::native::set_storage_cpu_(self, std::move(source), offset, sizes, strides);
}

at::Tensor& set_whole_storage(at::Tensor& self, at::Storage source) {
  const auto size = static_cast<int64_t>(source.nbytes() / self.element_size());
  return self.set_(std::move(source), 0, {size}, {});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return self.set_(source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  void* address = self.storage().mutable_data();
  if (address) device(device_of(address)).memory().used_by(address, stream_of(stream));
}

// ---- copies

void upload(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  Stream& queue = current_stream(to.device().index());
  const bool direct = non_blocking && from.dtype() == to.dtype() && from.sizes() == to.sizes() &&
                      from.is_contiguous() && is_pinned(from.const_data_ptr());
  if (non_blocking && from.numel() && !is_pinned(from.const_data_ptr())) ++unpinned_copies;
  // Pageable memory is staged by the driver before the call returns; pinned memory is read when the copy runs.
  // Not the tensor that Python has: to let go of that one a stream would wait for the interpreter's lock, which a thread
  // may hold that waits for room in the stream, as torch.Stream.wait_stream does.
  const at::Tensor source = direct ? from.detach() : from.clone();
  const std::uint64_t position = queue.push([source, target = bytes_of(to)] {
    const at::NoGradGuard no_grad;
    target.copy_(source);
  });
  if (!non_blocking) queue.wait(position);
}

void download(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  Stream& queue = current_stream(from.device().index());
  const bool direct = non_blocking && from.dtype() == to.dtype() && is_pinned(to.const_data_ptr());
  if (non_blocking && to.numel() && !is_pinned(to.const_data_ptr())) ++unpinned_copies;
  const std::uint64_t position = queue.push([source = bytes_of(from), target = to.detach()] {
    const at::NoGradGuard no_grad;
    target.copy_(source);
  });
  if (direct) return;
  queue.wait(position);
  device(from.device().index()).check();
}

void copy_between(const at::Tensor& from, const at::Tensor& to) {
  Stream& target = current_stream(to.device().index());
  Stream& source = current_stream(from.device().index());
  if (&source != &target) source.push_wait(target, target.issued());
  const std::uint64_t position = source.push([in = bytes_of(from), out = bytes_of(to)] {
    const at::NoGradGuard no_grad;
    out.copy_(in);
  });
  target.push_wait(source, position);
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& to, bool non_blocking) {
  return guarded([&] {
    const at::NoGradGuard no_grad;
    const at::Tensor from = self.sizes() == to.sizes() ? self : self.expand(to.sizes());
    if (to.numel() == 0) return to;
    if (on_device(from) && on_device(to)) copy_between(from, to);
    else if (on_device(to)) upload(from, to, non_blocking);
    else download(from, to, non_blocking);
    return to;
  });
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& to) {
  at::native::resize_output(to, self.sizes());
  return copy_from(self, to, false);
}

at::Scalar local_scalar(const at::Tensor& self) {
  at::Tensor number = at::empty(self.sizes(), self.options().device(at::kCPU));
  copy_from(self, number, false);
  return number.item();
}

// A tensor of the host may take the data of one here, as with CUDA and torch-npu: a parameter that moves to the device
// stays the same object, so that it keeps what Megatron has noted on it.
bool may_take_data(const at::Tensor& self, const at::Tensor& from) {
  const auto dense = [](const at::Tensor& tensor) {
    return tensor.layout() == at::kStrided && (tensor.device().is_cpu() || on_device(tensor));
  };
  return dense(self) && dense(from);
}

// ---- operators of which the CPU's version draws from the default generator

std::tuple<at::Tensor, at::Tensor> dropout(const at::Tensor& input, double p, std::optional<bool> train) {
  if (!train.value_or(true)) return {input.clone(), at::ones_like(input, at::kBool)};
  const at::Tensor mask = at::empty_like(input, at::kBool).bernoulli_(1 - p);
  return {input * mask * (p < 1 ? 1 / (1 - p) : 0), mask};
}

at::Tensor dropout_backward(const at::Tensor& grad, const at::Tensor& mask, double scale) { return grad * mask * scale; }

}  // namespace

std::int64_t unpinned_asynchronous_copies() { return unpinned_copies; }

std::string waiting_operators() {
  std::lock_guard<std::mutex> lock(names_mutex);
  std::string joined;
  for (const std::string& name : waiting_names) joined += (joined.empty() ? "" : " ") + name;
  return joined;
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", TORCH_FN(empty));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("resize_", TORCH_FN(resize_));
  m.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(set_storage));
  m.impl("set_.source_Storage", TORCH_FN(set_whole_storage));
  m.impl("set_.source_Tensor", TORCH_FN(set_tensor));
  m.impl("record_stream", TORCH_FN(record_stream));
  m.impl("_copy_from", TORCH_FN(copy_from));
  m.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
  m.impl("_local_scalar_dense", TORCH_FN(local_scalar));
  m.impl("_has_compatible_shallow_copy_type", TORCH_FN(may_take_data));
  m.impl("native_dropout", TORCH_FN(dropout));
  m.impl("native_dropout_backward", TORCH_FN(dropout_backward));
  m.impl("native_layer_norm_backward", torch::CppFunction::makeFromBoxedFunction<&layer_norm_backward>());
}

}  // namespace standin
