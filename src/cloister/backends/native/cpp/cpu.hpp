// Which kernels were compiled, and which of them this processor runs.
#pragma once
#include <string>
#include <vector>

#include "kernels.hpp"

namespace cloister {

// Tables that were compiled, best first; the last is always there.
std::vector<const Kernels*> compiled_kernels();

// Those of them that this processor runs, best first; the last is always there.
std::vector<const Kernels*> usable_kernels();

// The table of that name.
// Throws std::invalid_argument when this processor cannot run it.
const Kernels& find_kernels(const std::string& name);

}  // namespace cloister
