// What happens to each row on its own: norm, rounding to the inputs of a product, rotation, what goes into the cache.
#pragma once
#include "kernels.hpp"
#include "simd.hpp"

namespace cloister::CLOISTER_ISA {

INLINE f32x16 load_some(const float* p, int count) {
    if (count >= 16) return load<f32x16>(p);
    f32x16 v = {};
    if (count > 0) memcpy(&v, p, size_t(count) * 4);
    return v;
}
INLINE f32x16 load_some(const uint16_t* p, int count) {
    if (count >= 16) return from_bf16(load<u16x16>(p));
    u16x16 v = {};
    if (count > 0) memcpy(&v, p, size_t(count) * 2);
    return from_bf16(v);
}

// Root mean square norm (Zhang and Sennrich 2019).
static void norm(const float* row, const float* weight, float eps, int length, float* out) {
    f32x16 squares = {};
    for (int i = 0; i < length; i += 16) {
        f32x16 v = load_some(row + i, length - i);
        squares = fma(v, v, squares);
    }
    float root = std::sqrt(sum(squares) / float(length) + eps);
    f32x16 factor = set(1.0f / root);
    int i = 0;
    for (; i + 16 <= length; i += 16) store(out + i, load<f32x16>(row + i) * factor * load<f32x16>(weight + i));
    for (; i < length; i++) out[i] = row[i] * factor[0] * weight[i];
}

// Layer norm (Ba et al. 2016): the mean first, then the squares of what is left, so that a large mean costs no digits.
static void layer_norm(const float* row, const float* weight, const float* bias, float eps, int length, float* out) {
    f32x16 total = {}, squares = {};
    for (int i = 0; i < length; i += 16) total += load_some(row + i, length - i);
    float mean = sum(total) / float(length);
    i32x16 lanes;
    for (int i = 0; i < 16; i++) lanes[i] = i;
    for (int i = 0; i < length; i += 16) {
        f32x16 v = load_some(row + i, length - i) - mean;
        v = lanes < length - i ? v : set(0.0f);
        squares = fma(v, v, squares);
    }
    float factor = 1.0f / std::sqrt(sum(squares) / float(length) + eps);
    int i = 0;
    for (; i + 16 <= length; i += 16) {
        f32x16 v = (load<f32x16>(row + i) - mean) * factor * load<f32x16>(weight + i);
        store(out + i, bias ? v + load<f32x16>(bias + i) : v);
    }
    for (; i < length; i++) out[i] = (row[i] - mean) * factor * weight[i] + (bias ? bias[i] : 0.0f);
}

static void add_scaled(const float* from, float scale, int length, float* to) {
    int i = 0;
    for (; i + 16 <= length; i += 16) store(to + i, fma(load<f32x16>(from + i), set(scale), load<f32x16>(to + i)));
    for (; i < length; i++) to[i] = __builtin_fmaf(from[i], scale, to[i]);
}

static void bend(float* values, int length, float scale, float softcap) {
    float inverse = softcap != 0 ? 1.0f / softcap : 0.0f;
    for (int i = 0; i < length; i += 16) {
        int left = length - i;
        f32x16 v = load_some(values + i, left) * scale;
        if (softcap != 0) v = tanh(v * inverse) * softcap;
        if (left >= 16) store(values + i, v);
        else memcpy(values + i, &v, size_t(left) * 4);
    }
}

// A mixture's router: softmax over all experts, of which the highest are chosen; of equal ones the one with the lower number.
// Outputs that are no numbers choose the first experts with weights that are none either, so that nobody takes the answer for one.
static void choose(float* scores, int num_experts, int count, bool renormalize, int32_t* experts, float* weights) {
    float highest_score = scores[0], bad = 0.0f;
    for (int i = 0; i < num_experts; i++) {
        highest_score = scores[i] > highest_score ? scores[i] : highest_score;
        bad += scores[i] * 0.0f;
    }
    if (bad != 0.0f) {
        for (int j = 0; j < count; j++) {
            experts[j] = j;
            weights[j] = NAN;
        }
        return;
    }
    float total = 0.0f;
    for (int i = 0; i < num_experts; i += 16) {
        int some = num_experts - i < 16 ? num_experts - i : 16;
        f32x16 e = exp(load_some(scores + i, some) - highest_score);
        memcpy(scores + i, &e, size_t(some) * 4);
        for (int j = 0; j < some; j++) total += e[j];
    }
    int found = 0;
    for (int i = 0; i < num_experts; i++) {
        if (found == count && !(scores[i] > weights[count - 1])) continue;
        int at = found < count ? found++ : count - 1;
        for (; at > 0 && scores[i] > weights[at - 1]; at--) {
            weights[at] = weights[at - 1];
            experts[at] = experts[at - 1];
        }
        weights[at] = scores[i];
        experts[at] = i;
    }
    float divisor = total;
    if (renormalize) {
        divisor = 0.0f;
        for (int j = 0; j < count; j++) divisor += weights[j];
    }
    for (int j = 0; j < count; j++) weights[j] /= divisor;
}

INLINE int32_t sum_integers(i32x16 v) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_epi32((__m512i)v);
#else
    int32_t total = 0;
    for (int i = 0; i < 16; i++) total += v[i];
    return total;
#endif
}

