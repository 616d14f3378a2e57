// Products of many rows with vectors (tiles.hpp has those of AMX). A few hundred inputs of a panel at a time are laid out as the
// instruction wants them; then rows pass over them, as many at once as accumulators fit in registers. So four bits are unpacked, and
// bytes and bfloat16 widened, once for `pass_rows` rows. Every output takes its inputs in the order of the kernels for few rows, so
// it has their bits. Included by multiply.hpp.
#pragma once
#if defined(__AVX2__)
#include <numeric>

namespace cloister::CLOISTER_ISA {

// Rows at once: of inputs that lie as the instruction wants them, which are read in their blocks of 16, and of others.
#if defined(__AVX512F__)
constexpr int tile_rows = 12, direct_rows = 8;
#else
constexpr int tile_rows = 6, direct_rows = 6;
#endif
constexpr int pass_rows = 192;
constexpr int most_block_chunks = 16;
constexpr int most_block_groups = 2 * most_block_chunks;
constexpr int fewest_blocked_rows = 4;

// Lanes as bytes and 16-bit numbers; each has the width of a register.
#if defined(__AVX512BW__)
INLINE i32p add_pairs_of_words(i32p a, i32p b) { return (i32p)_mm512_madd_epi16((__m512i)a, (__m512i)b); }
INLINE i32p add_pairs_of_bytes(i32p a, i32p b) { return (i32p)_mm512_maddubs_epi16((__m512i)a, (__m512i)b); }
INLINE i32p ones() { return (i32p)_mm512_set1_epi16(1); }
#else
INLINE i32p add_pairs_of_words(i32p a, i32p b) { return (i32p)_mm256_madd_epi16((__m256i)a, (__m256i)b); }
INLINE i32p add_pairs_of_bytes(i32p a, i32p b) { return (i32p)_mm256_maddubs_epi16((__m256i)a, (__m256i)b); }
INLINE i32p ones() { return (i32p)_mm256_set1_epi16(1); }
#endif

// The weights of some chunks as bytes, 2048 a chunk: as they are packed, or unpacked to `out`.
NOINLINE const uint8_t* byte_tiles(const Matrix& w, int panel, int first, int count, uint8_t* out) {
    const uint8_t* codes = w.codes + size_t(panel) * w.panel_bytes();
    if (w.kind == Kind::int8) return codes + size_t(first) * 2048;
    for (int i = 0; i < count; i++) {
        uint8_t* tiles = out + size_t(i) * 2048;
        const uint8_t* packed = codes + size_t(first + i) * 1024;
        prefetch_ahead(packed + page, 1024);
        if (w.kind == Kind::qoq || w.e2m1) {
            integer_tiles(w, panel, codes, first + i, tiles);
            continue;
        }
        for (int half = 0; half < 2; half++) {
            for (int at = 0; at < 512; at += piece_bytes) {
                u32p both = load<u32p>(packed + 512 * half + at);
                store(tiles + 1024 * half + at, both & 0x0f0f0f0fu);
                store(tiles + 1024 * half + at + 512, (both >> 4) & 0x0f0f0f0fu);
            }
        }
    }
    return out;
}

// What a step does: two registers of weights meet 4 bytes of a row's inputs. `direct`: those bytes are the inputs as they lie; else
// `put_inputs` makes them.
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
// Bytes by bytes, 4 inputs a step.
struct Integers {
    typedef i32p Sum;
    static constexpr int steps = 16;
    static constexpr bool direct = true;
    static constexpr bool whole = true;
    static INLINE Sum step(Sum sum, i32p w, i32p x) {
#if defined(__AVX512VNNI__)
        return (Sum)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w, (__m512i)x);
#else
        return (Sum)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)w, (__m256i)x);
