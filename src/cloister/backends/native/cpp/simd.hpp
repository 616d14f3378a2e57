// What is computed lane by lane: number formats, sums of products, exponentials and activations.
#pragma once
#include <cmath>

#include "lanes.hpp"

namespace cloister::CLOISTER_ISA {

// ---- number formats ---------------------------------------------------------------------------------------------------------

INLINE f32x16 from_bf16(u16x16 v) { return as<float>(widen(v) << 16); }
// Round to nearest, ties to even; a NaN stays one.
INLINE u16x16 to_bf16(f32x16 v) {
#if defined(__AVX512BF16__)
    return (u16x16)_mm512_cvtneps_pbh((__m512)v.at[0]);
#else
    u32x16 bits = as<uint32_t>(v), rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    i32x16 nan = as<int32_t>(bits & 0x7fffffffu) > 0x7f800000;  // without a sign integers compare as they are
    return narrow(select(nan, set(0x7fc0u), rounded));
#endif
}
// The lower four bits of each lane as a number.
INLINE f32x16 low_code(i32x16 v) {
#if defined(__AVX512F__)
    __m512 codes = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return {(f32p)_mm512_permutexvar_ps((__m512i)v.at[0], codes)};
#else
    return to_f32(v & 15);
#endif
}
// Twice the numbers that the lower four bits of each lane are in E2M1 (OCP Microscaling Formats 1.0, section 5.3.3): a sign, then 0,
// 1, 2, 3, 4, 6, 8 or 12.
INLINE f32x16 e2m1_code(i32x16 v) {
#if defined(__AVX512F__)
    __m512 numbers = _mm512_setr_ps(0, 1, 2, 3, 4, 6, 8, 12, -0.0f, -1, -2, -3, -4, -6, -8, -12);
    return {(f32p)_mm512_permutexvar_ps((__m512i)v.at[0], numbers)};
#elif defined(__AVX2__)
    __m256 sizes = _mm256_setr_ps(0, 1, 2, 3, 4, 6, 8, 12);
    return as<float>(as<uint32_t>(by_piece(as<float>(v), [&](f32p bits) INLINE_LAMBDA {
        return (f32p)_mm256_permutevar8x32_ps(sizes, (__m256i)bits);
    })) | as<uint32_t>((v & 8) << 28));
#else
    i32x16 size = v & 7, power = size >> 1, odd = size & 1;
    f32x16 number = select(power > 0, as<float>((power + 127) << 23) * (1.0f + 0.5f * to_f32(odd)), to_f32(odd));
    return as<float>(as<uint32_t>(number) | as<uint32_t>((v & 8) << 28));
#endif
}
// Thirty-two numbers as bfloat16, one after the other.
INLINE void store_pair(uint8_t* out, f32x16 low, f32x16 high) {
#if defined(__AVX512BF16__)
    _mm512_storeu_si512(out, (__m512i)_mm512_cvtne2ps_pbh((__m512)high.at[0], (__m512)low.at[0]));
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
    return {(f32p)_mm512_cvtph_ps((__m256i)h)};
#elif defined(__F16C__)
    __m128i codes[2];
    memcpy(codes, &h, 32);
    return {(f32p)_mm256_cvtph_ps(codes[0]), (f32p)_mm256_cvtph_ps(codes[1])};
#else
    // exact also for subnormals: shift the exponent into place and multiply
    u32x16 w = widen(h);
    f32x16 magnitude = as<float>((w & 0x7fffu) << 13) * 0x1p112f;
    u32x16 infinite = select((w & 0x7c00u) == 0x7c00u, set(0x7f800000u), set(0u));
    return as<float>(as<uint32_t>(magnitude) | infinite | ((w & 0x8000u) << 16));
#endif
}

// ---- sums of products ---------------------------------------------------------------------------------------------------------

// Adds a . b over the bytes of each lane, b unsigned, a signed: 4 products, exact.
INLINE void add_quads(i32x16& sums, const uint8_t* b, int32_t a) {
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
INLINE void add_floats(f32x16& sums, const uint8_t* b, float a) {
    UNROLL for (int p = 0; p < pieces; p++) sums.at[p] = fma_piece(set_piece(a), load<f32p>(b + piece_bytes * p), sums.at[p]);
}

// Adds a . b over the two bfloat16 of each lane, in float32.
INLINE void add_pairs(f32x16& sums, const uint8_t* b, uint32_t a) {
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

// ---- exponentials, activations ------------------------------------------------------------------------------------------------

// e^x by splitting x = n ln 2 + r and a polynomial in r (Cephes' expf; relative error below 2e-7); 0 below -87.
INLINE f32p exp(f32p x) {
    f32p floor_x = max(min(x, set_piece(88.0f)), set_piece(-87.5f));
    f32p scaled = floor_x * 1.44269504088896341f;
    f32p n = (scaled + 12582912.0f) - 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    f32p r = fma_piece(n, set_piece(-0.693359375f), floor_x);
    r = fma_piece(n, set_piece(2.12194440e-4f), r);
    f32p p = set_piece(1.9875691500e-4f);
    p = fma_piece(p, r, set_piece(1.3981999507e-3f));
    p = fma_piece(p, r, set_piece(8.3334519073e-3f));
    p = fma_piece(p, r, set_piece(4.1665795894e-2f));
    p = fma_piece(p, r, set_piece(1.6666665459e-1f));
    p = fma_piece(p, r, set_piece(5.0000001201e-1f));
    p = fma_piece(p, r * r, r) + 1.0f;
    i32p power = (__builtin_convertvector(n, i32p) + 127) << 23;
    return x < -87.0f ? f32p{} : p * (f32p)power;
}
INLINE f32x16 exp(f32x16 x) { return by_piece(x, [](f32p v) INLINE_LAMBDA { return exp(v); }); }

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
INLINE f32p exp2_short_piece(f32p x) {
#if defined(__AVX512F__)
    f32p r = (f32p)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF);
#elif defined(__AVX2__)
    x = max(set_piece(-126.0f), x);  // no number stays no number
    f32p whole = (f32p)_mm256_floor_ps((__m256)x), r = x - whole;
#else
    return exp2_piece(x);
#endif
#if defined(__AVX2__)
    f32p p = fma_piece(r, set_piece(7.70670633e-02f), set_piece(2.27644955e-01f));
    p = fma_piece(p, r, set_piece(6.95116801e-01f));
    p = fma_piece(p, r, set_piece(1.0f));
#if defined(__AVX512F__)
    return (f32p)_mm512_scalef_ps((__m512)p, (__m512)x);
#else
    __m256i power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32((__m256)whole), _mm256_set1_epi32(127)), 23);
    __m256 seen = _mm256_cmp_ps((__m256)x, _mm256_set1_ps(-126.0f), _CMP_NLE_UQ);  // also where it is no number
    return (f32p)_mm256_and_ps(seen, _mm256_mul_ps((__m256)p, _mm256_castsi256_ps(power)));
#endif
#endif
}
INLINE f32x16 exp2_short(f32x16 x) { return by_piece(x, [](f32p v) INLINE_LAMBDA { return exp2_short_piece(v); }); }

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
    f32x16 size = as<float>(as<uint32_t>(x) & 0x7fffffffu), square = x * x;
    f32x16 far = as<float>(as<uint32_t>(1.0f - 2.0f / (exp(size + size) + 1.0f)) | (as<uint32_t>(x) & 0x80000000u));
    f32x16 p = fma(square, set(-5.70498872745e-3f), set(2.06390887954e-2f));
    p = fma(p, square, set(-5.37397155531e-2f));
    p = fma(p, square, set(1.33314422036e-1f));
    p = fma(p, square, set(-3.33332819422e-1f));
    f32x16 bent = select(size < 0.625f, fma(p * square, x, x), far);
    return select(x == x, bent, x);
}

