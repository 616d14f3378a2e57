// Products of rows with packed weights. Each output is the sum over K in one order, whatever the number of rows: chunk after
// chunk, inside a chunk as the instruction has it. Integer sums are exact, so any instruction may make them.
#pragma once
#include "kernels.hpp"
#include "simd.hpp"

namespace cloister::CLOISTER_ISA {

// Rows at once where no block of many rows is made (blocked.hpp): of adapters' matrices, which are not quantised, and of others.
#if defined(__AVX512F__)
constexpr int most_float_rows = 8;
#else
constexpr int most_float_rows = 2;
#endif
constexpr int most_integer_rows = 2;

// ---- the end of a tile: 32 outputs of some rows ---------------------------------------------------------------------------------

struct Outputs { f32x16 low, high; };

INLINE void store_outputs(float* out, int left, Outputs y) {
    if (left >= 32) {
        store(out, y.low);
        store(out + 16, y.high);
        return;
    }
    float both[32];
    store(both, y.low);
    store(both + 16, y.high);
    memcpy(out, both, size_t(left) * 4);
}

// Writes activation(gate) * up, 16 numbers, where the next product or the rounding to int8 wants them.
INLINE void store_gated(const Matrix& w, int row, int panel, f32x16 value, const Sink& sink) {
    if (sink.wide) {
        store(sink.wide + size_t(row) * sink.stride + panel * 16, to_bf16(value));
    } else if (sink.next_input == Input::f32) {
        store(sink.next->at(row, panel), value);
    } else {
        uint8_t* at = sink.next->at(row, panel / 2) + 32 * (panel % 2);
        store(at, to_bf16(value));
        if (panel == w.panels - 1 && panel % 2 == 0) memset(at + 32, 0, 32);
    }
}

// Writes activation(y), 32 numbers, where the next product or the rounding to int8 wants them. On its own: it is rarely needed.
static __attribute__((noinline)) void store_activated(int row, int panel, const float* outputs, const Sink& sink) {
    f32x16 low = activate(load<f32x16>(outputs), int(sink.activation)), high = activate(load<f32x16>(outputs + 16), int(sink.activation));
    if (sink.wide) {
        uint16_t* at = sink.wide + size_t(row) * sink.stride + panel * 32;
        store(at, to_bf16(low));
        store(at + 16, to_bf16(high));
    } else if (sink.next_input == Input::f32) {
        store(sink.next->at(row, 2 * panel), low);
        if (2 * panel + 1 < sink.next->chunks) store(sink.next->at(row, 2 * panel + 1), high);
    } else {
        store_pair(sink.next->at(row, panel), low, high);
    }
}

INLINE f32x16 gated(f32x16 gate, f32x16 up, const Sink& sink) {
    if (sink.clipping.limit != 0) return clipped_swiglu(gate, up, sink.clipping.alpha, sink.clipping.limit);
    return (sink.activation == Activation::silu ? silu(gate) : activate(gate, int(sink.activation))) * up;
}

// What `finish_rows` makes of outputs that were stored.
static void bend_outputs(const Matrix& w, const float* outputs, int row, const Sink& sink) {
    for (int panel = 0; panel < w.panels; panel++, outputs += 32) {
        if (sink.finish == Finish::activate) {
            store_activated(row, panel, outputs, sink);
            continue;
        }
        f32x16 low = load<f32x16>(outputs) * sink.scale, high = load<f32x16>(outputs + 16);
        store_gated(w, row, panel, gated(low, high, sink), sink);
    }
}

// Finishes rows [first, first + count): `value(i)` gives the outputs of row first + i before the scale of its inputs and the bias.
// What does not depend on the row is decided once.
template <class Value>
INLINE void finish_rows(const Matrix& w, const Rows& x, int panel, const Sink& sink, int first, int count, Value value) {
    f32x16 bias_low = w.bias ? load<f32x16>(w.bias + panel * 32) : f32x16{};
    f32x16 bias_high = w.bias ? load<f32x16>(w.bias + panel * 32 + 16) : f32x16{};
    f32x16 scale_low = w.output_scales ? load<f32x16>(w.output_scales + panel * 32) : f32x16{};
    f32x16 scale_high = w.output_scales ? load<f32x16>(w.output_scales + panel * 32 + 16) : f32x16{};
    bool scaled = x.form.type == Input::int8 && !x.form.group;  // where groups have scales they are in the sums already
    auto outputs = [&](int i) INLINE_LAMBDA {
        Outputs y = value(i);
        if (w.output_scales) {
            y.low *= scale_low;
            y.high *= scale_high;
        }
        if (scaled) {
            f32x16 scale = set(x.scales[first + i]);
            y.low *= scale;
            y.high *= scale;
        }
        y.low += bias_low;
        y.high += bias_high;
        return y;
    };
    if (sink.finish == Finish::glu) {
        if (sink.activation == Activation::silu && sink.clipping.limit == 0) {
            for (int i = 0; i < count; i++) {
                Outputs y = outputs(i);
                store_gated(w, first + i, panel, silu(y.low * sink.scale) * y.high, sink);
            }
        } else {
            for (int i = 0; i < count; i++) {
                Outputs y = outputs(i);
                store_gated(w, first + i, panel, gated(y.low * sink.scale, y.high, sink), sink);
            }
        }
        return;
    }
    if (sink.finish == Finish::activate) {
        for (int i = 0; i < count; i++) {
            Outputs y = outputs(i);
            store_activated(first + i, panel, (const float*)&y, sink);
        }
        return;
    }
    int left = w.outputs - panel * 32;
    float* out = sink.out + size_t(first) * sink.stride + size_t(panel) * 32;
    if (sink.finish == Finish::store) {
        for (int i = 0; i < count; i++, out += sink.stride) {
            Outputs y = outputs(i);
            store_outputs(out, left, {y.low * sink.scale, y.high * sink.scale});
        }
        return;
    }
    for (int i = 0; i < count; i++, out += sink.stride) {
        Outputs y = outputs(i);
        store(out, fma(y.low, set(sink.scale), load<f32x16>(out)));
        store(out + 16, fma(y.high, set(sink.scale), load<f32x16>(out + 16)));
    }
}

INLINE int32_t sum_inputs(const Rows& x, int row, int first, int count) {
    const int32_t* sums = x.sums_of(row) + first;
    int32_t total = 0;
    for (int i = 0; i < count; i++) total += sums[i];
    return total;
}

// What an int8 product over all of K is scaled by, for each output.
struct Channels {
    f32x16 low, high;
    int32_t zero_point;