#endif
    }
    static INLINE const uint8_t* prepare(const Matrix& w, int panel, int first, int count, uint8_t* out) { return byte_tiles(w, panel, first, count, out); }
};
#else
// 16-bit numbers, 2 inputs a step: of each half chunk first those at even places of their pairs, then those at odd ones.
struct Integers {
    typedef i32p Sum;
    static constexpr int steps = 32;
    static constexpr bool direct = false;
    static constexpr bool whole = true;
    static INLINE Sum step(Sum sum, i32p w, i32p x) { return sum + add_pairs_of_words(w, x); }
    static INLINE const uint8_t* prepare(const Matrix& w, int panel, int first, int count, uint8_t* out) {
        const uint8_t* bytes = byte_tiles(w, panel, first, count, out + size_t(count) * 2048);
        for (int i = 0; i < 2 * count; i++) {  // tiles of 16 outputs
            const uint8_t* tile = bytes + size_t(i) * 1024;
            uint8_t* to = out + size_t(i) * 2048;
            if (w.kind == Kind::int8) prefetch_ahead(tile + page, 1024);
            for (int r = 0; r < 16; r++) {
                for (int at = 0; at < 64; at += piece_bytes) {
                    u32p quads = load<u32p>(tile + 64 * r + at);
                    uint8_t* place = to + (r / 8 * 16 + r % 8) * 64 + at;
                    store(place, quads & 0x00ff00ffu);
                    store(place + 8 * 64, (quads >> 8) & 0x00ff00ffu);
                }
            }
        }
        return out;
    }
    static INLINE void put_inputs(const uint8_t* chunk, uint8_t* to) {
        for (int half = 0; half < 2; half++) {
            __m256i quads = _mm256_loadu_si256((const __m256i*)(chunk + 32 * half));
            _mm256_storeu_si256((__m256i*)(to + 64 * half), _mm256_srai_epi16(_mm256_slli_epi16(quads, 8), 8));
            _mm256_storeu_si256((__m256i*)(to + 64 * half + 32), _mm256_srai_epi16(quads, 8));
        }
    }
};
#endif

// Four bits by bytes where no instruction adds up four products: sums of 16 bits hold 32 inputs before they must widen.
struct Nibbles {
    typedef i32p Sum;
    static constexpr int steps = 16;
    static constexpr bool direct = true;
    static constexpr bool whole = true;
    static INLINE const uint8_t* prepare(const Matrix& w, int panel, int first, int count, uint8_t* out) { return byte_tiles(w, panel, first, count, out); }
};

NOINLINE const uint8_t* float_tiles(const Matrix& w, int panel, int first, int count, uint8_t* out) {
    const uint8_t* codes = w.codes + size_t(panel) * w.panel_bytes();
    if (w.kind != Kind::w4a16) return codes + size_t(first) * 2048;
    for (int i = 0; i < count; i++) widened_tiles(w, panel, codes, first + i, out + size_t(i) * 2048);
    return out;
}

#if defined(__AVX512BF16__)
struct Halves {
    typedef f32p Sum;
    static constexpr int steps = 16;
    static constexpr bool direct = true;
    static constexpr bool whole = false;
    static INLINE Sum step(Sum sum, f32p w, f32p x) { return (Sum)_mm512_dpbf16_ps((__m512)sum, (__m512bh)w, (__m512bh)x); }
    static INLINE const uint8_t* prepare(const Matrix& w, int panel, int first, int count, uint8_t* out) { return float_tiles(w, panel, first, count, out); }
};
#else
// bfloat16 widened to float32: the lower number of a pair first.
struct Halves {
    typedef f32p Sum;
    static constexpr int steps = 32;
    static constexpr bool direct = false;
    static constexpr bool whole = false;
    static INLINE Sum step(Sum sum, f32p w, f32p x) { return fma_piece(w, x, sum); }
    static INLINE const uint8_t* prepare(const Matrix& w, int panel, int first, int count, uint8_t* out) {
        const uint8_t* tiles = float_tiles(w, panel, first, count, out + size_t(count) * 2048);
        for (int i = 0; i < 32 * count; i++) {
            if (w.kind == Kind::bf16) __builtin_prefetch(tiles + 64 * i + page, 0, 3);
            for (int at = 0; at < 64; at += piece_bytes) {
                u32p pairs = load<u32p>(tiles + 64 * i + at);
                store(out + 128 * i + at, pairs << 16);
                store(out + 128 * i + 64 + at, pairs & 0xffff0000u);
            }
        }
        return out;
    }
    static INLINE void put_inputs(const uint8_t* chunk, uint8_t* to) {
        store(to, from_bf16(load<u16x16>(chunk)));
        store(to + 64, from_bf16(load<u16x16>(chunk + 32)));
    }
};
#endif

struct Floats {
    typedef f32p Sum;
    static constexpr int steps = 16;
    static constexpr bool direct = true;
    static constexpr bool whole = false;
    static INLINE Sum step(Sum sum, f32p w, f32p x) { return fma_piece(w, x, sum); }
    static INLINE const uint8_t* prepare(const Matrix& w, int panel, int first, int, uint8_t*) {
        return w.codes + size_t(panel) * w.panel_bytes() + size_t(first) * 2048;
    }
};

