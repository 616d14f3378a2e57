// Gated delta nets inside a step (Yang et al. 2024, arXiv:2412.06464; Qwen3-Next), in recurrent form: a state goes from token to token, in
// prompts too, so that bits do not depend on how a sequence is cut into steps, nor on what of it are drafts. The arithmetic: delta_net.hpp;
// the states of the convolution: short_conv.cpp.
#include "program.hpp"
#include "scan.hpp"

namespace cloister {

namespace {

float* head_state(const ShortConv& conv, const DeltaHeads& heads, int block, int head) {
    return conv.state(block) + conv.window() + size_t(head) * heads.head_state();
}

}  // namespace

void Program::delta_net_block(const Layer& layer, const Batch& batch, const Normed& inputs, const Sink& sink) {
    const ShortConv& conv = *layer.short_conv;
    const DeltaNet& net = *layer.delta_net;
    const DeltaHeads& heads = net.heads;
    int num_tokens = batch.num_tokens;
    size_t values = heads.values(), channels = size_t(conv.size), stride = net.features(layer.qkv), steps_at = size_t(layer.qkv.panels) * panel_width;
    float* projected = (float*)qkv_.reserve(size_t(num_tokens) * stride * 4);  // z; q, k and v; b and a
    products_.clear();
    products_.push_back({&layer.qkv, inputs.rows, {Finish::store, projected, stride}});
    products_.push_back({&net.steps, inputs.other, {Finish::store, projected + steps_at, stride}});
    run_products("qkv");
    size_t taps = size_t(conv.kernel_size) * sizeof(float*), copies = size_t(most_draft_states_) * heads.head_state() * 4;
    reserve_scratch(std::max(taps, copies + kernels_.delta_scratch(heads)));
    float* convolved = (float*)queries_.reserve(size_t(num_tokens) * channels * 4);
    each_row("convolution", num_tokens, [&](int row, int thread) {
        const float** from = (const float**)scratch(thread);
        for (int j = 0; j < conv.kernel_size; j++) from[j] = conv_input(conv, projected + values, stride, row, conv.kernel_size - 1 - j);
        kernels_.convolve(from, conv.filters, conv.bias, conv.kernel_size, conv.size, net.activation, convolved + size_t(row) * channels);
    });
    float* mixed = (float*)mixed_.reserve(size_t(num_tokens) * values * 4);
    int num_sequences = int(span_starts_.size()) - 1, num_heads = heads.num_value_heads;
    phase("scan", num_sequences * num_heads, [&](int task, int thread) {
        int sequence = task / num_heads, head = task % num_heads;
        scan(batch, sequence, heads.head_state(), (float*)scratch(thread), [&](int block) { return head_state(conv, heads, block, head); },
             [&](int first, int count, float* state) {
                 kernels_.advance_delta(heads, head, convolved + size_t(first) * channels, channels, projected + size_t(first) * stride + steps_at, stride,
                                        count, state, mixed + size_t(first) * values, scratch(thread) + copies);
             });
    });
    Rows rows = shape_rows(inputs_, layer.output.form(), num_tokens, int(values));
    each_row("gated norm", num_tokens, [&](int row, int) {
        float* out = mixed + size_t(row) * values;
        for (size_t i = 0; i < values; i += size_t(heads.value_dim)) kernels_.norm(out + i, net.norm, norm_eps_, heads.value_dim, out + i);
        kernels_.gate(out, projected + size_t(row) * stride, int(values), true);
        kernels_.put_row(out, int(values), rows, row);
    });
    leave_states(conv, batch, projected + values, stride);
    product("output", layer.output, rows, sink);
}

// Advances the state in a block by an accepted draft: what leave_states kept of it is q, k and v, and at the end b and a.
void Program::accept_delta_net(const Layer& layer, const float* kept, int block) {
    const ShortConv& conv = *layer.short_conv;
    const DeltaHeads& heads = layer.delta_net->heads;
    size_t channels = size_t(conv.size);
    reserve_scratch(std::max(size_t(conv.kernel_size) * sizeof(float*), kernels_.delta_scratch(heads)));
    float *convolved = (float*)queries_.reserve(channels * 4), *out = (float*)mixed_.reserve(heads.values() * 4);
    const float** from = (const float**)scratch(0);
    for (int j = 0; j + 1 < conv.kernel_size; j++) from[j] = conv.state(block) + size_t(j) * channels;
    from[conv.kernel_size - 1] = kept;
    kernels_.convolve(from, conv.filters, conv.bias, conv.kernel_size, conv.size, layer.delta_net->activation, convolved);
    const float* steps = kept + conv.draft_size - 2 * size_t(heads.num_value_heads);
    phase("scan", heads.num_value_heads, [&](int head, int thread) {
        kernels_.advance_delta(heads, head, convolved, 0, steps, 0, 1, head_state(conv, heads, block, head), out, scratch(thread));
    });
}

}  // namespace cloister