    INLINE Channels(const Matrix& w, int panel)
        : low(load<f32x16>(w.channel_scales + panel * 32)), high(load<f32x16>(w.channel_scales + panel * 32 + 16)), zero_point(w.zero_point) {}
    INLINE Outputs operator()(i32x16 first, i32x16 second, int32_t total) const {
        i32x16 shift = set(zero_point * total);
        return {to_f32(first - shift) * low, to_f32(second - shift) * high};
    }
};

INLINE f32x16 group_scale(const Matrix& w, size_t at) {
    if (w.scale_bytes == 1) {
        i32x16 bytes = widen(load<u8x16>((const uint8_t*)w.scales + at));
        // E4M3: a sign, and an exponent and a fraction in their places, the exponent 120 less than float32 has it
        if (w.has_e4m3_scales()) return as<float>((bytes & 127) << 20 | (bytes & 128) << 24) * 0x1p119f;
        // E8M0: the bits of a power of two, whose exponent may be that of no normal number
        return as<float>(max(bytes << 23, set(0x400000))) * 0.5f;
    }
    return w.scale_bytes == 4 ? load<f32x16>((const float*)w.scales + at) : from_f16(load<u16x16>((const uint16_t*)w.scales + at));
}

// How the zero points of groups come off: not at all (they are off), the same everywhere, or for each output and group. Offsets
// may come on top of `each`, and of `none` in blocks of rows.
enum class Zeros { none, one, each };

// One group of a panel: how its integer products join the float32 sums. Integers below 2^24 are exact in float32, so for the
// groups that formats have (to 512 inputs) zero points come off there, in one instruction.
template <Zeros zeros> struct Group {
    f32x16 low, high, low_offset = {}, high_offset = {};
    f32x16 low_zero = {}, high_zero = {};
    bool wide, shifted;

    INLINE Group(const Matrix& w, int panel, int group) : wide(w.group > 512), shifted(w.offsets) {
        size_t at = (size_t(panel) * w.groups + group) * 32;
        low = group_scale(w, at);
        high = group_scale(w, at + 16);
        if constexpr (zeros == Zeros::one) low_zero = high_zero = set(float(w.zero_point));
        if constexpr (zeros == Zeros::each) {
            low_zero = w.zeros ? to_f32(widen(load<u8x16>(w.zeros + at))) : set(float(w.zero_point));
            high_zero = w.zeros ? to_f32(widen(load<u8x16>(w.zeros + at + 16))) : set(float(w.zero_point));
            if (w.offsets) {
                low_offset = load<f32x16>(w.offsets + at);
                high_offset = load<f32x16>(w.offsets + at + 16);
            }
        }
    }
    // `scale` is that of the group's inputs, 1 where the row has one for all.
    INLINE Outputs add(Outputs c, i32x16 first, i32x16 second, int32_t total, float scale) const {
        f32x16 a = to_f32(first), b = to_f32(second);
        if constexpr (zeros != Zeros::none) {
            f32x16 sum_of = to_f32(set(total));
            a = fma(-low_zero, sum_of, a);
            b = fma(-high_zero, sum_of, b);
            if (wide) {
                a = to_f32(first - to_i32(low_zero) * total);
                b = to_f32(second - to_i32(high_zero) * total);
            }
        }
        f32x16 scales = set(scale);
        c.low = fma(a * scales, low, c.low);
        c.high = fma(b * scales, high, c.high);
        if constexpr (zeros == Zeros::each) {
            if (shifted) {
                f32x16 sum_of = set(float(total) * scale);
                c.low = fma(low_offset, sum_of, c.low);
                c.high = fma(high_offset, sum_of, c.high);
            }
        }
        return c;
    }
};

INLINE float group_input_scale(const Rows& x, int row, int group) {
    return x.form.group ? x.scales[size_t(row) * x.num_groups + group] : 1.0f;
}

INLINE bool is_plain(const Matrix& w) { return !w.zeros && !w.offsets; }

// ---- unpacking ------------------------------------------------------------------------------------------------------------

// What bytes of E2M1 codes become before a zero point of 12 comes off, so that they are not negative.
constexpr uint8_t e2m1_zero = 12;
alignas(16) constexpr uint8_t e2m1_bytes[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

// Integer tiles of a chunk as bytes; `group` is that of the first half. Rows 0-7 are the chunk's first 32 inputs. `middle` is
// taken off the codes of int4 and int8: with half of their range they are signed.
INLINE void unpack_tile(const Matrix& w, int panel, int half, const uint8_t* packed, int group, int next_group, uint8_t middle, uint8_t* tile) {
#if defined(__AVX512BW__)
    __m512i mask = _mm512_set1_epi8(15);
    if (w.e2m1) {
        __m512i table = _mm512_sub_epi8(_mm512_broadcast_i32x4(_mm_load_si128((const __m128i*)e2m1_bytes)), _mm512_set1_epi8(char(middle)));
        for (int r = 0; r < 8; r++) {
            __m512i v = _mm512_loadu_si512(packed + 64 * r);
            _mm512_storeu_si512(tile + 64 * r, _mm512_shuffle_epi8(table, _mm512_and_si512(v, mask)));
            _mm512_storeu_si512(tile + 64 * (r + 8), _mm512_shuffle_epi8(table, _mm512_and_si512(_mm512_srli_epi16(v, 4), mask)));
        }
        return;
    }
    if (w.kind == Kind::int4) {
        for (int r = 0; r < 8; r++) {
            __m512i v = _mm512_loadu_si512(packed + 64 * r);
            __m512i low = _mm512_and_si512(v, mask), high = _mm512_and_si512(_mm512_srli_epi16(v, 4), mask);
            if (middle) {
                low = _mm512_sub_epi8(low, _mm512_set1_epi8(char(middle)));
                high = _mm512_sub_epi8(high, _mm512_set1_epi8(char(middle)));
            }
            _mm512_storeu_si512(tile + 64 * r, low);
            _mm512_storeu_si512(tile + 64 * (r + 8), high);
        }
        return;
    }
    __m512i scale[2], offset[2];
    int groups[2] = {group, next_group};
    for (int h = 0; h < 2; h++) {
        size_t at = (size_t(panel) * w.groups + groups[h]) * 32 + 16 * half;
        __m512i s = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)(w.group_scales + at)));
        __m512i z = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)(w.zeros + at)));
        scale[h] = _mm512_or_si512(s, _mm512_slli_epi32(s, 16));
        __m512i o = _mm512_and_si512(_mm512_sub_epi32(_mm512_set1_epi32(128), _mm512_mullo_epi32(s, z)), _mm512_set1_epi32(255));
        o = _mm512_or_si512(o, _mm512_slli_epi32(o, 8));
        offset[h] = _mm512_or_si512(o, _mm512_slli_epi32(o, 16));
    }
    for (int r = 0; r < 8; r++) {
        __m512i v = _mm512_loadu_si512(packed + 64 * r);
        // 16-bit products of two codes at once: a code times its scale stays below 256 and so does not carry
        __m512i a = _mm512_mullo_epi16(_mm512_and_si512(v, mask), scale[0]);
        __m512i b = _mm512_mullo_epi16(_mm512_and_si512(_mm512_srli_epi16(v, 4), mask), scale[1]);
        _mm512_storeu_si512(tile + 64 * r, _mm512_add_epi8(a, offset[0]));
        _mm512_storeu_si512(tile + 64 * (r + 8), _mm512_add_epi8(b, offset[1]));
    }