// Where things lie while a panel is computed.
struct BlockScratch {
    uint8_t *weights, *inputs, *sums;      // [chunks][2][steps][64], [chunks][rows][steps][4], [pass_rows][32][4]
    float *scales, *zeros, *offsets;       // [groups][32]
    float *row_scales;                     // [rows][groups]
    float *row_shifts;                     // [rows][groups]: what offsets are multiplied by
    int32_t* row_totals;

    static constexpr size_t weights_bytes = size_t(most_block_chunks) * (4096 + 2048);
    static constexpr size_t inputs_bytes = size_t(tile_rows) * most_block_chunks * 128;
    static constexpr size_t table = size_t(most_block_groups) * 32 * 4;
    static constexpr size_t bytes = weights_bytes + inputs_bytes + pass_rows * 128 + 3 * table + 3 * size_t(tile_rows) * most_block_groups * 4;

    explicit BlockScratch(uint8_t* at)
        : weights(at), inputs(weights + weights_bytes), sums(inputs + inputs_bytes), scales((float*)(sums + pass_rows * 128)),
          zeros(scales + table / 4), offsets(zeros + table / 4), row_scales(offsets + table / 4),
          row_shifts(row_scales + size_t(tile_rows) * most_block_groups), row_totals((int32_t*)(row_shifts + size_t(tile_rows) * most_block_groups)) {}
};

constexpr int num_strips = pieces;        // a strip of a panel is as wide as two registers
constexpr int strip_bytes = 2 * piece_bytes;
template <class Core> INLINE const uint8_t* strip_of(const uint8_t* chunk, int strip) { return chunk + strip * Core::steps * 64; }
template <class Core> constexpr size_t second_register = pieces == 1 ? size_t(Core::steps) * 64 : piece_bytes;

template <class Core, int R>
INLINE void add_steps(typename Core::Sum (&sums)[R][2], const uint8_t* w, const uint8_t* x, int steps) {
    typedef typename Core::Sum V;
    for (int k = 0; k < steps; k++, w += 64, x += 4) {
        V low = load<V>(w), high = load<V>(w + second_register<Core>);
        UNROLL for (int r = 0; r < R; r++) {
            V both = (V)(i32p{} + load<int32_t>(x + r * Core::steps * 4));
            sums[r][0] = Core::step(sums[r][0], low, both);
            sums[r][1] = Core::step(sums[r][1], high, both);
        }
    }
}

// The inputs of some rows: [chunks][rows][steps][4], chunks being `chunk_bytes` apart.
struct Tile {
    const uint8_t* inputs;
    size_t chunk_bytes;
};

// Adds the products of some chunks to the sums of R rows.
template <class Core, int R>
NOINLINE void add_chunks(const uint8_t* weights, const Tile& tile, int chunks, uint8_t* out) {
    typedef typename Core::Sum V;
    for (int strip = 0; strip < num_strips; strip++) {
        V sums[R][2];
        uint8_t* at = out + strip * strip_bytes;
        UNROLL for (int r = 0; r < R; r++) {
            sums[r][0] = load<V>(at + r * 128);
            sums[r][1] = load<V>(at + r * 128 + piece_bytes);
        }
        for (int chunk = 0; chunk < chunks; chunk++) {
            const uint8_t* w = strip_of<Core>(weights + size_t(chunk) * Core::steps * 128, strip);
            add_steps<Core, R>(sums, w, tile.inputs + size_t(chunk) * tile.chunk_bytes, Core::steps);
        }
        UNROLL for (int r = 0; r < R; r++) {
            store(at + r * 128, sums[r][0]);
            store(at + r * 128 + piece_bytes, sums[r][1]);
        }
    }
}

// Adds 16-bit lanes where the sum is: from intrinsics GCC makes a copy for each, or all products of a loop before the first sum.
INLINE void add_words_to(i32p& sum, i32p words) {
#if defined(__AVX512F__)
    asm volatile("vpaddw %1, %0, %0" : "+v"(sum) : "v"(words));
#else
    asm volatile("vpaddw %1, %0, %0" : "+x"(sum) : "x"(words));
#endif
}

