// Sixteen lanes at a time, in terms of the compiler's vectors; compiled once for each instruction set.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace cloister::CLOISTER_ISA {

typedef float f32x16 __attribute__((vector_size(64), may_alias));
typedef int32_t i32x16 __attribute__((vector_size(64), may_alias));
typedef uint32_t u32x16 __attribute__((vector_size(64), may_alias));
typedef uint16_t u16x16 __attribute__((vector_size(32), may_alias));
typedef uint8_t u8x16 __attribute__((vector_size(16), may_alias));

#define INLINE inline __attribute__((always_inline))
// An array of accumulators stays in registers only where every index into it is known.
#define INLINE_LAMBDA __attribute__((always_inline))
#define NOINLINE static __attribute__((noinline))  // once, where it is called from many places and takes long
#define UNROLL _Pragma("GCC unroll 16")
#define NO_UNROLL _Pragma("GCC unroll 1")  // where GCC would otherwise keep accumulators in memory

template <class V> INLINE V load(const void* p) { V v; memcpy(&v, p, sizeof v); return v; }
template <class V> INLINE void store(void* p, V v) { memcpy(p, &v, sizeof v); }
// Sixteen lanes in as many pieces as take a register each: vectors of 64 bytes that are more than one register the compiler keeps
// in memory, which inner loops cannot have.
#if defined(__AVX512F__)
constexpr int pieces = 1;
#elif defined(__AVX2__)
constexpr int pieces = 2;
#else
constexpr int pieces = 4;
#endif
constexpr int piece_bytes = 64 / pieces;
typedef float f32p __attribute__((vector_size(piece_bytes), may_alias));
typedef int32_t i32p __attribute__((vector_size(piece_bytes), may_alias));
typedef uint32_t u32p __attribute__((vector_size(piece_bytes), may_alias));

// Written out for two registers: GCC 12 would write a number that is to fill 64 bytes into memory sixteen times.
INLINE f32x16 set(float x) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    __m256 both[2] = {_mm256_set1_ps(x), _mm256_set1_ps(x)};
    return load<f32x16>(both);
#else
    return f32x16{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x};  // 0 + x would be an addition
#endif
}
INLINE i32x16 set(int32_t x) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    __m256i both[2] = {_mm256_set1_epi32(x), _mm256_set1_epi32(x)};
    return load<i32x16>(both);
#else
    return i32x16{} + x;
#endif
}
// A function of every piece of a vector: what it computes on the way stays in registers.
template <class F> INLINE f32x16 by_piece(f32x16 x, F f) {
    f32p parts[pieces];
    memcpy(parts, &x, 64);
    UNROLL for (int p = 0; p < pieces; p++) parts[p] = f(parts[p]);
    return load<f32x16>(parts);
}
INLINE f32x16 as_f32(u32x16 v) { f32x16 r; memcpy(&r, &v, 64); return r; }
INLINE u32x16 as_u32(f32x16 v) { u32x16 r; memcpy(&r, &v, 64); return r; }
INLINE f32x16 to_f32(i32x16 v) { return __builtin_convertvector(v, f32x16); }

// Written out where GCC 12 would take conversions over a factor of four apart lane by lane.
INLINE i32x16 widen(u8x16 v) {
#if defined(__AVX512F__)
    return (i32x16)_mm512_cvtepu8_epi32((__m128i)v);
#elif defined(__AVX2__)
    __m256i halves[2] = {_mm256_cvtepu8_epi32((__m128i)v), _mm256_cvtepu8_epi32(_mm_srli_si128((__m128i)v, 8))};
    i32x16 r;
    memcpy(&r, halves, 64);
    return r;
#else
    return __builtin_convertvector(v, i32x16);
#endif
}
INLINE u8x16 narrow(i32x16 v) {
#if defined(__AVX512F__)
    return (u8x16)_mm512_cvtepi32_epi8((__m512i)v);
#elif defined(__AVX2__)
    __m256i halves[2], lowest = _mm256_setr_epi8(0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, 0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1);
    memcpy(halves, &v, 64);
    __m256i join = _mm256_setr_epi32(0, 4, 1, 1, 1, 1, 1, 1);
    __m128i first = _mm256_castsi256_si128(_mm256_permutevar8x32_epi32(_mm256_shuffle_epi8(halves[0], lowest), join));
    __m128i second = _mm256_castsi256_si128(_mm256_permutevar8x32_epi32(_mm256_shuffle_epi8(halves[1], lowest), join));
    return (u8x16)_mm_unpacklo_epi64(first, second);
#else
    return __builtin_convertvector(v, u8x16);
#endif
}