#elif defined(__AVX2__)
    (void)middle;  // QoQ and E2M1 only: int4 is multiplied as it is packed
    const __m256i mask = _mm256_set1_epi8(15);
    if (w.e2m1) {
        __m256i table = _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i*)e2m1_bytes));
        for (int i = 0; i < 512; i += 32) {
            __m256i v = _mm256_loadu_si256((const __m256i*)(packed + i));
            _mm256_storeu_si256((__m256i*)(tile + i), _mm256_shuffle_epi8(table, _mm256_and_si256(v, mask)));
            _mm256_storeu_si256((__m256i*)(tile + i + 512), _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi16(v, 4), mask)));
        }
        return;
    }
    int groups[2] = {group, next_group};
    for (int p = 0; p < pieces; p++) {
        __m256i scale[2], offset[2];
        for (int h = 0; h < 2; h++) {
            size_t at = (size_t(panel) * w.groups + groups[h]) * 32 + 16 * half + 8 * p;
            __m256i s = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(w.group_scales + at)));
            __m256i z = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(w.zeros + at)));
            scale[h] = _mm256_or_si256(s, _mm256_slli_epi32(s, 16));
            __m256i o = _mm256_sub_epi32(_mm256_set1_epi32(128), _mm256_mullo_epi32(s, z));
            // the lowest byte of each lane in all four
            offset[h] = _mm256_shuffle_epi8(o, _mm256_setr_epi64x(0x0404040400000000, 0x0c0c0c0c08080808, 0x0404040400000000, 0x0c0c0c0c08080808));
        }
        for (int i = 32 * p; i < 512; i += 64) {
            __m256i v = _mm256_loadu_si256((const __m256i*)(packed + i));
            // 16-bit products of two codes at once: a code times its scale stays below 256 and so does not carry
            __m256i a = _mm256_mullo_epi16(_mm256_and_si256(v, mask), scale[0]);
            __m256i b = _mm256_mullo_epi16(_mm256_and_si256(_mm256_srli_epi16(v, 4), mask), scale[1]);
            _mm256_storeu_si256((__m256i*)(tile + i), _mm256_add_epi8(a, offset[0]));
            _mm256_storeu_si256((__m256i*)(tile + i + 512), _mm256_add_epi8(b, offset[1]));
        }
    }