// The products of half a chunk.
template <class Core, int R> INLINE void add_half(i32p (&sums)[R][2], const uint8_t* w, const uint8_t* x) {
    if constexpr (std::is_same_v<Core, Nibbles>) {
        i32p words[R][2] = {};
        NO_UNROLL for (int k = 0; k < 8; k++) {
            i32p low = load<i32p>(w + 64 * k), high = load<i32p>(w + 64 * k + second_register<Core>);
            UNROLL for (int r = 0; r < R; r++) {
                i32p both = set_piece(load<int32_t>(x + r * Core::steps * 4 + 4 * k));
                add_words_to(words[r][0], add_pairs_of_bytes(low, both));
                add_words_to(words[r][1], add_pairs_of_bytes(high, both));
            }
        }
        UNROLL for (int r = 0; r < R; r++)
            UNROLL for (int i = 0; i < 2; i++) sums[r][i] += add_pairs_of_words(words[r][i], ones());
    } else {
        add_steps<Core, R>(sums, w, x, Core::steps / 2);
    }
}

// The groups of a block, `halves` halves of a chunk each: how their integer sums join those in float32 (`Group` in multiply.hpp).
struct GroupBlock {
    int num_groups, halves;
    bool wide;
};

// Sums of integers begin with what one zero point for all takes off; without zero points there are offsets. Inputs that have one scale for all are not `scaled` here.
template <class Core, int R, Zeros zeros, bool scaled>
NOINLINE void add_groups(const GroupBlock& block, const BlockScratch& at, const uint8_t* weights, const Tile& tile, uint8_t* out) {
    for (int strip = 0; strip < num_strips; strip++) {
        float* c = (float*)(out + strip * strip_bytes);
        for (int group = 0, half = 0; group < block.num_groups; group++) {
            i32p sums[R][2];
            UNROLL for (int r = 0; r < R; r++)
                sums[r][0] = sums[r][1] = zeros == Zeros::one ? i32p{} + at.row_totals[r * most_block_groups + group] : i32p{};
            for (int end = half + block.halves; half < end; half++) {
                const uint8_t* w = strip_of<Core>(weights + size_t(half / 2) * Core::steps * 128, strip) + half % 2 * Core::steps * 32;
                add_half<Core, R>(sums, w, tile.inputs + size_t(half / 2) * tile.chunk_bytes + half % 2 * Core::steps * 2);
            }
            const float* place = at.scales + size_t(group) * 32 + strip * (strip_bytes / 4);
            size_t table = BlockScratch::table / 4;
            UNROLL for (int r = 0; r < R; r++) {
                [[maybe_unused]] int32_t total = at.row_totals[r * most_block_groups + group];
                [[maybe_unused]] float scale = scaled ? at.row_scales[r * most_block_groups + group] : 1.0f;
                UNROLL for (int i = 0; i < 2; i++) {
                    const float* lanes_at = place + i * (piece_bytes / 4);
                    f32p a;
                    if constexpr (zeros == Zeros::each) {
                        f32p zero = load<f32p>(lanes_at + table);
                        if (block.wide) a = __builtin_convertvector(sums[r][i] - __builtin_convertvector(zero, i32p) * total, f32p);
                        else a = fma_piece(-zero, set_piece(float(total)), __builtin_convertvector(sums[r][i], f32p));
                    } else {
                        a = __builtin_convertvector(sums[r][i], f32p);
                    }
                    if constexpr (scaled) a = a * scale;
                    float* to = c + r * 32 + i * (piece_bytes / 4);
                    f32p sum = fma_piece(a, load<f32p>(lanes_at), load<f32p>(to));
                    if constexpr (zeros != Zeros::one) sum = fma_piece(load<f32p>(lanes_at + 2 * table), set_piece(at.row_shifts[r * most_block_groups + group]), sum);
                    store(to, sum);
                }
            }
        }
    }
}

// Chunks that are taken at once: whole groups of them; 0 where groups do not come out even.
INLINE int block_chunks_of(const Matrix& w) {
    if (input_of(w.kind) != Input::int8 || w.channel_scales) return 8;
    int least = std::lcm(w.group, 64) / 64;
    return least > most_block_chunks ? 0 : least > 8 ? least : 8 / least * least;
}