INLINE f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
#if defined(__AVX512F__)
    return (f32x16)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    __m256 x[2], y[2], z[2];
    memcpy(x, &a, 64);
    memcpy(y, &b, 64);
    memcpy(z, &c, 64);
    for (int half = 0; half < 2; half++) z[half] = _mm256_fmadd_ps(x[half], y[half], z[half]);
    f32x16 r;
    memcpy(&r, z, 64);
    return r;
#elif defined(__ARM_FEATURE_DOTPROD)
    float32x4_t x[4], y[4], z[4];
    memcpy(x, &a, 64);
    memcpy(y, &b, 64);
    memcpy(z, &c, 64);
    for (int part = 0; part < 4; part++) z[part] = vfmaq_f32(z[part], x[part], y[part]);
    f32x16 r;
    memcpy(&r, z, 64);
    return r;
#else
    return a * b + c;
#endif
}
INLINE f32p fma_piece(f32p a, f32p b, f32p c) {
#if defined(__AVX512F__)
    return (f32p)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (f32p)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__ARM_FEATURE_DOTPROD)
    return (f32p)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}
template <class V> INLINE V fma(V a, V b, V c) { return fma_piece(a, b, c); }
INLINE f32p set_piece(float x) {
#if defined(__AVX512F__)
    return (f32p)_mm512_set1_ps(x);
#elif defined(__AVX2__)
    return (f32p)_mm256_set1_ps(x);
#else
    return f32p{x, x, x, x};
#endif
}
INLINE bool any(i32p v) {
#if defined(__AVX512F__)
    return _mm512_test_epi32_mask((__m512i)v, (__m512i)v);
#elif defined(__AVX2__)
    return !_mm256_testz_si256((__m256i)v, (__m256i)v);
#else
    typedef uint64_t u64x2 __attribute__((vector_size(16)));
    u64x2 both = (u64x2)v;
    return both[0] | both[1];
#endif
}

template <class V> INLINE V max(V a, V b) { return a > b ? a : b; }
template <class V> INLINE V min(V a, V b) { return a < b ? a : b; }

// Lanes are joined in one fixed order, so that a sum has the same bits wherever it is made.
INLINE float sum(f32x16 v) {
    float a[16];
    memcpy(a, &v, 64);
    for (int step = 8; step; step /= 2)
        for (int i = 0; i < step; i++) a[i] += a[i + step];
    return a[0];
}
INLINE float highest(f32x16 v) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)v);
#else
    float a[16];
    memcpy(a, &v, 64);
    for (int step = 8; step; step /= 2)
        for (int i = 0; i < step; i++) a[i] = a[i] > a[i + step] ? a[i] : a[i + step];
    return a[0];
#endif
}
INLINE int32_t highest(i32x16 v) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_epi32((__m512i)v);
#elif defined(__AVX2__)
    __m256i halves[2];
    memcpy(halves, &v, 64);
    __m256i eight = _mm256_max_epi32(halves[0], halves[1]);
    __m128i four = _mm_max_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
    four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    return _mm_cvtsi128_si32(_mm_max_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
#else
    int32_t most = v[0];
    for (int i = 1; i < 16; i++) most = v[i] > most ? v[i] : most;
    return most;
#endif
}

INLINE f32x16 from_bf16(u16x16 v) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    __m128i codes[2];
    memcpy(codes, &v, 32);
    __m256i halves[2];
    UNROLL for (int i = 0; i < 2; i++) halves[i] = _mm256_slli_epi32(_mm256_cvtepu16_epi32(codes[i]), 16);
    return load<f32x16>(halves);
