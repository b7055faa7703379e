#include "trace.h"

#include <sys/syscall.h>
#include <unistd.h>

#include "streams.h"

namespace sim {

Tracer& tracer() {
  static auto* made = new Tracer;
  return *made;
}

void Tracer::begin() {
  std::lock_guard<std::mutex> lock(mutex_);
  all_.clear();
  points_.clear();
  is_on_ = true;
}

std::vector<Traced> Tracer::end() {
  std::lock_guard<std::mutex> lock(mutex_);
  is_on_ = false;
  return std::move(all_);
}

void Tracer::add(Traced traced, const Point* point) {
  traced.thread = syscall(SYS_gettid);
  std::lock_guard<std::mutex> lock(mutex_);
  if (point) {
    if (traced.kind == "record") points_[point] = int64_t(all_.size());
    auto found = points_.find(point);
    if (found == points_.end()) return;  // of before the trace
    traced.point = found->second;
  }
  all_.push_back(std::move(traced));
}

void Tracer::launch(const std::string& stream, const Work& work, const Site& site) {
  if (!is_on_) return;
  auto read = num_bytes(work.accesses.read), written = num_bytes(work.accesses.written);
  add({"kernel", stream, work.name, site.line(), work.link, work.flops, read, written}, nullptr);
}

void Tracer::by_host(const Site& site, const Accesses& accesses) {
  if (!is_on_) return;
  auto read = num_bytes(accesses.read), written = num_bytes(accesses.written);
  add({"host kernel", "", site.name, site.line(), "host", 0, read, written}, nullptr);
}

void Tracer::mark(const std::string& kind, int64_t number) {
  if (!is_on_) return;
  Traced traced{kind};
  traced.point = number;
  add(std::move(traced), nullptr);
}

void Tracer::record(const std::string& stream, const Point* point) {
  if (is_on_) add({"record", stream}, point);
}

void Tracer::wait(const std::string& stream, const Point* point) {
  if (is_on_) add({"wait", stream}, point);
}

void Tracer::host_wait(const Point* point) {
  if (is_on_) add({"host wait"}, point);
}

}  // namespace sim
