// The kernels of one instruction set, behind a table of functions: chosen once, at start, by what the processor has.
#pragma once
#include <algorithm>
#include <atomic>
#include <utility>

#include "layout.hpp"

namespace cloister {

enum class KVKind : int { f32 = 0, bf16 = 1, int8 = 2, int4 = 3, kivi2 = 4 };

// The cache of one layer. A block holds, for each KV head, K then V (layout in attention.hpp), then their scales; latents are K alone.
// With a recent window the newest keys are bfloat16 in blocks of another cache, and the others are read as `kind` says.
struct Cache {
    uint8_t* base = nullptr;
    size_t block_bytes = 0;
    int block_size = 0;
    KVKind kind = KVKind::bf16;
    uint8_t* recent_base = nullptr;
    size_t recent_bytes = 0;  // of a block
    int recent_window = 0;    // 0: none

    Cache recent() const { return {recent_base, recent_bytes, block_size, KVKind::bf16}; }
    // The first position whose key a query reads from `recent`: the first of a block, whatever was computed with it.
    int first_recent(int position) const { return std::max(0, position - recent_window + 1) / block_size * block_size; }
};

constexpr int kv_group_dims = 64;
constexpr int kivi_group = 32;  // keys of one channel, or channels of one value, that share a scale (backends/kivi.py)

// What attention of one layer computes.
struct AttentionShape {
    int num_heads = 0, num_kv_heads = 0, head_dim = 0, padded_dim = 0;
    int window = 0;  // 0: none
    float softcap = 0;  // scores become softcap * tanh(scores / softcap); 0: none
    int value_dim = 0;  // not 0: one KV head, whose value is that many first numbers of its key (latent attention)
    bool chunked = false;  // the window is a chunk: it begins at a multiple of its length, not behind the query
    const float* sinks = nullptr;  // [num_heads] logits that take part in the softmax and have no values, or null

    // Keys and values of few bits have a scale for each group of dimensions, and are rotated in blocks of no more before they are
    // rounded (rows.hpp); queries are rotated too, and outputs back.
    int kv_groups() const { return (padded_dim + kv_group_dims - 1) / kv_group_dims; }
    int kv_rotation(KVKind kind) const {
        if (kind != KVKind::int8 && kind != KVKind::int4) return 0;
        return head_dim % 64 == 0 ? 64 : head_dim % 16 == 0 ? 16 : 0;
    }
    int group() const { return num_heads / num_kv_heads; }
    // The first position that a query sees.
    int first_seen(int position) const {
        if (!window) return 0;
        return chunked ? position - position % window : std::max(0, position - window + 1);
    }
    int values() const { return value_dim ? value_dim : head_dim; }
    int padded_values() const { return value_dim ? (value_dim + 31) / 32 * 32 : padded_dim; }
};

// A node of a token tree. The slots of its ancestors in this step, the oldest first, and its own begin at `path`.
struct Node {
    int path, position;
};

// Results of one split of keys that several sequences share, computed for all of them at once (ChunkAttention, Ye et al. 2024): where
// those of a sequence's first row begin, for the first KV head.
struct SharedSplit {
    const float* at;
    size_t head_stride;
};

// How tokens weigh documents that were encoded separately (APE, Yang et al. 2025, section 4): scores of their keys, at [first, end), are
// divided by a temperature, and what they add up to is raised to `power`, which is scale * temperature.
struct DocumentWeights {
    int first = 0, end = 0;
    float inverse_temperature = 1, power = 1;
};

// One sequence of a step.
struct Sequence {
    const int32_t* table = nullptr;  // blocks: of each entry one for each group of layers
    int num_groups = 1, first_block = 0;  // the number of the first block of the group whose layer is computed
    int first_entry = 0, empty_block = 0;  // entries before this one are behind the window: an empty block stands for them
    int recent_table = 0, first_recent_block = 0, first_recent_entry = 0, empty_recent_block = 0;  // the same of the newest keys' cache
    int first_token = 0, num_tokens = 0, first_position = 0;
    // Of a token tree, whose keys from `first_position` on do not lie where their positions say; else null.
    const Node* nodes = nullptr;     // [num_tokens]
    const int32_t* paths = nullptr;  // of all nodes, one after the other
    const int32_t* last_seen = nullptr;  // [num_tokens] positions, or null: a token sees none after its own
    const SharedSplit* shared = nullptr;  // [num_shared] of the layers whose tasks are listed
    int num_shared = 0;                   // splits that are computed with other sequences: the first ones
    const DocumentWeights* documents = nullptr;  // or null: all keys weigh the same