#else
    return as_f32(__builtin_convertvector(v, u32x16) << 16);
#endif
}
// Round to nearest, ties to even; a NaN stays one.
INLINE u16x16 to_bf16(f32x16 v) {
#if defined(__AVX512BF16__)
    return (u16x16)_mm512_cvtneps_pbh((__m512)v);
#elif defined(__AVX2__) && !defined(__AVX512F__)
    __m256i halves[2], one = _mm256_set1_epi32(1), magnitude = _mm256_set1_epi32(0x7fffffff), infinity = _mm256_set1_epi32(0x7f800000);
    memcpy(halves, &v, 64);
    UNROLL for (int i = 0; i < 2; i++) {
        __m256i bits = halves[i], tie = _mm256_and_si256(_mm256_srli_epi32(bits, 16), one);
        __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), tie), 16);
        __m256i nan = _mm256_cmpgt_epi32(_mm256_and_si256(bits, magnitude), infinity);
        halves[i] = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc0), nan);
    }
    return (u16x16)_mm256_permute4x64_epi64(_mm256_packus_epi32(halves[0], halves[1]), 0xd8);
#else
    u32x16 bits = as_u32(v);
    u32x16 rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    u32x16 nan = (bits & 0x7fffffffu) > 0x7f800000u ? u32x16{} + 0x7fc0u : rounded;
    return __builtin_convertvector(nan, u16x16);
#endif
}
// Every number of a half twice: the low half of v, or the high one.
INLINE f32x16 twice(f32x16 v, int half) {
#if defined(__AVX512F__)
    __m512i places = half ? _mm512_setr_epi32(8, 8, 9, 9, 10, 10, 11, 11, 12, 12, 13, 13, 14, 14, 15, 15)
                          : _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
    return (f32x16)_mm512_permutexvar_ps(places, (__m512)v);
#elif defined(__AVX2__)
    __m256 eight, both[2];
    memcpy(&eight, (const char*)&v + 32 * half, 32);
    both[0] = _mm256_permutevar8x32_ps(eight, _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3));
    both[1] = _mm256_permutevar8x32_ps(eight, _mm256_setr_epi32(4, 4, 5, 5, 6, 6, 7, 7));
    return load<f32x16>(both);
#else
    f32x16 both;
    for (int i = 0; i < 16; i++) both[i] = v[8 * half + i / 2];
    return both;
