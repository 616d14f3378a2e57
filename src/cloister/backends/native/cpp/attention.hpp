// Attention over the paged cache with an online softmax (Milakov and Gimelshein 2018; Dao et al. 2022), split at absolute
// positions: split s holds the keys [256 s, 256 (s + 1)). The result of one split depends on nothing but its keys and the query;
// results are joined in the order of splits. Which thread computes a split, beside which others, changes no bit: so sequences that share
// blocks of a prefix have its splits computed once for all of their rows.
//
// A block of the cache holds for each KV head, with D the padded head dimension and B the block size:
//   float32   K [D][B], V [B][D]
//   bfloat16  K [D / 2][B][2], V [B / 2][D][2]       pairs of dimensions of K and pairs of keys of V stand together, as the
//   int8      the same in bytes, then scales K [G][B], V [G][B]     instructions for products of pairs want them
//   int4      K as int8, V [B][D / 2] in bytes of two codes, then scales K [G][B] and V [G][B] of (scale, zero)
//   kivi2     K in codes of 2 bits [B / 32][D][2] (16 keys in a word), V [B][D / 16] (16 dimensions in a word), then K [B / 32][D] and
//             V [B][D / 32] of (scale, zero), both bfloat16
// Latent attention has K alone, in float32 or bfloat16: values are the first dimensions of keys, and are transposed when gathered.
// G is the number of groups of 64 dimensions. Keys keep 8 bits: in 4 they cost five times what values do (docs/quantization.md).
#pragma once
#include <algorithm>
#include <climits>
#include <cmath>

#include "kernels.hpp"
#include "rows.hpp"
#include "simd.hpp"

namespace cloister::CLOISTER_ISA {

constexpr float nothing_yet = -1e30f;  // a maximum that is finite, so that e^(nothing_yet - m) is 0 and never NaN
constexpr int query_rows = 32;

// ---- the places of a block ------------------------------------------------------------------------------------------------

struct HeadPlace {
    uint8_t *keys, *values;
    float *key_scales, *value_scales;
};

INLINE HeadPlace head_place(const Cache& cache, const AttentionShape& shape, int block, int head) {
    size_t size = size_t(cache.block_size), even = (size + 1) / 2 * 2, dim = size_t(shape.padded_dim), groups = size_t(shape.kv_groups());
    size_t keys = 0, values = 0, scales = 0;
    switch (cache.kind) {
        case KVKind::f32: keys = values = 4 * dim * size; break;
        case KVKind::bf16: keys = 2 * dim * size; values = 2 * dim * even; break;
        case KVKind::int8: keys = dim * size; values = dim * even; scales = 4 * size * groups; break;
        case KVKind::int4: keys = dim * size; values = dim / 2 * size; scales = 4 * size * groups; break;
        case KVKind::kivi2: keys = values = dim * size / 4; scales = dim * size / 8; break;
    }
    if (shape.value_dim) values = 0;
    size_t value_scales = cache.kind == KVKind::int4 ? 2 * scales : scales;
    uint8_t* at = cache.base + size_t(block) * cache.block_bytes + (keys + values + scales + value_scales) * size_t(head);
    return {at, at + keys, (float*)(at + keys + values), (float*)(at + keys + values + scales)};
}

INLINE float peak(const float* x, int length) {
    Peak most;
    for (int i = 0; i < length; i += 16) most.look(load_some(x + i, length - i));
    return most.value();
}

// A group of dimensions in 8 bits, its greatest magnitude 127: of keys in pairs of dimensions, of values in pairs of positions.
INLINE void put_int8_group(const float* x, int first, int count, float* scale, int8_t* out, size_t dim, bool keys, int size, int slot) {
    float most = peak(x, count), inverse = most > 0 ? 127.0f / most : 0.0f;
    *scale = most / 127.0f;
    for (int i = 0; i < count; i++) {
        int8_t q = int8_t(int32_t(__builtin_rintf(x[i] * inverse)));
        int d = first + i;
        if (keys) out[(size_t(d / 2) * size + slot) * 2 + d % 2] = q;
        else out[(size_t(slot / 2) * dim + d) * 2 + slot % 2] = q;
    }
}

// A group of a value's dimensions in 4 bits, with a scale and a zero point (QServe, Lin et al. 2024, section 5.3). `seen` of them are
// the head's, the others padding.
INLINE void put_int4_group(const float* x, int first, int count, int seen, float* scale_zero, uint8_t* out, size_t dim, int slot) {
    float low = x[0], high = x[0];
    for (int i = 1; i < seen; i++) { low = x[i] < low ? x[i] : low; high = x[i] > high ? x[i] : high; }
    if (!std::isfinite(peak(x, seen))) low = NAN;  // comparisons pass over what is no number
    float scale = (high - low) / 15.0f, inverse = scale > 0 ? 1.0f / scale : 0.0f;
    scale_zero[0] = scale;
    scale_zero[1] = low;
    for (int i = 0; i < count; i += 2) {
        uint8_t byte = 0;
        for (int k = 0; k < 2; k++) {
            float v = (x[i + k] - low) * inverse;
            v = v > 0 ? (v < 15 ? v : 15) : 0;
            byte = uint8_t(byte | (int(__builtin_rintf(v)) << (4 * k)));
        }
        out[size_t(slot) * (dim / 2) + size_t(first + i) / 2] = byte;
    }
}

// One head's keys and values in few bits, group by group.
INLINE void put_few_bits(const float* keys, const float* values, const AttentionShape& shape, const Cache& cache, const HeadPlace& at, int slot) {
    int dim = shape.head_dim, padded = shape.padded_dim, size = cache.block_size, rotation = shape.kv_rotation(cache.kind);
    for (int group = 0, first = 0; first < padded; group++, first += kv_group_dims) {
        int count = padded - first < kv_group_dims ? padded - first : kv_group_dims;
        f32x16 v[4];
        float x[kv_group_dims];
        auto read = [&](const float* from) INLINE_LAMBDA {
            load_inputs(from + first, dim - first, rotation, v);
            for (int k = 0; k < 4; k++) store(x + 16 * k, v[k]);
        };
        read(keys);
        put_int8_group(x, first, count, at.key_scales + size_t(group) * size + slot, (int8_t*)at.keys, size_t(padded), true, size, slot);
        read(values);
        size_t place = size_t(group) * size + slot;
        if (cache.kind == KVKind::int8) put_int8_group(x, first, count, at.value_scales + place, (int8_t*)at.values, size_t(padded), false, size, slot);
        else put_int4_group(x, first, count, dim - first < count ? dim - first : count, at.value_scales + 2 * place, at.values, size_t(padded), slot);
    }
}

// How 32 numbers become codes of 2 bits: code * scale + zero, both rounded to bfloat16 before the codes are chosen. Those of keys reach
// from the least to the greatest; those of values are the middles of four equal parts of that range (backends/kivi.py).
struct KiviScale {
    float scale, zero, inverse;

