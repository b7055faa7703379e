#include "tensors.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/DeviceGuard.h>

#include <cstring>

#include "memory.h"
#include "streams.h"

namespace sim {
namespace {

// Give a storage other memory, and copy what both have room for.
void replace_memory(c10::StorageImpl* storage, size_t num_bytes) {
  c10::DeviceGuard guard(storage->device());
  auto data = num_bytes ? device_memory().allocate(num_bytes)
                        : c10::DataPtr(nullptr, storage->device());
  size_t common = std::min(num_bytes, storage->nbytes());
  if (common) {
    void *to = data.get(), *from = storage->mutable_data();
    auto& stream = current_stream(storage->device().index());
    Work work{"resize_", Accesses().reads(from, common).writes(to, common)};
    stream.launch(std::move(work), [=] { memcpy(to, from, common); });
  }
  storage->set_data_ptr_noswap(std::move(data));
  storage->set_nbytes(num_bytes);
}

}  // namespace

at::Tensor on_host(const at::Tensor& tensor) {
  auto options = tensor.options().device(at::kCPU).pinned_memory(false);
  void* data = tensor.numel() ? tensor.data_ptr() : nullptr;
  auto made = at::from_blob(data, tensor.sizes(), tensor.strides(), options);
  if (tensor.is_conj()) made._set_conj(true);
  if (tensor.is_neg()) made._set_neg(true);
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
    made.unsafeGetTensorImpl()->set_wrapped_number(true);
  }
  return made;
}

at::Tensor new_tensor(const at::Tensor& like) {
  return at::detail::empty_strided_generic(like.sizes(), like.strides(), &device_memory(),
                                           c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                           like.scalar_type());
}

void resize(const at::Tensor& tensor, c10::IntArrayRef sizes, c10::IntArrayRef strides) {
  int64_t last = tensor.storage_offset() + 1;
  for (size_t i = 0; i < sizes.size(); i++) {
    if (sizes[i] == 0) last = 0;
    if (last > 0) last += (sizes[i] - 1) * strides[i];
  }
  auto* storage = tensor.storage().unsafeGetStorageImpl();
  size_t needed = last * tensor.itemsize();
  if (needed > storage->nbytes()) replace_memory(storage, needed);
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
}

void resize_storage(const at::Tensor& holder, int64_t num_bytes) {
  replace_memory(holder.storage().unsafeGetStorageImpl(), num_bytes);
}

}  // namespace sim