#endif
}
// The lower four bits of each lane as a number.
INLINE f32x16 low_code(i32x16 v) {
#if defined(__AVX512F__)
    return (f32x16)_mm512_permutexvar_ps((__m512i)v, _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
#else
    return to_f32(v & 15);
#endif
}
// Thirty-two numbers as bfloat16, one after the other.
INLINE void store_pair(uint8_t* out, f32x16 low, f32x16 high) {
#if defined(__AVX512BF16__)
    _mm512_storeu_si512(out, (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low));
#else
    store(out, to_bf16(low));
    store(out + 32, to_bf16(high));
#endif
}
INLINE float from_bf16(uint16_t x) { uint32_t b = uint32_t(x) << 16; float f; memcpy(&f, &b, 4); return f; }
INLINE uint16_t to_bf16(float f) {
    uint32_t b;
    memcpy(&b, &f, 4);
    if ((b & 0x7fffffffu) > 0x7f800000u) return 0x7fc0;
    return uint16_t((b + 0x7fffu + ((b >> 16) & 1u)) >> 16);
}

INLINE f32x16 from_f16(u16x16 h) {
#if defined(__AVX512F__)
    return (f32x16)_mm512_cvtph_ps((__m256i)h);
#elif defined(__F16C__)
    __m128i codes[2];
    memcpy(codes, &h, 32);
    __m256 halves[2] = {_mm256_cvtph_ps(codes[0]), _mm256_cvtph_ps(codes[1])};
    f32x16 r;
    memcpy(&r, halves, 64);
    return r;
#else
    // exact also for subnormals: shift the exponent into place and multiply
    u32x16 w = __builtin_convertvector(h, u32x16);
    f32x16 magnitude = as_f32((w & 0x7fffu) << 13) * 0x1p112f;
    u32x16 infinite = (w & 0x7c00u) == 0x7c00u ? u32x16{} + 0x7f800000u : u32x16{};
    return as_f32(as_u32(magnitude) | infinite | ((w & 0x8000u) << 16));
#endif
}

// e^x by splitting x = n ln 2 + r and a polynomial in r (Cephes' expf; relative error below 2e-7); 0 below -87.
template <class V> INLINE V exp(V x) {
    typedef decltype(x < x) Ints;
    V zero = {}, floor_x = max(min(x, zero + 88.0f), zero - 87.5f);
    V scaled = floor_x * 1.44269504088896341f;
    V n = (scaled + 12582912.0f) - 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    V r = fma(n, zero - 0.693359375f, floor_x);
    r = fma(n, zero + 2.12194440e-4f, r);
    V p = zero + 1.9875691500e-4f;
    p = fma(p, r, zero + 1.3981999507e-3f);
    p = fma(p, r, zero + 8.3334519073e-3f);
    p = fma(p, r, zero + 4.1665795894e-2f);
    p = fma(p, r, zero + 1.6666665459e-1f);
    p = fma(p, r, zero + 5.0000001201e-1f);
    p = fma(p, r * r, r) + 1.0f;
    Ints power = (__builtin_convertvector(n, Ints) + 127) << 23;
    return x < -87.0f ? zero : p * (V)power;
}

struct FloatSums { f32p at[pieces]; };
struct IntSums { i32p at[pieces]; };
INLINE IntSums start_sums(int32_t value) {
    IntSums sums;
    UNROLL for (int p = 0; p < pieces; p++) sums.at[p] = i32p{} + value;
    return sums;
}
INLINE f32x16 lanes(const FloatSums& sums) { return load<f32x16>(&sums); }
INLINE i32x16 lanes(const IntSums& sums) { return load<i32x16>(&sums); }

// Adds a . b over the bytes of each lane, b unsigned, a signed: 4 products, exact.
INLINE void add_quads(IntSums& sums, const uint8_t* b, int32_t a) {
#if defined(__AVX512VNNI__)
    sums.at[0] = (i32p)_mm512_dpbusd_epi32((__m512i)sums.at[0], _mm512_loadu_si512(b), _mm512_set1_epi32(a));
#elif defined(__AVXVNNI__)
    UNROLL for (int p = 0; p < pieces; p++)
        sums.at[p] = (i32p)_mm256_dpbusd_avx_epi32((__m256i)sums.at[p], _mm256_loadu_si256((const __m256i*)(b + piece_bytes * p)), _mm256_set1_epi32(a));
#elif defined(__AVX512BW__)
    __m512i w = _mm512_loadu_si512(b), low = _mm512_set1_epi16(0xff), x = _mm512_set1_epi32(a);
    __m512i even = _mm512_srai_epi16(_mm512_slli_epi16(x, 8), 8), odd = _mm512_srai_epi16(x, 8);
    sums.at[0] += (i32p)_mm512_add_epi32(_mm512_madd_epi16(_mm512_and_si512(w, low), even), _mm512_madd_epi16(_mm512_srli_epi16(w, 8), odd));
#elif defined(__AVX2__)
    __m256i low = _mm256_set1_epi16(0xff), x = _mm256_set1_epi32(a);
    __m256i even = _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8), odd = _mm256_srai_epi16(x, 8);
    UNROLL for (int p = 0; p < pieces; p++) {
        __m256i w = _mm256_loadu_si256((const __m256i*)(b + piece_bytes * p));
        sums.at[p] += (i32p)_mm256_madd_epi16(_mm256_and_si256(w, low), even);
        sums.at[p] += (i32p)_mm256_madd_epi16(_mm256_srli_epi16(w, 8), odd);
    }
#elif defined(__ARM_FEATURE_DOTPROD)
    // the instruction has both sides signed: 128 is taken off every b, and the sum of a times that put back
    int8x16_t x = vreinterpretq_s8_s32(vdupq_n_s32(a)), middle = vdupq_n_s8(-128);
    int32x4_t taken = vdotq_s32(vdupq_n_s32(0), middle, x);
    UNROLL for (int p = 0; p < pieces; p++) {
        int8x16_t w = veorq_s8(vreinterpretq_s8_u8(vld1q_u8(b + piece_bytes * p)), middle);
        sums.at[p] = (i32p)vsubq_s32(vdotq_s32((int32x4_t)sums.at[p], w, x), taken);
    }
#else
    for (int p = 0; p < pieces; p++) {
        u32p w = load<u32p>(b + piece_bytes * p);
        for (int k = 0; k < 4; k++) sums.at[p] += (i32p)(w >> (8 * k) & 255u) * int32_t(int8_t(a >> (8 * k)));
    }
#endif
}