#else
    if (w.e2m1) {
        for (int i = 0; i < 512; i++) {
            tile[i] = uint8_t(e2m1_bytes[packed[i] & 15] - middle);
            tile[i + 512] = uint8_t(e2m1_bytes[packed[i] >> 4] - middle);
        }
        return;
    }
    typedef uint8_t u8x16 __attribute__((vector_size(16), may_alias));
    u8x16 scale[2][4], offset[2][4];
    int groups[2] = {group, next_group};
    bool unfold = w.kind == Kind::qoq;
    for (int h = 0; unfold && h < 2; h++) {
        size_t at = (size_t(panel) * w.groups + groups[h]) * 32 + 16 * half;
        for (int i = 0; i < 64; i++) {
            scale[h][i / 16][i % 16] = w.group_scales[at + i / 4];
            offset[h][i / 16][i % 16] = uint8_t(128 - w.zeros[at + i / 4] * w.group_scales[at + i / 4]);
        }
    }
    for (int i = 0; i < 512; i += 16) {
        u8x16 v = load<u8x16>(packed + i), low = v & 15, high = v >> 4;
        int part = i % 64 / 16;
        store(tile + i, unfold ? u8x16(low * scale[0][part] + offset[0][part]) : u8x16(low - middle));
        store(tile + i + 512, unfold ? u8x16(high * scale[1][part] + offset[1][part]) : u8x16(high - middle));
    }
#endif
}

