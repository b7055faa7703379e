#include "order.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <sstream>

namespace sim {

uint64_t Clock::operator[](size_t stream) const {
  return stream < counts_.size() ? counts_[stream] : 0;
}

uint64_t Clock::advance(size_t stream) {
  if (stream >= counts_.size()) counts_.resize(stream + 1);
  return ++counts_[stream];
}

void Clock::join(const Clock& other) {
  if (other.counts_.size() > counts_.size()) counts_.resize(other.counts_.size());
  for (size_t i = 0; i < other.counts_.size(); i++) {
    counts_[i] = std::max(counts_[i], other.counts_[i]);
  }
}

SitePtr here(std::string name) {
  auto site = std::make_shared<Site>();
  site->name = std::move(name);
  if (auto node = torch::autograd::get_current_node()) site->node = node->name();
  site->frames = python_frames();
  return site;
}

std::string Site::text(size_t most_lines) const {
  std::ostringstream out;
  out << name;
  if (!node.empty()) out << ", in " << node;
  size_t lines = 0;
  for (auto& frame : frames) {
    if (!frame.is_ours()) continue;
    if (lines++ == most_lines) break;
    out << "\n    " << frame.place();
  }
  return out.str();
}

std::string Site::line() const {
  std::string found = node.empty() ? name : name + ", in " + node;
  for (auto& frame : frames) {
    if (frame.is_ours()) return found + " by " + frame.place();
  }
  return found;
}

}  // namespace sim