    // `seen` of them are the head's, the others padding.
    KiviScale(const float* x, int seen, bool keys) {
        float low = x[0], high = x[0];
        bool finite = true;
        for (int i = 0; i < seen; i++) {
            low = x[i] < low ? x[i] : low;
            high = x[i] > high ? x[i] : high;
            finite = finite && std::isfinite(x[i]);
        }
        float range = high - low;
        scale = from_bf16(to_bf16(keys ? range / 3.0f : range * 0.25f));
        zero = from_bf16(to_bf16(!finite ? NAN : keys ? low : low + range * 0.125f));
        inverse = scale > 0 ? 1.0f / scale : 0.0f;
    }
    uint32_t packed() const { return uint32_t(to_bf16(scale)) | uint32_t(to_bf16(zero)) << 16; }
    // Of sixteen numbers, the first in the lowest bits.
    uint32_t codes(const float* x) const {
        uint32_t word = 0;
        for (int i = 0; i < 16; i++) {
            float v = (x[i] - zero) * inverse;
            v = v > 0 ? (v < 3 ? v : 3) : 0;
            word |= uint32_t(__builtin_rintf(v)) << (2 * i);
        }
        return word;
    }
};

// Keys by channel, values by token (KIVI, Liu et al. 2024, section 3.3).
static void pack_block(const AttentionShape& shape, const Cache& cache, int from, int to) {
    int dim = shape.padded_dim, size = cache.block_size;
    float x[kivi_group];
    for (int h = 0; h < shape.num_kv_heads; h++) {
        HeadPlace source = head_place(cache.recent(), shape, from, h), target = head_place(cache, shape, to, h);
        uint32_t *keys = (uint32_t*)target.keys, *key_scales = (uint32_t*)target.key_scales;
        uint32_t *values = (uint32_t*)target.values, *value_scales = (uint32_t*)target.value_scales;
        for (int key = 0; key < size; key += kivi_group) {
            for (int d = 0; d < dim; d++, keys += 2) {
                const uint16_t* numbers = (const uint16_t*)source.keys + (size_t(d / 2) * size + key) * 2 + d % 2;
                for (int i = 0; i < kivi_group; i++) x[i] = from_bf16(numbers[2 * i]);
                KiviScale scale(x, kivi_group, true);
                *key_scales++ = scale.packed();
                keys[0] = scale.codes(x);
                keys[1] = scale.codes(x + 16);
            }
        }
        for (int key = 0; key < size; key++) {
            const uint16_t* numbers = (const uint16_t*)source.values + size_t(key / 2) * dim * 2 + key % 2;
            for (int d = 0; d < dim; d += kivi_group, values += 2) {
                for (int i = 0; i < kivi_group; i++) x[i] = from_bf16(numbers[2 * (d + i)]);
                KiviScale scale(x, std::min(kivi_group, shape.head_dim - d), false);
                *value_scales++ = scale.packed();
                values[0] = scale.codes(x);
                values[1] = scale.codes(x + 16);
            }
        }
    }
}

static void put_keys(const float* keys, const float* values, const AttentionShape& shape, const Cache& cache, int block, int slot) {
    int dim = shape.head_dim, padded = shape.padded_dim, size = cache.block_size;
    for (int h = 0; h < shape.num_kv_heads; h++, keys += dim, values += dim) {
        HeadPlace at = head_place(cache, shape, block, h);
        if (cache.kind == KVKind::int8 || cache.kind == KVKind::int4) {
            put_few_bits(keys, values, shape, cache, at, slot);
            continue;
        }
        if (cache.kind == KVKind::f32) {
            for (int d = 0; d < padded; d++) ((float*)at.keys)[size_t(d) * size + slot] = d < dim ? keys[d] : 0.0f;
            for (int d = 0; d < padded && !shape.value_dim; d++) ((float*)at.values)[size_t(slot) * padded + d] = d < dim ? values[d] : 0.0f;
            continue;
        }
        uint32_t* key_pairs = (uint32_t*)at.keys + slot;
        uint16_t* value_lanes = (uint16_t*)at.values + size_t(slot / 2) * padded * 2 + slot % 2;
        for (int d = 0; d < padded; d += 16) {
            uint32_t k[8];
            uint16_t v[16];
            store(k, to_bf16(load_some(keys + d, dim - d)));
            for (int i = 0; i < 8; i++) key_pairs[size_t(d / 2 + i) * size] = k[i];
            if (shape.value_dim) continue;
            store(v, to_bf16(load_some(values + d, dim - d)));
            for (int i = 0; i < 16; i++) value_lanes[2 * (d + i)] = v[i];
        }
    }
}

// Copies one in every `stride` numbers, from place `a` of one array on to place `b` of another one on.
template <class T> INLINE void copy_column(const uint8_t* from, uint8_t* to, size_t a, size_t b, size_t stride, int count) {
    for (size_t i = 0; i < size_t(count) * stride; i += stride) ((T*)to)[b + i] = ((const T*)from)[a + i];
}

static void move_keys(const AttentionShape& shape, const Cache& cache, int from, int to) {
    int dim = shape.padded_dim, size = cache.block_size, a = from % size, b = to % size;
    size_t pairs = size_t(dim) * 2, a_pair = size_t(a / 2) * pairs + size_t(a % 2), b_pair = size_t(b / 2) * pairs + size_t(b % 2);
    for (int h = 0; h < shape.num_kv_heads; h++) {
        HeadPlace source = head_place(cache, shape, from / size, h), target = head_place(cache, shape, to / size, h);
        switch (cache.kind) {
            case KVKind::f32:
                copy_column<uint32_t>(source.keys, target.keys, a, b, size, dim);
                if (!shape.value_dim) copy_column<uint32_t>(source.values, target.values, size_t(a) * dim, size_t(b) * dim, 1, dim);
                break;
            case KVKind::bf16:
                copy_column<uint32_t>(source.keys, target.keys, a, b, size, dim / 2);
                if (!shape.value_dim) copy_column<uint16_t>(source.values, target.values, a_pair, b_pair, 2, dim);
                break;
            case KVKind::int8:
                copy_column<uint16_t>(source.keys, target.keys, a, b, size, dim / 2);
                copy_column<uint8_t>(source.values, target.values, a_pair, b_pair, 2, dim);
                copy_column<float>((uint8_t*)source.key_scales, (uint8_t*)target.key_scales, a, b, size, shape.kv_groups());
                copy_column<float>((uint8_t*)source.value_scales, (uint8_t*)target.value_scales, a, b, size, shape.kv_groups());
                break;
            case KVKind::int4:
                copy_column<uint16_t>(source.keys, target.keys, a, b, size, dim / 2);
                copy_column<uint8_t>(source.values, target.values, size_t(a) * dim / 2, size_t(b) * dim / 2, 1, dim / 2);
                copy_column<float>((uint8_t*)source.key_scales, (uint8_t*)target.key_scales, a, b, size, shape.kv_groups());
                copy_column<uint64_t>((uint8_t*)source.value_scales, (uint8_t*)target.value_scales, a, b, size, shape.kv_groups());
                break;
            case KVKind::kivi2: break;  // a whole block is packed from the recent cache
        }
    }
}

// ---- one split of one KV head, gathered ------------------------------------------------------------------------------------

// Panels: float32 K [D][256], V [256][D]; else bfloat16 K [D / 2][256][2], V [128][D][2], V with the D of values.
struct Panels {
    uint8_t *keys, *values;
};

INLINE u32x16 pair_up(f32x16 low, f32x16 high) {
    return widen(to_bf16(low)) | (widen(to_bf16(high)) << 16);
}

// What the codes of one value are: code * scale + zero.
struct ValueRow {
    float scale, zero;
    INLINE f32x16 number(i32x16 codes) const { return fma(to_f32(codes), set(scale), set(zero)); }
};

INLINE ValueRow value_row(const HeadPlace& at, bool wide, int size, int key, int d) {
    size_t place = size_t(d / kv_group_dims) * size + key;
    if (wide) return {at.value_scales[place], 0.0f};
    return {at.value_scales[2 * place], at.value_scales[2 * place + 1]};
}

// Sixteen codes of one value, from dimension d on.
INLINE i32x16 value_codes(const HeadPlace& at, bool wide, int dim, int key, int d) {
    if (wide) {
        i32x16 lanes = as<int32_t>(widen(load<u16x16>(at.values + (size_t(key / 2) * dim + d) * 2)));
        return key % 2 ? (lanes << 16) >> 24 : (lanes << 24) >> 24;
    }
    const uint8_t* packed = at.values + size_t(key) * (dim / 2) + d / 2;
    u8x16 codes;
#if defined(__SSE4_1__)
    __m128i spread = _mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i*)packed));
    // the low code in the low byte, the high code in the high byte
    codes = (u8x16)_mm_and_si128(_mm_or_si128(spread, _mm_slli_epi16(spread, 4)), _mm_set1_epi16(0x0f0f));
