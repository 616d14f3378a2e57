// Chooses a token from a row of logits: temperature, truncation, and the noise of runner/noise.py, which is the specification.
//
// Tokens stand in groups of 256. One pass over a row takes each group's largest logit. That bounds what a group can weigh, and
// therefore how far it can come in the race, so that of the many groups only the few that could win are looked into.
#pragma once
#include <algorithm>

#include "kernels.hpp"
#include "simd.hpp"

namespace cloister::CLOISTER_ISA {

constexpr float no_weight = -INFINITY;
constexpr int vectors_of_group = draw_group / 16;

INLINE f32x16 load_or(const float* p, int count, float rest) {
    if (count >= 16) return load<f32x16>(p);
    f32x16 v = set(rest);
    if (count > 0) memcpy(&v, p, size_t(count) * 4);
    return v;
}

static bool find_peaks(const float* logits, int length, int first, int last, bool barred, float* peaks) {
    f32x16 worst[4] = {};  // stay 0 unless a logit is infinite or no number
    f32x16 lowest = set(barred ? -3.402823466e38f : -INFINITY);
    for (int group = first; group < last; group++) {
        const float* at = logits + size_t(group) * draw_group;
        int left = length - group * draw_group;
        f32x16 most[4] = {set(no_weight), set(no_weight), set(no_weight), set(no_weight)};
        auto look = [&](int k, f32x16 v) INLINE_LAMBDA {
            most[k] = max(v, most[k]);
            worst[k] = fma(max(lowest, v), set(0.0f), worst[k]);  // no number stays no number
        };
        if (left >= draw_group) {
            for (int i = 0; i < draw_group; i += 64)
                UNROLL for (int k = 0; k < 4; k++) look(k, load<f32x16>(at + i + 16 * k));
        } else {
            for (int i = 0; i < left; i += 16) look(0, load_or(at + i, left - i, at[0]));
        }
        peaks[group] = highest(max(max(most[0], most[1]), max(most[2], most[3])));
    }
    return sum(worst[0] + worst[1] + (worst[2] + worst[3])) == 0.0f;
}

// Logits less the row's largest, over the temperature: 0 at most.
struct Scaled {
    const float* logits;
    int length;
    float best, temperature;

    INLINE f32x16 scale(f32x16 v) const { return temperature == 1.0f ? v - best : (v - best) / temperature; }
    INLINE f32x16 at(int i) const { return scale(load_or(logits + i, length - i, no_weight)); }
};

INLINE u32x16 mix(u32x16 bits) {
    bits = (bits ^ (bits >> 16)) * 0x85ebca6bu;
    bits = (bits ^ (bits >> 13)) * 0xc2b2ae35u;
    return bits ^ (bits >> 16);
}
INLINE uint64_t mix(uint64_t bits) {
    bits += 0x9e3779b97f4a7c15u;
    bits = (bits ^ (bits >> 30)) * 0xbf58476d1ce4e5b9u;
    bits = (bits ^ (bits >> 27)) * 0x94d049bb133111ebu;
    return bits ^ (bits >> 31);
}
INLINE uint64_t key_of(const Draw& draw) { return mix(mix(mix(draw.seed) ^ uint64_t(draw.index)) ^ uint64_t(draw.position)); }

// The natural logarithm of normal numbers in (0, 1] (Cephes' logf; relative error below 2e-7, near 1 too).
INLINE f32x16 log(f32x16 x) {
    i32x16 above = (i32x16)as_u32(x) - 0x3f3504f3;  // beyond the square root of 1/2
    i32x16 power = above >> 23;
    f32x16 m = as_f32(as_u32(x) - ((u32x16)power << 23)) - 1.0f, e = to_f32(power), z = m * m;
    f32x16 p = set(7.0376836292e-2f);
    p = fma(p, m, set(-1.1514610310e-1f));
    p = fma(p, m, set(1.1676998740e-1f));
    p = fma(p, m, set(-1.2420140846e-1f));
    p = fma(p, m, set(1.4249322787e-1f));
    p = fma(p, m, set(-1.6668057665e-1f));
    p = fma(p, m, set(2.0000714765e-1f));
    p = fma(p, m, set(-2.4999993993e-1f));
    p = fma(p, m, set(3.3333331174e-1f));
    f32x16 y = fma(e, set(-2.12194440e-4f), p * m * z);
    y = fma(z, set(-0.5f), y);
    return fma(e, set(0.693359375f), m + y);
}

// Exponential(1) noise of some ids: -log(1 - v), with log(1 - v) taken by Kahan's way, which keeps small v precise.
INLINE f32x16 noise(uint64_t key, u32x16 ids) {
    u32x16 bits = mix(mix(mix(ids + 1u) ^ uint32_t(key >> 32)) + uint32_t(key));
    f32x16 v = min((__builtin_convertvector(bits, f32x16) + 0.5f) * 0x1p-32f, set(0x1.fffffep-1f));
    f32x16 u = 1.0f - v, rest = 1.0f - u;
    return rest > 0.0f ? -log(u) * v / rest : v;
}

INLINE u32x16 count_from(uint32_t first) { return u32x16{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} + first; }

// Who is ahead in a race; of equal ones the lowest id.
struct Race {
    f32x16 most = set(-1.0f);
    u32x16 ids = {};

