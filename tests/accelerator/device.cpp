// A pretend accelerator: memory of a kind of its own, which lies on the host, kernels of
// the CPU, and an observer that sees whatever an accelerator would have to do.
//
// An op on tensors of the device takes its arguments as host views of the same memory,
// runs the CPU's kernel on them and labels the results as the device's. An op that mixes
// devices is refused, as CUDA refuses it. The observer hears of every
//   launch     an op that computes or fills,
//   wait       a number that the host reads, or an op whose result has a shape that
//              depends on values,
//   to_host, to_device     a copy between the two memories.

#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/extension.h>
#include <torch/library.h>

#include <atomic>
#include <chrono>
#include <map>
#include <set>

namespace pretend {

using namespace at;
using c10::DispatchKey;

constexpr auto KIND = c10::DeviceType::PrivateUse1;
const c10::Device HERE(KIND, 0);

bool on_device(const Tensor& t) { return t.device().type() == KIND; }

// ---- Memory: of the host, counted, and not more than the device has.

std::atomic<size_t> allocated{0}, capacity{size_t(1) << 32};

struct Block {  // keeps memory of the host, or a storage in it, alive
  std::shared_ptr<void> memory;
  size_t bytes;
};

void release(void* context) {
  auto* block = static_cast<Block*>(context);
  allocated -= block->bytes;
  delete block;
}

c10::DataPtr claim(void* data, std::shared_ptr<void> memory, size_t bytes) {
  TORCH_CHECK_WITH(OutOfMemoryError, allocated + bytes <= capacity,
                   "pretend: out of memory, ", bytes, " bytes more than the ",
                   allocated.load(), " of ", capacity.load(), " in use");
  allocated += bytes;
  return {data, new Block{std::move(memory), bytes}, release, HERE};
}

struct DeviceMemory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    auto memory = std::make_shared<c10::DataPtr>(getCPUAllocator()->allocate(bytes));
    return claim(memory->get(), memory, bytes);
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override {
    c10::CachingDeviceAllocator::DeviceStats stats;
    stats.allocated_bytes[0].current = stats.reserved_bytes[0].current = allocated;
    return stats;
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex) override {
    return {capacity - allocated, capacity};
  }
};
DeviceMemory device_memory;
REGISTER_ALLOCATOR(KIND, &device_memory);

// A tensor with the sizes and flags of another, on a storage of either memory.
Tensor as(const Tensor& t, c10::Storage storage, DispatchKey key) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(key), t.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(),
                                                    t.storage_offset());
  made._set_conj(t.is_conj());
  made._set_neg(t.is_neg());
  return made;
}

c10::Storage host_storage(const c10::Storage& storage) {
  auto drop = [](void* kept) { delete static_cast<c10::Storage*>(kept); };
  c10::DataPtr data(storage.mutable_data(), new c10::Storage(storage), drop, kCPU);
  return {c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(data),
          getCPUAllocator(), /*resizable=*/true};
}

c10::DataPtr device_pointer(const c10::Storage& storage) {
  auto kept = std::make_shared<c10::Storage>(storage);
  return claim(storage.mutable_data(), kept, storage.nbytes());
}

void refuse(const Tensor& t, const std::string& name, const std::string& op) {
  TORCH_CHECK(false, "Expected all tensors to be on the same device, but got ", name,
              " is on ", t.device(), ", different from other tensors on ", HERE, " (", op, ")");
}

Tensor host(const Tensor& t) {
  if (!t.defined()) return t;
  if (!on_device(t)) refuse(t, "an argument", "a kernel of the device");
  return as(t, host_storage(t.storage()), DispatchKey::CPU);
}

Tensor device(const Tensor& t) {
  if (!t.defined()) return t;
  c10::Storage storage(c10::Storage::use_byte_size_t(), t.storage().nbytes(),
                       device_pointer(t.storage()), &device_memory, true);
  return as(t, std::move(storage), DispatchKey::PrivateUse1);
}

// ---- The observer: a function of Python, `observer(kind, op, inputs, outputs)`, where
// inputs and outputs are (shape, dtype, bytes). It gets no tensors: to ask one for its
// shape would go through the modes of the loss that is observed.

std::atomic<bool> observed{false};
py::object& observer() {
  static auto* function = new py::object();  // outlives the interpreter
  return *function;
}

py::tuple description(const Tensor& t) {
  // Numbers that a view has several times, as windows do, are read once.
  size_t numbers = 1, span = 1;
  for (int64_t k = 0; k < t.dim(); ++k) {
    numbers *= t.stride(k) ? t.size(k) : 1;
    span += std::max<int64_t>(t.size(k) - 1, 0) * t.stride(k);
  }
  return py::make_tuple(py::tuple(py::cast(t.sizes().vec())),
                        std::string(toString(t.scalar_type())),
                        t.element_size() * std::min(numbers, span));
}