#else
    for (int i = 0; i < 8; i++) { codes[2 * i] = packed[i] & 15; codes[2 * i + 1] = packed[i] >> 4; }
#endif
    return widen(codes);
}

// K of some keys, 16 at most, all of a block, to columns of the panel.
template <bool all> INLINE void gather_keys(const HeadPlace& at, int size, int dim, int from, int some, uint32_t* keys) {
    f32x16 scale = {};
    for (int d = 0; d < dim / 2; d++) {
        if (d % (kv_group_dims / 2) == 0) {
            float scales[16] = {};
            memcpy(scales, at.key_scales + size_t(2 * d / kv_group_dims) * size + from, size_t(all ? 16 : some) * 4);
            scale = load<f32x16>(scales);
        }
        u16x16 both = {};
        memcpy(&both, at.keys + (size_t(d) * size + from) * 2, all ? 32 : size_t(some) * 2);
        i32x16 lanes = as<int32_t>(widen(both));
        u32x16 pairs = pair_up(to_f32((lanes << 24) >> 24) * scale, to_f32((lanes << 16) >> 24) * scale);
        memcpy(keys + size_t(d) * split_keys, &pairs, all ? 64 : size_t(some) * 4);
    }
}

// Blocks of `distance` by `distance` numbers change places across the diagonals of blocks twice as large.
template <int distance> INLINE void cross_rows(u32p (&rows)[piece_lanes]) {
    i32p upper, lower;
    for (int i = 0; i < piece_lanes; i++) {
        upper[i] = i & distance ? piece_lanes + (i ^ distance) : i;
        lower[i] = i & distance ? piece_lanes + i : i ^ distance;
    }
    UNROLL for (int i = 0; i < piece_lanes; i++) {
        if (i & distance) continue;
        u32p a = rows[i], b = rows[i | distance];
        rows[i] = shuffle(a, b, upper);
        rows[i | distance] = shuffle(a, b, lower);
    }
}

// Rows of as many numbers as there are rows become columns.
INLINE void transpose(u32p (&rows)[piece_lanes]) {
    cross_rows<1>(rows);
    cross_rows<2>(rows);
    if constexpr (piece_lanes > 4) cross_rows<4>(rows);
    if constexpr (piece_lanes > 8) cross_rows<8>(rows);
}

// The first dimensions of latents as values: keys [from, from + count) of a block to the panel's columns from `column` on. Columns
// after those, up to a whole register, get what the block has there, unless it is one key, which may stand between others.
static void gather_latent_values(const Cache& cache, const AttentionShape& shape, const HeadPlace& at, int from, int count, int column, uint8_t* values) {
    int dim = shape.padded_values(), size = cache.block_size, key = 0;
    bool floats = cache.kind == KVKind::f32;
    const uint32_t* keys = (const uint32_t*)at.keys + from;
    constexpr int some = piece_lanes;
    i32p front, back;  // of two registers, lane by lane in turn
    for (int i = 0; i < some; i++) {
        front[i] = i / 2 + i % 2 * some;
        back[i] = some / 2 + front[i];
    }
    int end = count > 1 && from + (count + some - 1) / some * some <= size ? (count + some - 1) / some * some : count;
    if (column + end > split_keys) end = count;
    for (; key + some <= end && column % 2 == 0; key += some) {
        for (int d = 0; d < dim; d += floats ? some : 2 * some) {
            u32p rows[some];
            UNROLL for (int i = 0; i < some; i++) rows[i] = load<u32p>(keys + size_t(floats ? d + i : d / 2 + i) * size + key);
            transpose(rows);
            if (floats) {
                UNROLL for (int i = 0; i < some; i++) store((float*)values + size_t(column + key + i) * dim + d, rows[i]);
                continue;
            }
            UNROLL for (int i = 0; i < some; i += 2) {
                u32p even = (rows[i] & 0xffffu) | (rows[i + 1] << 16), odd = (rows[i] >> 16) | (rows[i + 1] & 0xffff0000u);
                uint32_t* out = (uint32_t*)values + size_t((column + key + i) / 2) * dim + d;
                store(out, shuffle(even, odd, front));
                store(out + some, shuffle(even, odd, back));
            }
        }
    }
    for (; key < count; key++) {
        size_t to = size_t(column + key);
        for (int d = 0; d < dim; d++) {
            if (floats) ((uint32_t*)values)[to * dim + d] = keys[size_t(d) * size + key];
            else ((uint16_t*)values)[(to / 2 * dim + d) * 2 + to % 2] = uint16_t(keys[size_t(d / 2) * size + key] >> (16 * (d % 2)));
        }
    }
}

// Sixteen numbers of kivi2.
INLINE f32x16 kivi_numbers(uint32_t codes, uint32_t scale_zero) {
    u32x16 places;
    UNROLL for (int p = 0; p < pieces; p++) places.at[p] = set_piece(codes) >> (u32p)(lane_numbers().at[p] * 2);
    f32x16 scale = as<float>(set(scale_zero << 16)), zero = as<float>(set(scale_zero & 0xffff0000u));
    return fma(to_f32(as<int32_t>(places & 3u)), scale, zero);
}

// The same of kivi2, where `from`, `to` and `column` are multiples of 32.
static void gather_kivi(const HeadPlace& at, int dim, int from, int to, int column, Panels p) {
    uint32_t* keys = (uint32_t*)p.keys + column;
    uint16_t* values = (uint16_t*)p.values + size_t(column) * dim;
    for (int key = from; key < to; key += 16, keys += 16) {
        size_t group = size_t(key / kivi_group) * dim;
        const uint32_t *codes = (const uint32_t*)at.keys + 2 * group + key / 16 % 2, *scales = (const uint32_t*)at.key_scales + group;
        for (int d = 0; d < dim; d += 2)
            store(keys + size_t(d / 2) * split_keys, pair_up(kivi_numbers(codes[2 * d], scales[d]), kivi_numbers(codes[2 * d + 2], scales[d + 1])));
    }
    for (int key = from; key < to; key += 2, values += 2 * dim) {
        const uint32_t *codes = (const uint32_t*)at.values + size_t(key) * dim / 16, *scales = (const uint32_t*)at.value_scales + size_t(key) * dim / kivi_group;
        const uint32_t *others = codes + dim / 16, *other_scales = scales + dim / kivi_group;
        for (int d = 0; d < dim; d += 16)
            store(values + 2 * d, pair_up(kivi_numbers(codes[d / 16], scales[d / kivi_group]), kivi_numbers(others[d / 16], other_scales[d / kivi_group])));
    }
}