// GELU with the error function: x (1 - q) for positive x and x q for negative, where q = erfc(|x| / sqrt 2) / 2. q is e^-z^2 times a
// polynomial in 1 / (1 + p z), the form of Abramowitz and Stegun 7.1.26, here of degree 8 and fitted for relative error (below 1e-7).
INLINE f32x16 gelu(f32x16 x) {
    f32x16 z = as<float>(as<uint32_t>(x) & 0x7fffffffu) * 0.70710678118654752f, t = 1.0f / (1.0f + 0.3275911f * z);
    f32x16 p = fma(t, set(-0.0713596269f), set(0.251720726f));
    p = fma(p, t, set(-0.208904907f));
    p = fma(p, t, set(0.23226203f));
    p = fma(p, t, set(0.00961485785f));
    p = fma(p, t, set(0.10393212f));
    p = fma(p, t, set(0.0901964828f));
    p = fma(p, t, set(0.0925383568f));
    f32x16 part = x * (p * t * exp(-z * z));
    return select(x < 0.0f, part, x - part);
}

// No number stays no number, on either side.
INLINE f32x16 clipped_swiglu(f32x16 gate, f32x16 up, float alpha, float limit) {
    f32x16 g = min(set(limit), gate), u = min(set(limit), max(set(-limit), up));
    f32x16 opening = by_piece(g * (-alpha * log2_e), [](f32p v) INLINE_LAMBDA {
        return invert(set_piece(1.0f) + exp2_piece(min(set_piece(100.0f), v)));
    });
    return g * opening * (u + 1.0f);
}

INLINE f32x16 activate(f32x16 x, int kind) {
    if (kind == 0) return silu(x);
    if (kind == 3 || kind == 4) {
        x = select(x < 0.0f, set(0.0f), x);
        return kind == 3 ? x : x * x;
    }
    if (kind == 1) return gelu(x);
    f32x16 inner = 0.79788456080286536f * (x + 0.044715f * x * x * x);
    return x / (1.0f + exp(-2.0f * inner));  // 0.5 (1 + tanh u) = 1 / (1 + e^-2u)
}

}  // namespace cloister::CLOISTER_ISA
