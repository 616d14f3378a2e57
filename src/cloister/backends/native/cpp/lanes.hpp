// Sixteen lanes at a time, register by register; compiled once for each instruction set. Vectors of 64 bytes that take more than one
// register GCC keeps in memory, so they are arrays of registers here, and every operation goes over those.
#pragma once
#include <cstdint>
#include <cstring>
#include <type_traits>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace cloister::CLOISTER_ISA {

#define INLINE inline __attribute__((always_inline))
// An array of accumulators stays in registers only where every index into it is known.
#define INLINE_LAMBDA __attribute__((always_inline))
#define NOINLINE static __attribute__((noinline))  // once, where it is called from many places and takes long
#define UNROLL _Pragma("GCC unroll 16")
#define NO_UNROLL _Pragma("GCC unroll 1")  // where GCC would otherwise keep accumulators in memory

#if defined(__AVX512F__)
constexpr int pieces = 1;
#elif defined(__AVX2__)
constexpr int pieces = 2;
#else
constexpr int pieces = 4;
#endif
constexpr int piece_bytes = 64 / pieces;
constexpr int piece_lanes = piece_bytes / 4;

// One register.
typedef float f32p __attribute__((vector_size(piece_bytes), may_alias));
typedef int32_t i32p __attribute__((vector_size(piece_bytes), may_alias));
typedef uint32_t u32p __attribute__((vector_size(piece_bytes), may_alias));

INLINE f32p set_piece(float x) {
#if defined(__AVX512F__)
    return (f32p)_mm512_set1_ps(x);
#elif defined(__AVX2__)
    return (f32p)_mm256_set1_ps(x);
#else
    return f32p{x, x, x, x};  // 0 + x would be an addition
#endif
}
INLINE i32p set_piece(int32_t x) { return i32p{} + x; }
INLINE u32p set_piece(uint32_t x) { return u32p{} + x; }

// The lanes of two registers that `lanes` names, which is known when this is compiled.
INLINE u32p shuffle(u32p a, u32p b, i32p lanes) {
#if defined(__clang__)
    u32p v;
    for (int i = 0; i < piece_lanes; i++) v[i] = lanes[i] < piece_lanes ? a[lanes[i]] : b[lanes[i] - piece_lanes];
    return v;
#else
    return __builtin_shuffle(a, b, lanes);
#endif
}

// Sixteen lanes of float, int32_t or uint32_t.
template <class T> struct Sixteen {
    typedef T Piece __attribute__((vector_size(piece_bytes), may_alias));
    Piece at[pieces];
};
typedef Sixteen<float> f32x16;
typedef Sixteen<int32_t> i32x16;
typedef Sixteen<uint32_t> u32x16;
template <class V> constexpr bool in_pieces = false;
template <class T> constexpr bool in_pieces<Sixteen<T>> = true;
// Fewer bytes, which need no pieces.
typedef uint16_t u16x16 __attribute__((vector_size(32), may_alias));
typedef uint8_t u8x16 __attribute__((vector_size(16), may_alias));

// Piece by piece too: GCC would copy all at once through memory, in parts that a register then waits for.
template <class V> INLINE V load(const void* from) {
    V v;
    if constexpr (in_pieces<V>) {
        UNROLL for (int p = 0; p < pieces; p++) memcpy(&v.at[p], (const uint8_t*)from + piece_bytes * p, piece_bytes);
    } else {
        memcpy(&v, from, sizeof v);
    }
    return v;
}
template <class V> INLINE void store(void* to, V v) {
    if constexpr (in_pieces<V>) {
        UNROLL for (int p = 0; p < pieces; p++) memcpy((uint8_t*)to + piece_bytes * p, &v.at[p], piece_bytes);
    } else {
        memcpy(to, &v, sizeof v);
    }
}

