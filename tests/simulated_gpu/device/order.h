// What comes before what, and where the host has asked for it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "frames.h"

namespace sim {

// How much of each stream comes before something: a count of tasks, by number of the stream.
class Clock {
 public:
  uint64_t operator[](size_t stream) const;
  uint64_t advance(size_t stream);
  // What comes before `other` comes before this too.
  void join(const Clock& other);

 private:
  std::vector<uint64_t> counts_;
};

// Where the host has given a task to a stream, or has waited.
struct Site {
  std::string name;  // of the operation
  std::string node;  // of autograd's graph, whose backward this is
  std::vector<Frame> frames;  // of Python, from the innermost one

  // The operation, and the lines that led to it.
  std::string text(size_t most_lines) const;
  // The operation, and the innermost line that is not torch's.
  std::string line() const;
};
using SitePtr = std::shared_ptr<const Site>;

// Where this thread is.
SitePtr here(std::string name);

}  // namespace sim