void note(const char* kind, const std::string& op, const std::vector<Tensor>& inputs,
          const std::vector<Tensor>& outputs) {
  if (!observed) return;
  py::gil_scoped_acquire lock;
  py::list of_inputs, of_outputs;
  for (auto& t : inputs) of_inputs.append(description(t));
  for (auto& t : outputs) of_outputs.append(description(t));
  observer()(kind, op, of_inputs, of_outputs);
}

// ---- Generators: each has one of the host inside, so that a seed means the numbers
// that it means on the CPU. The states are apart: a draw from the wrong one is seen.

struct DeviceGenerator final : c10::GeneratorImpl {
  explicit DeviceGenerator(Generator inside)
      : GeneratorImpl(HERE, c10::DispatchKeySet(DispatchKey::PrivateUse1)),
        inside(std::move(inside)) {}
  void set_current_seed(uint64_t seed) override { inside.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { inside.set_offset(offset); }
  uint64_t get_offset() const override { return inside.get_offset(); }
  uint64_t current_seed() const override { return inside.current_seed(); }
  uint64_t seed() override { return inside.seed(); }
  void set_state(const c10::TensorImpl& state) override {
    inside.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return inside.unsafeGetGeneratorImpl()->get_state();
  }
  DeviceGenerator* clone_impl() const override {
    return new DeviceGenerator(inside.clone());
  }
  Generator inside;
};

Generator new_generator(uint64_t seed = default_rng_seed_val) {
  return make_generator<DeviceGenerator>(at::detail::createCPUGenerator(seed));
}

const Generator& default_generator() {
  static auto* generator = new Generator(new_generator());
  return *generator;
}

// ---- One device, one stream, events that are reached as soon as they are recorded.

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = KIND;
  static c10::Stream stream() { return c10::Stream(c10::Stream::DEFAULT, HERE); }
  c10::DeviceType type() const override { return KIND; }
  c10::Device exchangeDevice(c10::Device) const override { return HERE; }
  c10::Device getDevice() const override { return HERE; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Stream getStream(c10::Device) const override { return stream(); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream(); }
  c10::Stream exchangeStream(c10::Stream) const override { return stream(); }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override { wait("stream"); }
  void synchronizeDevice(const c10::DeviceIndex) const override { wait("device"); }
  void synchronizeEvent(void*) const override { wait("event"); }
  static void wait(const std::string& what) { note("wait", "synchronize " + what, {}, {}); }
  using Clock = std::chrono::steady_clock;
  static Clock::time_point& time(void* event) { return *static_cast<Clock::time_point*>(event); }
  void record(void** event, const c10::Stream&, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    if (!*event) *event = new Clock::time_point;
    time(*event) = Clock::now();
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete &time(event);
  }
  double elapsedTime(void* first, void* last, const c10::DeviceIndex) const override {
    return std::chrono::duration<double, std::milli>(time(last) - time(first)).count();
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return getCPUAllocator(); }
  const Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return default_generator();
  }
  Generator getNewGenerator(c10::DeviceIndex) const override { return new_generator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto data = device_memory.allocate(bytes);
    std::memcpy(data.get(), storage.data(), std::min(bytes, storage.nbytes()));
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(data));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
};
Hooks hooks;

// ---- Ops: one fallback for all of them.

// Ops whose results have a shape, or are numbers, that depend on values.
const std::set<std::string> WAITING = {
    "aten::nonzero",      "aten::masked_select", "aten::_unique",  "aten::_unique2",
    "aten::unique_dim",   "aten::equal",         "aten::bincount", "aten::histc",
    "aten::unique_consecutive", "aten::unique_dim_consecutive"};

bool is_view(const FunctionSchema& schema) {
  for (auto& result : schema.returns())
    if (result.alias_info() && !result.alias_info()->isWrite()) return true;
  return false;
}

bool waits(const FunctionSchema& schema, const std::vector<IValue>& arguments) {
  if (WAITING.count(schema.name())) return true;
  if (schema.name() == "aten::repeat_interleave") return arguments.back().isNone();
  if (schema.name() != "aten::_index_put_impl_" && schema.name() != "aten::index")
    return false;
  for (const std::optional<Tensor>& index : arguments[1].toOptionalTensorVector())
    if (index && index->defined() &&
        (index->scalar_type() == kBool || index->scalar_type() == kByte))
      return true;
  return false;
}

