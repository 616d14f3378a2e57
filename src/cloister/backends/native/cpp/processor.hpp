// Which instruction sets this processor and its system offer, whatever was compiled.
#pragma once
#include <string>
#include <vector>

namespace cloister {

// Names of the sets, best first; the last is "scalar", which every processor runs.
std::vector<std::string> runnable_sets();

}  // namespace cloister
