// Every operator without a kernel of its own: the CPU's, on the thread of the current stream.
//
// Shapes are found at once, on the meta device. Where only values tell them (nonzero, unique), the
// host waits, as it does for CUDA.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty_strided.h>
#include <Python.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <map>
#include <set>
#include <string>
#include <vector>

#include "generators.h"
#include "guard.h"
#include "settings.h"
#include "streams.h"
#include "tensors.h"

namespace sim {
namespace {

using Values = torch::jit::Stack;

// Call `change` for each tensor of a value, and return the value with what it returned.
template <typename Change>
c10::IValue changed(const c10::IValue& value, c10::Device device, const Change& change) {
  if (value.isTensor()) {
    return value.toTensor().defined() ? c10::IValue(change(value.toTensor())) : value;
  }
  if (value.isTensorList()) {
    c10::List<at::Tensor> found;
    for (const at::Tensor& tensor : value.toTensorList()) {
      found.push_back(tensor.defined() ? change(tensor) : tensor);
    }
    return found;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> found;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList()) {
      bool is_there = tensor.has_value() && tensor->defined();
      found.push_back(is_there ? std::optional<at::Tensor>(change(*tensor)) : tensor);
    }
    return found;
  }
  if (value.isDevice()) return device;
  return value;
}

// Norms of half precision keep their statistics in 32 bits on CUDA, and so on the meta device; the
// CPU's backward wants those that its forward made, in the format of the norm's parameters. They
// lose nothing on the way back.
void as_on_cpu(const c10::FunctionSchema& schema, Values& values) {
  static const std::set<std::string> norms = {"aten::native_layer_norm_backward",
                                              "aten::native_group_norm_backward",
                                              "aten::native_batch_norm_backward"};
  static const std::set<std::string> statistics = {"mean", "rstd", "save_mean", "save_invstd"};
  if (!norms.count(schema.name())) return;
  auto dtype = values[1].toTensor().scalar_type();  // of what was normalised
  for (size_t i = 0; i < values.size(); i++) {
    auto& name = schema.arguments()[i].name();
    bool is_there = values[i].isTensor() && values[i].toTensor().defined();
    if (is_there && (name == "weight" || name == "running_mean")) {
      dtype = values[i].toTensor().scalar_type();
    }
  }
  for (size_t i = 0; i < values.size(); i++) {
    if (!statistics.count(schema.arguments()[i].name()) || !values[i].isTensor()) continue;
    values[i] = values[i].toTensor().to(dtype);
  }
}

bool is_number(const at::Tensor& tensor) { return tensor.is_cpu() && tensor.dim() == 0; }

// One call of an operator, from its arguments to its results.
class Call {
 public:
  Call(const c10::OperatorHandle& op, Values arguments)
      : op_(op), schema_(op.schema()), arguments_(std::move(arguments)) {
    device_ = find_device();
  }

  Values run() {
    c10::DeviceGuard guard(c10::Device(kSim, device_));
    BelowAutograd below;
    bool knows_shapes = find_shapes();
    if (knows_shapes) resize_outputs();
    auto on_cpu = cpu_arguments(knows_shapes);
    return knows_shapes ? launch(std::move(on_cpu)) : wait_and_run(std::move(on_cpu));
  }

 private:
  c10::Device device() const { return c10::Device(kSim, device_); }

  int find_device() {
    int found = -1;
    auto see = [&](const at::Tensor& tensor) {
      if (tensor.device().type() == kSim && found < 0) found = tensor.device().index();
      return tensor;
    };
    for (auto& value : arguments_) {
      changed(value, c10::Device(kSim, 0), see);
      if (value.isDevice() && value.toDevice().type() == kSim && found < 0) {
        found = index_of(value.toDevice());
      }
    }
    return found < 0 ? current_device() : found;
  }

  // Run the operator on the meta device, with one meta tensor for each tensor.
  bool find_shapes() {
    auto to_meta = [&](const at::Tensor& tensor) -> at::Tensor {
      if (is_number(tensor)) return tensor;
      auto& found = metas_[tensor.unsafeGetTensorImpl()];
      if (!found.defined()) {
        auto options = tensor.options().device(at::kMeta).pinned_memory(false);
        found = at::empty_strided(tensor.sizes(), tensor.strides(), options);
      }
      return found;
    };
    try {
      for (auto& value : arguments_) {
        shapes_.push_back(value.isGenerator() ? c10::IValue()
                                              : changed(value, at::kMeta, to_meta));
      }
      op_.callBoxed(&shapes_);
    } catch (...) {
      if (PyGILState_Check()) PyErr_Clear();
      return false;
    }
    for (size_t i = 0; i < schema_.returns().size(); i++) {
      if (!shapes_[i].isTensor() && !shapes_[i].isTensorList()) return false;
    }
    return true;
  }

  // An out= that gets another shape.
  void resize_outputs() {
    for (auto& [impl, meta] : metas_) {
      using Pointer = c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
      at::Tensor tensor(Pointer::reclaim_copy(impl));
      if (tensor.device().type() == kSim && tensor.sizes() != meta.sizes()) {
        resize(tensor, meta.sizes(), meta.strides());
      }
    }
  }