// The tensors of one call of an op, in both memories.
struct Call {
  const FunctionSchema& schema;
  std::map<c10::StorageImpl*, c10::Storage> storages;  // host views that share memory
  std::vector<std::pair<Tensor, Tensor>> pairs;        // of the host, of the device
  std::vector<Tensor> inputs, outputs;

  Tensor to_host(const Tensor& t, const Argument& argument) {
    if (!t.defined()) return t;
    bool written = argument.alias_info() && argument.alias_info()->isWrite();
    if (!on_device(t)) {
      // CUDA takes numbers of the host along with the launch, and moves indices.
      bool number = t.dim() == 0 && !written;
      bool index = argument.name() == "indices" && argument.type()->str() == "Tensor?[]";
      if (!number && !index && argument.name() != "scalars")
        refuse(t, argument.name(), schema.name());
      if (index) note("to_device", schema.name(), {t}, {t});
      return t;
    }
    auto* impl = t.storage().unsafeGetStorageImpl();
    auto found = storages.find(impl);
    if (found == storages.end())
      found = storages.emplace(impl, host_storage(t.storage())).first;
    pairs.emplace_back(as(t, found->second, DispatchKey::CPU), t);
    if (!argument.is_out()) inputs.push_back(t);
    return pairs.back().first;
  }

  Tensor to_device(const Tensor& t) {
    if (!t.defined()) return t;
    outputs.push_back(t);
    for (auto& [there, here] : pairs) {
      if (there.is_same(t)) {
        if (there.storage().data() != here.storage().data()) {  // resized, as `out`
          auto* impl = here.storage().unsafeGetStorageImpl();
          impl->set_data_ptr_noswap(device_pointer(there.storage()));
          impl->set_nbytes(there.storage().nbytes());
        }
        if (there.sizes() != here.sizes())
          here.unsafeGetTensorImpl()->set_sizes_and_strides(there.sizes(), there.strides());
        return here;
      }
      if (t.storage().is_alias_of(there.storage()))
        return as(t, here.storage(), DispatchKey::PrivateUse1);
    }
    return device(t);
  }
};

void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  Call call{schema};
  auto arguments = torch::jit::pop(*stack, schema.arguments().size());
  const bool waiting = waits(schema, arguments);
  bool seeded = false;
  for (size_t k = 0; k < arguments.size(); ++k) {
    auto& value = arguments[k];
    auto& argument = schema.arguments()[k];
    if (value.isTensor()) {
      value = call.to_host(value.toTensor(), argument);
    } else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& t : value.toTensorVector()) list.push_back(call.to_host(t, argument));
      value = list;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (const std::optional<Tensor>& t : value.toOptionalTensorVector())
        list.push_back(t ? std::optional<Tensor>(call.to_host(*t, argument)) : t);
      value = list;
    } else if (value.isDevice() && value.toDevice().type() == KIND) {
      value = c10::Device(kCPU);
    } else if (argument.type()->str() == "Generator?") {
      auto generator = value.isGenerator() ? value.toGenerator() : default_generator();
      TORCH_CHECK(generator.device() == HERE, "Expected a '", HERE,
                  "' device type for generator but found '", generator.device(), "'");
      value = generator.get<DeviceGenerator>()->inside;
      seeded = true;
    }
  }
  TORCH_CHECK_NOT_IMPLEMENTED(seeded || !op.hasTag(at::Tag::nondeterministic_seeded),
                              schema.name(), " takes no generator: pretend cannot run it");
  for (auto& value : arguments) stack->push_back(std::move(value));
  op.redispatchBoxed(c10::DispatchKeySet(DispatchKey::CPU), stack);
  auto results = torch::jit::pop(*stack, schema.returns().size());
  for (auto& value : results) {
    if (value.isTensor()) {
      value = call.to_device(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& t : value.toTensorVector()) list.push_back(call.to_device(t));
      value = list;
    }
    stack->push_back(std::move(value));
  }
  if (call.outputs.empty())  // ops on lists in place return nothing
    for (auto& [there, here] : call.pairs) call.outputs.push_back(here);
  bool empty = true;
  for (auto& t : call.outputs) empty &= t.numel() == 0;
  if (waiting) {
    note("wait", schema.name(), call.inputs, call.outputs);
  } else if (!is_view(schema) && !empty) {
    note("launch", schema.name(), call.inputs, call.outputs);
  }
}

// ---- Ops that the CPU has in another form, or that are about memory.

Tensor empty(IntArrayRef size, std::optional<ScalarType> dtype, std::optional<Layout>,
             std::optional<Device>, std::optional<bool>, std::optional<MemoryFormat> format) {
  return at::detail::empty_generic(size, &device_memory,
                                   c10::DispatchKeySet(DispatchKey::PrivateUse1),
                                   dtype_or_default(dtype), format);
}