    INLINE void enter(f32x16 racers, u32x16 numbers) {
        auto ahead = (racers > most) | ((racers == most) & (numbers < ids));
        ids = ahead ? numbers : ids;
        most = ahead ? racers : most;
    }
    int winner() const {
        int lane = 0;
        for (int i = 1; i < 16; i++)
            if (most[i] > most[lane] || (most[i] == most[lane] && ids[i] < ids[lane])) lane = i;
        return int(ids[lane]);
    }
};

static float weigh_group(const Scaled& row, int group) {
    f32x16 total = {};
    for (int k = 0; k < vectors_of_group; k++) total += exp(row.at(group * draw_group + 16 * k));
    return sum(total);
}

// A group by its whole weight, then a token inside it by its own. `peaks` are scaled; `bounds` and `noises` are scratch.
static int draw_any(const Scaled& row, uint64_t key, const float* peaks, int groups, float* bounds, float* noises) {
    Race possible;
    for (int group = 0; group < groups; group += 16) {
        u32x16 ids = count_from(uint32_t(group));
        f32x16 n = noise(key, ids + uint32_t(row.length));
        f32x16 bound = exp(load_or(peaks + group, groups - group, no_weight)) * (1.001f * draw_group) / n;
        store(bounds + group, bound);
        store(noises + group, n);
        possible.enter(bound, ids);
    }
    int first = possible.winner(), best = first;
    float most = weigh_group(row, first) / noises[first];
    for (int group = 0; group < groups; group++) {
        if (bounds[group] < most || group == first) continue;
        float racer = weigh_group(row, group) / noises[group];
        if (racer > most || (racer == most && group < best)) {
            most = racer;
            best = group;
        }
    }
    Race inside;
    int begin = best * draw_group, end = std::min(row.length, begin + draw_group);
    for (int i = begin; i < end; i += 16) {
        u32x16 ids = count_from(uint32_t(i));
        f32x16 racers = exp(row.at(i)) / noise(key, ids);
        inside.enter(ids < uint32_t(row.length) ? racers : set(-1.0f), ids);
    }
    return inside.winner();
}

// A candidate: the bits of the scaled logit without its sign, then the id. In ascending order the most likely comes first, and of
// equal ones the lowest id.
INLINE int append(uint64_t* to, f32x16 scaled, uint32_t first, float least) {
    u32x16 bits = as_u32(scaled) & 0x7fffffffu, ids = count_from(first);
#if defined(__AVX512F__)
    __mmask16 kept = _mm512_cmp_ps_mask((__m512)scaled, _mm512_set1_ps(least), _CMP_GE_OQ);
    if (!kept) return 0;
    __m512i high = _mm512_maskz_compress_epi32(kept, (__m512i)bits), low = _mm512_maskz_compress_epi32(kept, (__m512i)ids);
    for (int half = 0; half < 2; half++) {
        __m256i h = half ? _mm512_extracti64x4_epi64(high, 1) : _mm512_castsi512_si256(high);
        __m256i l = half ? _mm512_extracti64x4_epi64(low, 1) : _mm512_castsi512_si256(low);
        _mm512_storeu_si512(to + 8 * half, _mm512_or_si512(_mm512_slli_epi64(_mm512_cvtepu32_epi64(h), 32), _mm512_cvtepu32_epi64(l)));
    }
    return __builtin_popcount(kept);
#else
    int count = 0;
    for (int lane = 0; lane < 16; lane++) {
        to[count] = uint64_t(bits[lane]) << 32 | ids[lane];
        count += scaled[lane] >= least;
    }
    return count;
#endif
}

// Writes the tokens that are at least as likely as `least`; returns how many. There is room for 16 more than there are tokens.
static int collect(const Scaled& row, const float* peaks, int groups, float least, uint64_t* to) {
    int count = 0;
    for (int group = 0; group < groups; group++) {
        if (!(peaks[group] >= least)) continue;
        int begin = group * draw_group, end = std::min(row.length, begin + draw_group);
        for (int i = begin; i < end; i += 16) {
            count += append(to + count, row.at(i), uint32_t(i), least);
            while (count && uint32_t(to[count - 1]) >= uint32_t(row.length)) count--;  // past the end of the vocabulary
        }
    }
    return count;
}

struct Candidates { f32x16 scaled; u32x16 ids; };

INLINE Candidates take(const uint64_t* from, int count) {
    typedef uint64_t u64x16 __attribute__((vector_size(128), may_alias));
    u64x16 some;
    if (count >= 16) {
        memcpy(&some, from, 128);
    } else {
        some = u64x16{} + (uint64_t(0x7f800000) << 32);
        memcpy(&some, from, size_t(count) * 8);
    }
    u32x16 bits = __builtin_convertvector(some >> 32, u32x16) | 0x80000000u;
    return {as_f32(bits), __builtin_convertvector(some, u32x16)};
}

static double weigh(const uint64_t* begin, const uint64_t* end) {
    double total = 0;
    for (; begin < end; begin += 16) {
        f32x16 weights = exp(take(begin, int(end - begin)).scaled);
        for (int lane = 0; lane < 16; lane++) total += double(weights[lane]);
    }
    return total;
}

// Moves what is below `edge` to the front, without branches; returns how many.
static int split(uint64_t* candidates, int count, uint64_t edge) {
    int below = 0;
    for (int i = 0; i < count; i++) {
        uint64_t one = candidates[i];
        candidates[i] = candidates[below];
        candidates[below] = one;
        below += one < edge;
    }
    return below;
}

// The most likely ones of many candidates, found by narrowing [low, high) around where they end.
struct Selection {
    uint64_t* candidates;
    int limit;      // at most so many,
    double wanted;  // and no more than reach this mass
    int low, high;
    double mass = 0;  // of those before `low`