// Adds a . b over the one float32 of each lane.
INLINE void add_floats(FloatSums& sums, const uint8_t* b, float a) {
    UNROLL for (int p = 0; p < pieces; p++) sums.at[p] = fma_piece(set_piece(a), load<f32p>(b + piece_bytes * p), sums.at[p]);
}

// Adds a . b over the two bfloat16 of each lane, in float32.
INLINE void add_pairs(FloatSums& sums, const uint8_t* b, uint32_t a) {
#if defined(__AVX512BF16__)
    sums.at[0] = (f32p)_mm512_dpbf16_ps((__m512)sums.at[0], (__m512bh)_mm512_loadu_si512(b), (__m512bh)_mm512_set1_epi32(int(a)));
#else
    uint32_t low = a << 16, high = a & 0xffff0000u;
    float x, y;
    memcpy(&x, &low, 4);
    memcpy(&y, &high, 4);
    UNROLL for (int p = 0; p < pieces; p++) {
        u32p w = load<u32p>(b + piece_bytes * p);
        sums.at[p] = fma_piece((f32p)(w << 16), set_piece(x), sums.at[p]);
        sums.at[p] = fma_piece((f32p)(w & 0xffff0000u), set_piece(y), sums.at[p]);
    }
#endif
}

// 2^x = 2^floor(x) p(x - floor(x)), with p of degree 5 fitted on [0, 1] (relative error below 1e-7, and p(0) = 1); 0 far below.
INLINE f32p exp2_piece(f32p x) {
#if defined(__AVX512F__)
    f32p r = (f32p)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF);  // x - floor(x), and 0 for minus infinity
#else
    x = max(set_piece(-126.0f), x);  // no number stays no number
    f32p whole = __builtin_convertvector(__builtin_convertvector(x, i32p), f32p);
    whole -= whole > x ? set_piece(1.0f) : set_piece(0.0f);
    f32p r = x - whole;
#endif
    f32p p = fma_piece(r, set_piece(1.86713e-3f), set_piece(9.01703e-3f));
    p = fma_piece(p, r, set_piece(5.579992e-2f));
    p = fma_piece(p, r, set_piece(2.4016445e-1f));
    p = fma_piece(p, r, set_piece(6.9315131e-1f));
    p = fma_piece(p, r, set_piece(1.0f));
#if defined(__AVX512F__)
    return (f32p)_mm512_scalef_ps((__m512)p, (__m512)x);  // takes the floor itself
#else
    u32p power = (u32p)(__builtin_convertvector(whole, i32p) + 127) << 23;
    return x <= -126.0f ? set_piece(0.0f) : p * (f32p)power;
#endif
}
INLINE f32x16 exp2(f32x16 x) { return by_piece(x, [](f32p v) INLINE_LAMBDA { return exp2_piece(v); }); }

// The same with a polynomial of degree 3 (relative error below 9e-5): for what is rounded to bfloat16 anyway.
INLINE f32x16 exp2_short(f32x16 x) {
#if defined(__AVX512F__)
    f32x16 r = (f32x16)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF);
    f32x16 p = fma(r, set(7.70670633e-02f), set(2.27644955e-01f));
    p = fma(p, r, set(6.95116801e-01f));
    p = fma(p, r, set(1.0f));
    return (f32x16)_mm512_scalef_ps((__m512)p, (__m512)x);
