// Products on AMX tiles (Intel SDM, volume 1, chapter 18): 32 rows by 32 outputs at a time. An accumulator tile takes chunk after
// chunk, so an output's bits do not depend on how many rows its tile has. Included by multiply.hpp.
#pragma once
#if defined(__AMX_TILE__)

namespace cloister::CLOISTER_ISA {

// Tiles 0-3 accumulate, 4 and 5 hold inputs of the upper and lower rows, 6 and 7 weights of 16 outputs each. Loading a
// configuration costs hundreds of cycles, so a thread does it only when it needs another one than before.
static void configure_tiles(int top, int bottom, int depth) {
    struct Known { uint64_t step; int top, bottom, depth; };
    static thread_local Known known = {~uint64_t(0), 0, 0, 0};
    uint64_t step = step_number.load(std::memory_order_relaxed);
    if (known.step == step && known.top == top && known.bottom == bottom && known.depth == depth) return;
    known = {step, top, bottom, depth};
    struct alignas(64) { uint8_t palette, start, reserved[14]; uint16_t bytes[16]; uint8_t rows[16]; } config = {};
    uint8_t upper = uint8_t(top), lower = uint8_t(bottom ? bottom : 1), weights = uint8_t(depth);
    config.palette = 1;
    uint8_t rows[8] = {upper, upper, lower, lower, upper, lower, weights, weights};
    for (int i = 0; i < 8; i++) {
        config.rows[i] = rows[i];
        config.bytes[i] = i == 4 || i == 5 ? uint16_t(depth * 4) : 64;
    }
    // not the intrinsic: GCC 12 tells the compiler only about the first 8 of the 64 bytes
    asm volatile("ldtilecfg %0" ::"m"(config));
}

INLINE void clear_tiles() { _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3); }

// Groups with one zero point for all are multiplied signed, this much taken off their codes beforehand: then nothing else need come off.
INLINE uint8_t signed_middle(const Matrix& w) {
    if (w.channel_scales || !is_plain(w)) return 0;
    if (w.kind == Kind::int8) return w.zero_point == 128 ? 128 : 0;
    return w.kind != Kind::int4 ? 0 : w.e2m1 ? e2m1_zero : 8;
}

// What the weights of a tile are; inputs in int8 are signed.
enum class Tiles { floats, bytes, signed_bytes };

template <Tiles kind, bool lower> INLINE void multiply_tiles() {
    if constexpr (kind == Tiles::floats) {
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if constexpr (lower) { _tile_dpbf16ps(2, 5, 6); _tile_dpbf16ps(3, 5, 7); }
    } else if constexpr (kind == Tiles::signed_bytes) {
        _tile_dpbssd(0, 4, 6);
        _tile_dpbssd(1, 4, 7);
        if constexpr (lower) { _tile_dpbssd(2, 5, 6); _tile_dpbssd(3, 5, 7); }
    } else {
        _tile_dpbsud(0, 4, 6);
        _tile_dpbsud(1, 4, 7);
        if constexpr (lower) { _tile_dpbsud(2, 5, 6); _tile_dpbsud(3, 5, 7); }
    }
}

INLINE void store_tiles(void* c, bool lower) {
    uint8_t* p = (uint8_t*)c;
    _tile_stored(0, p, 128);
    _tile_stored(1, p + 64, 128);
    if (lower) { _tile_stored(2, p + 2048, 128); _tile_stored(3, p + 2048 + 64, 128); }
}

// Two blocks of rows of x: where they begin, and how far it is to the next chunk.
struct BlockPair {
    const uint8_t *upper, *lower;
    int top, bottom;

    BlockPair(const Rows& x, int block, int end)
        : upper(x.block(block)), lower(nullptr), top(x.height(block)), bottom(0) {
        if (block + 1 < end) { lower = x.block(block + 1); bottom = x.height(block + 1); }
    }
    int num_rows() const { return top + bottom; }  // stored tiles have them one below the other: a lower block has 16 above it
};

// All chunks of a pair with tiles that lie ready one after the other; weights that come from memory are asked for beforehand.
template <Tiles kind, bool lower>
INLINE void multiply_run(const BlockPair& rows, const uint8_t* b, int chunks, bool from_memory) {
    size_t upper_step = size_t(rows.top) * 64, lower_step = size_t(rows.bottom) * 64;
    const uint8_t *upper = rows.upper, *under = rows.lower;
    for (int chunk = 0; chunk < chunks; chunk++, b += 2048, upper += upper_step) {
        if (from_memory) prefetch_ahead(b + page, 2048);
        _tile_loadd(6, b, 64);
        _tile_loadd(4, upper, 64);
        _tile_loadd(7, b + 1024, 64);
        if constexpr (lower) {
            _tile_loadd(5, under, 64);
            under += lower_step;
        }
        multiply_tiles<kind, lower>();
    }
}