// The tiles of one chunk of a panel, unpacked where they must be.
INLINE const uint8_t* integer_tiles(const Matrix& w, int panel, const uint8_t* codes, int chunk, uint8_t* scratch, uint8_t middle = 0) {
    const uint8_t* packed = codes + size_t(chunk) * 2 * tile_bytes(w.kind);
    if (w.kind == Kind::int8 && !middle) return packed;
    if (w.kind == Kind::int8) {
        typedef uint8_t u8x64 __attribute__((vector_size(64), may_alias));
        for (int at = 0; at < 2048; at += 64) store(scratch + at, load<u8x64>(packed + at) - middle);
        return scratch;
    }
    int group = 0, next = 0;
    if (w.kind == Kind::qoq) {
        group = chunk * 64 / w.group;
        next = (chunk * 64 + 32) / w.group;
        group = group < w.groups ? group : w.groups - 1;
        next = next < w.groups ? next : w.groups - 1;
    }
    unpack_tile(w, panel, 0, packed, group, next, middle, scratch);
    unpack_tile(w, panel, 1, packed + 512, group, next, middle, scratch + 1024);
    return scratch;
}

constexpr int half_length = 16;  // inputs of half a chunk of bfloat16: the least group

// Where a vector takes four registers, copies of these would take the compiler a minute.
#if defined(__AVX2__) || defined(__ARM_FEATURE_DOTPROD)
#define WIDEN_INLINE INLINE
#else
#define WIDEN_INLINE NOINLINE
#endif

// Rows [first, last) of a tile of E2M1 that meets bfloat16; all of them have the scales at `at`. What E8M0 and E4M3 scale is exact.
WIDEN_INLINE void widen_rows(const Matrix& w, size_t at, const uint8_t* packed, int first, int last, uint8_t* tile) {
    f32x16 scales = group_scale(w, at), low_scales = twice(scales, 0), high_scales = twice(scales, 1);
    UNROLL for (int r = first; r < last; r++) {
        i32x16 bytes = widen(load<u8x16>(packed + 16 * r));
        store_pair(tile + 64 * r, e2m1_code(bytes) * low_scales, e2m1_code(bytes >> 4) * high_scales);
    }
}

// One tile of w4a16 as bfloat16, rounded as a tensor is that was dequantised before: (code - zero) * scale + offset. With a scale
// of 11 bits zero * scale is exact, and one fused operation does for two.
WIDEN_INLINE void widen_tile(const Matrix& w, int panel, int half, const uint8_t* packed, int group, uint8_t* tile) {
    size_t at = (size_t(panel) * w.groups + group) * 32 + 16 * half;
    if (w.group == half_length) {  // the second half of the last chunk may be of no group: its codes are zero
        widen_rows(w, at, packed, 0, 8, tile);
        widen_rows(w, group + 1 < w.groups ? at + 32 : at, packed, 8, 16, tile);
        return;
    }
    f32x16 scales = group_scale(w, at), zeros = w.zeros ? to_f32(widen(load<u8x16>(w.zeros + at))) : set(float(w.zero_point));
    if (w.e2m1) return widen_rows(w, at, packed, 0, 16, tile);
    f32x16 low_scales = twice(scales, 0), high_scales = twice(scales, 1), low_zeros = twice(zeros, 0), high_zeros = twice(zeros, 1);
    if (w.scale_bytes < 4 && !w.offsets) {
        f32x16 low_shift = -low_zeros * low_scales, high_shift = -high_zeros * high_scales;
        UNROLL for (int r = 0; r < 16; r++) {
            i32x16 bytes = widen(load<u8x16>(packed + 16 * r));
            store_pair(tile + 64 * r, fma(low_code(bytes), low_scales, low_shift), fma(to_f32(bytes >> 4), high_scales, high_shift));
        }
        return;
    }
    f32x16 offsets = w.offsets ? load<f32x16>(w.offsets + at) : f32x16{};
    for (int r = 0; r < 16; r++) {
        i32x16 bytes = widen(load<u8x16>(packed + 16 * r));
        store_pair(tile + 64 * r, (low_code(bytes) - low_zeros) * low_scales + twice(offsets, 0),
                   (to_f32(bytes >> 4) - high_zeros) * high_scales + twice(offsets, 1));
    }
}

// The tiles of one chunk of a w4a16 panel, as bfloat16.
INLINE const uint8_t* widened_tiles(const Matrix& w, int panel, const uint8_t* codes, int chunk, uint8_t* scratch) {
    const uint8_t* packed = codes + size_t(chunk) * 512;
    int group = chunk * 32 / w.group;
    widen_tile(w, panel, 0, packed, group, scratch);
    widen_tile(w, panel, 1, packed + 256, group, scratch + 1024);
    return scratch;
}

