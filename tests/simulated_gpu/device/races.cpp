#include "races.h"

#include <ATen/core/function_schema.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <set>
#include <sstream>

#include "pinned.h"
#include "settings.h"
#include "streams.h"
#include "trace.h"

namespace sim {
namespace {

constexpr size_t kHost = size_t(-1);  // in place of a stream's number
constexpr size_t kMostRows = 1024;    // of a tensor with gaps, each a range of its own
constexpr size_t kLines = 12;
constexpr size_t kMostFound = 20;

thread_local bool only_observes = false;

std::string name_of(size_t stream) {
  return stream == kHost ? "the host" : stream_name(stream);
}

// The bytes of a tensor: one range for each run without a gap.
void add(const at::Tensor& tensor, std::vector<Range>& ranges) {
  if (!tensor.defined() || tensor.numel() == 0) return;
  auto begin = reinterpret_cast<uintptr_t>(tensor.data_ptr());
  int64_t run = tensor.itemsize();  // bytes without a gap
  std::vector<std::pair<int64_t, int64_t>> dims;  // bytes of a step, size
  for (int64_t i = 0; i < tensor.dim(); i++) {
    if (tensor.size(i) > 1 && tensor.stride(i) != 0) {
      dims.emplace_back(tensor.stride(i) * tensor.itemsize(), tensor.size(i));
    }
  }
  std::sort(dims.begin(), dims.end());
  size_t inner = 0;
  while (inner < dims.size() && dims[inner].first <= run) {
    run = std::max(run, dims[inner].first * (dims[inner].second - 1) + run);
    inner++;
  }
  size_t count = 1;
  int64_t last = run;
  for (size_t i = inner; i < dims.size(); i++) {
    count *= dims[i].second;
    last += dims[i].first * (dims[i].second - 1);
  }
  if (count > kMostRows) {
    ranges.push_back({begin, begin + last});
    return;
  }
  std::vector<uintptr_t> starts{begin};
  for (size_t i = inner; i < dims.size(); i++) {
    std::vector<uintptr_t> next;
    for (auto start : starts) {
      for (int64_t k = 0; k < dims[i].second; k++) next.push_back(start + k * dims[i].first);
    }
    starts = std::move(next);
  }
  for (auto start : starts) ranges.push_back({start, start + run});
}

}  // namespace

Races& races() {
  static auto* made = new Races;
  return *made;
}

void observe_only() { only_observes = true; }

bool knows_order() { return settings().races != int(OnRace::kIgnore) || tracer().is_on(); }

// Accesses

Accesses& Accesses::reads(const at::Tensor& tensor) {
  add(tensor, read);
  return *this;
}

Accesses& Accesses::writes(const at::Tensor& tensor) {
  add(tensor, written);
  return *this;
}

Accesses& Accesses::reads(const void* data, size_t num_bytes) {
  auto begin = reinterpret_cast<uintptr_t>(data);
  if (num_bytes) read.push_back({begin, begin + num_bytes});
  return *this;
}

Accesses& Accesses::writes(const void* data, size_t num_bytes) {
  auto begin = reinterpret_cast<uintptr_t>(data);
  if (num_bytes) written.push_back({begin, begin + num_bytes});
  return *this;
}

int64_t num_bytes(const std::vector<Range>& ranges) {
  int64_t sum = 0;
  for (auto& range : ranges) sum += range.end - range.begin;
  return sum;
}

// Clocks

Clock Races::copy_of(const Clock& clock) {
  std::lock_guard<std::mutex> lock(mutex_);
  return clock;
}

void Races::follow(Clock& clock, const Clock& point) {
  std::lock_guard<std::mutex> lock(mutex_);
  clock.join(point);
}

void Races::host_follows(const Clock& point) {
  if (only_observes) return;
  std::lock_guard<std::mutex> lock(mutex_);
  host_.join(point);
}

// Accesses of streams and of the host

void Races::launch(size_t stream, Clock& clock, const SitePtr& site, const Accesses& accesses) {
  launch_quietly(stream, clock, site, accesses);
  raise();
}

void Races::launch_quietly(size_t stream, Clock& clock, const SitePtr& site,
                           const Accesses& accesses) {
  std::lock_guard<std::mutex> lock(mutex_);
  clock.join(host_);
  record(stream, clock, site, accesses);
}

void Races::by_host(const SitePtr& site, const Accesses& accesses) {
  std::lock_guard<std::mutex> lock(mutex_);
  Access now{kHost, 0, site};
  for (auto* ranges : {&accesses.read, &accesses.written}) {
    bool writes = ranges == &accesses.written;
    const char* does = writes ? "writes" : "reads";
    for (auto& range : *ranges) {
      auto at = segments_.upper_bound(range.begin);
      if (at != segments_.begin() && std::prev(at)->second.end > range.begin) --at;
      for (; at != segments_.end() && at->first < range.end; ++at) {
        check(at->second.write, "writes", now, does, host_, range);
        if (!writes) continue;
        for (auto& before : at->second.reads) check(before, "reads", now, does, host_, range);
      }
    }
  }
}

void Races::record(size_t stream, Clock& clock, const SitePtr& site, const Accesses& accesses) {
  Access now{stream, clock.advance(stream), site};
  for (auto& range : accesses.read) read(range, now, clock);
  for (auto& range : accesses.written) write(range, now, clock);
}

// Begin a segment at an address, if it lies within one; return the first one behind it.
Races::Segments::iterator Races::cut_at(uintptr_t address) {
  auto next = segments_.lower_bound(address);
  if (next == segments_.begin() || (next != segments_.end() && next->first == address)) return next;
  auto& before = std::prev(next)->second;
  if (before.end <= address) return next;
  Segment rest = before;
  before.end = address;
  return segments_.emplace_hint(next, address, std::move(rest));
}

void Races::read(const Range& range, const Access& access, const Clock& clock) {
  auto last = cut_at(range.end);
  auto at = cut_at(range.begin);
  uintptr_t covered = range.begin;
  auto add_gap = [&](uintptr_t end) {
    if (covered < end) segments_.emplace_hint(at, covered, Segment{end, {}, {access}});
  };
  for (; at != last; ++at) {
    add_gap(at->first);
    auto& [end, written, reads] = at->second;
    check(written, "writes", access, "reads", clock, range);
    auto own = std::find_if(reads.begin(), reads.end(),
                            [&](auto& each) { return each.stream == access.stream; });
    if (own != reads.end()) *own = access;
    else reads.push_back(access);
    covered = end;
  }
  add_gap(range.end);
}

void Races::write(const Range& range, const Access& access, const Clock& clock) {
  auto last = cut_at(range.end);
  auto first = cut_at(range.begin);
  for (auto at = first; at != last; ++at) {
    check(at->second.write, "writes", access, "writes", clock, range);
    for (auto& before : at->second.reads) check(before, "reads", access, "writes", clock, range);
  }
  segments_.erase(first, last);
  segments_.emplace_hint(last, range.begin, Segment{range.end, access, {}});
}

void Races::forget(const void* data, size_t num_bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto begin = reinterpret_cast<uintptr_t>(data);
  auto last = cut_at(begin + num_bytes);
  segments_.erase(cut_at(begin), last);
}

void Races::check(const Access& before, const char* did, const Access& now, const char* does,
                  const Clock& clock, const Range& range) {
  if (!before.site || before.stream == now.stream || clock[before.stream] >= before.count) return;
  if (settings().races == int(OnRace::kIgnore) || found_.size() >= kMostFound) return;
  std::ostringstream out;
  out << "a race: " << now.site->line() << " " << does << " on " << name_of(now.stream) << " what "
      << before.site->line() << " " << did << " on " << name_of(before.stream)
      << ", and nothing orders them (" << range.end - range.begin << " bytes)\n  now:    "
      << now.site->text(kLines) << "\n  before: " << before.site->text(kLines);
  auto text = out.str();
  if (std::find(found_.begin(), found_.end(), text) == found_.end()) found_.push_back(text);
}

void Races::raise() {
  std::string text;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (settings().races != int(OnRace::kRaise) || raised_ == found_.size()) return;
    text = found_[raised_];
    raised_ = found_.size();
  }
  TORCH_CHECK(false, text);
}

