// Tensors of the device, and the same memory as tensors of the CPU.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace sim {

// The same memory on the CPU. Nothing keeps it alive.
at::Tensor on_host(const at::Tensor& tensor);
// Memory of a device, of this shape and format.
at::Tensor new_tensor(const at::Tensor& like);
// Give a tensor another shape, and its storage more memory where that needs it.
void resize(const at::Tensor& tensor, c10::IntArrayRef sizes, c10::IntArrayRef strides);
// torch.UntypedStorage.resize_, of the storage of a tensor.
void resize_storage(const at::Tensor& holder, int64_t num_bytes);

// Nothing of autograd, autocast or modes while this lives: what is called is a kernel.
struct BelowAutograd {
  c10::impl::ExcludeDispatchKeyGuard excluded{
      c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset |
      c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot,
                           c10::DispatchKey::Functionalize})};
};

}  // namespace sim