    // A block of the layer's cache.
    int block(int entry) const { return entry < first_entry ? empty_block : table[size_t(entry) * size_t(num_groups)] - first_block; }
    // The sequence as the cache of its newest keys has it.
    Sequence recent() const {
        Sequence other = *this;
        other.table += recent_table;
        other.first_block = first_recent_block;
        other.first_entry = first_recent_entry;
        other.empty_block = empty_recent_block;
        return other;
    }
    int position(int token) const { return nodes ? nodes[token].position : first_position + token; }
    int seen(int token) const { return last_seen ? last_seen[token] : position(token); }
    // Tokens [begin, end): the first of their positions, and the one after the last that they see.
    std::pair<int, int> range(int begin, int end) const {
        int low = position(begin), high = seen(end - 1);  // which is all, where they stand in a row
        for (int token = begin; nodes && token < end; token++) {
            low = std::min(low, nodes[token].position);
            high = std::max(high, seen(token));
        }
        return {low, high + 1};
    }
};

// Attention of rows [begin, end) of one sequence and one KV head; a row is (token, head of the group). If several sequences share
// the splits, `rows` lists the rows of all: (token of the step, head of the group) as one number. They see all keys of the splits.
struct AttentionTask {
    int sequence = 0, kv_head = 0, begin = 0, end = 0;
    const int32_t* rows = nullptr;  // or null
    int first_split = 0, last_split = 0;  // computed here, inclusive
    float* partial = nullptr;             // where results of single splits go, or null: this task has all splits
    double cost = 0;
};

// How one token is chosen from a row of logits. Python writes it (backends/base.py, DRAW), field for field.
struct Draw {
    float temperature;  // 0: the most likely token
    int32_t row;
    int64_t top_k;
    double top_p, min_p;
    uint64_t seed;
    int64_t index, position;

    bool truncates() const { return top_k > 0 || top_p < 1 || min_p > 0; }
};

// How a token chooses the experts of a mixture (backends/spec.py, MoeSpec): scores are a softmax over all experts or a sigmoid of
// each, the highest of score + correction take the token, and their scores are its weights. Of equal ones the lower number wins.
struct Routing {
    int num_experts = 0, num_chosen = 1;
    bool renormalize = true, sigmoid = false;
    const float* correction = nullptr;  // [num_experts], or null
    int num_groups = 1, num_chosen_groups = 1, num_group_scores = 1;  // of groups, the best by the sum of their highest are chosen from
    float scale = 1;  // of the weights
};

// One head of Mamba 2 and the consecutive tokens that advance its state.
struct Scan {
    int head_dim = 0, d_state = 0, num_tokens = 0;
    const float *x = nullptr, *b = nullptr, *c = nullptr;  // of the first token; those of the next are `stride` further
    size_t stride = 0;
    const float *steps = nullptr, *decays = nullptr;  // [num_tokens]
    float skip = 0;
    float* out = nullptr;  // [head_dim] of the first token
    size_t out_stride = 0;
};
// The heads of a gated delta net (backends/spec.py, GatedDeltaNetSpec): [query heads][key heads][value heads] in a row, and the state of
// each value head, [value_dim][key_dim].
struct DeltaHeads {
    int num_key_heads = 0, num_value_heads = 0, key_dim = 0, value_dim = 0;
    const float *a_log = nullptr, *dt_bias = nullptr;  // [num_value_heads]
    size_t keys() const { return size_t(num_key_heads) * size_t(key_dim); }
    size_t values() const { return size_t(num_value_heads) * size_t(value_dim); }
    size_t head_state() const { return size_t(value_dim) * size_t(key_dim); }
};
constexpr int most_delta_dim = 256;  // of a key
constexpr int most_streams = 64;     // of a token
// How numbers lie that are not packed.
enum class NumberType : int { f32 = 0, bf16 = 1, f16 = 2 };

constexpr int draw_group = 256;  // neighbouring tokens that are drawn together first
inline int num_draw_groups(int length) { return (length + draw_group - 1) / draw_group; }

struct Kernels {
    const char* name;

