// The device guard (devices, streams, events) and the hooks (is there CUDA, generators, memory).
#include "guard.h"

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "generators.h"
#include "memory.h"
#include "pinned.h"
#include "settings.h"

namespace sim {
namespace {

Stream& stream_of(const c10::Stream& stream) {
  return sim::stream_of(int(stream.device_index()), stream.id());
}

PointPtr& point_of(void* event) { return *static_cast<PointPtr*>(event); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kSim; }
  c10::DeviceIndex deviceCount() const noexcept override { return settings().devices; }

  c10::Device getDevice() const override { return c10::Device(kSim, current_device()); }
  void setDevice(c10::Device device) const override {
    if (device.has_index()) set_current_device(device.index());
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override { setDevice(device); }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }

  c10::Stream getStream(c10::Device device) const override {
    return as_stream(index_of(device), current_stream_id(index_of(device)));
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return as_stream(index_of(device), 0);
  }
  c10::Stream getNewStream(c10::Device device, int priority) const override {
    return as_stream(index_of(device), next_stream_id(index_of(device), priority < 0));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool is_high_priority) const override {
    return as_stream(index_of(device), next_stream_id(index_of(device), is_high_priority));
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    int device = stream.device_index();
    auto before = as_stream(device, current_stream_id(device));
    set_current_stream_id(device, stream.id());
    return before;
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override {
    return reinterpret_cast<void*>(intptr_t(stream.id() + 1000 * stream.device_index()));
  }
  bool queryStream(const c10::Stream& stream) const override {
    return stream_of(stream).is_idle();
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    note_host_wait("stream.synchronize");
    host_wait(stream_of(stream).record());
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    note_host_wait("synchronize");
    host_wait_for_device(device < 0 ? current_device() : device);
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    if (!*event) *event = new PointPtr;
    point_of(*event) = stream_of(stream).record();
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<PointPtr*>(event);
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event) stream_of(stream).wait(point_of(event));
  }
  bool queryEvent(void* event) const override {
    if (!event) return true;
    auto& point = point_of(event);
    if (!point->is_reached()) return false;
    races().host_follows(point->clock);
    return true;
  }
  void synchronizeEvent(void* event) const override {
    if (event) host_wait(point_of(event));
  }
  double elapsedTime(void* from, void* to, const c10::DeviceIndex) const override {
    return point_of(to)->time_ms() - point_of(from)->time_ms();
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    device_memory().record_stream(data.get(), stream.id());
  }
};

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}

  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return settings().devices > 0; }
  bool hasCUDA() const override { return settings().devices > 0; }
  bool hasCUDART() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }

  c10::DeviceIndex deviceCount() const override { return settings().devices; }
  int getNumGPUs() const override { return settings().devices; }
  c10::DeviceIndex current_device() const override { return sim::current_device(); }
  c10::DeviceIndex getCurrentDevice() const override { return sim::current_device(); }
  void setCurrentDevice(c10::DeviceIndex device) const override { set_current_device(device); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    auto before = sim::current_device();
    if (device >= 0) set_current_device(device);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return exchangeDevice(device);
  }
  void deviceSynchronize(c10::DeviceIndex device) const override { host_wait_for_device(device); }

  bool isPinnedPtr(const void* data) const override { return pinned_memory().is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory(); }
  c10::Allocator* getCUDADeviceAllocator() const override { return &device_memory(); }
  c10::Device getDeviceFromPtr(void*) const override {
    return c10::Device(kSim, sim::current_device());
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generator(device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return new_generator(device);
  }
};

[[maybe_unused]] const bool has_allocators = [] {
  c10::SetAllocator(kSim, &device_memory(), 200);
  at::setHostAllocator(kSim, &pinned_memory(), 200);
  watch_host_operators();
  return true;
}();

}  // namespace

// In the namespaces below a guard and hooks of this name would be others.
using SimulatedGuard = Guard;
using SimulatedHooks = Hooks;

}  // namespace sim

namespace c10::impl {
namespace {
using sim::SimulatedGuard;
C10_REGISTER_GUARD_IMPL(CUDA, SimulatedGuard)
}  // namespace
}  // namespace c10::impl

namespace at {
using sim::SimulatedHooks;
C10_REGISTER_TYPED_CLASS(CUDAHooksRegistry, "CUDAHooks", SimulatedHooks)
}  // namespace at
