// What Python asks of the device: see `simulated_gpu/cuda.py`.
#include <torch/csrc/utils/pybind.h>

#include "generators.h"
#include "memory.h"
#include "pinned.h"
#include "settings.h"
#include "streams.h"
#include "tensors.h"
#include "trace.h"

namespace sim {
namespace {

template <typename Value>
void set(Value& to, py::handle from) {
  to = from.cast<Value>();
}

void configure(const py::kwargs& given) {
  auto& all = settings();
  for (auto item : given) {
    auto name = item.first.cast<std::string>();
    auto value = item.second;
    if (name == "devices") set(all.devices, value);
    else if (name == "delay_us") set(all.delay_us, value);
    else if (name == "delay_share") set(all.delay_share, value);
    else if (name == "seed") set(all.seed, value), seed_streams(all.seed);
    else if (name == "poison") set(all.poison, value);
    else if (name == "memory") set(all.memory, value);
    else if (name == "sync_debug") set(all.sync_debug, value);
    else if (name == "most_bytes") set(all.most_bytes, value);
    else if (name == "races") set(all.races, value);
    else if (name == "stall_s") set(all.stall_s, value);
    else if (name == "strict_register") set(all.strict_register, value);
    else throw py::key_error("no setting of the simulated GPU: " + name);
  }
}

py::dict stats(int device) {
  auto found = device_memory().stats(device);
  py::dict made;
  for (size_t i = 0; i < kNumCounted; i++) {
    py::dict of_pools;
    for (size_t j = 0; j < kPoolNames.size(); j++) {
      auto& stat = found.counted[i][j];
      py::dict numbers;
      numbers["current"] = stat.current;
      numbers["peak"] = stat.peak;
      numbers["allocated"] = stat.allocated;
      numbers["freed"] = stat.freed;
      of_pools[kPoolNames[j]] = numbers;
    }
    made[kCountedNames[i]] = of_pools;
  }
  made["num_alloc_retries"] = found.num_alloc_retries;
  made["num_ooms"] = found.num_ooms;
  made["num_sync_all_streams"] = found.num_sync_all_streams;
  made["num_device_alloc"] = found.num_device_alloc;
  made["num_device_free"] = found.num_device_free;
  return made;
}

py::dict count() {
  auto& all = counts();
  std::lock_guard<std::mutex> lock(all.mutex);
  py::dict made;
  made["kernels"] = all.kernels.load();
  made["host_waits"] = all.host_waits.load();
  made["blocking"] = all.blocking;
  return made;
}

py::list trace() {
  py::list made;
  for (auto& each : tracer().end()) {
    py::dict entry;
    entry["kind"] = each.kind;
    entry["stream"] = each.stream;
    entry["name"] = each.name;
    entry["line"] = each.line;
    entry["link"] = each.link;
    entry["flops"] = each.flops;
    entry["read"] = each.read;
    entry["written"] = each.written;
    entry["point"] = each.point;
    entry["thread"] = each.thread;
    made.append(std::move(entry));
  }
  return made;
}

}  // namespace
}  // namespace sim

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace sim;
  using NoGil = py::call_guard<py::gil_scoped_release>;
  m.def("configure", &configure);
  m.def("count", &count);
  m.def("device_count", [] { return settings().devices; });
  m.def("memory", [] { return settings().memory; });
  m.def("sync_debug", [] { return settings().sync_debug; });
  m.def("current_device", &current_device);
  m.def("set_device", &set_current_device);
  m.def("is_forked", &is_forked);
  m.def("stop_streams", &stop_streams);
  m.def("stalls", [](double for_s) { return stalls(for_s); });
  m.def("races", [] { return races().found(); });
  m.def("clear_races", [] { races().clear(); });
  m.def("observe_only", &observe_only);
  m.def("begin_trace", [] { tracer().begin(); });
  m.def("end_trace", &trace);
  m.def("mark", [](const std::string& kind, int64_t number) { tracer().mark(kind, number); });
  m.def("stats", &stats);
  m.def("reset_peak", [](int device) { device_memory().reset_peak(device); });
  m.def("reset_accumulated", [](int device) { device_memory().reset_accumulated(device); });
  m.def("empty_cache", [] { device_memory().empty_cache(current_device()); }, NoGil());
  m.def("resize_storage", &resize_storage);
  m.def("host_register", [](int64_t address, int64_t num_bytes) {
    pinned_memory().register_range(reinterpret_cast<char*>(address), num_bytes);
  });
  m.def("host_unregister", [](int64_t address) {
    pinned_memory().unregister_range(reinterpret_cast<char*>(address));
  });
  m.def("default_generator", [](int device) { return default_generator(device); });
  m.def("on_host", &on_host);
}