// The largest magnitude. Compared as integers, infinity is beyond every number and no number beyond infinity: neither is lost.
struct Peak {
    i32x16 most = {};
    INLINE void look(f32x16 v) {
        i32x16 magnitude = (i32x16)(as_u32(v) & 0x7fffffffu);
        most = most > magnitude ? most : magnitude;
    }
    INLINE float value() const {
        int32_t top = highest(most);
        float f;
        memcpy(&f, &top, 4);
        return f;
    }
};

// Symmetric, one scale a token: q = round(x * 127 / max|x|), half to even. A row that is not finite gets a scale that is not.
template <class T> INLINE void put_int8(const T* row, int length, Rows& rows, int index) {
    Peak most[4];
    int i = 0;
    for (; i + 64 <= length; i += 64)
        UNROLL for (int k = 0; k < 4; k++) most[k].look(load_some(row + i + 16 * k, 16));
    for (; i < length; i += 16) most[0].look(load_some(row + i, length - i));
    for (int k = 1; k < 4; k++) most[0].look((f32x16)most[k].most);
    float peak = most[0].value();
    float inverse = peak > 0 ? 127.0f / peak : 0.0f;
    rows.scales[index] = peak / 127.0f;
    int32_t *sums = rows.sums_of(index), all = 0;
    uint8_t* at = rows.at(index, 0);
    size_t step = size_t(rows.height(index / block_rows)) * 64;
    f32x16 magic = set(12582912.0f);  // 1.5 * 2^23: adding it rounds half to even
    for (int chunk = 0; chunk < rows.chunks; chunk++, at += step) {
        i32x16 q[4];
        int left = length - chunk * 64;
        const T* from = row + chunk * 64;
        UNROLL for (int k = 0; k < 4; k++) {
            f32x16 v = left >= 64 ? load_some(from + 16 * k, 16) : load_some(from + 16 * k, left - 16 * k);
            q[k] = (i32x16)as_u32(v * inverse + magic) - 0x4b400000;
            store(at + 16 * k, narrow(q[k]));
        }
        int32_t first = sum_integers(q[0] + q[1]), second = sum_integers(q[2] + q[3]);
        sums[2 * chunk] = first;
        sums[2 * chunk + 1] = second;
        all += first + second;
    }
    rows.totals[index] = all;
}

static void put_row(const float* row, int length, Input input, Rows& rows, int index) {
    if (input == Input::int8) return put_int8(row, length, rows, index);
    for (int chunk = 0; chunk < rows.chunks; chunk++) {
        uint8_t* at = rows.at(index, chunk);
        if (input == Input::f32) {
            store(at, load_some(row + chunk * 16, length - chunk * 16));
        } else {
            store(at, to_bf16(load_some(row + chunk * 32, length - chunk * 32)));
            store(at + 32, to_bf16(load_some(row + chunk * 32 + 16, length - chunk * 32 - 16)));
        }
    }
}

static void put_wide_row(const uint16_t* row, int length, Rows& rows, int index) { put_int8(row, length, rows, index); }

// Rotary embedding (Su et al. 2021), half-split; no fused multiply-add, so that it equals the oracle's two roundings.
static void rotate(float* heads, int num_heads, int head_dim, int half, const float* cos, const float* sin) {
    for (int h = 0; h < num_heads; h++) {
        float* first = heads + size_t(h) * head_dim;
        float* second = first + half;
        int i = 0;
        for (; i + 16 <= half; i += 16) {
            f32x16 a = load<f32x16>(first + i), b = load<f32x16>(second + i), c = load<f32x16>(cos + i), s = load<f32x16>(sin + i);
            store(first + i, a * c - b * s);
            store(second + i, b * c + a * s);
        }
        for (; i < half; i++) {
            float a = first[i], b = second[i];
            first[i] = a * cos[i] - b * sin[i];
            second[i] = b * cos[i] + a * sin[i];
        }
    }
}

static void put_queries(const float* heads, const AttentionShape& shape, float scale, KVKind kind, uint8_t* out) {
    int dim = shape.head_dim, padded = shape.padded_dim;
    for (int h = 0; h < shape.num_heads; h++) {
        for (int i = 0; i < padded; i += 16) {
            f32x16 v = load_some(heads + h * dim + i, dim - i) * scale;
            size_t at = size_t(h) * padded + i;
            if (kind == KVKind::f32) store(out + at * 4, v);
            else store(out + at * 2, to_bf16(v));
        }
    }
}

static int find_best(const float* values, int length) {
    f32x16 most = set(-INFINITY), worst = {};
    int i = 0;
    for (; i + 16 <= length; i += 16) {
        f32x16 v = load<f32x16>(values + i);
        most = max(v, most);
        worst = fma(v, set(0.0f), worst);  // stays 0 unless a value is infinite or no number
    }
    float best = highest(most), bad = sum(worst);
    for (int j = i; j < length; j++) {
        best = values[j] > best ? values[j] : best;
        bad += values[j] * 0.0f;
    }
    if (bad != 0.0f) return -1;
    for (int j = 0; j < length; j++)
        if (values[j] == best) return j;
    return -1;
}

}  // namespace cloister::CLOISTER_ISA
