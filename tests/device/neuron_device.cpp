// A device for tests, behind torch's PrivateUse1 key: its memory is the host's, its streams are as late as they may be.
//
// A copy that does not block waits in the queue of its stream until somebody waits for it: for an event that was
// recorded after it, for its stream, or for the whole device. Whoever reads the target before that finds what was there.
// Everything else runs at once, after what waits in the queues, and is computed by torch's kernels for the CPU.

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdlib>
#include <deque>
#include <functional>
#include <map>
#include <mutex>

namespace {

constexpr auto kDevice = c10::DeviceType::PrivateUse1;
const c10::Device the_device(kDevice, 0);

// What was waited for, and how many copies did not block: tests ask. And whether events are known: tests say.
int64_t waits_for_events, waits_for_streams, waits_for_devices, late_copies;
bool has_events = true;

struct Queue {
  std::deque<std::function<void()>> waiting;
  int64_t done = 0;
  int64_t end() const { return done + static_cast<int64_t>(waiting.size()); }
};

std::recursive_mutex mutex;
std::map<c10::StreamId, Queue> queues;
thread_local c10::StreamId current_stream = 0;
c10::StreamId newest_stream = 0;

// Run what waits in a stream's queue, up to the number `until`.
void finish(c10::StreamId stream, int64_t until) {
  std::lock_guard lock(mutex);
  auto& queue = queues[stream];
  for (; queue.done < until; ++queue.done) {
    queue.waiting.front()();
    queue.waiting.pop_front();
  }
}

void finish_all() {
  std::lock_guard lock(mutex);
  for (auto& [stream, queue] : queues) finish(stream, queue.end());
}

// ---- memory

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    void* memory = std::malloc(std::max<size_t>(nbytes, 1));
    return {memory, memory, &free, the_device};
  }
  static void free(void* memory) { std::free(memory); }
  c10::DeleterFnPtr raw_deleter() const override { return &free; }
  void copy_data(void* to, const void* from, size_t nbytes) const override { default_copy_data(to, from, nbytes); }
} allocator;
REGISTER_ALLOCATOR(kDevice, &allocator);

// ---- devices, streams, events

struct Event {
  c10::StreamId stream;
  int64_t end;  // of the stream's queue when the event was recorded

  void finish() const { ::finish(stream, end); }
  bool finished() const { return queues[stream].done >= end; }
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kDevice; }
  c10::Device exchangeDevice(c10::Device) const override { return the_device; }
  c10::Device getDevice() const override { return the_device; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }

  static c10::Stream stream(c10::StreamId id) { return c10::Stream(c10::Stream::UNSAFE, the_device, id); }
  c10::Stream getStream(c10::Device) const override { return stream(current_stream); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(0); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream(++newest_stream); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override { return stream(++newest_stream); }
  c10::Stream exchangeStream(c10::Stream next) const override {
    auto before = stream(current_stream);
    current_stream = next.id();
    return before;
  }
  bool queryStream(const c10::Stream& stream) const override { return queues[stream.id()].waiting.empty(); }
  void synchronizeStream(const c10::Stream& stream) const override {
    ++waits_for_streams;
    finish(stream.id(), queues[stream.id()].end());
  }
  void synchronizeDevice(const c10::DeviceIndex) const override {
    ++waits_for_devices;
    finish_all();
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    TORCH_CHECK(has_events, "Backend doesn't support events.");
    if (*event == nullptr) *event = new Event;
    *static_cast<Event*>(*event) = {stream.id(), queues[stream.id()].end()};
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  bool queryEvent(void* event) const override { return static_cast<Event*>(event)->finished(); }
  void block(void* event, const c10::Stream&) const override { static_cast<Event*>(event)->finish(); }
  void synchronizeEvent(void* event) const override {
    ++waits_for_events;
    static_cast<Event*>(event)->finish();
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
} hooks;

// ---- kernels

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

at::Tensor empty(
    at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device>,
    std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, &allocator, kKeys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &allocator, kKeys, c10::dtype_or_default(dtype));
}

// The memory of a tensor as a tensor of the CPU.
at::Tensor on_host(const at::Tensor& tensor) {
  if (tensor.is_cpu()) return tensor;
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), at::TensorOptions(tensor.scalar_type()));
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  auto copy = [source, target] { on_host(target).copy_(on_host(source)); };
  if (non_blocking && target.is_cpu()) {
    std::lock_guard lock(mutex);
    ++late_copies;
    queues[current_stream].waiting.push_back(copy);
  } else {
    finish_all();
    copy();
  }
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  at::native::resize_(target, source.sizes());
  return copy_from(source, target, false);
}

at::Tensor& set_storage(
    at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  return at::native::set_storage_cpu_(self, source, offset, size, stride);
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) { at::native::cpu_fallback(op, stack); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("resize_", &at::native::resize_);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY(test_device, m) {
  m.def("counts() -> int[]", [] {
    return std::vector<int64_t>{late_copies, waits_for_events, waits_for_streams, waits_for_devices};
  });
  m.def("set_has_events(bool value) -> ()", [](bool value) { has_events = value; });
}

const bool registered = [] {
  at::RegisterPrivateUse1HooksInterface(&hooks);
  return true;
}();

}  // namespace