#elif defined(__AVX2__)
    x = max(set(-126.0f), x);  // no number stays no number
    __m256 parts[2];
    memcpy(parts, &x, 64);
    for (int i = 0; i < 2; i++) {
        __m256 whole = _mm256_floor_ps(parts[i]), r = _mm256_sub_ps(parts[i], whole);
        __m256 p = _mm256_fmadd_ps(r, _mm256_set1_ps(7.70670633e-02f), _mm256_set1_ps(2.27644955e-01f));
        p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(6.95116801e-01f));
        p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f));
        __m256i power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(whole), _mm256_set1_epi32(127)), 23);
        __m256 seen = _mm256_cmp_ps(parts[i], _mm256_set1_ps(-126.0f), _CMP_NLE_UQ);  // also where it is no number
        parts[i] = _mm256_and_ps(seen, _mm256_mul_ps(p, _mm256_castsi256_ps(power)));
    }
    return load<f32x16>(parts);
#else
    return exp2(x);
#endif
}

constexpr float log2_e = 1.44269504088896341f;

// 1 / x for finite x of at least 1: an estimate of 14 bits, and one step of Newton's method.
INLINE f32p invert(f32p x) {
#if defined(__AVX512F__)
    f32p y = (f32p)_mm512_rcp14_ps((__m512)x);
    return y * fma_piece(-x, y, set_piece(2.0f));
#else
    return set_piece(1.0f) / x;
#endif
}

INLINE f32x16 silu(f32x16 x) {
    return by_piece(x, [](f32p v) INLINE_LAMBDA {
        return v * invert(set_piece(1.0f) + exp2_piece(min(v * set_piece(-log2_e), set_piece(100.0f))));
    });
}

// tanh (Cephes' tanhf; relative error below 3e-7): a polynomial near zero, else 1 - 2 / (e^2|x| + 1). No number stays no number.
INLINE f32x16 tanh(f32x16 x) {
    f32x16 size = as_f32(as_u32(x) & 0x7fffffffu), square = x * x;
    f32x16 far = as_f32(as_u32(1.0f - 2.0f / (exp(size + size) + 1.0f)) | (as_u32(x) & 0x80000000u));
    f32x16 p = fma(square, set(-5.70498872745e-3f), set(2.06390887954e-2f));
    p = fma(p, square, set(-5.37397155531e-2f));
    p = fma(p, square, set(1.33314422036e-1f));
    p = fma(p, square, set(-3.33332819422e-1f));
    f32x16 bent = size < 0.625f ? fma(p * square, x, x) : far;
    return x == x ? bent : x;
}

// GELU with the error function: x (1 - q) for positive x and x q for negative, where q = erfc(|x| / sqrt 2) / 2. q is e^-z^2 times a
// polynomial in 1 / (1 + p z), the form of Abramowitz and Stegun 7.1.26, here of degree 8 and fitted for relative error (below 1e-7).
INLINE f32x16 gelu(f32x16 x) {
    f32x16 z = as_f32(as_u32(x) & 0x7fffffffu) * 0.70710678118654752f, t = 1.0f / (1.0f + 0.3275911f * z);
    f32x16 p = fma(t, set(-0.0713596269f), set(0.251720726f));
    p = fma(p, t, set(-0.208904907f));
    p = fma(p, t, set(0.23226203f));
    p = fma(p, t, set(0.00961485785f));
    p = fma(p, t, set(0.10393212f));
    p = fma(p, t, set(0.0901964828f));
    p = fma(p, t, set(0.0925383568f));
    f32x16 part = x * (p * t * exp(-z * z));
    return x < 0.0f ? part : x - part;
}

INLINE f32x16 activate(f32x16 x, int kind) {
    if (kind == 0) return silu(x);
    if (kind == 3) return x < 0.0f ? set(0.0f) : x;
    if (kind == 1) return gelu(x);
    f32x16 inner = 0.79788456080286536f * (x + 0.044715f * x * x * x);
    return x / (1.0f + exp(-2.0f * inner));  // 0.5 (1 + tanh u) = 1 / (1 + e^-2u)
}

}  // namespace cloister::CLOISTER_ISA