Tensor empty_strided(IntArrayRef size, IntArrayRef stride, std::optional<ScalarType> dtype,
                     std::optional<Layout>, std::optional<Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &device_memory,
                                           c10::DispatchKeySet(DispatchKey::PrivateUse1),
                                           dtype_or_default(dtype));
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool) {
  bool read = on_device(from), written = on_device(to);
  (written ? host(to) : to).copy_(read ? host(from) : from);
  note(!read ? "to_device" : !written ? "to_host" : "launch", "aten::copy_", {from}, {to});
  return to;
}

Scalar local_scalar(const Tensor& t) {
  note("wait", "aten::item", {t}, {});
  return at::_local_scalar_dense(host(t));
}

const Tensor& resize(const Tensor& t, IntArrayRef size, std::optional<MemoryFormat>) {
  size_t bytes = t.element_size() * (c10::multiply_integers(size) + t.storage_offset());
  if (t.storage().nbytes() < bytes) hooks.resizePrivateUse1Bytes(t.storage(), bytes);
  t.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return t;
}

Tensor zeros(IntArrayRef size, std::optional<ScalarType> dtype, std::optional<Layout>,
             std::optional<Device>, std::optional<bool>) {
  return at::zeros(size, TensorOptions(HERE).dtype(dtype));
}

Tensor& set_storage(Tensor& t, c10::Storage storage, int64_t offset, IntArrayRef size,
                    IntArrayRef stride) {
  t.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(storage));
  t.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
  return t;
}

Tensor& set_whole_storage(Tensor& t, c10::Storage storage) {
  int64_t size = storage.nbytes() / t.element_size();
  return set_storage(t, std::move(storage), 0, {size}, {1});
}

Tensor& set_tensor(Tensor& t, const Tensor& source) {
  return set_storage(t, source.storage(), source.storage_offset(), source.sizes(),
                     source.strides());
}

Tensor convolution(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                   IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation,
                   bool transposed, IntArrayRef output_padding, int64_t groups) {
  Tensor added = bias ? host(*bias) : Tensor();
  auto out = at::convolution(host(x), host(weight), added, stride, padding, dilation,
                             transposed, output_padding, groups);
  note("launch", "aten::convolution", {x, weight}, {out});
  return device(out);
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(
    const Tensor& grad, const Tensor& x, const Tensor& weight, IntArrayRef stride,
    IntArrayRef padding, IntArrayRef dilation, bool transposed, IntArrayRef output_padding,
    int64_t groups, std::array<bool, 3> mask) {
  std::vector<int64_t> channels{transposed ? weight.size(1) * groups : weight.size(0)};
  auto [of_x, of_weight, of_bias] = at::convolution_backward(
      host(grad), host(x), host(weight), channels, stride, padding, dilation, transposed,
      output_padding, groups, mask);
  std::vector<Tensor> outputs;
  for (auto& t : {of_x, of_weight, of_bias})
    if (t.defined()) outputs.push_back(t);
  note("launch", "aten::convolution_backward", {grad, x, weight}, outputs);
  return {device(of_x), device(of_weight), device(of_bias)};
}

std::tuple<Tensor, Tensor> dropout(const Tensor& x, double p, std::optional<bool> train) {
  auto keep = at::empty_like(host(x));
  p = train.value_or(true) ? p : 0.0;
  if (p == 0) keep.fill_(1);
  else keep.bernoulli_(1 - p, default_generator().get<DeviceGenerator>()->inside);
  auto mask = keep.to(kBool), out = host(x).mul(mask).mul_(p == 1 ? 0.0 : 1 / (1 - p));
  note("launch", "aten::native_dropout", {x}, {out, mask});
  return {device(out), device(mask)};
}

// Products of half precision with float32 results, as CUDA has them.
Tensor in_float32(const Tensor& t, ScalarType out) {
  TORCH_CHECK(t.scalar_type() == kHalf || t.scalar_type() == kBFloat16,
              "pretend: out_dtype is for factors in half precision, not ", t.scalar_type());
  TORCH_CHECK(out == kFloat, "pretend: out_dtype is float32, not ", out);
  return host(t).to(out);
}

template <auto op>
Tensor product(const Tensor& a, const Tensor& b, ScalarType out) {
  TORCH_CHECK(a.scalar_type() == b.scalar_type(), "pretend: factors of two dtypes");
  auto result = op(in_float32(a, out), in_float32(b, out));
  note("launch", a.dim() == 2 ? "aten::mm" : "aten::bmm", {a, b}, {result});
  return device(result);
}

template <auto op>
Tensor added_product(const Tensor& t, const Tensor& a, const Tensor& b, ScalarType out,
                     const Scalar& beta, const Scalar& alpha) {
  TORCH_CHECK(a.scalar_type() == b.scalar_type(), "pretend: factors of two dtypes");
  auto result = op(host(t).to(out), in_float32(a, out), in_float32(b, out), beta, alpha);
  note("launch", a.dim() == 2 ? "aten::addmm" : "aten::baddbmm", {t, a, b}, {result});
  return device(result);
}

Tensor host_mm(const Tensor& a, const Tensor& b) { return at::mm(a, b); }
Tensor host_bmm(const Tensor& a, const Tensor& b) { return at::bmm(a, b); }
Tensor host_addmm(const Tensor& t, const Tensor& a, const Tensor& b, const Scalar& beta,
                  const Scalar& alpha) {
  return at::addmm(t, a, b, beta, alpha);
}
Tensor host_baddbmm(const Tensor& t, const Tensor& a, const Tensor& b, const Scalar& beta,
                    const Scalar& alpha) {
  return at::baddbmm(t, a, b, beta, alpha);
}

#include "cells.h"

// ---- Registrations.

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}
TORCH_LIBRARY_IMPL(_, AutogradPrivateUse1, m) {
  m.fallback(torch::autograd::autogradNotImplementedFallback());
}
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_efficientzerotensor", &zeros);
  m.impl("_copy_from", &copy_from);
  m.impl("_local_scalar_dense", &local_scalar);
  m.impl("resize_", &resize);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Storage", &set_whole_storage);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("convolution_overrideable", &convolution);
  m.impl("convolution_backward_overrideable", &convolution_backward);
  m.impl("native_dropout", &dropout);
  m.impl("mm.dtype", &product<&host_mm>);
  m.impl("bmm.dtype", &product<&host_bmm>);
  m.impl("addmm.dtype", &added_product<&host_addmm>);
  m.impl("baddbmm.dtype", &added_product<&host_baddbmm>);
  m.impl("_thnn_fused_lstm_cell", &lstm_cell);
  m.impl("_thnn_fused_lstm_cell_backward_impl", &lstm_cell_backward);
  m.impl("_thnn_fused_gru_cell", &gru_cell);
  m.impl("_thnn_fused_gru_cell_backward", &gru_cell_backward);
}