// Keys [from, to) of a block, all in one split, to column `column` of the panels.
static void gather_run(const Cache& cache, const AttentionShape& shape, const HeadPlace& at, int from, int to, int column, Panels p) {
    int dim = shape.padded_dim, size = cache.block_size, count = to - from;
    if (shape.value_dim) gather_latent_values(cache, shape, at, from, count, column, p.values);
    if (!p.keys) return;
    if (cache.kind == KVKind::f32) {
        for (int d = 0; d < dim; d++)
            memcpy((float*)p.keys + size_t(d) * split_keys + column, (float*)at.keys + size_t(d) * size + from, size_t(count) * 4);
        if (shape.value_dim) return;
        memcpy((float*)p.values + size_t(column) * dim, (float*)at.values + size_t(from) * dim, size_t(count) * dim * 4);
        return;
    }
    uint32_t* keys = (uint32_t*)p.keys + column;
    uint16_t* values = (uint16_t*)p.values;
    if (cache.kind == KVKind::bf16) {
        const uint32_t* source = (const uint32_t*)at.keys + from;
        if (count == 16) {
            for (int d = 0; d < dim / 2; d++) store(keys + size_t(d) * split_keys, load<u32x16>(source + size_t(d) * size));
        } else {
            for (int d = 0; d < dim / 2; d++) memcpy(keys + size_t(d) * split_keys, source + size_t(d) * size, size_t(count) * 4);
        }
        if (shape.value_dim) return;
        if (from % 2 == 0 && column % 2 == 0) {
            memcpy(values + size_t(column) * dim, (const uint16_t*)at.values + size_t(from) * dim, size_t(count + 1) / 2 * dim * 4);
        } else {
            for (int j = 0; j < count; j++)
                for (int d = 0; d < dim; d++)
                    values[(size_t((column + j) / 2) * dim + d) * 2 + (column + j) % 2] =
                        ((const uint16_t*)at.values)[(size_t((from + j) / 2) * dim + d) * 2 + (from + j) % 2];
        }
        return;
    }
    if (cache.kind == KVKind::kivi2) return gather_kivi(at, dim, from, to, column, p);
    bool wide = cache.kind == KVKind::int8;
    for (int j = 0; j < count; j += 16) {
        int some = count - j < 16 ? count - j : 16;
        if (some == 16) gather_keys<true>(at, size, dim, from + j, 16, keys + j);
        else gather_keys<false>(at, size, dim, from + j, some, keys + j);
    }
    if (from % 2 == 0 && column % 2 == 0) {
        for (int j = 0; j < count; j += 2) {
            int key = from + j;
            ValueRow first = {}, second = {};
            uint16_t* out = values + size_t(column + j) * dim;
            for (int d = 0; d < dim; d += 16) {
                if (d % kv_group_dims == 0) {
                    first = value_row(at, wide, size, key, d);
                    second = j + 1 < count ? value_row(at, wide, size, key + 1, d) : ValueRow{0.0f, 0.0f};
                }
                i32x16 one = value_codes(at, wide, dim, key, d), other = value_codes(at, wide, dim, key + (j + 1 < count), d);
                store(out + 2 * d, pair_up(first.number(one), second.number(other)));
            }
        }
        return;
    }
    for (int j = 0; j < count; j++) {
        uint16_t* out = values + size_t((column + j) / 2) * dim * 2 + (column + j) % 2;
        for (int d = 0; d < dim; d += 16) {
            u16x16 v = to_bf16(value_row(at, wide, size, from + j, d).number(value_codes(at, wide, dim, from + j, d)));
            for (int i = 0; i < 16; i++) out[2 * (d + i)] = v[i];
        }
    }
}

// Gathers keys [start, end) that lie where their positions say, to column `column` on; without a panel for keys the values of latents alone.
static void gather(const Cache& cache, const AttentionShape& shape, const Sequence& sequence, int head, int start, int end, Panels p, int column = 0) {
    for (int key = start; key < end;) {
        int place = key % cache.block_size, run = cache.block_size - place;
        if (run > end - key) run = end - key;
        int block = sequence.block(key / cache.block_size);
        if (key + run < end) {  // ask for the next block while this one is copied
            HeadPlace next = head_place(cache, shape, sequence.block((key + run) / cache.block_size), head);
            for (const uint8_t* line = next.keys; line < (const uint8_t*)next.key_scales; line += 64) __builtin_prefetch(line, 0, 3);
        }
        gather_run(cache, shape, head_place(cache, shape, block, head), place, place + run, column + key - start, p);
        key += run;
    }
}

// Values of columns [from, to) become zeros, which their weights are too; `to` is even.
static void clear_values(const Cache& cache, int dim, int from, int to, Panels p) {
    if (cache.kind == KVKind::f32) {
        memset((float*)p.values + size_t(from) * dim, 0, size_t(to - from) * dim * 4);
        return;
    }
    uint16_t* pairs = (uint16_t*)p.values + size_t(from / 2) * dim * 2;
    if (from % 2)
        for (int d = 0; d < dim; d++) pairs[2 * d + 1] = 0;
    memset(pairs + size_t(from % 2) * dim * 2, 0, size_t(to - from) / 2 * dim * 4);
}

// Columns from `count` up to the next multiple of 32 become zeros.
static void clear_rest(const Cache& cache, const AttentionShape& shape, int count, Panels p) {
    int dim = shape.padded_dim, padded = (count + 31) / 32 * 32, lines = cache.kind == KVKind::f32 ? dim : dim / 2;
    if (padded == count) return;
    for (int d = 0; d < lines; d++) memset(p.keys + (size_t(d) * split_keys + count) * 4, 0, size_t(padded - count) * 4);
    clear_values(cache, shape.padded_values(), count, padded, p);
}

// ---- small products -----------------------------------------------------------------------------------------------------

// By two registers each: enough sums that none waits for itself.
#if defined(__AVX512BF16__)
constexpr int product_rows_at_once = 4;
#elif defined(__AVX512F__)
constexpr int product_rows_at_once = 8;
#elif defined(__AVX2__)
constexpr int product_rows_at_once = 6;
#else
constexpr int product_rows_at_once = 2;
#endif

// Where no instruction multiplies bfloat16, queries and weights are widened once, so that a product has them from memory.
#if defined(__AVX512BF16__)
constexpr bool widens = false;
#else
constexpr bool widens = true;
#endif
template <bool floats> constexpr int a_number = floats || widens ? 4 : 2;  // bytes of a number of a
template <bool floats> constexpr int a_step = floats ? 4 : 2 * a_number<floats>;  // bytes that meet a row of b

// Adds what one row of b, two registers of it, and one number (or pair) of each of R rows of a make. bfloat16 is widened once for all.
template <int R, bool floats>
INLINE void add_products_of_row(f32p (&acc)[R][2], const uint8_t* a, size_t stride_a, const uint8_t* first, const uint8_t* second) {
    if constexpr (floats) {
        f32p w[2] = {load<f32p>(first), load<f32p>(second)};
        UNROLL for (int r = 0; r < R; r++) {
            f32p x = set_piece(load<float>(a + r * stride_a));
            UNROLL for (int i = 0; i < 2; i++) acc[r][i] = fma_piece(x, w[i], acc[r][i]);
        }
    } else {
#if defined(__AVX512BF16__)
        __m512bh w[2] = {(__m512bh)_mm512_loadu_si512(first), (__m512bh)_mm512_loadu_si512(second)};
        UNROLL for (int r = 0; r < R; r++) {
            __m512bh x = (__m512bh)_mm512_set1_epi32(load<int32_t>(a + r * stride_a));
            UNROLL for (int i = 0; i < 2; i++) acc[r][i] = (f32p)_mm512_dpbf16_ps((__m512)acc[r][i], w[i], x);
        }
#else
        u32p pairs[2] = {load<u32p>(first), load<u32p>(second)};
        UNROLL for (int half = 0; half < 2; half++) {
            f32p w[2];
            UNROLL for (int i = 0; i < 2; i++) w[i] = (f32p)(half ? pairs[i] & 0xffff0000u : pairs[i] << 16);
            UNROLL for (int r = 0; r < R; r++) {
                f32p x = set_piece(load<float>(a + r * stride_a + 4 * half));
                UNROLL for (int i = 0; i < 2; i++) acc[r][i] = fma_piece(x, w[i], acc[r][i]);
            }
        }
#endif
    }
}

