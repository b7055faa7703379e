// Operators with kernels of their own: what makes tensors, copies, and what the host waits for.
#include <ATen/EmptyTensor.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/strides.h>
#include <torch/library.h>

#include "guard.h"
#include "memory.h"
#include "pinned.h"
#include "streams.h"
#include "tensors.h"

namespace sim {
namespace {

const c10::DispatchKeySet kKeys(c10::DispatchKey::CUDA);

at::Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype,
                 std::optional<c10::Layout>, std::optional<c10::Device> device,
                 std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_generic(size, &device_memory(), kKeys, c10::dtype_or_default(dtype),
                                   format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride,
                         std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                         std::optional<c10::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_strided_generic(size, stride, &device_memory(), kKeys,
                                           c10::dtype_or_default(dtype));
}

const at::Tensor& resize_(const at::Tensor& self, c10::IntArrayRef size,
                          std::optional<c10::MemoryFormat>) {
  if (self.sizes() != size) resize(self, size, c10::contiguous_strides(size));
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source) {
  int64_t count = source.nbytes() / self.itemsize();
  return at::native::set_storage_cpu_(self, std::move(source), 0, {count}, {});
}

at::Tensor& set_storage_at(at::Tensor& self, at::Storage source, int64_t offset,
                           c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::native::set_storage_cpu_(self, std::move(source), offset, size, stride);
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  device_memory().record_stream(self.storage().mutable_data(), stream.id());
}

at::Scalar item(const at::Tensor& self) {
  host_wait_for_stream(self.get_device(), "item");
  races().by_host(here("item"), Accesses().reads(self));
  return at::native::_local_scalar_dense_cpu(on_host(self));
}

at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  if (self.numel() == 0) return self;
  auto from = source.sizes() == self.sizes() ? source : source.expand(self.sizes());
  bool is_down = self.is_cpu(), is_up = source.is_cpu();
  int device = is_down ? source.get_device() : self.get_device();
  c10::DeviceGuard guard(c10::Device(kSim, device));
  if (!is_down && !is_up && source.get_device() != device) {
    // The stream of the target follows that of the source, and the other way round.
    auto& other = current_stream(source.get_device());
    auto& own = current_stream(device);
    own.wait(other.record());
    auto a = on_host(self), b = on_host(from);
    Work work{"copy_", Accesses().reads(from).writes(self)};
    own.launch(std::move(work), [a, b] { BelowAutograd below; a.copy_(b); });
    other.wait(own.record());
    return self;
  }
  auto a = on_host(self), b = on_host(from);
  const at::Tensor& host = is_down ? self : source;
  bool is_pinned = (is_down || is_up) &&
                   pinned_memory().is_pinned(host.data_ptr(), host.numel() * host.itemsize());
  Work work{"copy_", Accesses().reads(from).writes(self)};
  if (is_up) work.link = "up";
  if (is_down) work.link = "down";
  auto copy = [a, b] { BelowAutograd below; a.copy_(b); };
  current_stream(device).launch(std::move(work), std::move(copy));
  if (!is_down && !is_up) return self;
  if (non_blocking && is_pinned) {
    auto stream = as_stream(device, current_stream_id(device));
    pinned_memory().record_event(host.data_ptr(), nullptr, stream);
  } else {
    host_wait_for_stream(device, is_down ? "copy to the host" : "copy from pageable memory");
  }
  return self;
}

std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& x, double share,
                                                  std::optional<bool> is_training) {
  auto as_mask = x.options().dtype(at::kBool);
  if (share == 0 || (is_training.has_value() && !*is_training)) {
    return {x.clone(), at::ones_like(x, as_mask)};
  }
  auto mask = at::empty_like(x, as_mask).bernoulli_(1 - share);
  return {x.mul(mask).mul_(share == 1 ? 0.0 : 1 / (1 - share)), mask};
}

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("unfold", TORCH_FN(at::native::unfold));
  m.impl("resize_", &resize_);
  m.impl("set_.source_Storage", &set_storage);
  m.impl("set_.source_Storage_storage_offset", &set_storage_at);
  m.impl("copy_", &copy_);
  m.impl("_local_scalar_dense", &item);
  m.impl("record_stream", &record_stream);
  m.impl("native_dropout", &native_dropout);
}

}  // namespace
}  // namespace sim