// Calls run(R, row, tile) for rows [begin, end), `begin` being the first of a block.
template <class Core, class Run> INLINE void each_tile(const Rows& x, int begin, int end, int first_chunk, int chunks, uint8_t* inputs, Run run) {
    constexpr int most = Core::direct ? direct_rows : tile_rows;
    auto run_some = [&](auto R, int row) INLINE_LAMBDA {
        if constexpr (Core::direct) {
            run(R, row, Tile{x.at(row, first_chunk), size_t(x.height(row / block_rows)) * 64});
        } else {
            constexpr size_t row_bytes = size_t(Core::steps) * 4;
            for (int r = 0; r < R; r++) {
                const uint8_t* from = x.at(row + r, first_chunk);
                size_t step = size_t(x.height((row + r) / block_rows)) * 64;
                uint8_t* to = inputs + r * row_bytes;
                for (int i = 0; i < chunks; i++, from += step, to += R * row_bytes) Core::put_inputs(from, to);
            }
            run(R, row, Tile{inputs, R * row_bytes});
        }
    };
    while (begin < end) {
        int stop = Core::direct && begin + block_rows < end ? begin + block_rows : end;
        each_run<most>(stop - begin, [&](auto R, int row) INLINE_LAMBDA { run_some(R, begin + row); });
        begin = stop;
    }
}

// The scales of a block's groups in float32, zero points and offsets beside them.
NOINLINE void read_groups(const Matrix& w, int panel, int first, int count, Zeros zeros, const BlockScratch& at) {
    for (int group = 0; group < count; group++) {
        for (int half = 0; half < 2; half++) {
            size_t from = (size_t(panel) * w.groups + first + group) * 32 + 16 * half, to = size_t(group) * 32 + 16 * half;
            store(at.scales + to, group_scale(w, from));
            if (zeros == Zeros::one) continue;
            store(at.zeros + to, w.zeros ? to_f32(widen(load<u8x16>(w.zeros + from))) : set(float(w.zero_point)));
            store(at.offsets + to, w.offsets ? load<f32x16>(w.offsets + from) : f32x16{});
        }
    }
}

// The sums of the inputs of groups, times `factor`, and their scales where they have any: once for each tile and panel, so in loops
// that compilers make vectors of.
NOINLINE void read_row_groups(const Rows& x, int row, int count, int first, int num_groups, int halves, int factor, const BlockScratch& at) {
    for (int r = 0; r < count; r++) {
        int32_t* totals = at.row_totals + r * most_block_groups;
        const int32_t* sums = x.sums_of(row + r) + size_t(first) * halves;
        if (halves == 1) {
            for (int group = 0; group < num_groups; group++) totals[group] = factor * sums[group];
        } else {
            for (int group = 0; group < num_groups; group++) totals[group] = factor * sum_inputs(x, row + r, (first + group) * halves, halves);
        }
        float *scales = at.row_scales + r * most_block_groups, *shifts = at.row_shifts + r * most_block_groups;
        const float* given = x.scales + size_t(row + r) * x.num_groups + first;
        for (int group = 0; group < num_groups; group++) scales[group] = x.form.group ? given[group] : 1.0f;
        for (int group = 0; group < num_groups; group++) shifts[group] = float(totals[group]) * scales[group];
    }
}

// What becomes of the sums [count][32] of rows from `row` on: integers over all of K, or numbers.
template <bool whole> NOINLINE void finish_sums(const Matrix& w, const Rows& x, int panel, const Sink& sink, int row, int count, const uint8_t* sums) {
    if constexpr (whole) {
        Channels channels(w, panel);
        finish_rows(w, x, panel, sink, row, count, [&](int r) INLINE_LAMBDA {
            return channels(load<i32x16>(sums + r * 128), load<i32x16>(sums + r * 128 + 64), x.totals[row + r]);
        });
    } else {
        finish_rows(w, x, panel, sink, row, count, [&](int r) INLINE_LAMBDA {
            return Outputs{load<f32x16>(sums + r * 128), load<f32x16>(sums + r * 128 + 64)};
        });
    }
}

// Asks for weights that are read where they lie, a block ahead, tile by tile of the rows that the block before meets: a burst for all
// of it would fill every line buffer. Worth it where few rows meet a panel, such as those of an expert.
struct BlockAhead {
    const uint8_t* at;
    int lines;  // for a row
    INLINE BlockAhead(const Matrix& w, int panel, int first, int chunks, int num_rows)
        : at(w.codes + size_t(panel) * w.panel_bytes() + size_t(first + chunks) * 2048), lines((chunks * 32 + num_rows - 1) / num_rows) {}
    INLINE void ask(int rows) {
        for (int i = 0; i < rows * lines; i++, at += 64) __builtin_prefetch(at, 0, 2);
    }
};