    bool weighs() const { return wanted < INFINITY; }
    bool is_enough(int count, double weight) const { return count >= limit || weight >= wanted; }

    // Counts and weighs them by bins of their logits: one pass over many, where ordering takes several.
    void narrow() {
        constexpr int num_bins = 512, bins_of_one = 16;
        int counts[num_bins] = {};
        double masses[num_bins] = {};
        for (int i = low; i < high; i += 16) {
            f32x16 scaled = take(candidates + i, high - i).scaled;
            f32x16 weights = weighs() ? exp(scaled) : f32x16{};
            i32x16 bins = __builtin_convertvector(min(scaled * -float(bins_of_one), set(float(num_bins - 1))), i32x16);
            for (int lane = 0; lane < std::min(16, high - i); lane++) {
                counts[bins[lane]]++;
                masses[bins[lane]] += double(weights[lane]);
            }
        }
        int bin = 0, before = low;
        for (; bin < num_bins - 1 && !is_enough(before + counts[bin], mass + masses[bin]); bin++) {
            before += counts[bin];
            mass += masses[bin];
        }
        if (bin < num_bins - 1) high = low + split(candidates + low, high - low, edge_of(float(bin + 1) / bins_of_one));
        low += split(candidates + low, high - low, edge_of(float(bin) / bins_of_one));
    }

    static uint64_t edge_of(float distance) {
        uint32_t bits;
        memcpy(&bits, &distance, 4);
        return uint64_t(bits) << 32;
    }