// One chunk, or one half of it, of tiles that are unpacked as they come.
template <Tiles kind, bool lower> INLINE void multiply_piece(const BlockPair& rows, const uint8_t* tiles, int chunk, int half) {
    _tile_loadd(6, tiles + 512 * half, 64);
    _tile_loadd(7, tiles + 1024 + 512 * half, 64);
    _tile_loadd(4, rows.upper + size_t(chunk) * rows.top * 64 + 32 * half, 64);
    if constexpr (lower) _tile_loadd(5, rows.lower + size_t(chunk) * rows.bottom * 64 + 32 * half, 64);
    multiply_tiles<kind, lower>();
}

// All chunks of a pair with tiles that are unpacked as they come.
template <Tiles kind, bool lower> INLINE void multiply_packed_run(const Matrix& w, int panel, const BlockPair& rows) {
    alignas(64) uint8_t scratch[2048];
    const uint8_t* codes = w.codes + size_t(panel) * w.panel_bytes();
    int step = 2 * tile_bytes(w.kind);
    for (int chunk = 0; chunk < w.chunks; chunk++) {
        prefetch_ahead(codes + size_t(chunk) * step + page, step);
        const uint8_t* tiles = kind == Tiles::floats ? widened_tiles(w, panel, codes, chunk, scratch) : integer_tiles(w, panel, codes, chunk, scratch);
        multiply_piece<kind, lower>(rows, tiles, chunk, 0);
    }
}

static void multiply_float_tiles(const Matrix& w, const Rows& x, int begin, int end, int panel, const Sink& sink) {
    alignas(64) float c[32][32];
    const uint8_t* codes = w.codes + size_t(panel) * w.panel_bytes();
    for (int block = begin; block < end; block += 2) {
        BlockPair rows(x, block, end);
        configure_tiles(rows.top, rows.bottom, 16);
        clear_tiles();
        bool packed = w.kind == Kind::w4a16;
        if (packed && rows.bottom) multiply_packed_run<Tiles::floats, true>(w, panel, rows);
        else if (packed) multiply_packed_run<Tiles::floats, false>(w, panel, rows);
        else if (rows.bottom) multiply_run<Tiles::floats, true>(rows, codes, w.chunks, block == begin);
        else multiply_run<Tiles::floats, false>(rows, codes, w.chunks, block == begin);
        store_tiles(c, rows.bottom);
        finish_rows(w, x, panel, sink, block * 16, rows.num_rows(), [&](int r) INLINE_LAMBDA {
            return Outputs{load<f32x16>(c[r]), load<f32x16>(c[r] + 16)};
        });
    }
}

// Int8 over all of K, its tiles ready: int8, or an unpacked panel.
static void multiply_channel_tiles(const Matrix& w, const Rows& x, int begin, int end, int panel, const Sink& sink) {
    alignas(64) int32_t sums[32][32];
    const uint8_t* codes = w.codes + size_t(panel) * w.panel_bytes();
    for (int block = begin; block < end; block += 2) {
        BlockPair rows(x, block, end);
        configure_tiles(rows.top, rows.bottom, 16);
        clear_tiles();
        if (rows.bottom) multiply_run<Tiles::bytes, true>(rows, codes, w.chunks, block == begin);
        else multiply_run<Tiles::bytes, false>(rows, codes, w.chunks, block == begin);
        store_tiles(sums, rows.bottom);
        Channels channels(w, panel);
        finish_rows(w, x, panel, sink, block * 16, rows.num_rows(), [&](int r) INLINE_LAMBDA {
            return channels(load<i32x16>(sums[r]), load<i32x16>(sums[r] + 16), x.totals[block * 16 + r]);
        });
    }
}

// QoQ for few rows: integers over all of K, unpacked chunk by chunk.
static void multiply_packed_tiles(const Matrix& w, const Rows& x, int begin, int end, int panel, const Sink& sink) {
    alignas(64) int32_t sums[32][32];
    BlockPair rows(x, begin, end);
    configure_tiles(rows.top, rows.bottom, 16);
    clear_tiles();
    if (rows.bottom) multiply_packed_run<Tiles::bytes, true>(w, panel, rows);
    else multiply_packed_run<Tiles::bytes, false>(w, panel, rows);
    store_tiles(sums, rows.bottom);
    Channels channels(w, panel);
    finish_rows(w, x, panel, sink, begin * 16, rows.num_rows(), [&](int r) INLINE_LAMBDA {
        return channels(load<i32x16>(sums[r]), load<i32x16>(sums[r] + 16), x.totals[begin * 16 + r]);
    });
}