    // Multiplies row blocks [begin, end) of x with one panel of w.
    void (*multiply)(const Matrix& w, const Rows& x, int begin, int end, int panel, const Sink& sink, uint8_t* scratch);
    size_t (*multiply_scratch)(const Matrix& w);

    // RMS norm of one row of float32; `out` may be `row`.
    void (*norm)(const float* row, const float* weight, float eps, int length, float* out);
    // Layer norm of one row; `out` may be `row`, `bias` may be null.
    void (*layer_norm)(const float* row, const float* weight, const float* bias, float eps, int length, float* out);
    // to += scale * from.
    void (*add_scaled)(const float* from, float scale, int length, float* to);
    // Multiplies by `scale`, then bends to softcap * tanh(x / softcap) unless that is 0.
    void (*bend)(float* values, int length, float scale, float softcap);
    // Turns one token's router outputs into scores and chooses experts: their numbers and weights, the first choice first.
    // `group_scores` [num_groups] is written to.
    void (*choose)(float* scores, float* group_scores, const Routing& routing, int32_t* experts, float* weights);
    // Writes one row of inputs as `rows.form` says: rounds to bfloat16, or to int8 with scales and sums. Zeros fill the last chunk.
    void (*put_row)(const float* row, int length, Rows& rows, int index);
    void (*put_wide_row)(const uint16_t* row, int length, Rows& rows, int index);

    // Rotates the first 2 * half values of each head of one row in place: pairs (d, d + half).
    void (*rotate)(float* heads, int num_heads, int head_dim, int half, const float* cos, const float* sin);
    // Writes queries [num_heads][padded_dim] of one token, scaled: bfloat16, or float32 with a float32 cache.
    void (*put_queries)(const float* heads, const AttentionShape& shape, float scale, KVKind kind, uint8_t* out);
    void (*put_keys)(const float* keys, const float* values, const AttentionShape& shape, const Cache& cache, int block, int slot);
    // Packs a block of the recent cache, all of whose keys are there, into block `to`.
    void (*pack_block)(const AttentionShape& shape, const Cache& cache, int from, int to);
    // Copies what `put_keys` wrote, bit for bit; a slot of block b is b * block_size more here.
    void (*move_keys)(const AttentionShape& shape, const Cache& cache, int from, int to);

    void (*attend)(const AttentionTask& task, const Sequence& sequence, const AttentionShape& shape, const Cache& cache,
                   const uint8_t* queries, float* out, size_t out_stride, uint8_t* scratch);
    // Joins the partial results of all splits of a task's rows.
    void (*join)(const AttentionTask& task, const Sequence& sequence, const AttentionShape& shape, KVKind kind, const float* partial,
                 int num_splits, float* out, size_t out_stride, uint8_t* scratch);
    size_t (*attend_scratch)(const AttentionShape& shape);

    // Writes what becomes of the stored outputs [panels * 32] of one row where `sink` gates or activates: the same bits as at once.
    void (*bend_outputs)(const Matrix& w, const float* outputs, int row, const Sink& sink);

    // Reads one row of a packed matrix (an embedding) as float32.
    void (*read_row)(const Matrix& w, int row, float* out);
    // The place of the largest of `length` numbers, the lowest among equal ones; -1 when one is not finite.
    int (*find_best)(const float* values, int length);

    // Writes the largest logit of groups [first, last) of a row; returns whether all are finite. With `barred`, minus infinity
    // passes: the token is not to be chosen.
    bool (*find_peaks)(const float* logits, int length, int first, int last, bool barred, float* peaks);
    // Writes a row with minus infinity where `mask` has no bit, and its peaks as above; returns whether all it read are finite.
    bool (*mask_peaks)(const float* from, float* to, const uint32_t* mask, int length, int first, int last, float* peaks);
    // Chooses a token of a row whose peaks are known; -1 where there is none to choose.
    int (*draw)(const float* logits, const float* peaks, int length, const Draw& draw, uint8_t* scratch);
    size_t (*draw_scratch)(int length, const Draw& draw);