constexpr int page = 4096;  // how far ahead weights are asked for

INLINE void prefetch_ahead(const uint8_t* p, int bytes) {
    _Pragma("GCC unroll 32") for (int i = 0; i < bytes; i += 64) __builtin_prefetch(p + i, 0, 3);
}

}  // namespace cloister::CLOISTER_ISA

#include "tiles.hpp"

namespace cloister::CLOISTER_ISA {

// ---- vector kernels: R rows by 32 outputs -------------------------------------------------------------------------------------
// Each is a function of its own: in one, several times as long as any other, they take a compiler two to five times as long.

template <int R, Kind K>
NOINLINE void multiply_floats(const Matrix& w, const Rows& x, int block, int first, int panel, const Sink& sink) {
    f32x16 c[R][2] = {};
    int height = x.height(block);
    const uint8_t* a = x.block(block) + size_t(first) * 64;
    const uint8_t* codes = w.codes + size_t(panel) * w.panel_bytes();
    alignas(64) uint8_t scratch[2048];
    constexpr int step = K == Kind::w4a16 ? 512 : 2048;
    for (int chunk = 0; chunk < w.chunks; chunk++, a += size_t(height) * 64) {
        prefetch_ahead(codes + size_t(chunk) * step + page, step);
        const uint8_t* b = K == Kind::w4a16 ? widened_tiles(w, panel, codes, chunk, scratch) : codes + size_t(chunk) * step;
        for (int k = 0; k < 16; k++) {
            UNROLL for (int r = 0; r < R; r++) {
                if constexpr (K == Kind::f32) {
                    float value = load<float>(a + r * 64 + k * 4);
                    add_floats(c[r][0], b + k * 64, value);
                    add_floats(c[r][1], b + 1024 + k * 64, value);
                } else {
                    uint32_t pair = load<uint32_t>(a + r * 64 + k * 4);
                    add_pairs(c[r][0], b + k * 64, pair);
                    add_pairs(c[r][1], b + 1024 + k * 64, pair);
                }
            }
        }
    }
    finish_rows(w, x, panel, sink, block * 16 + first, R, [&](int r) INLINE_LAMBDA { return Outputs{c[r][0], c[r][1]}; });
}

#if defined(__AVX2__) && !defined(__AVX512BW__) && !defined(__AVXVNNI__)
constexpr bool asks_singly = true;  // where a chunk takes long enough to multiply
#else
constexpr bool asks_singly = false;
#endif

// With `streams` the tiles are weights as they lie in memory: those of the next page are asked for one by one, as a burst for a
// whole chunk fills every line buffer and the loads behind it wait.
template <int R, bool streams = false>
INLINE void add_products(i32x16 (&acc)[R][2], const uint8_t* tiles, const uint8_t* a, int first_row, int last_row) {
    for (int k = first_row; k < last_row; k++) {
        if constexpr (streams) {
            __builtin_prefetch(tiles + k * 64 + page, 0, 3);
            __builtin_prefetch(tiles + 1024 + k * 64 + page, 0, 3);
        }
        UNROLL for (int r = 0; r < R; r++) {
            int32_t quad = load<int32_t>(a + r * 64 + k * 4);
            add_quads(acc[r][0], tiles + k * 64, quad);
            add_quads(acc[r][1], tiles + 1024 + k * 64, quad);
        }
    }
}

#if defined(__AVX2__) && !defined(__AVX512BW__)
// Int4 as it is packed, one half of a chunk (32 inputs): sums of pairs stay below 2^15, so that they widen once.
template <int R>
INLINE void add_nibbles(i32x16 (&acc)[R][2], const uint8_t* packed, const uint8_t* a, int half) {
    const __m256i mask = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
    UNROLL for (int part = 0; part < 2 * pieces; part++) {
        __m256i sums[R] = {};
        UNROLL for (int k = 0; k < 8; k++) {
            __m256i v = _mm256_loadu_si256((const __m256i*)(packed + part / pieces * 512 + k * 64 + part % pieces * 32));
            v = _mm256_and_si256(half ? _mm256_srli_epi16(v, 4) : v, mask);
            UNROLL for (int r = 0; r < R; r++)
                sums[r] = _mm256_add_epi16(sums[r], _mm256_maddubs_epi16(v, _mm256_set1_epi32(load<int32_t>(a + r * 64 + half * 32 + k * 4))));
        }
        UNROLL for (int r = 0; r < R; r++) acc[r][part / pieces].at[part % pieces] += (i32p)_mm256_madd_epi16(sums[r], ones);
    }
}
constexpr bool takes_nibbles = true;
#else
template <int R> INLINE void add_nibbles(i32x16 (&)[R][2], const uint8_t*, const uint8_t*, int) {}
constexpr bool takes_nibbles = false;
#endif

// Int8 over all of K, and QoQ.
template <int R>
NOINLINE void multiply_channels(const Matrix& w, const Rows& x, int block, int first, int panel, const Sink& sink) {
    alignas(64) uint8_t scratch[2048];
    i32x16 acc[R][2] = {};
    int height = x.height(block);
    const uint8_t* a = x.block(block) + size_t(first) * 64;
    const uint8_t* codes = w.codes + size_t(panel) * w.panel_bytes();
    int step = 2 * tile_bytes(w.kind);
    for (int chunk = 0; chunk < w.chunks; chunk++, a += size_t(height) * 64) {
        if (asks_singly && w.kind == Kind::int8) {
            add_products<R, true>(acc, codes + size_t(chunk) * step, a, 0, 16);
            continue;
        }
        prefetch_ahead(codes + size_t(chunk) * step + page, step);
        add_products<R>(acc, integer_tiles(w, panel, codes, chunk, scratch), a, 0, 16);
    }
    Channels channels(w, panel);
    int row = block * 16 + first;
    finish_rows(w, x, panel, sink, row, R, [&](int r) INLINE_LAMBDA { return channels(acc[r][0], acc[r][1], x.totals[row + r]); });
}

// Groups with scales of their own. One zero point for all comes off before a group begins.
template <int R, Zeros zeros>
NOINLINE void multiply_groups(const Matrix& w, const Rows& x, int block, int first, int panel, const Sink& sink) {
    alignas(64) uint8_t scratch[2048];
    f32x16 c[R][2] = {};
    int height = x.height(block), halves = w.group / 32;
    const uint8_t* codes = w.codes + size_t(panel) * w.panel_bytes();
    const uint8_t* a = x.block(block) + size_t(first) * 64;
    const uint8_t* tiles = nullptr;
    int step = 2 * tile_bytes(w.kind);
    for (int group = 0, half = 0; group < w.groups; group++) {
        int32_t totals[R];
        i32x16 acc[R][2];
        UNROLL for (int r = 0; r < R; r++) {
            totals[r] = sum_inputs(x, block * 16 + first + r, half, halves);
            acc[r][0] = acc[r][1] = set(zeros == Zeros::none ? -w.zero_point * totals[r] : 0);
        }
        for (int end = half + halves; half < end; half++) {
            if (half % 2 == 0) prefetch_ahead(codes + size_t(half / 2) * step + page, step);
            if (takes_nibbles && w.kind == Kind::int4 && !w.e2m1) {
                const uint8_t *packed = codes + size_t(half / 2) * step, *inputs = a + size_t(half / 2) * height * 64;
                if (half % 2) add_nibbles<R>(acc, packed, inputs, 1);
                else add_nibbles<R>(acc, packed, inputs, 0);
                continue;
            }
            if (half % 2 == 0) tiles = integer_tiles(w, panel, codes, half / 2, scratch);
            add_products<R>(acc, tiles, a + size_t(half / 2) * height * 64, 8 * (half % 2), 8 * (half % 2) + 8);
        }
        Group<zeros> scales(w, panel, group);
        UNROLL for (int r = 0; r < R; r++) {
            Outputs y = scales.add({c[r][0], c[r][1]}, acc[r][0], acc[r][1], totals[r], group_input_scale(x, block * 16 + first + r, group));
            c[r][0] = y.low;
            c[r][1] = y.high;
        }
    }
    finish_rows(w, x, panel, sink, block * 16 + first, R, [&](int r) INLINE_LAMBDA { return Outputs{c[r][0], c[r][1]}; });
}

template <int R>
INLINE void multiply_some(const Matrix& w, const Rows& x, int block, int first, int panel, const Sink& sink) {
    if (w.kind == Kind::f32) return multiply_floats<R, Kind::f32>(w, x, block, first, panel, sink);
    if (w.kind == Kind::bf16) return multiply_floats<R, Kind::bf16>(w, x, block, first, panel, sink);
    if constexpr (R <= most_integer_rows) {
        if (w.kind == Kind::w4a16) return multiply_floats<R, Kind::w4a16>(w, x, block, first, panel, sink);
        if (w.channel_scales) return multiply_channels<R>(w, x, block, first, panel, sink);
        if (is_plain(w)) return multiply_groups<R, Zeros::none>(w, x, block, first, panel, sink);
        multiply_groups<R, Zeros::each>(w, x, block, first, panel, sink);
    }
}

// Rows of blocks, as many at once as there are and `most` and the registers let.
static void multiply_vectors(const Matrix& w, const Rows& x, int begin, int end, int panel, const Sink& sink) {
    int most = w.kind == Kind::f32 || w.kind == Kind::bf16 ? most_float_rows : most_integer_rows;
    for (int block = begin; block < end; block++) {
        for (int row = 0, some; row < x.height(block); row += some) {
            some = std::min(most, x.height(block) - row);
            if (some >= 8) multiply_some<most_float_rows>(w, x, block, row, panel, sink), some = 8;
            else if (some >= 4) multiply_some<std::min(most_float_rows, 4)>(w, x, block, row, panel, sink), some = 4;
            else if (some >= 2) multiply_some<2>(w, x, block, row, panel, sink), some = 2;
            else multiply_some<1>(w, x, block, row, panel, sink);
        }
    }
}

#if defined(__AMX_TILE__) || !defined(__AVX2__)
// A panel as int8 or bfloat16, for many rows.
static void unpack_panel(const Matrix& w, int panel, uint8_t middle, uint8_t* scratch) {
    const uint8_t* codes = w.codes + size_t(panel) * w.panel_bytes();
    for (int chunk = 0; chunk < w.chunks; chunk++) {
        uint8_t* tiles = scratch + size_t(chunk) * 2048;
        if (w.kind == Kind::w4a16) widened_tiles(w, panel, codes, chunk, tiles);
        else integer_tiles(w, panel, codes, chunk, tiles, middle);
    }
}
#endif

}  // namespace cloister::CLOISTER_ISA

