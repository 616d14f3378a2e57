// Which kernels this processor runs.
#pragma once
#include <string>
#include <vector>

#include "kernels.hpp"

namespace cloister {

// Usable tables, best first; the last is always there.
std::vector<const Kernels*> usable_kernels();

// The table of that name.
// Throws std::invalid_argument when this processor cannot run it.
const Kernels& find_kernels(const std::string& name);

}  // namespace cloister