std::vector<std::string> Races::found() {
  std::lock_guard<std::mutex> lock(mutex_);
  return found_;
}

void Races::clear() {
  std::lock_guard<std::mutex> lock(mutex_);
  found_.clear();
  raised_ = 0;
}

// Operators of the CPU

namespace {

// Whether an operator touches the values of its arguments: others make tensors, or look at shapes.
bool touches_values(const std::string& name) {
  static const std::set<std::string> others = {
      "aten::set_", "aten::resize_", "aten::result_type", "aten::is_same_size",
      "aten::is_pinned", "aten::record_stream", "aten::detach_", "aten::_pin_memory",
      "aten::zeros_like", "aten::ones_like", "aten::full_like", "aten::rand_like",
      "aten::randn_like",
  };
  return !others.count(name) && name.find("empty") == std::string::npos &&
         name.find("aten::new_") == std::string::npos;
}

std::unique_ptr<at::ObserverContext> before_operator(const at::RecordFunction& call) {
  if (!knows_order() || is_stream_thread()) return nullptr;
  Accesses accesses;
  std::optional<c10::FunctionSchema> schema;
  size_t number = 0;
  for (auto& value : call.inputs()) {
    auto index = number++;
    auto see = [&](const at::Tensor& tensor) {
      if (!tensor.defined() || !tensor.is_cpu() || tensor.numel() == 0 || !tensor.has_storage() ||
          !tensor.unsafeGetTensorImpl()->storage().data()) return;
      if (!pinned_memory().is_known(tensor.const_data_ptr())) return;
      if (!schema) schema = call.operator_schema();
      if (!schema || index >= schema->arguments().size()) return;
      auto* info = schema->arguments()[index].alias_info();
      if (info && !info->isWrite()) return;  // a view of it is made
      if (info) accesses.writes(tensor);
      else accesses.reads(tensor);
    };
    if (value.isTensor()) {
      if (value.toTensor().defined() && value.toTensor().device().type() == kSim) return nullptr;
      see(value.toTensor());
    } else if (value.isTensorList()) {
      for (const at::Tensor& tensor : value.toTensorList()) {
        if (tensor.defined() && tensor.device().type() == kSim) return nullptr;
        see(tensor);
      }
    }
  }
  if (accesses.read.empty() && accesses.written.empty()) return nullptr;
  if (!touches_values(schema->name())) return nullptr;
  auto site = here(schema->name());
  races().by_host(site, accesses);
  tracer().by_host(*site, accesses);
  return nullptr;
}

}  // namespace

void watch_host_operators() {
  at::addGlobalCallback(at::RecordFunctionCallback(&before_operator)
                            .needsInputs(true)
                            .scopes({at::RecordScope::FUNCTION}));
}

}  // namespace sim
