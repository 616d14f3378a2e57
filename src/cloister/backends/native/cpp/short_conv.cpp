// Gated short convolutions inside a step (LFM2): out(C * conv(B * x)). A sequence's state is the last inputs of the convolution. Every
// token reads its own and the `kernel_size - 1` inputs before it, from this step or from the state, and sums them in the order of positions:
// bits do not depend on how a sequence is cut into steps, nor on what of it are drafts.
#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "program.hpp"

namespace cloister {

namespace {

void require(bool fits, const char* otherwise) {
    if (!fits) throw std::invalid_argument(otherwise);
}

}  // namespace

// The mixer of the first layer with a state, or null. The blocks of all of them have the same numbers.
const ShortConv* Program::first_state() const {
    auto layer = std::find_if(layers.begin(), layers.end(), [](const Layer& each) { return each.stateful() != nullptr; });
    return layer == layers.end() ? nullptr : &*layer->stateful()->short_conv;
}

void Program::check_states(const Batch& batch) const {
    const ShortConv* conv = first_state();
    if (!conv) return;
    int sequence = 0, end = 0, base = -1, left = -1;  // blocks of the state before a sequence, and behind its tokens so far
    bool drafts = false;
    for (int i = 0; i < batch.num_state_spans; i++) {
        auto [first, past, read, written] = batch.state_spans[i];
        require(first == end && past > first && past <= batch.num_tokens, "the state spans of a batch do not make up its tokens");
        end = past;
        if (first >= batch.query_starts[sequence + 1]) {
            do sequence++;
            while (first >= batch.query_starts[sequence + 1]);
            base = -1;
        }
        require(past <= batch.query_starts[sequence + 1], "a state span of a batch is of several sequences");
        require(conv->has_block(read) && (written == -1 || conv->has_block(written)), "a batch names a state that the cache does not have");
        if (base < 0) {
            base = left = read;
        } else {
            require(!drafts || written == -1, "known tokens of a batch follow drafts");
            require(read == left && (written == -1 || left != base), "state spans of a sequence do not go on from each other");
        }
        drafts = written == -1;
        if (!drafts) left = written;
    }
    require(end == batch.num_tokens, "the state spans of a batch do not make up its tokens");
}

// Finds the token before each, the state before each sequence, and which tokens are drafts.
void Program::place_states(const Batch& batch) {
    num_drafts_ = most_draft_states_ = 0;
    span_starts_.clear();
    if (!first_state()) return;
    size_t num_tokens = size_t(batch.num_tokens);
    before_.resize(num_tokens);
    state_of_.resize(num_tokens);
    draft_of_.assign(num_tokens, -1);
    int sequence = -1, start = 0, base = 0, drafts_before = 0;
    for (int i = 0; i < batch.num_state_spans; i++) {
        const StateSpan& span = batch.state_spans[i];
        if (sequence < 0 || span.first >= batch.query_starts[sequence + 1]) {
            do sequence++;
            while (span.first >= batch.query_starts[sequence + 1]);
            start = span.first;
            base = span.read;
            span_starts_.push_back(i);
            drafts_before = num_drafts_;
        }
        for (int token = span.first; token < span.end; token++) {
            before_[size_t(token)] = token == start ? -1 : batch.parents && span.written < 0 ? batch.parents[token] : token - 1;
            state_of_[size_t(token)] = base;
            if (span.written < 0) draft_of_[size_t(token)] = num_drafts_++;
        }
        int own = num_drafts_ - drafts_before;
        most_draft_states_ = std::max(most_draft_states_, batch.parents ? own : std::min(own, 1));
    }
    span_starts_.push_back(batch.num_state_spans);
    if (!num_drafts_) return;
    size_t kept = 0;
    for (const Layer& layer : layers)
        if (layer.stateful()) kept += layer.stateful()->short_conv->draft_size;
    drafts_.reserve(kept * size_t(num_drafts_) * 4);
}

// The input `back` positions before a token.
const float* Program::conv_input(const ShortConv& conv, const float* gated, size_t stride, int token, int back) const {
    int state = state_of_[size_t(token)];
    for (; back && token >= 0; back--) token = before_[size_t(token)];
    if (token >= 0) return gated + size_t(token) * stride;
    return conv.state(state) + size_t(conv.kernel_size - 2 - back) * size_t(conv.size);
}

void Program::short_conv_block(const Layer& layer, const Batch& batch, const Rows& inputs, const Sink& sink) {
    const ShortConv& conv = *layer.short_conv;
    int num_tokens = batch.num_tokens, size = conv.size;
    size_t stride = size_t(layer.qkv.panels) * panel_width;
    float* gated = (float*)qkv_.reserve(size_t(num_tokens) * stride * 4);
    product("qkv", layer.qkv, inputs, {Finish::store, gated, stride});
    each_row("gate", num_tokens, [&](int row, int) {
        float* b = gated + size_t(row) * stride;
        const float* x = b + 2 * size;
        for (int c = 0; c < size; c++) b[c] *= x[c];
    });
    float* mixed = (float*)mixed_.reserve(size_t(num_tokens) * size_t(size) * 4);
    Rows rows = shape_rows(inputs_, layer.output.form(), num_tokens, size);
    each_row("convolution", num_tokens, [&](int row, int) {
        float* out = mixed + size_t(row) * size_t(size);
        for (int j = 0; j < conv.kernel_size; j++) {
            const float *input = conv_input(conv, gated, stride, row, conv.kernel_size - 1 - j), *filter = conv.filters + size_t(j) * size_t(size);
            if (j == 0) for (int c = 0; c < size; c++) out[c] = input[c] * filter[c];
            else for (int c = 0; c < size; c++) out[c] += input[c] * filter[c];
        }
        for (int c = 0; conv.bias && c < size; c++) out[c] += conv.bias[c];
        const float* gate = gated + size_t(row) * stride + size;
        for (int c = 0; c < size; c++) out[c] *= gate[c];
        kernels_.put_row(out, size, rows, row);
    });
    leave_states(conv, batch, gated, stride);
    product("output", layer.output, rows, sink);
}

// Writes the states behind spans, and keeps the inputs of drafts for `accept_drafts`.
void Program::leave_states(const ShortConv& conv, const Batch& batch, const float* gated, size_t stride) {
    size_t size = size_t(conv.size);
    float* kept = drafts_.get<float>() + conv.draft_start * size_t(num_drafts_);
    for (int i = 0; i < batch.num_state_spans; i++) {  // only the last known tokens of a sequence overwrite the state before it (`check_states`)
        const StateSpan& span = batch.state_spans[i];
        if (span.written < 0) {
            for (int token = span.first; token < span.end; token++)
                std::memcpy(kept + size_t(draft_of_[size_t(token)]) * conv.draft_size, gated + size_t(token) * stride, conv.draft_size * 4);
            continue;
        }
        float* state = conv.state(span.written);  // in place too: row j comes from a later one
        for (int j = 0; j < conv.kernel_size - 1; j++)
            std::memcpy(state + size_t(j) * size, conv_input(conv, gated, stride, span.end - 1, conv.kernel_size - 2 - j), size * 4);
    }
}

void Program::accept_drafts(const int32_t* accepted, int num_accepted) {
    for (int i = 0; i < num_accepted; i++) {
        int token = accepted[2 * i], block = accepted[2 * i + 1];
        require(token >= 0 && num_drafts_ && size_t(token) < draft_of_.size() && draft_of_[size_t(token)] >= 0, "the last step had no such draft");
        require(first_state()->has_block(block), "an accepted draft names a state that the cache does not have");
    }
    for (const Layer& layer : layers) {
        const Layer* mixer = layer.stateful();
        if (!mixer) continue;
        const ShortConv& conv = *mixer->short_conv;
        size_t size = size_t(conv.size), others = size_t(conv.kernel_size - 2) * size;
        const float* kept = drafts_.get<float>() + conv.draft_start * size_t(num_drafts_);
        for (int i = 0; i < num_accepted; i++) {
            float* state = conv.state(accepted[2 * i + 1]);
            const float* draft = kept + size_t(draft_of_[size_t(accepted[2 * i])]) * conv.draft_size;
            if (mixer->mamba2) accept_mamba2(*mixer, draft, accepted[2 * i + 1]);
            if (mixer->delta_net) accept_delta_net(*mixer, draft, accepted[2 * i + 1]);
            std::memmove(state, state + size, others * 4);
            std::memcpy(state + others, draft, size * 4);
        }
    }
    num_drafts_ = 0;
}

}  // namespace cloister
