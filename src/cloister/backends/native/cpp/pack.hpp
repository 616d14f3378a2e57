// Lays weights out as layout.hpp says.
#pragma once
#include <cstdint>

#include "layout.hpp"
#include "pool.hpp"

namespace cloister {

enum class Source : int { f32 = 0, bf16 = 1, f16 = 2, codes = 3 };

// Packs rows [num_rows][inputs] of `source`; row i becomes packed row places[i], and places increase. The target was zero.
void pack(Pool& pool, Kind kind, Source source, const void* data, int num_rows, int inputs, const int32_t* places, uint8_t* codes);

}  // namespace cloister