    // One row of a causal convolution, activated: the sum of inputs[j] * filters[j] over [kernel_size][size], the oldest position first, and
    // `bias`, unless that is null.
    void (*convolve)(const float* const* inputs, const float* filters, const float* bias, int kernel_size, int size, Activation activation, float* out);
    // values *= sigmoid(gates), or gates * sigmoid(gates) with `times_gate`.
    void (*gate)(float* values, const float* gates, int length, bool times_gate);
    // Advances the state of one value head by tokens whose convolved rows are `stride` apart, and writes its part of rows of
    // `heads.values()`. `steps` is [num_value_heads] of b and of a, `step_stride` apart.
    void (*advance_delta)(const DeltaHeads& heads, int head, const float* convolved, size_t stride, const float* steps, size_t step_stride,
                          int num_tokens, float* state, float* out, uint8_t* scratch);
    size_t (*delta_scratch)(const DeltaHeads& heads);
    // For each token of a head of Mamba 2: state = decay state + step x b, out = state c + skip x. The layout of the state: mamba2.hpp.
    void (*scan)(const Scan& scan, float* state);

    // out[i] = (rows[i] . x) * scale, rows [num_rows][length].
    void (*dot_rows)(const float* rows, const float* x, int num_rows, int length, float scale, float* out);
    // Each stream [num_streams][length] of a token gains weights[its number][i] * streams[i], summed in the order of i.
    void (*predict_streams)(float* streams, const float* weights, int num_streams, int length);
    // Stream j gains (row - streams[active]) * weights[j].
    void (*correct_streams)(float* streams, const float* row, const float* weights, int active, int num_streams, int length);
    float (*mean_square)(const float* row, int length);
    void (*multiply_by)(float* values, const float* others, int length);
    void (*activate_row)(float* values, Activation activation, int length);
    // Outputs of a product with gates and what they multiply, 16 by 16 in turn: gates become what they exceed the mean of all `length`
    // by, less so many deviations, and at least 0.
    void (*keep_largest)(float* outputs, int length, float deviations);
    void (*read_numbers)(const uint8_t* from, NumberType type, int length, float* out);
};

// Counts steps. What a thread knows of its tile registers holds for one step only: between two, other code may use them.
extern std::atomic<uint64_t> step_number;

constexpr int split_keys = 256;
constexpr int task_rows = 256;

// The tables that this build has, best first; null-terminated. Whether the processor can run one: `cpu.hpp`.
extern const Kernels kernels_scalar;
#if defined(__x86_64__)
extern const Kernels kernels_avx2, kernels_avxvnni, kernels_avx512, kernels_vnni, kernels_bf16, kernels_amx;
#elif defined(__aarch64__)
extern const Kernels kernels_neon;
#endif

// Floats of one split's result for one row: the values, then the maximum and the sum.
inline size_t partial_row(const AttentionShape& shape) { return size_t(shape.padded_values()) + 16; }

// Bytes of a block of one layer's cache.
inline size_t kv_block_bytes(const AttentionShape& shape, KVKind kind, int block_size) {
    size_t even = size_t(block_size + 1) / 2 * 2, dim = size_t(shape.padded_dim);
    if (shape.value_dim) return (dim * size_t(block_size) * (kind == KVKind::f32 ? 4 : 2) + 63) / 64 * 64;
    size_t head = 0;
    switch (kind) {
        case KVKind::f32: head = 8 * dim * size_t(block_size); break;
        case KVKind::bf16: head = 2 * dim * (size_t(block_size) + even); break;
        case KVKind::int8: head = dim * (size_t(block_size) + even) + 8 * size_t(shape.kv_groups()) * size_t(block_size); break;
        case KVKind::int4: head = dim * size_t(block_size) + dim / 2 * size_t(block_size) + 12 * size_t(shape.kv_groups()) * size_t(block_size); break;
        case KVKind::kivi2: head = dim * size_t(block_size) / 4 * 3; break;
    }
    return (head * size_t(shape.num_kv_heads) + 63) / 64 * 64;
}

}  // namespace cloister