template <class Core> static void multiply_channel_blocks(const Matrix& w, const Rows& x, int begin, int end, int panel, const Sink& sink, uint8_t* scratch) {
    BlockScratch at(scratch);
    for (int row = begin; row < end; row += pass_rows) {
        int num_rows = end - row < pass_rows ? end - row : pass_rows;
        bool asks_ahead = tile_bytes(w.kind) == 1024 && end - begin <= pass_rows;
        memset(at.sums, 0, size_t(num_rows) * 128);
        for (int first = 0; first < w.chunks; first += 8) {
            int chunks = w.chunks - first < 8 ? w.chunks - first : 8;
            const uint8_t* weights = Core::prepare(w, panel, first, chunks, at.weights);
            BlockAhead ahead(w, panel, first, chunks, num_rows);
            each_tile<Core>(x, row, row + num_rows, first, chunks, at.inputs, [&](auto R, int its_row, const Tile& tile) INLINE_LAMBDA {
                if (Core::direct && asks_ahead) ahead.ask(R);
                add_chunks<Core, R>(weights, tile, chunks, at.sums + size_t(its_row - row) * 128);
            });
        }
        finish_sums<Core::whole>(w, x, panel, sink, row, num_rows, at.sums);
    }
}

template <class Core, Zeros zeros, bool scaled>
static void multiply_group_blocks(const Matrix& w, const Rows& x, int begin, int end, int panel, const Sink& sink, uint8_t* scratch) {
    BlockScratch at(scratch);
    int per_block = block_chunks_of(w), halves = w.group / 32, block_groups = per_block * 64 / w.group;
    for (int row = begin; row < end; row += pass_rows) {
        int num_rows = end - row < pass_rows ? end - row : pass_rows;
        memset(at.sums, 0, size_t(num_rows) * 128);
        for (int first = 0, group = 0; group < w.groups; first += per_block, group += block_groups) {
            int chunks = w.chunks - first < per_block ? w.chunks - first : per_block;
            const uint8_t* weights = Core::prepare(w, panel, first, chunks, at.weights);
            GroupBlock block{w.groups - group < block_groups ? w.groups - group : block_groups, halves, w.group > 512};
            read_groups(w, panel, group, block.num_groups, zeros, at);
            each_tile<Core>(x, row, row + num_rows, first, chunks, at.inputs, [&](auto R, int its_row, const Tile& tile) INLINE_LAMBDA {
                read_row_groups(x, its_row, R, group, block.num_groups, halves, zeros == Zeros::one ? -w.zero_point : 1, at);
                add_groups<Core, R, zeros, scaled>(block, at, weights, tile, at.sums + size_t(its_row - row) * 128);
            });
        }
        finish_sums<false>(w, x, panel, sink, row, num_rows, at.sums);
    }
}

template <class Core> static void multiply_group_blocks(const Matrix& w, const Rows& x, int begin, int end, int panel, const Sink& sink, uint8_t* scratch) {
    bool without_zeros = !w.zeros && w.zero_point == 0;
    if (without_zeros && w.offsets && x.form.group) multiply_group_blocks<Core, Zeros::none, true>(w, x, begin, end, panel, sink, scratch);
    else if (!is_plain(w) && x.form.group) multiply_group_blocks<Core, Zeros::each, true>(w, x, begin, end, panel, sink, scratch);
    else if (!is_plain(w)) multiply_group_blocks<Core, Zeros::each, false>(w, x, begin, end, panel, sink, scratch);
    else if (x.form.group) multiply_group_blocks<Core, Zeros::one, true>(w, x, begin, end, panel, sink, scratch);
    else multiply_group_blocks<Core, Zeros::one, false>(w, x, begin, end, panel, sink, scratch);
}

// Multiplies rows [begin, end); the scratch has `BlockScratch::bytes`.
static void multiply_blocked(const Matrix& w, const Rows& x, int begin, int end, int panel, const Sink& sink, uint8_t* scratch) {
    if (w.kind == Kind::f32) return multiply_channel_blocks<Floats>(w, x, begin, end, panel, sink, scratch);
    if (input_of(w.kind) == Input::bf16) return multiply_channel_blocks<Halves>(w, x, begin, end, panel, sink, scratch);
    if (w.channel_scales) return multiply_channel_blocks<Integers>(w, x, begin, end, panel, sink, scratch);
    if (w.kind == Kind::int4 && !w.e2m1 && Integers::steps == 32) return multiply_group_blocks<Nibbles>(w, x, begin, end, panel, sink, scratch);
    multiply_group_blocks<Integers>(w, x, begin, end, panel, sink, scratch);
}

}  // namespace cloister::CLOISTER_ISA
#endif