    // Puts them first; returns how many they are, one at least.
    int finish() {
        if (high > 1024) narrow();
        while (high - low > 32) {
            int middle = low + (high - low) / 2;
            std::nth_element(candidates + low, candidates + middle, candidates + high);
            double more = weighs() ? weigh(candidates + low, candidates + middle) : 0;
            if (is_enough(middle, mass + more)) {
                high = middle;
            } else {
                low = middle;
                mass += more;
            }
        }
        std::sort(candidates + low, candidates + high);
        while (low < high && !is_enough(low, mass)) {
            mass += weigh(candidates + low, candidates + low + 1);
            low++;
        }
        return std::max(low, 1);
    }
};

// The tokens that truncation leaves, in any order: top-k, then top-p of what that left, then min-p (runner/filters.py).
static int keep(const Scaled& row, const Draw& draw, const float* peaks, int groups, float* sorted, uint64_t* to) {
    float least = std::min(float(std::log(draw.min_p)), 0.0f);
    bool bounded = draw.top_k > 0 && draw.top_k < row.length, nucleus = draw.top_p < 1;
    if (!bounded && !nucleus) return collect(row, peaks, groups, least, to);
    int count;
    double total = 0;
    if (bounded) {
        float enough = no_weight;  // as many groups as tokens are wanted have a token at least as likely
        if (draw.top_k <= groups) {
            std::copy(peaks, peaks + groups, sorted);
            std::nth_element(sorted, sorted + draw.top_k - 1, sorted + groups, [](float a, float b) { return a > b; });
            enough = sorted[draw.top_k - 1];
        }
        count = collect(row, peaks, groups, enough, to);
        if (count > draw.top_k) count = Selection{to, int(draw.top_k), INFINITY, 0, count}.finish();
        if (nucleus) total = weigh(to, to + count);
    } else {
        for (int group = 0; group < groups; group++)
            if (peaks[group] > -87.0f) total += double(weigh_group(row, group));
        // all tokens less likely than this one weigh less together than may be missing
        count = collect(row, peaks, groups, float(std::log((1 - draw.top_p) * total / row.length / 2)), to);
    }
    if (nucleus) count = Selection{to, count, draw.top_p * total, 0, count}.finish();
    if (least == no_weight) return count;
    return split(to, count, Selection::edge_of(std::abs(least)) + (uint64_t(1) << 32));  // those equal to `least` stay
}

static size_t draw_scratch(int length, const Draw& draw) {
    size_t floats = size_t(num_draw_groups(length) + 15) / 16 * 16 * 4;
    return 3 * floats + (draw.truncates() ? (size_t(length) + 32) * 8 : 0);
}

static int draw(const float* logits, const float* peaks, int length, const Draw& draw, uint8_t* scratch) {
    int groups = num_draw_groups(length), at = 0;
    for (int group = 1; group < groups; group++)
        if (peaks[group] > peaks[at]) at = group;
    float best = peaks[at];
    if (!std::isfinite(best)) return -1;
    if (!(draw.temperature > 0)) return int(std::find(logits + at * draw_group, logits + length, best) - logits);
    Scaled row{logits, length, best, draw.temperature};
    int padded = (groups + 15) / 16 * 16;
    float *scaled = (float*)scratch, *bounds = scaled + padded, *noises = bounds + padded;
    for (int i = 0; i < groups; i += 16) store(scaled + i, row.scale(load_or(peaks + i, groups - i, no_weight)));
    uint64_t key = key_of(draw);
    if (!draw.truncates()) return draw_any(row, key, scaled, groups, bounds, noises);
    uint64_t* kept = (uint64_t*)(noises + padded);
    int count = keep(row, draw, scaled, groups, bounds, kept);
    Race race;
    for (int i = 0; i < count; i += 16) {
        Candidates some = take(kept + i, count - i);
        f32x16 racers = exp(some.scaled) / noise(key, some.ids);
        race.enter(count_from(uint32_t(i)) < uint32_t(count) ? racers : set(-1.0f), some.ids);
    }
    return race.winner();
}

}  // namespace cloister::CLOISTER_ISA
