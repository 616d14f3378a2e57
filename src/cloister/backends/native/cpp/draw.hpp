// Chooses a token from a row of logits: temperature, truncation, and the noise of executor/noise.py, which is the specification.
//
// Tokens stand in groups of 256. One pass over a row takes each group's largest logit, which bounds what its tokens can weigh, and
// so how far they can come in the race: nearly all are left out before their weight and the logarithm of their noise are taken.
// Truncation sorts nothing either: tokens are counted and weighed in bins of their distance from the most likely one, and only
// those of the bin in which the kept ones end are looked at one by one.
#pragma once
#include <algorithm>

#include "kernels.hpp"
#include "simd.hpp"

namespace cloister::CLOISTER_ISA {

constexpr float no_weight = -INFINITY;

INLINE f32p load_or(const float* p, int count, float rest) {
    if (count >= piece_lanes) return load<f32p>(p);
    f32p v = f32p{} + rest;
    if (count > 0) memcpy(&v, p, size_t(count) * 4);
    return v;
}

INLINE u32p count_from(uint32_t first) {
    u32p ids;
    for (int lane = 0; lane < piece_lanes; lane++) ids[lane] = uint32_t(lane);
    return ids + first;
}

static bool find_peaks(const float* logits, int length, int first, int last, bool barred, float* peaks) {
    f32p worst[4] = {};  // stay 0 unless a logit is infinite or no number
    f32p lowest = f32p{} + (barred ? -3.402823466e38f : -INFINITY);
    for (int group = first; group < last; group++) {
        const float* at = logits + size_t(group) * draw_group;
        int left = length - group * draw_group;
        f32p most[4];
        UNROLL for (int k = 0; k < 4; k++) most[k] = f32p{} + no_weight;
        auto look = [&](int k, f32p v) INLINE_LAMBDA {
            most[k] = max(v, most[k]);
            worst[k] = fma(max(lowest, v), f32p{}, worst[k]);  // no number stays no number
        };
        if (left >= draw_group) {
            for (int i = 0; i < draw_group; i += 4 * piece_lanes)
                UNROLL for (int k = 0; k < 4; k++) look(k, load<f32p>(at + i + k * piece_lanes));
        } else {
            for (int i = 0; i < left; i += piece_lanes) look(0, load_or(at + i, left - i, at[0]));
        }
        f32p all = max(max(most[0], most[1]), max(most[2], most[3]));
        float peak = all[0];
        for (int lane = 1; lane < piece_lanes; lane++) peak = all[lane] > peak ? all[lane] : peak;
        peaks[group] = peak;
    }
    f32p all = worst[0] + worst[1] + (worst[2] + worst[3]);
    float total = 0;
    for (int lane = 0; lane < piece_lanes; lane++) total += all[lane];
    return total == 0.0f;
}

// Bars what the mask does not have by minus infinity, and finds the peaks of what is left; `from` may be `to`.
static bool mask_peaks(const float* from, float* to, const uint32_t* mask, int length, int first, int last, float* peaks) {
    f32p worst = {};  // as above, of barred logits too
    f32p lowest = f32p{} - INFINITY;
    for (int group = first; group < last; group++) {
        f32p most = f32p{} + no_weight;
        for (int begin = group * draw_group; begin < std::min(length, (group + 1) * draw_group); begin += 32) {
            uint32_t bits = mask[begin / 32];
            for (int at = begin; at < std::min(length, begin + 32); at += piece_lanes) {
                f32p v = load_or(from + at, length - at, from[at]);
                worst = fma(max(lowest, v), f32p{}, worst);
                if (bits != ~0u) {
                    u32p own = ((u32p{} + (bits >> (at - begin))) >> count_from(0)) & 1u;
                    v = own != 0 ? v : f32p{} + no_weight;
                } else if (from == to) {
                    most = max(v, most);
                    continue;
                }
                most = max(v, most);
                if (length - at >= piece_lanes) store(to + at, v);
                else memcpy(to + at, &v, size_t(length - at) * 4);
            }
        }
        float peak = most[0];
        for (int lane = 1; lane < piece_lanes; lane++) peak = most[lane] > peak ? most[lane] : peak;
        peaks[group] = peak;
    }
    float total = 0;
    for (int lane = 0; lane < piece_lanes; lane++) total += worst[lane];
    return total == 0.0f;
}

// Logits less the row's largest, over the temperature: 0 at most.
struct Scaled {
    const float* logits;
    int length;
    float best, temperature;

