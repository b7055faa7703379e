// Lines of Python that a thread is executing, also while it has let go of Python's lock.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace sim {

struct Code;  // a function of Python's

struct Frame {
  const Code* code;
  int instruction;

  // "unit.py:393 in reshard", with the whole path.
  std::string place() const;
  // Whether it is neither torch's nor the simulator's.
  bool is_ours() const;
};

// Of this thread, from the innermost one.
std::vector<Frame> python_frames();

}  // namespace sim
