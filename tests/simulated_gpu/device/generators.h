// Random numbers of a device: like CUDA's, a generator moves on when a kernel is launched.
#pragma once

#include <ATen/core/Generator.h>

namespace sim {

// The generator of a device; of the current one for -1.
at::Generator& default_generator(int device);
at::Generator new_generator(int device);
// A generator of the CPU for one kernel, seeded by the next number of `generator`.
at::Generator for_one_kernel(const at::Generator& generator);

}  // namespace sim