    INLINE f32p scale(f32p v) const { return temperature == 1.0f ? v - best : (v - best) / temperature; }
    INLINE f32p at(int i) const { return scale(load_or(logits + i, length - i, no_weight)); }
};

INLINE u32p mix(u32p bits) {
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
INLINE f32p log(f32p x) {
    i32p above = (i32p)x - 0x3f3504f3;  // beyond the square root of 1/2
    i32p power = above >> 23;
    f32p m = (f32p)((i32p)x - (i32p)((u32p)power << 23)) - 1.0f, e = __builtin_convertvector(power, f32p), z = m * m;
    f32p p = f32p{} + 7.0376836292e-2f;
    p = fma(p, m, f32p{} + -1.1514610310e-1f);
    p = fma(p, m, f32p{} + 1.1676998740e-1f);
    p = fma(p, m, f32p{} + -1.2420140846e-1f);
    p = fma(p, m, f32p{} + 1.4249322787e-1f);
    p = fma(p, m, f32p{} + -1.6668057665e-1f);
    p = fma(p, m, f32p{} + 2.0000714765e-1f);
    p = fma(p, m, f32p{} + -2.4999993993e-1f);
    p = fma(p, m, f32p{} + 3.3333331174e-1f);
    f32p y = fma(e, f32p{} + -2.12194440e-4f, p * m * z);
    y = fma(z, f32p{} + -0.5f, y);
    return fma(e, f32p{} + 0.693359375f, m + y);
}

INLINE u32p noise_bits(uint64_t key, u32p ids) { return mix(mix(mix(ids + 1u) ^ uint32_t(key >> 32)) + uint32_t(key)); }

// Exponential(1) noise: -log(1 - v), with log(1 - v) taken by Kahan's way, which keeps small v precise. It is never below v.
INLINE f32p noise_of(u32p bits) {
    f32p v = min((__builtin_convertvector(bits, f32p) + 0.5f) * 0x1p-32f, f32p{} + 0x1.fffffep-1f);
    f32p u = 1.0f - v, rest = 1.0f - u;
    return rest > 0.0f ? -log(u) * v / rest : v;
}

// Who is ahead in a race; of equal ones the lowest id.
struct Race {
    f32p most = f32p{} - 1.0f;
    u32p ids = {};

    INLINE void enter(f32p racers, u32p numbers) {
        auto ahead = (racers > most) | ((racers == most) & (numbers < ids));
        ids = ahead ? numbers : ids;
        most = ahead ? racers : most;
    }
    int leading_lane() const {
        int lane = 0;
        for (int i = 1; i < piece_lanes; i++)
            if (most[i] > most[lane] || (most[i] == most[lane] && ids[i] < ids[lane])) lane = i;
        return lane;
    }
    int winner() const { return int(ids[leading_lane()]); }
};

static float weigh_group(const Scaled& row, int group) {
    f32x16 total = {};
    for (int i = group * draw_group; i < (group + 1) * draw_group; i += 16)
        UNROLL for (int p = 0; p < pieces; p++) total.at[p] += exp(row.at(i + p * piece_lanes));
    return sum(total);
}

// A group by its whole weight, then a token inside it by its own. `peaks` are scaled; `bounds` and `noises` are scratch.
static int draw_any(const Scaled& row, uint64_t key, const float* peaks, int groups, float* bounds, float* noises) {
    Race possible;
    for (int group = 0; group < groups; group += piece_lanes) {
        u32p ids = count_from(uint32_t(group));
        f32p n = noise_of(noise_bits(key, ids + uint32_t(row.length)));
        f32p bound = exp(load_or(peaks + group, groups - group, no_weight)) * (1.001f * draw_group) / n;
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
    for (int i = begin; i < end; i += piece_lanes) {
        u32p ids = count_from(uint32_t(i));
        f32p racers = exp(row.at(i)) / noise_of(noise_bits(key, ids));
        inside.enter(ids < uint32_t(row.length) ? racers : f32p{} - 1.0f, ids);
    }
    return inside.winner();
}

// ---- truncation ---------------------------------------------------------------------------------------------------------------

// A token's place in the order of likelihood: the bits of its distance from the most likely one, then its id.
typedef uint64_t Place;
constexpr Place after_all = ~Place(0);

INLINE uint32_t distance_bits(float scaled) {
    uint32_t bits;
    memcpy(&bits, &scaled, 4);
    return bits & 0x7fffffffu;
}
INLINE u32p distance_bits(f32p scaled) { return (u32p)scaled & 0x7fffffffu; }
INLINE float scaled_of(uint32_t distance) {
    uint32_t bits = std::min(distance, 0x7f800000u) | 0x80000000u;
    float scaled;
    memcpy(&scaled, &bits, 4);
    return scaled;
}

struct Range { uint32_t first, last; };  // of distances' bits, inclusive

// Writes the places of the tokens in a range; returns how many. There is room for 16 more than there are tokens.
static int collect(const Scaled& row, const float* peaks, int groups, Range range, Place* to) {
    int count = 0;
    float least = scaled_of(range.last);
    for (int group = 0; group < groups; group++) {
        if (!(peaks[group] >= least)) continue;
        int begin = group * draw_group, end = std::min(row.length, begin + draw_group);
        for (int i = begin; i < end; i += piece_lanes) {
            u32p bits = distance_bits(row.at(i)), ids = count_from(uint32_t(i));
            auto inside = (bits - range.first <= range.last - range.first) & (ids < uint32_t(row.length));
            if (!any((i32p)inside)) continue;
#if defined(__AVX512F__)
            __mmask16 kept = _mm512_movepi32_mask((__m512i)inside);
            __m512i high = _mm512_maskz_compress_epi32(kept, (__m512i)bits), low = _mm512_maskz_compress_epi32(kept, (__m512i)ids);
            for (int half = 0; half < 2; half++) {
                __m512i h = _mm512_cvtepu32_epi64(half ? _mm512_extracti64x4_epi64(high, 1) : _mm512_castsi512_si256(high));
                __m512i l = _mm512_cvtepu32_epi64(half ? _mm512_extracti64x4_epi64(low, 1) : _mm512_castsi512_si256(low));
                _mm512_storeu_si512(to + count + 8 * half, _mm512_or_si512(_mm512_slli_epi64(h, 32), l));
            }
            count += __builtin_popcount(kept);
#else
            for (int lane = 0; lane < piece_lanes; lane++) {
                to[count] = Place(bits[lane]) << 32 | ids[lane];
                count += inside[lane] != 0;
            }
#endif
        }
    }
    return count;
}

typedef double Sums __attribute__((vector_size(16)));  // mass and number of some tokens

// How many tokens are kept: at most `count`, and no more than reach `mass`.
struct Goal {
    double mass = INFINITY, count = INFINITY;
    bool is_met(Sums sums) const { return sums[0] >= mass || sums[1] >= count; }
};

// Tokens counted and weighed by their distance: 2^shift neighbouring floats share a bin, and the outermost take all that is beyond.
struct Bins {
    static constexpr int number = 512, tables = 4;  // neighbouring tokens are often in one bin, and must not wait for each other
    uint32_t first;
    int shift;
    Sums at[number][tables] = {};

    INLINE u32p place(u32p bits) const {
        u32p above = bits > first ? (bits - first) >> shift : u32p{};
        return above < uint32_t(number - 1) ? above : u32p{} + uint32_t(number - 1);
    }
    INLINE void add(u32p distances, f32p weights, int count) {
        alignas(64) uint32_t bins[piece_lanes];
        alignas(64) double masses[piece_lanes];
        store(bins, place(distances));
        for (int lane = 0; lane < piece_lanes; lane++) masses[lane] = double(weights[lane]);
        if (count >= piece_lanes) {
            UNROLL for (int lane = 0; lane < piece_lanes; lane++) at[bins[lane]][lane % tables] += Sums{masses[lane], 1};
        } else {
            for (int lane = 0; lane < count; lane++) at[bins[lane]][0] += Sums{masses[lane], 1};
        }
    }
    Sums sums(int bin) const { return at[bin][0] + at[bin][1] + (at[bin][2] + at[bin][3]); }
    double mass() const {
        Sums total = {};
        for (int bin = 0; bin < number; bin++) total += sums(bin);
        return total[0];
    }
    // The bin in which a goal is met; adds those before it to `before`.
    Range find(const Goal& goal, Sums& before) const {
        int bin = 0;
        for (; bin < number - 1 && !goal.is_met(before + sums(bin)); bin++) before += sums(bin);
        uint32_t from = first + (uint32_t(bin) << shift);
        return {bin ? from : 0, bin < number - 1 ? from + (1u << shift) - 1 : 0xffffffffu};
    }
};

// Counts a row's tokens from `cut` on, and weighs them if so wanted; returns what the others weigh.
static double fill(Bins& bins, const Scaled& row, const float* peaks, int groups, float cut, bool weighs) {
    double others = 0;
    for (int group = 0; group < groups; group++) {
        if (peaks[group] < cut) {
            if (weighs && peaks[group] > -87.0f) others += double(weigh_group(row, group));
            continue;
        }
        f32p below = {};
        int begin = group * draw_group, end = std::min(row.length, begin + draw_group);
        for (int i = begin; i < end; i += piece_lanes) {
            f32p scaled = row.at(i), weights = weighs ? exp(scaled) : f32p{};
            if (any(scaled >= cut)) bins.add(distance_bits(scaled), weights, row.length - i);
            else below += weights;
        }
        for (int lane = 0; lane < piece_lanes; lane++) others += double(below[lane]);
    }
    return others;
}

// The last token that is kept, and the mass of all that are.
struct Ending {
    Place last;
    double mass;
};

INLINE double weigh(Place place) { return double(exp(f32p{} + scaled_of(uint32_t(place >> 32)))[0]); }

// The end of the kept ones among some tokens whose equals stand in the order of their ids; `before` are those that come first.
static Ending find_end(Place* tokens, int count, Sums before, const Goal& goal) {
    while (count > 64) {
        uint32_t nearest = 0xffffffffu, farthest = 0;
        for (int i = 0; i < count; i++) {
            nearest = std::min(nearest, uint32_t(tokens[i] >> 32));
            farthest = std::max(farthest, uint32_t(tokens[i] >> 32));
        }
        if (nearest == farthest) break;
        Bins bins{nearest, std::max(0, 23 - __builtin_clz(farthest - nearest))};
        for (int i = 0; i < count; i += piece_lanes) {
            u32p distances = {};
            for (int lane = 0; lane < std::min(piece_lanes, count - i); lane++) distances[lane] = uint32_t(tokens[i + lane] >> 32);
            bins.add(distances, exp((f32p)(distances | 0x80000000u)), count - i);
        }
        Range range = bins.find(goal, before);
        int left = 0;
        for (int i = 0; i < count; i++) {
            Place token = tokens[i];
            tokens[left] = token;
            left += uint32_t(token >> 32) - range.first <= range.last - range.first;
        }
        count = left;
    }
    if (count <= 64) std::sort(tokens, tokens + count);
    double weight = 0;
    for (int i = 0; i < count; i++) {
        if (i == 0 || tokens[i] >> 32 != tokens[i - 1] >> 32) weight = weigh(tokens[i]);
        before += Sums{weight, 1};
        if (goal.is_met(before) || i == count - 1) return {tokens[i], before[0]};
    }
    return {0, before[0]};
}

constexpr uint32_t nearest_bins = 0x3e000000u;  // from 1/8 on, 64 bins for each doubling, to 32
constexpr int bins_shift = 17;

static Ending find_end(const Scaled& row, const float* peaks, int groups, Range range, const Goal& goal, Place* tokens) {
    return find_end(tokens, collect(row, peaks, groups, range, tokens), Sums{}, goal);
}

static Ending find_top_k(const Scaled& row, const Draw& draw, const float* peaks, int groups, float* sorted, Place* tokens) {
    Goal goal{INFINITY, double(draw.top_k)};
    if (draw.top_k <= groups) {  // as many groups as tokens are wanted have a token at least as likely
        std::copy(peaks, peaks + groups, sorted);
        std::nth_element(sorted, sorted + draw.top_k - 1, sorted + groups, [](float a, float b) { return a > b; });
        return find_end(row, peaks, groups, {0, distance_bits(sorted[draw.top_k - 1])}, goal, tokens);
    }
    Bins bins{nearest_bins, bins_shift};
    fill(bins, row, peaks, groups, no_weight, draw.top_p < 1);
    Sums before = {};
    Range range = bins.find(goal, before);
    return find_end(tokens, collect(row, peaks, groups, range, tokens), before, goal);
}

// The nucleus of all tokens, or of those that top-k left.
static Place find_nucleus(const Scaled& row, const Draw& draw, const float* peaks, int groups, const Ending* top_k, Place* tokens) {
    uint32_t farthest = top_k ? uint32_t(top_k->last >> 32) : 0;
    if (top_k && draw.top_k <= 4096)
        return find_end(row, peaks, groups, {0, farthest}, Goal{draw.top_p * top_k->mass}, tokens).last;
    // all tokens less likely than this one weigh less together than may be missing
    float cut = top_k ? scaled_of(farthest) : float(std::log((1 - draw.top_p) / row.length / 2));
    Bins bins{nearest_bins, bins_shift};
    double others = fill(bins, row, peaks, groups, cut, true);
    Goal goal{draw.top_p * (top_k ? top_k->mass : others + bins.mass())};
    Sums before = {};
    Range range = bins.find(goal, before);
    return find_end(tokens, collect(row, peaks, groups, range, tokens), before, goal).last;
}

// The last token that truncation leaves: top-k, then top-p of what that left, then min-p (runner/filters.py).
static Place find_last(const Scaled& row, const Draw& draw, const float* peaks, int groups, float* sorted, Place* tokens) {
    float least = std::min(float(std::log(draw.min_p)), 0.0f);
    Place last = least == no_weight ? after_all : Place(distance_bits(least)) << 32 | 0xffffffffu;
    bool bounded = draw.top_k > 0 && draw.top_k < row.length;
    Ending top_k{after_all, 0};
    if (bounded) top_k = find_top_k(row, draw, peaks, groups, sorted, tokens);
    last = std::min(last, top_k.last);
    if (draw.top_p < 1) last = std::min(last, find_nucleus(row, draw, peaks, groups, bounded ? &top_k : nullptr, tokens));
    return last;
}

// The race of all tokens to `last`. `bounds` is scratch.
static int draw_to(const Scaled& row, Place last, uint64_t key, const float* peaks, int groups, float* bounds) {
    constexpr int step = 4;
    uint32_t last_distance = uint32_t(last >> 32), last_id = uint32_t(last);
    float least = scaled_of(last_distance), most = 0;
    for (int group = 0; group < groups; group += piece_lanes)
        store(bounds + group, exp(load_or(peaks + group, groups - group, no_weight)) * (1.001f * 0x1p32f));
    Race race;
    // Noise is at least its bits over 2^32: beyond this many, no token of the group comes to the fore.
    auto limit_of = [&](int group) { return bounds[group] < most * 0x1p31f ? uint32_t(bounds[group] / most) + 1 : 0xffffffffu; };
    for (int group = 0; group < groups; group++) {
        if (!(peaks[group] >= least)) continue;
        uint32_t limit = limit_of(group);
        for (int i = group * draw_group; i < std::min(row.length, (group + 1) * draw_group); i += step * piece_lanes) {
            u32p bits[step], ids = count_from(uint32_t(i));
            UNROLL for (int k = 0; k < step; k++) bits[k] = noise_bits(key, ids + uint32_t(k * piece_lanes));
            u32p lowest = bits[0];
            UNROLL for (int k = 1; k < step; k++) lowest = bits[k] < lowest ? bits[k] : lowest;
            if (!any(lowest <= limit)) continue;
            for (int k = 0; k < step; k++, ids += uint32_t(piece_lanes)) {
                f32p scaled = row.at(i + k * piece_lanes);
                u32p distances = distance_bits(scaled);
                auto kept = (distances < last_distance) | ((distances == last_distance) & (ids <= last_id));
                f32p racers = exp(scaled) / noise_of(bits[k]);
                race.enter(kept & (ids < uint32_t(row.length)) ? racers : f32p{} - 1.0f, ids);
            }
            most = std::max(0.0f, race.most[race.leading_lane()]);
            limit = limit_of(group);
        }
    }
    return race.winner();
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
    for (int i = 0; i < groups; i += piece_lanes) store(scaled + i, row.scale(load_or(peaks + i, groups - i, no_weight)));
    uint64_t key = key_of(draw);
    if (!draw.truncates()) return draw_any(row, key, scaled, groups, bounds, noises);
    return draw_to(row, find_last(row, draw, scaled, groups, bounds, (Place*)(noises + padded)), key, scaled, groups, bounds);
}

}  // namespace cloister::CLOISTER_ISA