// Adds a group's integers to the float32 sums of some rows; this loop takes longer than the tiles do, so nothing in it branches.
template <Zeros zeros>
INLINE void fold_group(const Matrix& w, const Rows& x, int panel, int group, int halves, int row, int count, const int32_t (*sums)[32], float (*c)[32]) {
    static const float one = 1;
    Group<zeros> scales(w, panel, group);
    const float* scale = x.form.group ? x.scales + size_t(row) * x.num_groups + group : &one;
    size_t next_scale = x.form.group ? x.num_groups : 0;
    const int32_t* inputs = x.sums_of(row) + size_t(group) * halves;
    for (int r = 0; r < count; r++, scale += next_scale, inputs += x.chunks * 2) {
        int32_t total = 0;
        if constexpr (zeros != Zeros::none) for (int i = 0; i < halves; i++) total += inputs[i];
        Outputs y = scales.add({load<f32x16>(c[r]), load<f32x16>(c[r] + 16)}, load<i32x16>(sums[r]), load<i32x16>(sums[r] + 16), total, *scale);
        store(c[r], y.low);
        store(c[r] + 16, y.high);
    }
}

// Groups with scales of their own: each group's integers are folded into float32 sums while the tiles take the next group.
template <Zeros zeros>
static void multiply_group_tiles(const Matrix& w, const Rows& x, int begin, int end, int panel, const Sink& sink) {
    alignas(64) uint8_t scratch[2048];
    alignas(64) int32_t sums[2][32][32];
    alignas(64) float c[32][32];
    const uint8_t* codes = w.codes + size_t(panel) * w.panel_bytes();
    constexpr Tiles kind = zeros == Zeros::none ? Tiles::signed_bytes : Tiles::bytes;
    uint8_t middle = zeros == Zeros::none ? signed_middle(w) : 0;
    bool by_half = w.group % 64 != 0;
    int step = 2 * tile_bytes(w.kind), halves = w.group / 32;
    for (int block = begin; block < end; block += 2) {
        BlockPair rows(x, block, end);
        configure_tiles(rows.top, rows.bottom, by_half ? 8 : 16);
        memset(c, 0, sizeof c);
        const uint8_t* tiles = nullptr;
        auto multiply_group = [&](int group) INLINE_LAMBDA {
            clear_tiles();
            for (int half = group * halves, last = half + halves; half < last; half += by_half ? 1 : 2) {
                int chunk = half / 2;
                if (half % 2 == 0) {
                    if (block == begin) prefetch_ahead(codes + size_t(chunk) * step + page, step);
                    tiles = integer_tiles(w, panel, codes, chunk, scratch, middle);
                }
                if (rows.bottom) multiply_piece<kind, true>(rows, tiles, chunk, half % 2);
                else multiply_piece<kind, false>(rows, tiles, chunk, half % 2);
            }
            store_tiles(sums[group % 2], rows.bottom);
        };
        multiply_group(0);
        for (int group = 0; group < w.groups; group++) {
            if (group + 1 < w.groups) multiply_group(group + 1);
            if (halves == 1) fold_group<zeros>(w, x, panel, group, 1, block * 16, rows.num_rows(), sums[group % 2], c);
            else fold_group<zeros>(w, x, panel, group, halves, block * 16, rows.num_rows(), sums[group % 2], c);
        }
        finish_rows(w, x, panel, sink, block * 16, rows.num_rows(), [&](int r) INLINE_LAMBDA {
            return Outputs{load<f32x16>(c[r]), load<f32x16>(c[r] + 16)};
        });
    }
}

static void multiply_integer_tiles(const Matrix& w, const Rows& x, int begin, int end, int panel, const Sink& sink) {
    if (!w.channel_scales && is_plain(w) && (signed_middle(w) || w.zero_point == 0)) return multiply_group_tiles<Zeros::none>(w, x, begin, end, panel, sink);
    if (!w.channel_scales && is_plain(w)) return multiply_group_tiles<Zeros::one>(w, x, begin, end, panel, sink);
    if (!w.channel_scales) return multiply_group_tiles<Zeros::each>(w, x, begin, end, panel, sink);
    if (w.kind == Kind::int8) return multiply_channel_tiles(w, x, begin, end, panel, sink);
    for (int block = begin; block < end; block += 2) multiply_packed_tiles(w, x, block, end < block + 2 ? end : block + 2, panel, sink);
}

}  // namespace cloister::CLOISTER_ISA
#endif
