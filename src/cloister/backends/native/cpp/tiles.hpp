// Products on AMX tiles (Intel SDM, volume 1, chapter 18): 32 rows by 32 outputs at a time. An accumulator tile takes chunk after
// chunk, so an output's bits do not depend on how many rows its tile has. Included by multiply.hpp.
#pragma once
#if defined(__AMX_TILE__)

namespace cloister::CLOISTER_ISA {

INLINE void finish_row(const Matrix& w, const Rows& x, int row, int panel, f32x16 low, f32x16 high, const Sink& sink);
INLINE int32_t sum_inputs(const Rows& x, int row, int first, int count);
INLINE f32x16 scale_channel(const Matrix& w, int panel, int half, i32x16 acc, int32_t total);
INLINE f32x16 group_scale(const Matrix& w, size_t at);
INLINE f32x16 fold(const Matrix& w, size_t at, f32x16 scale, i32x16 acc, int32_t total, f32x16 c);
INLINE const uint8_t* integer_tiles(const Matrix& w, int panel, const uint8_t* codes, int chunk, uint8_t* scratch);
INLINE void prefetch_ahead(const uint8_t* p, int bytes);

// Tiles 0-3 accumulate, 4 and 5 hold inputs of the upper and lower rows, 6 and 7 weights of 16 outputs each.
INLINE void configure_tiles(int top, int bottom, int depth) {
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

template <bool floats> INLINE void multiply_tiles(bool lower) {
    if constexpr (floats) {
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (lower) { _tile_dpbf16ps(2, 5, 6); _tile_dpbf16ps(3, 5, 7); }
    } else {
        _tile_dpbsud(0, 4, 6);
        _tile_dpbsud(1, 4, 7);
        if (lower) { _tile_dpbsud(2, 5, 6); _tile_dpbsud(3, 5, 7); }
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
    INLINE void load(int chunk, int offset) const {
        _tile_loadd(4, upper + size_t(chunk) * top * 64 + offset, 64);
        if (bottom) _tile_loadd(5, lower + size_t(chunk) * bottom * 64 + offset, 64);
    }
};

static void multiply_bf16_tiles(const Matrix& w, const Rows& x, int begin, int end, int panel, const Sink& sink) {
    alignas(64) float c[32][32];
    const uint8_t* codes = w.codes + size_t(panel) * w.panel_bytes();
    for (int block = begin; block < end; block += 2) {
        BlockPair rows(x, block, end);
        configure_tiles(rows.top, rows.bottom, 16);
        clear_tiles();
        const uint8_t* b = codes;
        for (int chunk = 0; chunk < w.chunks; chunk++, b += 2048) {
            if (block == begin) prefetch_ahead(b + 4096, 2048);
            _tile_loadd(6, b, 64);
            _tile_loadd(7, b + 1024, 64);
            rows.load(chunk, 0);
            multiply_tiles<true>(rows.bottom);
        }
        store_tiles(c, rows.bottom);
        for (int r = 0; r < rows.top + rows.bottom; r++) {
            int at = r < rows.top ? r : r - rows.top + 16;
            finish_row(w, x, block * 16 + at, panel, load<f32x16>(c[at]), load<f32x16>(c[at] + 16), sink);
        }
    }
}

static void multiply_integer_tiles(const Matrix& w, const Rows& x, int begin, int end, int panel, const Sink& sink) {
    alignas(64) uint8_t scratch[2048];
    alignas(64) int32_t sums[32][32];
    alignas(64) float c[32][32];
    const uint8_t* codes = w.codes + size_t(panel) * w.panel_bytes();
    bool grouped = !w.channel_scales, by_half = grouped && w.group % 64;
    int step = 2 * tile_bytes(w.kind);
    for (int block = begin; block < end; block += 2) {
        BlockPair rows(x, block, end);
        int num_rows = rows.top + rows.bottom;
        configure_tiles(rows.top, rows.bottom, by_half ? 8 : 16);
        clear_tiles();
        if (grouped) memset(c, 0, sizeof c);
        int halves = grouped ? w.group / 32 : 2 * w.chunks;
        int units = grouped ? w.groups : 1;  // sums that are folded one by one
        const uint8_t* tiles = nullptr;
        for (int unit = 0, half = 0; unit < units; unit++) {
            int end_half = half + halves;
            while (half < end_half) {
                int chunk = half / 2;
                if (half % 2 == 0) {
                    if (block == begin) prefetch_ahead(codes + size_t(chunk) * step + 4096, step);
                    tiles = integer_tiles(w, panel, codes, chunk, scratch);
                }
                int offset = half % 2;
                _tile_loadd(6, tiles + 512 * offset, 64);
                _tile_loadd(7, tiles + 1024 + 512 * offset, 64);
                rows.load(chunk, 32 * offset);
                multiply_tiles<false>(rows.bottom);
                half += by_half ? 1 : 2;
            }
            store_tiles(sums, rows.bottom);
            if (!grouped) break;
            clear_tiles();
            size_t at = (size_t(panel) * w.groups + unit) * 32;
            f32x16 low = group_scale(w, at), high = group_scale(w, at + 16);
            for (int r = 0; r < num_rows; r++) {
                int i = r < rows.top ? r : r - rows.top + 16;
                int32_t total = sum_inputs(x, block * 16 + i, half - halves, halves);
                store(c[i], fold(w, at, low, load<i32x16>(sums[i]), total, load<f32x16>(c[i])));
                store(c[i] + 16, fold(w, at + 16, high, load<i32x16>(sums[i] + 16), total, load<f32x16>(c[i] + 16)));
            }
        }
        for (int r = 0; r < num_rows; r++) {
            int i = r < rows.top ? r : r - rows.top + 16, row = block * 16 + i;
            if (grouped) {
                finish_row(w, x, row, panel, load<f32x16>(c[i]), load<f32x16>(c[i] + 16), sink);
            } else {
                int32_t total = sum_inputs(x, row, 0, 2 * w.chunks);
                finish_row(w, x, row, panel, scale_channel(w, panel, 0, load<i32x16>(sums[i]), total),
                           scale_channel(w, panel, 1, load<i32x16>(sums[i] + 16), total), sink);
            }
        }
    }
}

}  // namespace cloister::CLOISTER_ISA
#endif
