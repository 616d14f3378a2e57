// Mamba 2 inside a step (Dao and Gu, arXiv:2405.21060), in recurrent form: a state goes from token to token, in prompts too, so that bits
// do not depend on how a sequence is cut into steps, nor on what of it are drafts. The convolution and its states: short_conv.cpp.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "program.hpp"

namespace cloister {

namespace {

float silu(float x) { return x / (1.0f + std::exp(-x)); }

float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

// s = decay s + step b; returns s c, summed in 16 lanes.
float advance_row(float* __restrict s, const float* __restrict b, const float* __restrict c, int length, float decay, float step) {
    float sums[16] = {};
    int k = 0;
    for (; k + 16 <= length; k += 16) {
        for (int lane = 0; lane < 16; lane++) {
            s[k + lane] = s[k + lane] * decay + step * b[k + lane];
            sums[lane] += s[k + lane] * c[k + lane];
        }
    }
    for (int lane = 0; k < length; k++, lane++) {
        s[k] = s[k] * decay + step * b[k];
        sums[lane] += s[k] * c[k];
    }
    for (int half = 8; half; half /= 2)
        for (int lane = 0; lane < half; lane++) sums[lane] += sums[lane + half];
    return sums[0];
}

// Advances one head's state [head_dim][d_state] by a token. `convolved` is x, B and C of all heads, `dt` is of this one.
void advance_head(const Mamba2& mamba, int head, const float* convolved, float dt, float* state, float* out) {
    int rows = mamba.head_dim, length = mamba.d_state;
    const float* x = convolved + size_t(head) * size_t(rows);
    const float* b = convolved + mamba.inner() + size_t(head / (mamba.num_heads / mamba.num_groups)) * size_t(length);
    const float* c = b + size_t(mamba.num_groups) * size_t(length);
    dt = softplus(dt + mamba.dt_bias[head]);
    dt = dt < mamba.least_dt ? mamba.least_dt : dt > mamba.greatest_dt ? mamba.greatest_dt : dt;  // not a number stays so
    float decay = std::exp(dt * -std::exp(mamba.a_log[head]));
    for (int row = 0; row < rows; row++)
        out[row] = advance_row(state + size_t(row) * size_t(length), b, c, length, decay, x[row] * dt) + x[row] * mamba.skip[head];
}

// One token's convolved and activated inputs; `input(back)` lies so many positions before it.
template <class Input> void convolve(const ShortConv& conv, Input&& input, float* out) {
    for (int j = 0; j < conv.kernel_size; j++) {
        const float *from = input(conv.kernel_size - 1 - j), *filter = conv.filters + size_t(j) * size_t(conv.size);
        if (j == 0) for (int c = 0; c < conv.size; c++) out[c] = from[c] * filter[c];
        else for (int c = 0; c < conv.size; c++) out[c] += from[c] * filter[c];
    }
    for (int c = 0; conv.bias && c < conv.size; c++) out[c] += conv.bias[c];
    for (int c = 0; c < conv.size; c++) out[c] = silu(out[c]);
}

float* head_state(const ShortConv& conv, const Mamba2& mamba, int block, int head) {
    return conv.state(block) + conv.window() + size_t(head) * mamba.head_state();
}

}  // namespace

void Program::mamba2_block(const Layer& layer, const Batch& batch, const Rows& inputs) {
    const ShortConv& conv = *layer.short_conv;
    const Mamba2& mamba = *layer.mamba2;
    int num_tokens = batch.num_tokens;
    size_t inner = mamba.inner(), channels = size_t(conv.size), stride = size_t(layer.qkv.panels) * panel_width;
    float* projected = (float*)qkv_.reserve(size_t(num_tokens) * stride * 4);  // gate; x, B and C; dt
    product("qkv", layer.qkv, inputs, {Finish::store, projected, stride});
    float* convolved = (float*)queries_.reserve(size_t(num_tokens) * channels * 4);
    each_row("convolution", num_tokens, [&](int row, int) {
        convolve(conv, [&](int back) { return conv_input(conv, projected + inner, stride, row, back); }, convolved + size_t(row) * channels);
    });
    float* mixed = (float*)mixed_.reserve(size_t(num_tokens) * inner * 4);
    reserve_scratch(size_t(most_draft_states_) * mamba.head_state() * 4);
    int num_sequences = int(span_starts_.size()) - 1;
    phase("scan", num_sequences * mamba.num_heads, [&](int task, int thread) {
        int sequence = task / mamba.num_heads, head = task % mamba.num_heads;
        scan_head(layer, batch, sequence, head, projected + inner + channels, stride, convolved, mixed, (float*)scratch(thread));
    });
    Rows rows = shape_rows(inputs_, layer.output.form(), num_tokens, int(inner));
    each_row("gated norm", num_tokens, [&](int row, int) {
        float* out = mixed + size_t(row) * inner;
        const float* gate = projected + size_t(row) * stride;
        auto apply_gate = [&] { for (size_t i = 0; i < inner; i++) out[i] *= silu(gate[i]); };
        size_t length = inner / size_t(mamba.num_groups);
        if (!mamba.norms_before_gate) apply_gate();
        for (size_t i = 0; mamba.norm && i < inner; i += length) kernels_.norm(out + i, mamba.norm + i, norm_eps_, int(length), out + i);
        if (mamba.norms_before_gate) apply_gate();
        kernels_.put_row(out, int(inner), rows, row);
    });
    leave_states(conv, batch, projected + inner, stride);
    product("output", layer.output, rows, branch_sink(layer, layer.attention_post_norm, num_tokens));
    join_branch(layer, layer.attention_post_norm, num_tokens);
}

// Advances one head by the tokens of a sequence. Known tokens change states in place; drafts change copies, which are forgotten: one of a
// chain, one for each node of a tree.
void Program::scan_head(const Layer& layer, const Batch& batch, int sequence, int head, const float* dts, size_t stride, const float* convolved,
                        float* mixed, float* copies) {
    const ShortConv& conv = *layer.short_conv;
    const Mamba2& mamba = *layer.mamba2;
    size_t size = mamba.head_state(), at = size_t(head) * size_t(mamba.head_dim);
    auto advance = [&](int token, float* state) {
        advance_head(mamba, head, convolved + size_t(token) * size_t(conv.size), dts[size_t(token) * stride + size_t(head)], state,
                     mixed + size_t(token) * mamba.inner() + at);
    };
    int first_draft = -1;
    for (int i = span_starts_[size_t(sequence)]; i < span_starts_[size_t(sequence) + 1]; i++) {
        const StateSpan& span = batch.state_spans[i];
        const float* before = head_state(conv, mamba, span.read, head);
        if (span.written >= 0) {
            float* state = head_state(conv, mamba, span.written, head);
            if (span.written != span.read) std::memcpy(state, before, size * 4);
            for (int token = span.first; token < span.end; token++) advance(token, state);
            continue;
        }
        for (int token = span.first; token < span.end; token++) {
            if (first_draft < 0) first_draft = draft_of_[size_t(token)];
            int parent = before_[size_t(token)], parent_draft = parent < 0 ? -1 : draft_of_[size_t(parent)];
            float* state = batch.parents ? copies + size_t(draft_of_[size_t(token)] - first_draft) * size : copies;
            if (parent_draft < 0) std::memcpy(state, before, size * 4);
            else if (batch.parents) std::memcpy(state, copies + size_t(parent_draft - first_draft) * size, size * 4);
            advance(token, state);
        }
    }
}

// Advances the state in a block by an accepted draft: what leave_states kept of it is x, B, C and dt.
void Program::accept_mamba2(const Layer& layer, const float* kept, int block) {
    const ShortConv& conv = *layer.short_conv;
    const Mamba2& mamba = *layer.mamba2;
    size_t channels = size_t(conv.size);
    float *convolved = (float*)queries_.reserve(channels * 4), *out = (float*)mixed_.reserve(mamba.inner() * 4);
    const float* window = conv.state(block);
    convolve(conv, [&](int back) { return back ? window + size_t(conv.kernel_size - 1 - back) * channels : kept; }, convolved);
    phase("scan", mamba.num_heads, [&](int head, int) {
        advance_head(mamba, head, convolved, kept[channels + size_t(head)], head_state(conv, mamba, block, head), out + size_t(head) * size_t(mamba.head_dim));
    });
}

}  // namespace cloister