template <class T> INLINE Sixteen<T> set(T x) {
    Sixteen<T> v;
    UNROLL for (int p = 0; p < pieces; p++) v.at[p] = set_piece(x);
    return v;
}
// What a function makes of every piece of one vector or two.
template <class T, class F> INLINE Sixteen<T> by_piece(Sixteen<T> v, F f) {
    UNROLL for (int p = 0; p < pieces; p++) v.at[p] = f(v.at[p]);
    return v;
}
template <class T, class F> INLINE Sixteen<T> by_piece(Sixteen<T> a, Sixteen<T> b, F f) {
    UNROLL for (int p = 0; p < pieces; p++) a.at[p] = f(a.at[p], b.at[p]);
    return a;
}

template <class T> struct Same { typedef T Type; };  // where the other operand says what T is
template <class T> using Number = typename Same<T>::Type;
#define OPERATOR(op)                                                                                                             \
    template <class T> INLINE Sixteen<T> operator op(Sixteen<T> a, Sixteen<T> b) {                                               \
        return by_piece(a, b, [](auto x, auto y) INLINE_LAMBDA { return x op y; });                                              \
    }                                                                                                                            \
    template <class T> INLINE Sixteen<T> operator op(Sixteen<T> a, Number<T> b) { return a op set<T>(b); }                       \
    template <class T> INLINE Sixteen<T> operator op(Number<T> a, Sixteen<T> b) { return set<T>(a) op b; }                       \
    template <class T, class B> INLINE Sixteen<T>& operator op##=(Sixteen<T>& a, B b) { return a = a op b; }
OPERATOR(+)
OPERATOR(-)
OPERATOR(*)
OPERATOR(/)
OPERATOR(&)
OPERATOR(|)
OPERATOR(^)
#undef OPERATOR
#define SHIFT(op)                                                                                                                \
    template <class T> INLINE Sixteen<T> operator op(Sixteen<T> a, int bits) {                                                   \
        return by_piece(a, [&](auto x) INLINE_LAMBDA { return x op bits; });                                                     \
    }
SHIFT(<<)
SHIFT(>>)
#undef SHIFT
template <class T> INLINE Sixteen<T> operator-(Sixteen<T> v) {
    return by_piece(v, [](auto x) INLINE_LAMBDA { return -x; });
}
// All bits of a lane where it holds, none where not: what `select` takes.
#define COMPARISON(op)                                                                                                           \
    template <class T> INLINE i32x16 operator op(Sixteen<T> a, Sixteen<T> b) {                                                   \
        i32x16 mask;                                                                                                             \
        UNROLL for (int p = 0; p < pieces; p++) mask.at[p] = (i32p)(a.at[p] op b.at[p]);                                         \
        return mask;                                                                                                             \
    }                                                                                                                            \
    template <class T> INLINE i32x16 operator op(Sixteen<T> a, Number<T> b) { return a op set<T>(b); }
COMPARISON(<)
COMPARISON(>)
COMPARISON(>=)
COMPARISON(==)
#undef COMPARISON
template <class T> INLINE Sixteen<T> select(i32x16 mask, Sixteen<T> a, Sixteen<T> b) {
    UNROLL for (int p = 0; p < pieces; p++) a.at[p] = mask.at[p] ? a.at[p] : b.at[p];
    return a;
}

template <class V> INLINE V max(V a, V b) { return a > b ? a : b; }
template <class V> INLINE V min(V a, V b) { return a < b ? a : b; }
template <class T> INLINE Sixteen<T> max(Sixteen<T> a, Sixteen<T> b) {
    return by_piece(a, b, [](auto x, auto y) INLINE_LAMBDA { return x > y ? x : y; });
}
template <class T> INLINE Sixteen<T> min(Sixteen<T> a, Sixteen<T> b) {
    return by_piece(a, b, [](auto x, auto y) INLINE_LAMBDA { return x < y ? x : y; });
}

