#include "pack.hpp"

#include <cmath>
#include <cstring>
#include <vector>

namespace cloister {

namespace {

float half_to_float(uint16_t h) {
    int exponent = h >> 10 & 31, fraction = h & 1023;
    float magnitude = exponent == 0    ? std::ldexp(float(fraction), -24)
                      : exponent == 31 ? (fraction ? NAN : INFINITY)
                                       : std::ldexp(float(fraction + 1024), exponent - 25);
    return h >> 15 ? -magnitude : magnitude;
}

uint16_t to_bf16(float f) {
    uint32_t b;
    memcpy(&b, &f, 4);
    if ((b & 0x7fffffffu) > 0x7f800000u) return 0x7fc0;
    return uint16_t((b + 0x7fffu + ((b >> 16) & 1u)) >> 16);
}

float value(Source source, const void* data, size_t i) {
    if (source == Source::f32) return static_cast<const float*>(data)[i];
    uint16_t raw = static_cast<const uint16_t*>(data)[i];
    if (source == Source::f16) return half_to_float(raw);
    uint32_t bits = uint32_t(raw) << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

// One row's 64 bytes of one chunk, as the inputs meet them.
void read_chunk(Kind kind, Source source, const void* data, size_t start, int count, uint8_t* out) {
    memset(out, 0, 64);
    if (source == Source::codes) {
        memcpy(out, static_cast<const uint8_t*>(data) + start, size_t(count));
    } else if (kind == Kind::bf16 && source == Source::bf16) {
        memcpy(out, static_cast<const uint16_t*>(data) + start, size_t(count) * 2);
    } else {
        for (int i = 0; i < count; i++) {
            float v = value(source, data, start + size_t(i));
            if (kind == Kind::f32) {
                memcpy(out + 4 * i, &v, 4);
            } else {
                uint16_t rounded = to_bf16(v);
                memcpy(out + 2 * i, &rounded, 2);
            }
        }
    }
}

}  // namespace

void pack(Pool& pool, Kind kind, Source source, const void* data, int num_rows, int inputs, const int32_t* places, uint8_t* codes) {
    int length = chunk_length(kind), chunks = (inputs + length - 1) / length, size = tile_bytes(kind);
    // Rows of one tile are one task, since outputs of w4a16 share bytes.
    std::vector<int> starts;
    for (int row = 0; row < num_rows; row++)
        if (row == 0 || places[row] / 16 != places[row - 1] / 16) starts.push_back(row);
    starts.push_back(num_rows);
    pool.run(int(starts.size()) - 1, [&](int strip, int) {
        uint8_t row_bytes[64];
        int end = starts[size_t(strip) + 1];
        for (int chunk = 0; chunk < chunks; chunk++) {
            for (int row = starts[size_t(strip)]; row < end; row++) {
                int place = places[row], start = chunk * length;
                int count = inputs - start < length ? inputs - start : length;
                read_chunk(kind, source, data, size_t(row) * inputs + size_t(start), count, row_bytes);
                uint8_t* tile = codes + (size_t(place / 32) * chunks * 2 + size_t(chunk) * 2 + size_t(place % 32 / 16)) * size;
                uint8_t* lane = tile + place % 16 * 4;
                if (kind == Kind::w4a16) {
                    for (int i = 0; i < 32; i++) {
                        int at = place % 16 * 2 + i % 2;
                        tile[i / 2 * 16 + at % 16] |= uint8_t(row_bytes[i] << (at / 16 * 4));
                    }
                } else if (size == 1024) {
                    for (int r = 0; r < 16; r++) memcpy(lane + r * 64, row_bytes + r * 4, 4);
                } else {
                    for (int r = 0; r < 8; r++)
                        for (int j = 0; j < 4; j++) lane[r * 64 + j] = uint8_t(row_bytes[r * 4 + j] | row_bytes[(r + 8) * 4 + j] << 4);
                }
            }
        }
    });
}

}  // namespace cloister
