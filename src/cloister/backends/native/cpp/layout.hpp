// How packed weights and the inputs of a product lie in memory. The same layout serves every instruction set.
//
// A product meets K in chunks: 64 bytes of a row of inputs (16 float32, 32 bfloat16 or 64 int8). Weights come in panels of 32
// outputs; a panel holds, chunk after chunk, two tiles of 16 outputs. A tile has 16 rows of 64 bytes, and a row holds for each of
// its 16 outputs the 4 bytes (1 float32, 2 bfloat16, 4 int8) that meet the same 4 bytes of the inputs. Int4 tiles take half of
// that: the low halves of row r are row r, the high halves are row r + 8. Four bits that meet bfloat16 (w4a16) take a quarter: row r
// is 16 bytes, the low halves are codes of the first 8 outputs (two inputs of one, two of the next), the high halves of the others.
#pragma once
#include <cstddef>
#include <cstdint>

namespace cloister {

enum class Kind : int { f32 = 0, bf16 = 1, int8 = 2, int4 = 3, qoq = 4, w4a16 = 5 };

// What the inputs of a product with such weights must be.
enum class Input : int { f32 = 0, bf16 = 1, int8 = 2 };

inline Input input_of(Kind kind) {
    if (kind == Kind::f32) return Input::f32;
    return kind == Kind::int8 || kind == Kind::int4 || kind == Kind::qoq ? Input::int8 : Input::bf16;
}
inline int chunk_length(Input input) { return input == Input::f32 ? 16 : input == Input::bf16 ? 32 : 64; }
inline int chunk_length(Kind kind) { return chunk_length(input_of(kind)); }

// How the inputs of a product are written. In int8 they have one scale for each row, or one for each row and group of the weights;
// blocks of them may be rotated first, as the weights were that they meet (backends/tensors.py, `rotate_blocks`).
struct InputForm {
    Input type = Input::bf16;
    int group = 0;     // inputs that share a scale; 0: all of a row
    int rotation = 0;  // 128, 64, 16, or 0 for none

    bool operator==(const InputForm& other) const { return type == other.type && group == other.group && rotation == other.rotation; }
    bool operator!=(const InputForm& other) const { return !(*this == other); }
};
inline int tile_bytes(Kind kind) { return kind == Kind::w4a16 ? 256 : kind == Kind::int4 || kind == Kind::qoq ? 512 : 1024; }

constexpr int panel_width = 32;
constexpr int block_rows = 16;
constexpr int sum_length = 32;  // inputs that share a sum, for zero points: a group is one or more of them

// One packed matrix; everything it points at lives in memory that Python keeps.
struct Matrix {
    Kind kind = Kind::bf16;
    int outputs = 0, inputs = 0;
    int panels = 0, chunks = 0;
    int group = 0, groups = 0;              // inputs that share a scale, and how many such; 0 without groups
    const uint8_t* codes = nullptr;         // [panels][chunks][2][tile]
    const float* channel_scales = nullptr;  // [panels][32]: int8 without groups, and qoq
    const void* scales = nullptr;           // [panels][groups][32] float16, float32, or one byte: half of an E8M0 or E4M3 number
    int scale_bytes = 2;
    const float* output_scales = nullptr;   // [panels][32] of sums over all of K, or null; scales of one byte beside them are E4M3
    const uint8_t* zeros = nullptr;         // [panels][groups][32], or null for zero_point everywhere
    const float* offsets = nullptr;         // [panels][groups][32], or null
    const uint8_t* group_scales = nullptr;  // [panels][groups][32]: qoq
    const float* bias = nullptr;            // [panels][32], or null
    int zero_point = 0;
    bool group_inputs = false;              // inputs have a scale for each group too
    int rotation = 0;                       // of the inputs
    bool e2m1 = false;                      // codes of int4 and w4a16 are floats of 4 bits, whose values here are twice theirs

    bool has_e4m3_scales() const { return scale_bytes == 1 && output_scales; }
    InputForm form() const { return {input_of(kind), group_inputs ? group : 0, rotation}; }
    size_t panel_bytes() const { return size_t(chunks) * 2 * tile_bytes(kind); }
};

// The inputs of a product: blocks of 16 rows (the last has what is left), each [chunks][rows of the block][64 bytes].
struct Rows {
    uint8_t* data = nullptr;
    float* scales = nullptr;   // [num_rows][num_groups], int8 only
    int32_t* totals = nullptr; // [num_rows], int8 only: sums of all codes
    int32_t* sums = nullptr;   // [num_rows][chunks * 2], int8 only: sums of 32 codes
    int num_rows = 0, chunks = 0;
    InputForm form;
    int num_groups = 1;  // that have scales

    int height(int block) const {
        int left = num_rows - block * block_rows;
        return left < block_rows ? left : block_rows;
    }
    uint8_t* block(int block) const { return data + size_t(block) * block_rows * chunks * 64; }
    uint8_t* at(int row, int chunk) const {
        int b = row / block_rows;
        return block(b) + (size_t(chunk) * height(b) + row % block_rows) * 64;
    }
    int32_t* sums_of(int row) const { return sums + size_t(row) * chunks * 2; }
    // `count` rows from `first` on, in blocks of their own: what is written through them is read through them.
    Rows slice(int first, int count) const {
        return {data + size_t(first) * chunks * 64, scales + size_t(first) * num_groups, totals + first, sums_of(first), count, chunks, form, num_groups};
    }
};

enum class Finish : int { store = 0, add = 1, glu = 2, activate = 3 };
enum class Activation : int { silu = 0, gelu = 1, gelu_tanh = 2, relu = 3, relu2 = 4 };

// gpt-oss gates so, in place of an activation: g * sigmoid(alpha g) * (u + 1), g at most `limit`, u in [-limit, limit]; limit 0: no.
struct Clipping {
    float alpha = 0, limit = 0;
};

// What becomes of a finished tile of a product.
struct Sink {
    Finish finish = Finish::store;
    float* out = nullptr;       // store, add: [num_rows][stride]
    size_t stride = 0;
    Activation activation = Activation::silu;
    Rows* next = nullptr;       // glu, activate: inputs of the next product, where they need no scale
    Input next_input = Input::bf16;
    uint16_t* wide = nullptr;   // glu, activate: bfloat16 [num_rows][stride], where they do
    float scale = 1;            // store, add: of the outputs; glu: of the gate
    Clipping clipping = {};     // glu
};

}  // namespace cloister
