// A CUDA device as far as a CPU build of torch asks for one: a device guard, which autograd and tensor constructors
// look up, and the hooks by which ATen recognises an accelerator. Nothing runs on it: its tensors are fake ones.
// Pinned memory is host memory whose addresses are remembered, so that `is_pinned` tells the truth.

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <mutex>
#include <set>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;

constexpr auto kDevice = DeviceType::CUDA;

Stream only_stream() {
  return Stream(Stream::DEFAULT, Device(kDevice, 0));
}

struct FakeGuard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return kDevice; }
  Device exchangeDevice(Device) const override { return Device(kDevice, 0); }
  Device getDevice() const override { return Device(kDevice, 0); }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  Stream getStream(Device) const override { return only_stream(); }
  Stream getDefaultStream(Device) const override { return only_stream(); }
  Stream exchangeStream(Stream) const override { return only_stream(); }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void** event, const Stream&, const DeviceIndex, const c10::EventFlag) const override {
    *event = const_cast<FakeGuard*>(this);  // any address: an event that has happened
  }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}
};

std::mutex pinned_lock;
std::set<const void*> pinned;

void unpin(void* address) {
  {
    std::lock_guard<std::mutex> held(pinned_lock);
    pinned.erase(address);
  }
  c10::GetCPUAllocator()->raw_deleter()(address);
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* address = c10::GetCPUAllocator()->raw_allocate(bytes);
    std::lock_guard<std::mutex> held(pinned_lock);
    pinned.insert(address);
    return {address, address, &unpin, Device(DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* to, const void* from, std::size_t count) const override { default_copy_data(to, from, count); }
};

struct FakeHooks final : at::CUDAHooksInterface {
  explicit FakeHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  at::Allocator* getPinnedMemoryAllocator() const override {
    static PinnedAllocator allocator;
    return &allocator;
  }
  bool isPinnedPtr(const void* address) const override {
    std::lock_guard<std::mutex> held(pinned_lock);
    return pinned.count(address) > 0;
  }
};

FakeGuard guard;

}  // namespace

namespace at {
using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
C10_REGISTER_TYPED_CLASS(CUDAHooksRegistry, "CUDAHooks", ::FakeHooks)
}  // namespace at

extern "C" void set_guard() {
  c10::impl::device_guard_impl_registry[static_cast<size_t>(kDevice)].store(&guard);
}