// R rows of a meet the columns of b that two registers hold, or one where `second` is 0: c [R][stride_c].
template <int R, bool floats>
NOINLINE void product_rows(const uint8_t* a, size_t stride_a, const uint8_t* b, size_t stride_b, size_t second, int depth, float* c, size_t stride_c) {
    f32p acc[R][2] = {};
    NO_UNROLL for (int k = 0; k < depth; k++, b += stride_b) add_products_of_row<R, floats>(acc, a + size_t(k) * a_step<floats>, stride_a, b, b + second);
    UNROLL for (int r = 0; r < R; r++) {
        store(c + r * stride_c, acc[r][0]);
        if (second) store(c + r * stride_c + piece_bytes / 4, acc[r][1]);
    }
}

// c [rows][stride_c] = a [rows][k] b: b has rows of `columns` lanes of 4 bytes (one float32, or a pair of bfloat16 of K). All rows
// meet some columns before the next ones are read, so that those stay in the nearest cache.
template <bool floats>
static void product_vectors(const uint8_t* a, size_t stride_a, int rows, const uint8_t* b, size_t stride_b, int depth, int columns, float* c, size_t stride_c) {
    constexpr int lanes = piece_bytes / 4;
    for (int n = 0; n < columns; n += 2 * lanes) {
        size_t second = n + lanes < columns ? piece_bytes : 0;
        each_run<product_rows_at_once>(rows, [&](auto R, int r) INLINE_LAMBDA {
            product_rows<R, floats>(a + r * stride_a, stride_a, b + size_t(n) * 4, stride_b, second, depth, c + r * stride_c + n, stride_c);
        });
    }
}