// The same bits as another type, and the same numbers.
template <class To, class From> INLINE Sixteen<To> as(Sixteen<From> v) {
    Sixteen<To> r;
    UNROLL for (int p = 0; p < pieces; p++) r.at[p] = (typename Sixteen<To>::Piece)v.at[p];
    return r;
}
template <class T, class V> INLINE Sixteen<T> as_lanes(V v) { return load<Sixteen<T>>(&v); }
INLINE f32x16 to_f32(i32x16 v) {
    f32x16 r;
    UNROLL for (int p = 0; p < pieces; p++) r.at[p] = __builtin_convertvector(v.at[p], f32p);
    return r;
}
INLINE i32x16 to_i32(f32x16 v) {
    i32x16 r;
    UNROLL for (int p = 0; p < pieces; p++) r.at[p] = __builtin_convertvector(v.at[p], i32p);
    return r;
}
// 0, 1, 2 ... 15.
INLINE i32x16 lane_numbers() {
    i32x16 v;
    for (int p = 0; p < pieces; p++)
        for (int i = 0; i < piece_lanes; i++) v.at[p][i] = p * piece_lanes + i;
    return v;
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
INLINE f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
    UNROLL for (int p = 0; p < pieces; p++) c.at[p] = fma_piece(a.at[p], b.at[p], c.at[p]);
    return c;
}

// Codes of 8 and 16 bits as integers.
INLINE i32x16 widen(u8x16 v) {
    i32x16 r;
#if defined(__AVX512F__)
    r.at[0] = (i32p)_mm512_cvtepu8_epi32((__m128i)v);
#elif defined(__AVX2__)
    r.at[0] = (i32p)_mm256_cvtepu8_epi32((__m128i)v);
    r.at[1] = (i32p)_mm256_cvtepu8_epi32(_mm_srli_si128((__m128i)v, 8));
#else
    typedef int32_t Wide __attribute__((vector_size(64)));
    r = as_lanes<int32_t>(__builtin_convertvector(v, Wide));
#endif
    return r;
}
INLINE u32x16 widen(u16x16 v) {
    u32x16 r;
#if defined(__AVX512F__)
    r.at[0] = (u32p)_mm512_cvtepu16_epi32((__m256i)v);
#elif defined(__AVX2__)
    __m128i codes[2];
    memcpy(codes, &v, 32);
    UNROLL for (int p = 0; p < 2; p++) r.at[p] = (u32p)_mm256_cvtepu16_epi32(codes[p]);
#else
    typedef uint32_t Wide __attribute__((vector_size(64)));
    r = as_lanes<uint32_t>(__builtin_convertvector(v, Wide));
#endif
    return r;
}
// The lowest byte of each lane.
INLINE u8x16 narrow(i32x16 v) {
#if defined(__AVX512F__)
    return (u8x16)_mm512_cvtepi32_epi8((__m512i)v.at[0]);
#elif defined(__AVX2__)
    __m256i lowest = _mm256_setr_epi8(0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, 0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1);
    __m256i join = _mm256_setr_epi32(0, 4, 1, 1, 1, 1, 1, 1);
    __m128i first = _mm256_castsi256_si128(_mm256_permutevar8x32_epi32(_mm256_shuffle_epi8((__m256i)v.at[0], lowest), join));
    __m128i second = _mm256_castsi256_si128(_mm256_permutevar8x32_epi32(_mm256_shuffle_epi8((__m256i)v.at[1], lowest), join));
    return (u8x16)_mm_unpacklo_epi64(first, second);
#else
    typedef int32_t Wide __attribute__((vector_size(64), may_alias));
    return __builtin_convertvector(load<Wide>(&v), u8x16);
#endif
}
// The lowest two bytes of each lane.
INLINE u16x16 narrow(u32x16 v) {
#if defined(__AVX512F__)
    return (u16x16)_mm512_cvtepi32_epi16((__m512i)v.at[0]);
#elif defined(__AVX2__)
    __m256i low = _mm256_set1_epi32(0xffff);
    __m256i both = _mm256_packus_epi32(_mm256_and_si256((__m256i)v.at[0], low), _mm256_and_si256((__m256i)v.at[1], low));
    return (u16x16)_mm256_permute4x64_epi64(both, 0xd8);
#else
    typedef uint32_t Wide __attribute__((vector_size(64), may_alias));
    return __builtin_convertvector(load<Wide>(&v), u16x16);
#endif
}