// Autocast casts the ops that it casts on CUDA, by torch's own lists.
Tensor refused(const Tensor&, const Tensor&, const std::optional<Tensor>&, int64_t) {
  TORCH_CHECK(false, "binary_cross_entropy is unsafe to autocast. Use ",
              "binary_cross_entropy_with_logits.");
}
#define LOW(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define FULL(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define WITH_DTYPE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define APPENDED(...) KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE(__VA_ARGS__)
#define WIDEST(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  AT_FORALL_LOWER_PRECISION_FP(LOW)
  AT_FORALL_FP32(FULL)
  AT_FORALL_FP32_SET_OPT_DTYPE(WITH_DTYPE)
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(APPENDED)
  AT_FORALL_PROMOTE(WIDEST)
  m.impl("binary_cross_entropy", &refused);
}

// Ops that are one kernel on an accelerator, though torch would compose them for a device
// that has no kernel of its own.
void register_whole() {
  static auto* library = new torch::Library(torch::Library::IMPL, "aten",
                                            DispatchKey::PrivateUse1, __FILE__, __LINE__);
  auto& dispatcher = c10::Dispatcher::singleton();
  for (auto& name : dispatcher.getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0) continue;
    auto op = dispatcher.findOp(name);
    if (!op || op->hasKernelForDispatchKey(DispatchKey::PrivateUse1)) continue;
    bool on_lists = name.name.rfind("aten::_foreach_", 0) == 0 &&
                    name.name != "aten::_foreach_copy_";  // which may copy from the host
    if (!on_lists && !op->hasKernelForDispatchKey(DispatchKey::CPU)) continue;
    auto local = name.name.substr(6) + (name.overload_name.empty() ? "" : "." + name.overload_name);
    library->impl(local.c_str(), torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
}

}  // namespace pretend

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace pretend;
  at::RegisterPrivateUse1HooksInterface(&hooks);
  register_whole();
  m.def("observe", [](py::object function) {
    observed = !function.is_none();
    observer() = std::move(function);
  });
  m.def("set_capacity", [](size_t bytes) { capacity = bytes; });
  m.def("host_view", &host);
  m.def("default_generator", &default_generator);
}