#if defined(__AMX_TILE__)
// depth is a multiple of 16 pairs, columns one of 16, rows at most 32.
static void product_tiles(const uint8_t* a, size_t stride_a, int rows, const uint8_t* b, size_t stride_b, int depth, int columns, float* c, size_t stride_c) {
    int top = rows < 16 ? rows : 16, bottom = rows - top;
    for (int n = 0; n < columns; n += 32) {
        clear_tiles();
        bool both = n + 16 < columns;
        const uint8_t* at = b + size_t(n) * 4;
        for (int k = 0; k < depth; k += 16) {
            _tile_loadd(4, a + size_t(k) * 4, stride_a);
            if (bottom) _tile_loadd(5, a + 16 * stride_a + size_t(k) * 4, stride_a);
            _tile_loadd(6, at + size_t(k) * stride_b, stride_b);
            _tile_dpbf16ps(0, 4, 6);
            if (bottom) _tile_dpbf16ps(2, 5, 6);
            if (!both) continue;
            _tile_loadd(7, at + 64 + size_t(k) * stride_b, stride_b);
            _tile_dpbf16ps(1, 4, 7);
            if (bottom) _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(0, c + n, stride_c * 4);
        if (both) _tile_stored(1, c + n + 16, stride_c * 4);
        if (!bottom) continue;
        _tile_stored(2, c + 16 * stride_c + n, stride_c * 4);
        if (both) _tile_stored(3, c + 16 * stride_c + n + 16, stride_c * 4);
    }
}
#endif

INLINE void product(bool floats, const uint8_t* a, size_t stride_a, int rows, const uint8_t* b, size_t stride_b, int depth, int columns, float* c, size_t stride_c) {
    if (floats) return product_vectors<true>(a, stride_a, rows, b, stride_b, depth, columns, c, stride_c);
#if defined(__AMX_TILE__)
    product_tiles(a, stride_a, rows, b, stride_b, depth, columns, c, stride_c);
#else
    product_vectors<false>(a, stride_a, rows, b, stride_b, depth, columns, c, stride_c);
#endif
}

// ---- products with a cache where it lies ----------------------------------------------------------------------------------------
// A few query rows read keys and values where they are, in blocks of whole runs of 16 keys: gathering would copy what is read once.
// Sums have the order of `product`, and so its bits.

#if defined(__AVX2__) && !defined(__AMX_TILE__)
constexpr bool reads_in_place = true;
#else
constexpr bool reads_in_place = false;
#endif
constexpr int run_keys = 16, most_rows_in_place = 16, registers_in_run = pieces;

// Where the runs of a split lie.
struct Runs {
    const uint8_t *keys[split_keys / run_keys], *values[split_keys / run_keys];
    size_t key_stride, value_stride;  // from one (pair of) dimensions to the next, and of keys
};

// Runs from one on.
struct RunsFrom {
    const uint8_t* const* keys;
    size_t key_stride;
};

template <bool floats> INLINE Runs find_runs(const Cache& cache, const AttentionShape& shape, const Sequence& sequence, int head, int start, int end) {
    Runs runs;
    runs.key_stride = size_t(cache.block_size) * 4;
    runs.value_stride = size_t(shape.padded_dim) * 4;
    for (int i = 0; i < split_keys / run_keys; i++) {
        int key = start + run_keys * i < end ? start + run_keys * i : (end - 1) / run_keys * run_keys;  // what lies past the end is masked
        HeadPlace at = head_place(cache, shape, sequence.block(key / cache.block_size), head);
        int place = key % cache.block_size;
        runs.keys[i] = at.keys + place * 4;
        runs.values[i] = at.values + size_t(floats ? place : place / 2) * runs.value_stride;
    }
    return runs;
}

INLINE void prefetch_rows(const uint8_t* at, size_t stride, int count, int width) {
    for (int i = 0; i < count; i++)
        for (int j = 0; j < width; j += 64) __builtin_prefetch(at + i * stride + j, 0, 3);
}

// Scores of R rows with `count` keys.
template <int R, bool floats> NOINLINE void score_rows(RunsFrom runs, const uint8_t* q, size_t stride_q, int depth, int count, float* c) {
    for (int n = 0; n < count; n += 2 * run_keys / registers_in_run) {
        f32p acc[R][2] = {};
        int run = n / run_keys;
        const uint8_t* first = runs.keys[run];
        const uint8_t* second = registers_in_run == 1 ? runs.keys[run + 1] : first + piece_bytes;
        NO_UNROLL for (int k = 0; k < depth; k++) add_products_of_row<R, floats>(acc, q + size_t(k) * a_step<floats>, stride_q, first + k * runs.key_stride, second + k * runs.key_stride);
        UNROLL for (int r = 0; r < R; r++) {
            store(c + r * split_keys + n, acc[r][0]);
            store(c + r * split_keys + n + piece_bytes / 4, acc[r][1]);
        }
    }
}

// The values of `count` keys, mixed by the weights of R rows.
template <int R, bool floats> NOINLINE void mix_rows(const Runs& runs, const uint8_t* weights, int padded, int count, float* c) {
    constexpr int steps = floats ? run_keys : run_keys / 2;
    for (int n = 0; n < padded; n += 2 * piece_bytes / 4) {
        f32p acc[R][2] = {};
        for (int run = 0; run < count / run_keys; run++) {
            const uint8_t* row = runs.values[run] + size_t(n) * 4;
            NO_UNROLL for (int k = 0; k < steps; k++, row += runs.value_stride)
                add_products_of_row<R, floats>(acc, weights + size_t(run * steps + k) * a_step<floats>, split_keys * a_number<floats>, row, row + piece_bytes);
        }
        UNROLL for (int r = 0; r < R; r++) {
            store(c + r * padded + n, acc[r][0]);
            store(c + r * padded + n + piece_bytes / 4, acc[r][1]);
        }
    }
}

// ---- softmax ----------------------------------------------------------------------------------------------------------------

// Which keys of a split one row sees.
struct View {
    int low, high;  // columns [low, high)
};

INLINE View view_of(const AttentionShape& shape, const Sequence& sequence, int row, int start) {
    int token = row / shape.group();
    int low = std::max(0, shape.first_seen(sequence.position(token)) - start);
    int high = sequence.seen(token) + 1 - start;
    return {low < split_keys ? low : split_keys, high < 0 ? 0 : high < split_keys ? high : split_keys};
}

// The largest score of a row among the keys that it sees; the others become minus infinity.
INLINE float find_maximum(float* scores, int count, View view) {
    // two running maxima, joined in one order: a vector that was not computed would have changed nothing
    f32x16 most[2] = {set(nothing_yet), set(nothing_yet)};
    if (view.low == 0 && view.high >= count) {
        for (int j = 0; j < count; j += 32)
            UNROLL for (int k = 0; k < 2; k++) most[k] = max(load<f32x16>(scores + j + 16 * k), most[k]);
        return highest(max(most[0], most[1]));
    }
    for (int j = 0; j < count; j += 32) {
        UNROLL for (int k = 0; k < 2; k++) {
            i32x16 column = lane_numbers() + (j + 16 * k);
            f32x16 s = select((column >= view.low) & (column < view.high), load<f32x16>(scores + j + 16 * k), set(-INFINITY));
            store(scores + j + 16 * k, s);
            most[k] = max(s, most[k]);
        }
    }
    return highest(max(most[0], most[1]));
}

// Turns scores into weights e^(score - maximum); returns their sum.
template <bool floats> INLINE float soften(const float* scores, int count, float maximum, uint8_t* weights) {
    f32x16 shift = set(-maximum * log2_e), sums[2] = {};
    for (int j = 0; j < count; j += 32) {
        f32x16 p[2];
        UNROLL for (int k = 0; k < 2; k++) {
            f32x16 x = fma(load<f32x16>(scores + j + 16 * k), set(log2_e), shift);
            p[k] = floats ? exp2(x) : exp2_short(x);
            sums[k] += p[k];
        }
        if constexpr (floats) {
            store(weights + size_t(j) * 4, p[0]);
            store(weights + size_t(j + 16) * 4, p[1]);
        } else if constexpr (widens) {
            UNROLL for (int k = 0; k < 2; k++) store(weights + size_t(j + 16 * k) * 4, from_bf16(to_bf16(p[k])));
        } else {
            store_pair(weights + size_t(j) * 2, p[0], p[1]);
        }
    }
    return sum(sums[0] + sums[1]);
}

// Joins one split's result into a state [padded_dim] values, maximum, sum.
INLINE void join_split(float* state, const float* values, float maximum, float total, int dim, int padded) {
    float highest_yet = state[padded], *sum_yet = state + padded + 1;
    float together = highest_yet > maximum ? highest_yet : maximum;
    f32p both = exp2_piece((f32p{highest_yet, maximum} - together) * log2_e);
    float fade = both[0], rise = both[1];
    for (int d = 0; d < dim; d += 16) store(state + d, fma(load<f32x16>(values + d), set(rise), load<f32x16>(state + d) * fade));
    *sum_yet = __builtin_fmaf(total, rise, *sum_yet * fade);
    state[padded] = together;
}

INLINE void clear_state(float* state, int padded) {
    memset(state, 0, size_t(padded + 16) * 4);
    state[padded] = nothing_yet;
}

// The state of a row before the first split of its task: a sink is the first score, so it is joined in the same order whatever
// follows. Splits that were computed with other sequences come next.
INLINE void begin_state(float* state, const AttentionShape& shape, const Sequence& sequence, int kv_head, int row) {
    int padded = shape.padded_values();
    clear_state(state, padded);
    if (shape.sinks) {
        state[padded] = shape.sinks[kv_head * shape.group() + row % shape.group()];
        state[padded + 1] = 1.0f;
    }
    for (int split = 0; split < sequence.num_shared; split++) {
        const SharedSplit& shared = sequence.shared[split];
        const float* from = shared.at + size_t(kv_head) * shared.head_stride + size_t(row) * partial_row(shape);
        join_split(state, from, from[padded], from[padded + 1], padded, padded);
    }
}

INLINE void write_out(const float* state, const AttentionShape& shape, KVKind kind, const Sequence& sequence, int kv_head, int row, float* out, size_t stride) {
    int token = sequence.first_token + row / shape.group(), head = kv_head * shape.group() + row % shape.group();
    float* at = out + size_t(token) * stride + size_t(head) * shape.values();
    float inverse = 1.0f / state[shape.padded_values() + 1];
    if (int rotation = shape.kv_rotation(kind)) {
        f32x16 v[4];
        for (int i = 0; i < shape.head_dim; i += 64) {
            load_inputs(state + i, shape.head_dim - i, rotation, v);
            for (int k = 0; k < 4 && i + 16 * k < shape.head_dim; k++) store(at + i + 16 * k, v[k] * inverse);
        }
        return;
    }
    for (int d = 0; d < shape.values(); d++) at[d] = state[d] * inverse;
}

// ---- tasks ------------------------------------------------------------------------------------------------------------------

struct AttendScratch {
    uint8_t *keys, *values, *queries, *weights;
    float *scores, *outputs, *states;

    static size_t panel(const AttentionShape& shape) { return size_t(split_keys) * shape.padded_dim * 4; }
    static size_t bytes(const AttentionShape& shape) {
        size_t padded = size_t(shape.padded_dim), values = size_t(shape.padded_values());
        return panel(shape) + split_keys * values * 4 + task_rows * padded * 4 + query_rows * split_keys * 4 * 2 + query_rows * values * 4 +
               task_rows * (values + 16) * 4;
    }
    AttendScratch(uint8_t* at, const AttentionShape& shape) {
        size_t padded = size_t(shape.padded_dim);
        keys = at;
        values = keys + panel(shape);
        queries = values + split_keys * size_t(shape.padded_values()) * 4;
        weights = queries + task_rows * padded * 4;
        scores = (float*)(weights + query_rows * split_keys * 4);
        outputs = scores + query_rows * split_keys;
        states = outputs + query_rows * size_t(shape.padded_values());
    }
};

// What one task works on.
struct Attending {
    const AttentionTask& task;
    const Sequence& sequence;
    const AttentionShape& shape;
    const Cache& cache;
    AttendScratch scratch;
    const Runs* runs = nullptr;  // of the split, where it is read in place
    int from = 0, to = INT_MAX;  // the positions of keys that rows see here
    float inverse_temperature = 1;  // of scores

    int num_rows() const { return task.end - task.begin; }
    // A row's query among those of the step.
    size_t query(int row) const {
        int group = shape.group(), number = task.rows ? task.rows[task.begin + row] : sequence.first_token * group + task.begin + row;
        return size_t(number / group) * size_t(shape.num_heads) + size_t(task.kv_head * group + number % group);
    }
    View view(int row, int start) const {
        if (task.rows) return {0, split_keys};
        View seen = view_of(shape, sequence, task.begin + row, start);
        return {std::max(seen.low, std::min(from - start, split_keys)), std::max(0, std::min(seen.high, to - start))};
    }
    // The position after the last key that some row sees.
    int end() const {
        if (task.rows) return (task.last_split + 1) * split_keys;
        return std::min(to, sequence.nodes ? sequence.first_position : sequence.seen((task.end - 1) / shape.group()) + 1);
    }
    Panels panels() const { return {scratch.keys, scratch.values}; }
    float* state(int row) const { return scratch.states + size_t(row) * partial_row(shape); }
    float* partial(int split, int row) const {
        return task.partial + (size_t(split - task.first_split) * num_rows() + row) * partial_row(shape);
    }
};

// One split for `rows` rows of a task from `first` on, which see keys before column `end` at most: their keys are gathered.
template <bool floats> NOINLINE void attend_split(const Attending& at, int split, int first, int rows, int end) {
    const AttentionShape& shape = at.shape;
    const AttendScratch& scratch = at.scratch;
    int padded = shape.padded_dim, values_dim = shape.padded_values(), start = split * split_keys, count = (end + 31) / 32 * 32;
    size_t width = a_number<floats>;
    if (count == 0) {  // this split lies wholly after these rows
        for (int r = 0; at.task.partial && r < rows; r++) clear_state(at.partial(split, first + r), values_dim);
        return;
    }
#if defined(__AMX_TILE__)
    if (!floats) configure_tiles(rows < 16 ? rows : 16, rows > 16 ? rows - 16 : 0, 16);
#endif
    const uint8_t* q = scratch.queries + size_t(first) * padded * width;
    int depth = floats ? padded : padded / 2;
    if (reads_in_place && at.runs) {
        int step = shape.value_dim ? 2 * run_keys : count;  // latents are large: all rows meet some before the next ones are read
        for (int n = 0; n < count; n += step) {
            each_run<product_rows_at_once>(rows, [&](auto R, int r) INLINE_LAMBDA {
                score_rows<R, floats>(RunsFrom{at.runs->keys + n / run_keys, at.runs->key_stride}, q + size_t(r) * padded * width, padded * width, depth, step, scratch.scores + size_t(r) * split_keys + n);
            });
        }
        if (!shape.value_dim) prefetch_rows(at.runs->values[0], at.runs->value_stride, floats ? run_keys : run_keys / 2, padded * 4);
    } else {
        product(floats, q, padded * width, rows, scratch.keys, split_keys * 4, depth, count, scratch.scores, split_keys);
    }
    if (shape.softcap != 0)
        for (int r = 0; r < rows; r++) bend(scratch.scores + size_t(r) * split_keys, count, 1.0f, shape.softcap);
    if (at.inverse_temperature != 1)
        for (int r = 0; r < rows; r++) bend(scratch.scores + size_t(r) * split_keys, count, at.inverse_temperature, 0.0f);
    float maxima[query_rows], totals[query_rows];
    auto maximum_of = [&](int r) INLINE_LAMBDA {
        return find_maximum(scratch.scores + size_t(r) * split_keys, count, at.view(first + r, start));
    };
    maxima[0] = maximum_of(0);
    for (int r = 0; r < rows; r++) {
        if (r + 1 < rows) maxima[r + 1] = maximum_of(r + 1);  // early, so that nothing waits for it
        totals[r] = soften<floats>(scratch.scores + size_t(r) * split_keys, count, maxima[r], scratch.weights + size_t(r) * split_keys * width);
    }
    if (reads_in_place && at.runs && !shape.value_dim) {
        each_run<product_rows_at_once>(rows, [&](auto R, int r) INLINE_LAMBDA {
            mix_rows<R, floats>(*at.runs, scratch.weights + size_t(r) * split_keys * width, padded, count, scratch.outputs + size_t(r) * padded);
        });
    } else {
        product(floats, scratch.weights, split_keys * width, rows, scratch.values, size_t(values_dim) * 4, floats ? count : count / 2,
                values_dim, scratch.outputs, size_t(values_dim));
    }
    for (int r = 0; r < rows; r++) {
        const float* values = scratch.outputs + size_t(r) * values_dim;
        if (at.task.partial) {
            float* to = at.partial(split, first + r);
            memcpy(to, values, size_t(values_dim) * 4);
            to[values_dim] = maxima[r];
            to[values_dim + 1] = totals[r];
        } else {
            join_split(at.state(first + r), values, maxima[r], totals[r], values_dim, values_dim);
        }
    }
}

// The first column of a split whose key a row reads as bfloat16: those before it are packed. 0 in a cache of one form.
INLINE int first_recent(const Attending& at, int row, int start, int count) {
    if (!at.cache.recent_window) return 0;
    if (at.task.rows) return count;  // which sequences share packed keys only
    return std::max(0, std::min(at.cache.first_recent(at.sequence.position((at.task.begin + row) / at.shape.group())) - start, count));
}

// Gathers columns [from, to) of a split in the forms that a row reads whose recent keys begin at column `recent`.
static void gather_forms(const Attending& at, int start, int from, int to, int recent) {
    int middle = std::max(from, std::min(recent, to));
    if (!at.cache.recent_window) return gather(at.cache, at.shape, at.sequence, at.task.kv_head, start + from, start + to, at.panels(), from);
    gather(at.cache, at.shape, at.sequence, at.task.kv_head, start + from, start + middle, at.panels(), from);
    gather(at.cache.recent(), at.shape, at.sequence.recent(), at.task.kv_head, start + middle, start + to, at.panels(), middle);
}

// Where the panels hold other forms than a row reads, gathers those columns again.
INLINE void change_forms(const Attending& at, int start, int& held, int recent) {
    if (held != recent) gather_forms(at, start, std::min(held, recent), std::max(held, recent), recent);
    held = recent;
}

// A split of a cache with two forms of keys: rows that read the same forms stand together, and meet one split as in one form.
template <bool floats> static void attend_forms(const Attending& at, int start, int split, int count) {
    int num_rows = at.num_rows(), held = first_recent(at, 0, start, count);
    gather_forms(at, start, 0, count, held);
    clear_rest(at.cache, at.shape, count, at.panels());
    for (int first = 0, rows; first < num_rows; first += rows) {
        change_forms(at, start, held, first_recent(at, first, start, count));
        for (rows = 1; first + rows < num_rows && rows < query_rows && first_recent(at, first + rows, start, count) == held;) rows++;
        attend_split<floats>(at, split, first, rows, at.view(first + rows - 1, start).high);
    }
}

// A split in which a tree has keys of its own, node by node: the panels hold what stands before the tree, and then each node's
// path in the order of its positions, as a chain would have it. What a node shares with the one before it stays there.
template <bool floats> static void attend_nodes(const Attending& at, int split) {
    const Sequence& sequence = at.sequence;
    const Cache cache = at.cache.recent_window ? at.cache.recent() : at.cache;  // which nodes are in
    const Sequence written = at.cache.recent_window ? sequence.recent() : sequence;
    int start = split * split_keys, tree = sequence.first_position, group = at.shape.group(), num_rows = at.num_rows();
    int own = tree > start ? tree - start : 0;  // the first column that the tree has
    int recent = first_recent(at, 0, start, own);
    if (own) gather_forms(at, start, 0, own, recent);
    int32_t held[split_keys];
    for (int column = own; column < split_keys; column++) held[column] = -1;
    for (int first = 0, rows; first < num_rows; first += rows) {
        int token = (at.task.begin + first) / group, next = (token + 1) * group - at.task.begin;
        rows = std::min(std::min(next, num_rows) - first, query_rows);
        const Node& node = sequence.nodes[token];
        change_forms(at, start, recent, first_recent(at, first, start, own));
        int end = std::max(0, std::min(sequence.seen(token) + 1 - start, split_keys)), padded = (end + 31) / 32 * 32;
        for (int column = own; column < end; column++) {
            int position = start + column;  // one after the node's is that of a known token, which lies where its position says
            int slot = position > node.position ? position : sequence.paths[node.path + position - tree], place = slot % cache.block_size;
            if (held[column] == slot) continue;
            held[column] = slot;
            HeadPlace from = head_place(cache, at.shape, written.block(slot / cache.block_size), at.task.kv_head);
            gather_run(cache, at.shape, from, place, place + 1, column, at.panels());
        }
        clear_values(cache, at.shape.padded_values(), end, padded, at.panels());
        for (int column = end; column < padded; column++) held[column] = -1;
        attend_split<floats>(at, split, first, rows, end);
    }
}

// Some splits of a task, of which rows see keys at positions [at.from, at.to).
template <bool floats> static void attend_splits(Attending& at, int first_split, int last_split) {
    const AttentionShape& shape = at.shape;
    const Sequence& sequence = at.sequence;
    const Cache& cache = at.cache;
    int num_rows = at.num_rows(), last_end = at.end(), kv_head = at.task.kv_head;
    bool plain = cache.kind == KVKind::f32 || cache.kind == KVKind::bf16, few = num_rows <= most_rows_in_place || shape.value_dim;
    bool in_place = reads_in_place && plain && few && cache.block_size % run_keys == 0;
    for (int split = first_split; split <= last_split; split++) {
        int start = split * split_keys, count = std::min(last_end - start, split_keys);
        if (sequence.nodes && count < split_keys && at.to > sequence.first_position) {
            attend_nodes<floats>(at, split);
            continue;
        }
        if (cache.recent_window) {
            attend_forms<floats>(at, start, split, count);
            continue;
        }
        Runs runs;
        if (in_place) {
            runs = find_runs<floats>(cache, shape, sequence, kv_head, start, start + count);
            at.runs = &runs;
            if (shape.value_dim) {  // keys stay where they are, from which values are transposed
                gather(cache, shape, sequence, kv_head, start, start + count, {nullptr, at.scratch.values});
                clear_values(cache, shape.padded_values(), count, (count + 31) / 32 * 32, at.panels());
            }
        } else {
            gather(cache, shape, sequence, kv_head, start, start + count, at.panels());
            clear_rest(cache, shape, count, at.panels());
        }
        for (int first = 0; first < num_rows; first += query_rows) {
            int rows = std::min(num_rows - first, query_rows);
            attend_split<floats>(at, split, first, rows, at.view(first + rows - 1, start).high);
        }
        at.runs = nullptr;
    }
}

// Documents first, as one softmax of their own; what it adds up to is weighed, and then joined with all other keys as one split would be.
template <bool floats> static void attend_documents(Attending& at) {
    const AttentionShape& shape = at.shape;
    const DocumentWeights& documents = *at.sequence.documents;
    int values = shape.padded_values();
    for (int r = 0; r < at.num_rows(); r++) clear_state(at.state(r), values);
    at.from = documents.first;
    at.to = documents.end;
    at.inverse_temperature = documents.inverse_temperature;
    attend_splits<floats>(at, documents.first / split_keys, (documents.end - 1) / split_keys);
    at.inverse_temperature = 1;
    for (int r = 0; r < at.num_rows(); r++) {
        float *state = at.state(r), inverse = 1.0f / state[values + 1];
        for (int d = 0; d < values; d += 16) store(state + d, load<f32x16>(state + d) * inverse);
        state[values] = documents.power * (state[values] + float(std::log(double(state[values + 1]))));
        state[values + 1] = 1.0f;
        if (!shape.sinks) continue;
        memset(at.scratch.outputs, 0, size_t(values) * 4);
        join_split(state, at.scratch.outputs, shape.sinks[at.task.kv_head * shape.group() + (at.task.begin + r) % shape.group()], 1.0f, values, values);
    }
    at.from = 0;
    at.to = documents.first;
    if (at.to > 0) attend_splits<floats>(at, 0, (documents.first - 1) / split_keys);
    at.from = documents.end;
    at.to = INT_MAX;
    attend_splits<floats>(at, documents.end / split_keys, at.task.last_split);
}

template <bool floats>
static void attend_rows(const AttentionTask& task, const Sequence& sequence, const AttentionShape& shape, const Cache& cache,
                        const uint8_t* queries, float* out, size_t out_stride, uint8_t* memory) {
    Attending at{task, sequence, shape, cache, AttendScratch(memory, shape)};
    int padded = shape.padded_dim, num_rows = at.num_rows();
    size_t query_bytes = size_t(padded) * (floats ? 4 : 2);
    for (int r = 0; r < num_rows; r++) {
        size_t head = at.query(r);
        if constexpr (floats || !widens) {
            memcpy(at.scratch.queries + r * query_bytes, queries + head * query_bytes, query_bytes);
        } else {
            for (int d = 0; d < padded; d += 16)
                store(at.scratch.queries + (size_t(r) * padded + d) * 4, from_bf16(load<u16x16>(queries + head * query_bytes + size_t(d) * 2)));
        }
        if (!task.partial && !sequence.documents) begin_state(at.state(r), shape, sequence, task.kv_head, task.begin + r);
    }
    if (sequence.documents) attend_documents<floats>(at);
    else attend_splits<floats>(at, task.first_split, task.last_split);
    if (task.partial) return;
    for (int r = 0; r < num_rows; r++) write_out(at.state(r), shape, cache.kind, sequence, task.kv_head, task.begin + r, out, out_stride);
}

static void attend(const AttentionTask& task, const Sequence& sequence, const AttentionShape& shape, const Cache& cache,
                   const uint8_t* queries, float* out, size_t out_stride, uint8_t* scratch) {
    if (cache.kind == KVKind::f32) attend_rows<true>(task, sequence, shape, cache, queries, out, out_stride, scratch);
    else attend_rows<false>(task, sequence, shape, cache, queries, out, out_stride, scratch);
}

static void join(const AttentionTask& task, const Sequence& sequence, const AttentionShape& shape, KVKind kind, const float* partial, int num_splits,
                 float* out, size_t out_stride, uint8_t* scratch) {
    int padded = shape.padded_values(), num_rows = task.end - task.begin;
    size_t length = partial_row(shape);
    float* state = AttendScratch(scratch, shape).states;
    for (int r = 0; r < num_rows; r++) {
        begin_state(state, shape, sequence, task.kv_head, task.begin + r);
        for (int split = 0; split < num_splits; split++) {
            const float* from = partial + (size_t(split) * num_rows + r) * length;
            join_split(state, from, from[padded], from[padded + 1], padded, padded);
        }
        write_out(state, shape, kind, sequence, task.kv_head, task.begin + r, out, out_stride);
    }
}

static size_t attend_scratch(const AttentionShape& shape) { return AttendScratch::bytes(shape); }

}  // namespace cloister::CLOISTER_ISA