// Every number of a half twice: the low half of v, or the high one.
INLINE f32x16 twice(f32x16 v, int half) {
    f32x16 r;
#if defined(__AVX512F__)
    __m512i places = half ? _mm512_setr_epi32(8, 8, 9, 9, 10, 10, 11, 11, 12, 12, 13, 13, 14, 14, 15, 15)
                          : _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
    r.at[0] = (f32p)_mm512_permutexvar_ps(places, (__m512)v.at[0]);
#elif defined(__AVX2__)
    __m256 eight = (__m256)(half ? v.at[1] : v.at[0]);
    r.at[0] = (f32p)_mm256_permutevar8x32_ps(eight, _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3));
    r.at[1] = (f32p)_mm256_permutevar8x32_ps(eight, _mm256_setr_epi32(4, 4, 5, 5, 6, 6, 7, 7));
#else
    float from[16], to[16];
    store(from, v);
    for (int i = 0; i < 16; i++) to[i] = from[8 * half + i / 2];
    r = load<f32x16>(to);
#endif
    return r;
}

// ---- what joins lanes, in one fixed order, so that it has the same bits wherever it is made --------------------------------------

#if defined(__AVX2__)
INLINE __m256 low_half(f32x16 v) {
#if defined(__AVX512F__)
    return _mm512_castps512_ps256((__m512)v.at[0]);
#else
    return (__m256)v.at[0];
#endif
}
INLINE __m256 high_half(f32x16 v) {
#if defined(__AVX512F__)
    return _mm512_extractf32x8_ps((__m512)v.at[0], 1);
#else
    return (__m256)v.at[1];
#endif
}
#endif
INLINE float sum(f32x16 v) {
#if defined(__AVX2__)
    __m256 eight = _mm256_add_ps(low_half(v), high_half(v));
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
#else
    float a[16];
    memcpy(a, &v, 64);
    for (int step = 8; step; step /= 2)
        for (int i = 0; i < step; i++) a[i] += a[i + step];
    return a[0];
#endif
}
INLINE float highest(f32x16 v) {
#if defined(__AVX2__)
    __m256 eight = _mm256_max_ps(low_half(v), high_half(v));
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    four = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
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
    return _mm512_reduce_max_epi32((__m512i)v.at[0]);
#elif defined(__AVX2__)
    __m256i eight = _mm256_max_epi32((__m256i)v.at[0], (__m256i)v.at[1]);
    __m128i four = _mm_max_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
    four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    return _mm_cvtsi128_si32(_mm_max_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
#else
    int32_t a[16], most;
    memcpy(a, &v, 64);
    most = a[0];
    for (int i = 1; i < 16; i++) most = a[i] > most ? a[i] : most;
    return most;
#endif
}
INLINE int32_t sum(i32x16 v) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_epi32((__m512i)v.at[0]);
#elif defined(__AVX2__)
    __m256i eight = _mm256_add_epi32((__m256i)v.at[0], (__m256i)v.at[1]);
    __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
    four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
#else
    int32_t a[16], total = 0;
    memcpy(a, &v, 64);
    for (int i = 0; i < 16; i++) total += a[i];
    return total;
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

// ---- rows at once ---------------------------------------------------------------------------------------------------------------

// Calls run(R, row) for runs of at most `most` rows that cover `rows` of them, all runs about as long: a short one would wait for
// its few sums.
template <int most, class Run> INLINE void each_run(int rows, Run run) {
    static_assert(most <= 12);
    for (int r = 0, num_runs = (rows + most - 1) / most; num_runs > 0; num_runs--) {
        int some = (rows - r + num_runs - 1) / num_runs;
        switch (some) {
#define RUN(R) case R: if constexpr (R <= most) run(std::integral_constant<int, R>(), r); break;
            RUN(1) RUN(2) RUN(3) RUN(4) RUN(5) RUN(6) RUN(7) RUN(8) RUN(9) RUN(10) RUN(11) RUN(12)
#undef RUN
        }
        r += some;
    }
}

}  // namespace cloister::CLOISTER_ISA
