// Latent attention inside a step (DeepSeek-V2, arXiv:2405.04434, section 2.1.2), in absorbed form: each head's query becomes one that
// meets latents, and the latents that it mixes become its value. Prefill is computed so too: an answer then does not depend on how
// its prompt was cut.
#include <cstring>

#include "program.hpp"

namespace cloister {

// Calls write(head, its rows, token) for each token and head, and multiplies each head's rows with a matrix of its own: outputs
// [num_tokens][num_heads][padded outputs].
template <class Write> void Program::multiply_heads(const char* name, const std::vector<Matrix>& matrices, int num_tokens, float* out, Write&& write) {
    size_t num_heads = matrices.size(), width = size_t(matrices[0].panels) * panel_width;
    Rows all = shape_rows(gathered_, matrices[0].form(), num_tokens * int(num_heads), matrices[0].inputs);
    nexts_.resize(std::max(nexts_.size(), num_heads));
    products_.clear();
    for (size_t h = 0; h < num_heads; h++) {
        nexts_[h] = all.slice(int(h) * num_tokens, num_tokens);
        products_.push_back({&matrices[h], nexts_[h], {Finish::store, out + h * width, num_heads * width}});
    }
    each_row("round", num_tokens, [&](int token, int) {
        for (size_t h = 0; h < num_heads; h++) write(h, nexts_[h], token);
    });
    run_products(name);
}

// What the first projection gave, [num_tokens][stride] of queries or their latent and then the latent of keys, becomes queries that
// meet latents, and latents in the cache.
void Program::place_latents(const Layer& layer, const Batch& batch, float* first, size_t stride) {
    const AttentionShape& shape = layer.shape;
    const Latent& latent = *layer.latent;
    int num_tokens = batch.num_tokens, rank = shape.value_dim, turned = shape.head_dim - rank, dim = latent.plain_dim + turned;
    size_t heads = size_t(shape.num_heads), query_stride = stride;
    float* queries = first;
    if (latent.query_rank) {
        Rows rows = shape_rows(next_inputs_, latent.queries.form(), num_tokens, latent.query_rank);
        each_row("norm", num_tokens, [&](int row, int) {
            float* at = first + size_t(row) * stride;
            kernels_.norm(at, latent.query_norm, latent.eps, latent.query_rank, at);
            kernels_.put_row(at, latent.query_rank, rows, row);
        });
        query_stride = size_t(latent.queries.panels) * panel_width;
        queries = (float*)latent_.reserve(size_t(num_tokens) * query_stride * 4);
        product("queries", latent.queries, rows, {Finish::store, queries, query_stride});
        adapt_latent_queries(layer, first, stride, queries, query_stride);
    }
    size_t width = size_t(latent.absorb[0].panels) * panel_width;
    float* absorbed = (float*)mixed_.reserve(size_t(num_tokens) * heads * width * 4);  // until attention writes there
    multiply_heads("absorb", latent.absorb, num_tokens, absorbed, [&](size_t head, Rows& rows, int token) {
        kernels_.put_row(queries + size_t(token) * query_stride + head * size_t(dim), latent.plain_dim, rows, token);
    });

    size_t number_bytes = layer.cache.kind == KVKind::f32 ? 4 : 2, query_bytes = size_t(shape.padded_dim) * number_bytes;
    uint8_t* placed = queries_.reserve(size_t(num_tokens) * heads * query_bytes);
    AttentionShape one = shape;
    one.num_heads = 1;
    reserve_scratch(size_t(2 * shape.head_dim) * 4);
    const Rope* rope = layer.rope < 0 ? nullptr : &ropes[size_t(layer.rope)];
    each_row("rope", num_tokens, [&](int row, int thread) {
        float *query = queries + size_t(row) * query_stride, *key = first + size_t(row) * stride + latent.key_column, *whole = (float*)scratch(thread);
        if (rope) {
            int half = int(rope->inv_freq.size());
            const float* cos = angles(*rope, batch, row, whole + shape.head_dim);
            kernels_.rotate(query + latent.plain_dim, shape.num_heads, dim, half, cos, cos + half);
            kernels_.rotate(key + rank, 1, turned, half, cos, cos + half);
        }
        kernels_.norm(key, latent.key_norm, latent.eps, rank, key);
        for (size_t h = 0; h < heads; h++) {
            std::memcpy(whole, absorbed + (size_t(row) * heads + h) * width, size_t(rank) * 4);
            std::memcpy(whole + rank, query + h * size_t(dim) + latent.plain_dim, size_t(turned) * 4);
            kernels_.put_queries(whole, one, layer.scale, layer.cache.kind, placed + (size_t(row) * heads + h) * query_bytes);
        }
        int slot = slot_of_[size_t(row)], size = layer.cache.block_size;
        kernels_.put_keys(key, nullptr, shape, layer.cache, sequences_[size_t(sequence_of_[size_t(row)])].block(slot / size), slot % size);
    });
}

// Returns the values of all heads, [num_tokens][num_heads * value_dim], of the latents that they mixed.
const float* Program::expand_latents(const Layer& layer, int num_tokens) {
    const Latent& latent = *layer.latent;
    size_t heads = latent.expand.size(), width = size_t(latent.expand[0].panels) * panel_width, values = size_t(latent.expand[0].outputs);
    int rank = layer.shape.value_dim;
    const float* mixed = mixed_.get<float>();
    float* out = (float*)latent_.reserve(size_t(num_tokens) * heads * width * 4);
    multiply_heads("expand", latent.expand, num_tokens, out, [&](size_t head, Rows& rows, int token) {
        kernels_.put_row(mixed + (size_t(token) * heads + head) * size_t(rank), rank, rows, token);
    });
    if (width == values) return out;
    for (size_t to = 1; to < size_t(num_tokens) * heads; to++) std::memmove(out + to * values, out + to * width, values * 4);
    return out;
}

}  // namespace cloister
