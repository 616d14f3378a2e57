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

INLINE void store_some(float* to, f32x16 v, int count) {
    if (count >= 16) store(to, v);
    else if (count > 0) memcpy(to, &v, size_t(count) * 4);
}

// Root mean square norm (Zhang and Sennrich 2019).
static void norm(const float* row, const float* weight, float eps, int length, float* out) {
    f32x16 squares = {};
    for (int i = 0; i < length; i += 16) {
        f32x16 v = load_some(row + i, length - i);
        squares = fma(v, v, squares);
    }
    float root = std::sqrt(sum(squares) / float(length) + eps);
    float factor = 1.0f / root;
    int i = 0;
    for (; i + 16 <= length; i += 16) store(out + i, load<f32x16>(row + i) * factor * load<f32x16>(weight + i));
    for (; i < length; i++) out[i] = row[i] * factor * weight[i];
}

// Layer norm (Ba et al. 2016): the mean first, then the squares of what is left, so that a large mean costs no digits.
static void layer_norm(const float* row, const float* weight, const float* bias, float eps, int length, float* out) {
    f32x16 total = {}, squares = {};
    for (int i = 0; i < length; i += 16) total += load_some(row + i, length - i);
    float mean = sum(total) / float(length);
    for (int i = 0; i < length; i += 16) {
        f32x16 v = load_some(row + i, length - i) - mean;
        v = select(lane_numbers() < length - i, v, set(0.0f));
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

// The largest magnitude. Compared as integers, infinity is beyond every number and no number beyond infinity: neither is lost.
struct Peak {
    i32x16 most = {};
    INLINE void look(f32x16 v) {
        most = max(as<int32_t>(v) & 0x7fffffff, most);
    }
    INLINE float value() const {
        int32_t top = highest(most);
        float f;
        memcpy(&f, &top, 4);
        return f;
    }
};

// One step of a Hadamard transform: lanes `distance` apart become their sum and their difference.
template <int distance> INLINE f32x16 cross_lanes(f32x16 v) {
    f32x16 r;
    if constexpr (distance >= piece_lanes) {
        constexpr int step = distance / piece_lanes;
        UNROLL for (int p = 0; p < pieces; p++) r.at[p] = p & step ? v.at[p ^ step] - v.at[p] : v.at[p ^ step] + v.at[p];
        return r;
    } else {
        i32p places;
        u32p signs;
        for (int i = 0; i < piece_lanes; i++) {
            places[i] = i ^ distance;
            signs[i] = i & distance ? 0x80000000u : 0u;
        }
        UNROLL for (int p = 0; p < pieces; p++) {
#if defined(__clang__)
            f32p other;
            for (int i = 0; i < piece_lanes; i++) other[i] = v.at[p][i ^ distance];
#else
            f32p other = __builtin_shuffle(v.at[p], places);
#endif
            r.at[p] = other + (f32p)((u32p)v.at[p] ^ signs);
        }
        return r;
    }
}

// The sums and differences of 64 inputs over distances below `rotation`, 64 or 16 (backends/tensors.py, `rotate_blocks`; the same order
// of sums). What is left is the factor.
INLINE void cross_inputs(f32x16 (&v)[4], int rotation) {
    UNROLL for (int k = 0; k < 4; k++) v[k] = cross_lanes<8>(cross_lanes<4>(cross_lanes<2>(cross_lanes<1>(v[k]))));
    if (rotation == 16) return;
    f32x16 a = v[0] + v[1], b = v[0] - v[1], c = v[2] + v[3], d = v[2] - v[3];
    v[0] = a + c;
    v[1] = b + d;
    v[2] = a - c;
    v[3] = b - d;
}

// 64 inputs of a row that has `left` of them, zeros after those, rotated in blocks of 64 or 16, or not at all.
template <class T> INLINE void load_inputs(const T* row, int left, int rotation, f32x16 (&v)[4]) {
    UNROLL for (int k = 0; k < 4; k++) v[k] = left >= 64 ? load_some(row + 16 * k, 16) : load_some(row + 16 * k, left - 16 * k);
    if (!rotation) return;
    cross_inputs(v, rotation);
    UNROLL for (int k = 0; k < 4; k++) v[k] *= rotation == 16 ? 0.25f : 0.125f;
}

// Calls take(v, first) for 64 inputs at a time until `padded`, zeros being after `length`, rotated in blocks of 128, 64 or 16, or not at all.
template <class T, class Take> INLINE void each_inputs(const T* row, int length, int padded, int rotation, Take take) {
    f32x16 v[4], w[4];
    if (rotation != 128) {
        for (int i = 0; i < padded; i += 64) {
            load_inputs(row + i, length - i, rotation, v);
            take(v, i);
        }
        return;
    }
    for (int i = 0; i < length; i += 128) {
        UNROLL for (int k = 0; k < 4; k++) {
            v[k] = load_some(row + i + 16 * k, 16);
            w[k] = load_some(row + i + 64 + 16 * k, 16);
        }
        cross_inputs(v, 64);
        cross_inputs(w, 64);
        UNROLL for (int k = 0; k < 4; k++) {
            f32x16 sum = v[k] + w[k];
            w[k] = (v[k] - w[k]) * 0.088388347648318447f;
            v[k] = sum * 0.088388347648318447f;
        }
        take(v, i);
        take(w, i + 64);
    }
}

// What codes are: q = round(x * 127 / max|x|), half to even. Inputs that are not finite get a scale that is not.
struct Scale {
    float inverse, scale;
    INLINE explicit Scale(float peak) : inverse(peak > 0 ? 127.0f / peak : 0.0f), scale(peak / 127.0f) {}
    INLINE i32x16 codes(f32x16 v) const { return as<int32_t>(v * inverse + 12582912.0f) - 0x4b400000; }  // adding 1.5 * 2^23 rounds
};

// Writes half a chunk, 32 codes, and their sum.
INLINE int32_t put_half(f32x16 low, f32x16 high, const Scale& scale, uint8_t* at) {
    i32x16 first = scale.codes(low), second = scale.codes(high);
    store(at, narrow(first));
    store(at + 16, narrow(second));
    return sum(first + second);
}

// Symmetric, one scale a row.
template <class T> INLINE void put_int8(const T* row, int length, Rows& rows, int index) {
    int rotation = rows.form.rotation, padded = rows.chunks * 64;
    Peak most[4];
    each_inputs(row, length, padded, rotation, [&](const f32x16 (&v)[4], int) INLINE_LAMBDA {
        UNROLL for (int k = 0; k < 4; k++) most[k].look(v[k]);
    });
    for (int k = 1; k < 4; k++) most[0].look(as<float>(most[k].most));
    Scale scale(most[0].value());
    rows.scales[index] = scale.scale;
    int32_t *sums = rows.sums_of(index), all = 0;
    uint8_t* at = rows.at(index, 0);
    size_t step = size_t(rows.height(index / block_rows)) * 64;
    each_inputs(row, length, padded, rotation, [&](const f32x16 (&v)[4], int) INLINE_LAMBDA {
        sums[0] = put_half(v[0], v[1], scale, at);
        sums[1] = put_half(v[2], v[3], scale, at + 32);
        all += sums[0] + sums[1];
        sums += 2;
        at += step;
    });
    rows.totals[index] = all;
}

// Symmetric, one scale for each group of a row; groups are halves of chunks, and several of them.
template <class T> INLINE void put_int8_groups(const T* row, int length, Rows& rows, int index) {
    int32_t *sums = rows.sums_of(index), all = 0;
    int group = rows.form.group;
    uint8_t* at = rows.at(index, 0);
    size_t step = size_t(rows.height(index / block_rows)) * 64;
    for (int first = 0, number = 0; first < length; first += group, number++) {
        Peak most;
        for (int i = first; i < first + group; i += 16) most.look(load_some(row + i, length - i));
        Scale scale(most.value());
        rows.scales[size_t(index) * rows.num_groups + number] = scale.scale;
        for (int i = first; i < first + group; i += 32) {
            sums[i / 32] = put_half(load_some(row + i, length - i), load_some(row + i + 16, length - i - 16), scale, at + size_t(i / 64) * step + i % 64);
            all += sums[i / 32];
        }
    }
    if (length % 64 != 0) {  // the half that is left of the last chunk
        memset(at + size_t(rows.chunks - 1) * step + 32, 0, 32);
        sums[2 * rows.chunks - 1] = 0;
    }
    rows.totals[index] = all;
}

static void put_row(const float* row, int length, Rows& rows, int index) {
    Input input = rows.form.type;
    if (rows.form.group) return put_int8_groups(row, length, rows, index);
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

static void put_wide_row(const uint16_t* row, int length, Rows& rows, int index) {
    if (rows.form.group) put_int8_groups(row, length, rows, index);
    else put_int8(row, length, rows, index);
}

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
    int dim = shape.head_dim, padded = shape.padded_dim, rotation = shape.kv_rotation(kind);
    for (int h = 0; h < shape.num_heads; h++) {
        if (rotation) {
            f32x16 v[4];
            for (int i = 0; i < padded; i += 64) {
                load_inputs(heads + h * dim + i, dim - i, rotation, v);
                for (int k = 0; k < 4 && i + 16 * k < padded; k++) store(out + (size_t(h) * padded + i + 16 * k) * 2, to_bf16(v[k] * scale));
            }
            continue;
        }
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

// One row of a causal convolution over positions: `inputs` are the token's, after those of the tokens before it.
static void convolve(const float* const* inputs, const float* filters, const float* bias, int kernel_size, int size, Activation activation, float* out) {
    for (int at = 0; at < size; at += 16) {
        int left = size - at;
        f32x16 total = load_some(inputs[0] + at, left) * load_some(filters + at, left);
        for (int j = 1; j < kernel_size; j++) total = fma(load_some(inputs[j] + at, left), load_some(filters + size_t(j) * size_t(size) + at, left), total);
        if (bias) total += load_some(bias + at, left);
        store_some(out + at, activate(total, int(activation)), left);
    }
}

// What is no number stays none.
INLINE f32x16 sigmoid(f32x16 x) {
    return by_piece(x, [](f32p v) INLINE_LAMBDA { return invert(set_piece(1.0f) + exp2_piece(min(set_piece(100.0f), v * set_piece(-log2_e)))); });
}

static void gate(float* values, const float* gates, int length, bool times_gate) {
    for (int at = 0; at < length; at += 16) {
        int left = length - at;
        f32x16 v = load_some(values + at, left), g = load_some(gates + at, left);
        store_some(values + at, times_gate ? v * silu(g) : v * sigmoid(g), left);
    }
}

}  // namespace cloister::CLOISTER_ISA
