#include "settings.h"

namespace sim {

// Never destroyed: streams still run when a process ends.
Settings& settings() {
  static auto* made = new Settings;
  return *made;
}

Counts& counts() {
  static auto* made = new Counts;
  return *made;
}

}  // namespace sim