#include "blocked.hpp"

namespace cloister::CLOISTER_ISA {

static size_t multiply_scratch([[maybe_unused]] const Matrix& w) {
#if defined(__AMX_TILE__)
    size_t panel = tile_bytes(w.kind) < 1024 || signed_middle(w) ? size_t(w.chunks) * 2048 : 0;
    return panel > BlockScratch::bytes ? panel : BlockScratch::bytes;
#elif defined(__AVX2__)
    return BlockScratch::bytes;
#else
    return tile_bytes(w.kind) < 1024 ? size_t(w.chunks) * 2048 : 0;
#endif
}

static void multiply(const Matrix& matrix, const Rows& x, int begin, int end, int panel, const Sink& sink, uint8_t* scratch) {
    Matrix w = matrix;
    [[maybe_unused]] int num_rows = (end - begin) * 16 - 16 + x.height(end - 1);
#if defined(__AVX2__)
#if defined(__AMX_TILE__)
    bool has_tiles = w.kind != Kind::f32;
#else
    bool has_tiles = false;
#endif
    if (!has_tiles && scratch && num_rows >= fewest_blocked_rows && block_chunks_of(w))
        return multiply_blocked(w, x, begin * 16, begin * 16 + num_rows, panel, sink, scratch);
#endif
#if defined(__AMX_TILE__) || !defined(__AVX2__)
#if defined(__AMX_TILE__)
    uint8_t middle = signed_middle(w);  // what tiles take signed is signed already
#else
    uint8_t middle = 0;
#endif
    if ((tile_bytes(w.kind) < 1024 || middle) && end - begin > 1) {
        unpack_panel(w, panel, middle, scratch);
        w.codes = scratch - size_t(panel) * w.chunks * 2048;  // so that this panel begins at scratch
        w.kind = w.kind == Kind::w4a16 ? Kind::bf16 : Kind::int8;
        if (w.channel_scales) w.zero_point = 128;
        if (middle) w.zero_point = 0;
    }
#endif
#if defined(__AMX_TILE__)
    if (w.kind == Kind::bf16 || w.kind == Kind::w4a16) return multiply_float_tiles(w, x, begin, end, panel, sink);
    if (w.kind != Kind::f32 && num_rows > 2) return multiply_integer_tiles(w, x, begin, end, panel, sink);
#endif
    multiply_vectors(w, x, begin, end, panel, sink);
}

}  // namespace cloister::CLOISTER_ISA
