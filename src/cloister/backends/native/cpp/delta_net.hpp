// Gated delta nets (Yang et al. 2024, arXiv:2412.06464) in recurrent form. No row of a state depends on
// another: a row stays in registers over many tokens. Its bits do not depend on how many those are.
#pragma once
#include "kernels.hpp"
#include "rows.hpp"
#include "simd.hpp"

namespace cloister::CLOISTER_ISA {

constexpr int delta_tokens = 16;  // at once: their keys and queries stay in the nearest cache

// Registers of 16 that a row of a state takes: there is a kernel for each of these numbers.
INLINE int delta_registers(int dim) {
    int n = 1;
    while (16 * n < dim) n *= 2;
    return n;
}

// Some tokens as one head reads them. Keys and queries are [delta_tokens][16 * registers], zeros after `key_dim`.
struct DeltaScratch {
    float *keys, *queries;
    float *decays, *betas, *products;  // products: of key and query
    static size_t bytes(int dim) { return 4 * size_t(delta_tokens) * size_t(32 * delta_registers(dim) + 3); }
    DeltaScratch(uint8_t* at, int dim) {
        size_t width = size_t(16 * delta_registers(dim)) * delta_tokens;
        keys = (float*)at;
        queries = keys + width;
        decays = queries + width;
        betas = decays + delta_tokens;
        products = betas + delta_tokens;
    }
};

// R rows of a head's state s. With n = decay s, a token writes s = n + step key^T, where step = beta (value - n key), and its output is
// s query: n query + step (key query), so that both products read the state of the token before.
template <int R, int N> INLINE void advance_delta_rows(const DeltaScratch& tokens, int num_tokens, const float* values, size_t value_stride, int dim,
                                                       float* state, float* out, size_t out_stride) {
    f32x16 s[R][N];
    UNROLL for (int i = 0; i < R; i++)
        UNROLL for (int k = 0; k < N; k++) s[i][k] = load_some(state + size_t(i) * size_t(dim) + 16 * k, dim - 16 * k);
    for (int token = 0; token < num_tokens; token++) {
        const float *key = tokens.keys + size_t(token) * 16 * N, *query = tokens.queries + size_t(token) * 16 * N;
        f32x16 known[R][2] = {}, found[R][2] = {};
        UNROLL for (int k = 0; k < N; k++) {
            f32x16 its_key = load<f32x16>(key + 16 * k), its_query = load<f32x16>(query + 16 * k);
            UNROLL for (int i = 0; i < R; i++) {
                known[i][k % 2] = fma(s[i][k], its_key, known[i][k % 2]);
                found[i][k % 2] = fma(s[i][k], its_query, found[i][k % 2]);
            }
        }
        f32x16 decay = set(tokens.decays[token]), steps[R];
        UNROLL for (int i = 0; i < R; i++) {
            float step = (values[size_t(token) * value_stride + size_t(i)] - tokens.decays[token] * sum(known[i][0] + known[i][1])) * tokens.betas[token];
            out[size_t(token) * out_stride + size_t(i)] = tokens.decays[token] * sum(found[i][0] + found[i][1]) + step * tokens.products[token];
            steps[i] = set(step);
        }
        UNROLL for (int k = 0; k < N; k++) {
            f32x16 its_key = load<f32x16>(key + 16 * k);
            UNROLL for (int i = 0; i < R; i++) s[i][k] = fma(steps[i], its_key, s[i][k] * decay);
        }
    }
    UNROLL for (int i = 0; i < R; i++)
        UNROLL for (int k = 0; k < N; k++) store_some(state + size_t(i) * size_t(dim) + 16 * k, s[i][k], dim - 16 * k);
}

template <int N> NOINLINE void advance_delta_head(const DeltaScratch& tokens, int num_tokens, const float* values, size_t value_stride,
                                                  const DeltaHeads& heads, float* state, float* out, size_t out_stride) {
    int row = 0, dim = heads.key_dim;
    for (; row + 2 <= heads.value_dim; row += 2)
        advance_delta_rows<2, N>(tokens, num_tokens, values + row, value_stride, dim, state + size_t(row) * size_t(dim), out + row, out_stride);
    if (row < heads.value_dim)
        advance_delta_rows<1, N>(tokens, num_tokens, values + row, value_stride, dim, state + size_t(row) * size_t(dim), out + row, out_stride);
}

// Writes x / |x| * factor, and zeros after it.
INLINE void put_of_length(const float* x, int dim, float factor, float* to) {
    f32x16 squares = {};
    for (int k = 0; k < dim; k += 16) {
        f32x16 v = load_some(x + k, dim - k);
        squares = fma(v, v, squares);
    }
    factor /= std::sqrt(sum(squares) + 1e-6f);
    for (int k = 0; k < delta_registers(dim); k++) store(to + 16 * k, load_some(x + 16 * k, dim - 16 * k) * factor);
}

INLINE void put_token(const DeltaHeads& heads, int head, const float* convolved, const float* steps, int index, const DeltaScratch& to) {
    int dim = heads.key_dim, width = 16 * delta_registers(dim), key_head = head / (heads.num_value_heads / heads.num_key_heads);
    const float *query = convolved + size_t(key_head) * size_t(dim), *key = query + heads.keys();
    float *its_key = to.keys + index * width, *its_query = to.queries + index * width;
    put_of_length(query, dim, 1.0f / std::sqrt(float(dim)), its_query);
    put_of_length(key, dim, 1.0f, its_key);
    f32x16 product = {};
    for (int k = 0; k < width; k += 16) product = fma(load<f32x16>(its_key + k), load<f32x16>(its_query + k), product);
    to.products[index] = sum(product);
    float step = steps[heads.num_value_heads + head] + heads.dt_bias[head];
    step = step > 20.0f ? step : std::log1p(std::exp(step));
    to.decays[index] = std::exp(step * -std::exp(heads.a_log[head]));
    to.betas[index] = 1.0f / (1.0f + std::exp(-steps[head]));
}

static void advance_delta(const DeltaHeads& heads, int head, const float* convolved, size_t stride, const float* steps, size_t step_stride,
                          int num_tokens, float* state, float* out, uint8_t* memory) {
    DeltaScratch tokens(memory, heads.key_dim);
    const float* values = convolved + 2 * heads.keys() + size_t(head) * size_t(heads.value_dim);
    size_t out_stride = heads.values();
    out += size_t(head) * size_t(heads.value_dim);
    for (int first = 0; first < num_tokens; first += delta_tokens) {
        int count = num_tokens - first < delta_tokens ? num_tokens - first : delta_tokens;
        for (int i = 0; i < count; i++) put_token(heads, head, convolved + size_t(first + i) * stride, steps + size_t(first + i) * step_stride, i, tokens);
        const float* from = values + size_t(first) * stride;
        float* to = out + size_t(first) * out_stride;
        switch (delta_registers(heads.key_dim)) {
            case 1: advance_delta_head<1>(tokens, count, from, stride, heads, state, to, out_stride); break;
            case 2: advance_delta_head<2>(tokens, count, from, stride, heads, state, to, out_stride); break;
            case 4: advance_delta_head<4>(tokens, count, from, stride, heads, state, to, out_stride); break;
            case 8: advance_delta_head<8>(tokens, count, from, stride, heads, state, to, out_stride); break;
            default: advance_delta_head<16>(tokens, count, from, stride, heads, state, to, out_stride);
        }
    }
}

static size_t delta_scratch(const DeltaHeads& heads) { return DeltaScratch::bytes(heads.key_dim); }

}  // namespace cloister::CLOISTER_ISA