  Values cpu_arguments(bool runs_later) {
    auto to_cpu = [&](const at::Tensor& tensor) -> at::Tensor {
      if (tensor.is_cpu()) return is_number(tensor) && runs_later ? tensor.clone() : tensor;
      auto& found = aliases_[tensor.unsafeGetTensorImpl()];
      if (!found.defined()) found = on_host(tensor);
      return found;
    };
    bool draws = false;
    for (auto tag : op_.getTags()) draws |= tag == at::Tag::nondeterministic_seeded;
    static const auto generator_type = c10::OptionalType::create(c10::GeneratorType::get());
    Values found;
    for (size_t i = 0; i < arguments_.size(); i++) {
      auto& value = arguments_[i];
      if (draws && schema_.arguments()[i].type()->isSubtypeOf(*generator_type)) {
        auto generator = value.isNone() ? default_generator(device_) : value.toGenerator();
        found.push_back(for_one_kernel(generator));
      } else {
        found.push_back(changed(value, at::kCPU, to_cpu));
      }
    }
    return found;
  }

  // The argument that a result is, if it is one.
  const c10::IValue* argument_of(size_t result) const {
    auto* info = schema_.returns()[result].alias_info();
    if (!info) return nullptr;
    for (size_t i = 0; i < arguments_.size(); i++) {
      auto* other = schema_.arguments()[i].alias_info();
      if (other && other->beforeSets() == info->beforeSets()) return &arguments_[i];
    }
    return nullptr;
  }

  Values launch(Values on_cpu) {
    Values results;
    std::vector<std::pair<size_t, c10::IValue>> targets;  // results that the kernel fills
    for (size_t i = 0; i < schema_.returns().size(); i++) {
      if (auto* argument = argument_of(i)) {
        results.push_back(*argument);
        continue;
      }
      results.push_back(changed(shapes_[i], device(), new_tensor));
      targets.emplace_back(i, changed(results.back(), at::kCPU, on_host));
    }
    auto kernel = [op = op_, on_cpu = std::move(on_cpu), targets = std::move(targets)]() mutable {
      BelowAutograd below;
      as_on_cpu(op.schema(), on_cpu);
      op.callBoxed(&on_cpu);
      for (auto& [i, target] : targets) fill(target, on_cpu[i]);
    };
    Work work{schema_.name(), accesses()};
    if (schema_.name() == "simulated_gpu::call") work.name = arguments_.back().toStringRef();
    work.flops = num_flops();
    for (auto& [i, target] : targets) add(results[i], true, work.accesses);
    current_stream(device_).launch(std::move(work), std::move(kernel));
    return results;
  }

  static void add(const c10::IValue& value, bool writes, Accesses& accesses) {
    changed(value, c10::Device(kSim, 0), [&](const at::Tensor& tensor) {
      if (tensor.device().type() == kSim) {
        if (writes) accesses.writes(tensor);
        else accesses.reads(tensor);
      }
      return tensor;
    });
  }

  // What the arguments' bytes are to the operator.
  Accesses accesses() const {
    Accesses found;
    for (size_t i = 0; i < arguments_.size(); i++) {
      auto* info = schema_.arguments()[i].alias_info();
      add(arguments_[i], info && info->isWrite(), found);
    }
    return found;
  }

  // Of a product of two matrices, or of batches of them, which come last among the arguments.
  double num_flops() const {
    if (schema_.name().find("mm") == std::string::npos) return 0;
    std::vector<at::Tensor> tensors;
    for (size_t i = 0; i < arguments_.size(); i++) {
      auto& value = arguments_[i];
      if (!value.isTensor() || schema_.arguments()[i].alias_info()) continue;
      if (value.toTensor().dim() >= 2) tensors.push_back(value.toTensor());
    }
    if (tensors.size() < 2) return 0;
    return 2.0 * tensors[tensors.size() - 2].numel() * tensors.back().size(-1);
  }

  static void fill(const c10::IValue& target, const c10::IValue& values) {
    if (target.isTensor()) {
      auto& to = target.toTensor();
      auto& from = values.toTensor();
      // The CPU leaves empty what it has no use for: statistics of a batch norm that evaluates.
      bool is_left_out = !from.defined() || (from.numel() == 0 && to.numel() > 0);
      if (!is_left_out) to.copy_(from);
      return;
    }
    auto to = target.toTensorList(), from = values.toTensorList();
    for (size_t i = 0; i < to.size(); i++) at::Tensor(to.get(i)).copy_(from.get(i));
  }

  Values wait_and_run(Values on_cpu) {
    {
      std::lock_guard<std::mutex> lock(counts().mutex);
      counts().blocking[c10::toString(op_.operator_name())]++;
    }
    host_wait_for_stream(device_, schema_.name().c_str());
    races().by_host(here(schema_.name()), accesses());
    op_.callBoxed(&on_cpu);
    auto to_device = [&](const at::Tensor& tensor) {
      auto made = new_tensor(tensor);
      // Behind the poison of who had this memory before.
      current_stream(device_).then([to = on_host(made), tensor] {
        BelowAutograd below;
        to.copy_(tensor);
      });
      return made;
    };
    Values results;
    for (size_t i = 0; i < schema_.returns().size(); i++) {
      auto* argument = argument_of(i);
      results.push_back(argument ? *argument : changed(on_cpu[i], device(), to_device));
    }
    return results;
  }

  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  const Values arguments_;
  int device_;
  Values shapes_;  // arguments, later results, on the meta device
  std::map<c10::TensorImpl*, at::Tensor> metas_, aliases_;
};

void run_boxed(const c10::OperatorHandle& op, Values* stack) {
  size_t num_arguments = op.schema().arguments().size();
  Call call(op, Values(stack->end() - num_arguments, stack->end()));
  auto results = call.run();
  torch::jit::drop(*stack, num_arguments);
  for (auto& result : results) stack->push_back(std::move(result));
}

TORCH_LIBRARY_IMPL(_, CUDA, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_boxed>());
}

// What torch would make of other operators where a device has no kernel: with other bits.
TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  for (auto name : {"native_layer_norm", "native_group_norm"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_boxed>());
  }
}

}  // namespace
}  // namespace sim
