// The arithmetic of Mamba 2 (mamba2.cpp). A head's state is [head_dim][d_state] numbers. They lie in panels of 16 rows (the last has what is
// left), each [d_state][rows], so that lanes are rows: no sum goes over lanes, and one over d_state has one order, however many of its
// numbers an instruction set keeps in registers.
#pragma once
#include "kernels.hpp"
#include "rows.hpp"
#include "simd.hpp"

namespace cloister::CLOISTER_ISA {

constexpr int scan_columns = pieces == 1 ? 16 : 4;  // of a panel, which stay in registers over all tokens
constexpr int scan_sums = pieces == 1 ? 2 : 1;      // of every other column, so that additions overlap

// Advances columns [first, first + count) of a panel by all tokens, and adds what they give to the outputs; the first adds to skip * x.
template <int count, class Load, class Store>
INLINE void scan_panel(const Scan& scan, float* panel, int width, int row, int first, Load load_row, Store store_row) {
    f32x16 state[count];
    UNROLL for (int k = 0; k < count; k++) state[k] = load_row(panel + size_t(first + k) * size_t(width));
    NO_UNROLL for (int token = 0; token < scan.num_tokens; token++) {
        const float *x = scan.x + size_t(token) * scan.stride, *b = scan.b + size_t(token) * scan.stride + first, *c = scan.c + size_t(token) * scan.stride + first;
        float* out = scan.out + size_t(token) * scan.out_stride + row;
        f32x16 its = load_row(x + row), step = its * scan.steps[token], decay = set(scan.decays[token]);
        f32x16 sums[scan_sums] = {first ? load_row(out) : its * scan.skip};
        UNROLL for (int k = 0; k < count; k++) {
            state[k] = fma(step, set(b[k]), state[k] * decay);
            sums[k % scan_sums] = fma(state[k], set(c[k]), sums[k % scan_sums]);
        }
        store_row(out, scan_sums == 1 ? sums[0] : sums[0] + sums[scan_sums - 1]);
    }
    UNROLL for (int k = 0; k < count; k++) store_row(panel + size_t(first + k) * size_t(width), state[k]);
}

template <class Load, class Store> INLINE void scan_rows(const Scan& scan, float* panel, int width, int row, Load load_row, Store store_row) {
    int first = 0;
    for (; first + scan_columns <= scan.d_state; first += scan_columns) scan_panel<scan_columns>(scan, panel, width, row, first, load_row, store_row);
    for (; first < scan.d_state; first++) scan_panel<1>(scan, panel, width, row, first, load_row, store_row);
}

static void scan(const Scan& scan, float* state) {
    for (int row = 0; row < scan.head_dim; row += 16) {
        float* panel = state + size_t(row) * size_t(scan.d_state);
        int width = std::min(16, scan.head_dim - row);
        if (width == 16) {
            scan_rows(scan, panel, 16, row, [](const float* from) INLINE_LAMBDA { return load<f32x16>(from); },
                      [](float* to, f32x16 v) INLINE_LAMBDA { store(to, v); });
        } else {
            scan_rows(scan, panel, width, row, [&](const float* from) INLINE_LAMBDA { return load_some(from, width); },
                      [&](float* to, f32x16 v) INLINE_LAMBDA { memcpy(to, &v, size_t(width) * 4); });
        }
    }
}

}  // namespace cloister::CLOISTER_ISA
