// Mamba 2 inside a step (Dao and Gu, arXiv:2405.21060), in recurrent form: a state goes from token to token, in prompts too, so that bits
// do not depend on how a sequence is cut into steps, nor on what of it are drafts. The arithmetic: mamba2.hpp; the states of the
// convolution: short_conv.cpp.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "program.hpp"
#include "scan.hpp"

namespace cloister {

namespace {

constexpr int scan_tokens = 16;  // at once: their B and C stay in the nearest cache

float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

// Advances one head's state by consecutive tokens. `convolved` is x, B and C of all heads, `dts` are of all heads too.
void advance_head(const Kernels& kernels, const Mamba2& mamba, int head, const float* convolved, size_t channels, const float* dts, size_t stride,
                  int num_tokens, float* state, float* out) {
    float steps[scan_tokens], decays[scan_tokens], rate = -std::exp(mamba.a_log[head]);
    Scan scan;
    scan.head_dim = mamba.head_dim;
    scan.d_state = mamba.d_state;
    scan.stride = channels;
    scan.steps = steps;
    scan.decays = decays;
    scan.skip = mamba.skip[head];
    scan.out_stride = mamba.inner();
    for (int first = 0; first < num_tokens; first += scan_tokens) {
        scan.num_tokens = std::min(scan_tokens, num_tokens - first);
        scan.x = convolved + size_t(first) * channels + size_t(head) * size_t(mamba.head_dim);
        scan.b = convolved + size_t(first) * channels + mamba.inner() + size_t(head / (mamba.num_heads / mamba.num_groups)) * size_t(mamba.d_state);
        scan.c = scan.b + size_t(mamba.num_groups) * size_t(mamba.d_state);
        scan.out = out + size_t(first) * mamba.inner() + size_t(head) * size_t(mamba.head_dim);
        for (int i = 0; i < scan.num_tokens; i++) {
            float dt = softplus(dts[size_t(first + i) * stride + size_t(head)] + mamba.dt_bias[head]);
            dt = dt < mamba.least_dt ? mamba.least_dt : dt > mamba.greatest_dt ? mamba.greatest_dt : dt;  // not a number stays so
            steps[i] = dt;
            decays[i] = std::exp(dt * rate);
        }
        kernels.scan(scan, state);
    }
}

float* head_state(const ShortConv& conv, const Mamba2& mamba, int block, int head) {
    return conv.state(block) + conv.window() + size_t(head) * mamba.head_state();
}

}  // namespace

void Program::mamba2_block(const Layer& layer, const Batch& batch, const Rows& inputs, const Sink& sink) {
    const ShortConv& conv = *layer.short_conv;
    const Mamba2& mamba = *layer.mamba2;
    int num_tokens = batch.num_tokens;
    size_t inner = mamba.inner(), channels = size_t(conv.size), stride = size_t(layer.qkv.panels) * panel_width;
    float* projected = (float*)qkv_.reserve(size_t(num_tokens) * stride * 4);  // gate; x, B and C; dt
    product("qkv", layer.qkv, inputs, {Finish::store, projected, stride});
    if (mamba.is_scaled()) scale_sections(mamba, projected, stride, num_tokens);
    reserve_scratch(std::max(size_t(conv.kernel_size) * sizeof(float*), size_t(most_draft_states_) * mamba.head_state() * 4));
    float* convolved = (float*)queries_.reserve(size_t(num_tokens) * channels * 4);
    each_row("convolution", num_tokens, [&](int row, int thread) {
        const float** from = (const float**)scratch(thread);
        for (int j = 0; j < conv.kernel_size; j++) from[j] = conv_input(conv, projected + inner, stride, row, conv.kernel_size - 1 - j);
        kernels_.convolve(from, conv.filters, conv.bias, conv.kernel_size, conv.size, mamba.activation, convolved + size_t(row) * channels);
    });
    float* mixed = (float*)mixed_.reserve(size_t(num_tokens) * inner * 4);
    int num_sequences = int(span_starts_.size()) - 1;
    phase("scan", num_sequences * mamba.num_heads, [&](int task, int thread) {
        int sequence = task / mamba.num_heads, head = task % mamba.num_heads;
        scan(batch, sequence, mamba.head_state(), (float*)scratch(thread), [&](int block) { return head_state(conv, mamba, block, head); },
             [&](int first, int count, float* state) {
                 advance_head(kernels_, mamba, head, convolved + size_t(first) * channels, channels, projected + size_t(first) * stride + inner + channels,
                              stride, count, state, mixed + size_t(first) * inner);
             });
    });
    Rows rows = shape_rows(inputs_, layer.output.form(), num_tokens, int(inner));
    each_row("gated norm", num_tokens, [&](int row, int) {
        float* out = mixed + size_t(row) * inner;
        const float* gates = projected + size_t(row) * stride;
        size_t length = inner / size_t(mamba.num_groups);
        if (!mamba.norms_before_gate) kernels_.gate(out, gates, int(inner), true);
        for (size_t i = 0; mamba.norm && i < inner; i += length) kernels_.norm(out + i, mamba.norm + i, norm_eps_, int(length), out + i);
        if (mamba.norms_before_gate) kernels_.gate(out, gates, int(inner), true);
        kernels_.put_row(out, int(inner), rows, row);
    });
    leave_states(conv, batch, projected + inner, stride);
    product("output", layer.output, rows, sink);
}

void Program::scale_sections(const Mamba2& mamba, float* projected, size_t stride, int num_tokens) {
    int inner = int(mamba.inner()), group = mamba.num_groups * mamba.d_state;
    const int sizes[] = {inner, inner, group, group, mamba.num_heads};
    each_row("scale", num_tokens, [&](int row, int) {
        float* at = projected + size_t(row) * stride;
        for (int i = 0; i < 5; at += sizes[i++])
            if (mamba.scales[i] != 1) kernels_.bend(at, sizes[i], mamba.scales[i], 0);
    });
}

// Advances the state in a block by an accepted draft: what leave_states kept of it is x, B, C and dt.
void Program::accept_mamba2(const Layer& layer, const float* kept, int block) {
    const ShortConv& conv = *layer.short_conv;
    const Mamba2& mamba = *layer.mamba2;
    size_t channels = size_t(conv.size);
    reserve_scratch(size_t(conv.kernel_size) * sizeof(float*));
    float *convolved = (float*)queries_.reserve(channels * 4), *out = (float*)mixed_.reserve(mamba.inner() * 4);
    const float** from = (const float**)scratch(0);
    for (int j = 0; j + 1 < conv.kernel_size; j++) from[j] = conv.state(block) + size_t(j) * channels;
    from[conv.kernel_size - 1] = kept;
    kernels_.convolve(from, conv.filters, conv.bias, conv.kernel_size, conv.size, mamba.activation, convolved);
    phase("scan", mamba.num_heads, [&](int head, int) {
        advance_head(kernels_, mamba, head, convolved, 0, kept + channels, 0, 1, head_state(conv, mamba, block, head), out);
    });
}

}  // namespace cloister
