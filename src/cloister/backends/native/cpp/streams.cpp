// Several residual streams inside a step, of which each block computes one (backends/spec.py, StreamsSpec). `residual_` has the active
// stream where a block reads and writes it; `streams_`, [num_tokens][num_streams][hidden_size], has all of them before it and after it.
// All but products is computed token by token, so that no bit depends on the company of a token.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "program.hpp"

namespace cloister {

namespace {

constexpr float least_square = 1e-5f;  // of a stream that is scaled to the size of another

}  // namespace

float* Program::streams_of(int token) const {
    return streams_.get<float>() + size_t(token) * size_t(streams->num_streams) * size_t(hidden_size_);
}

// Makes streams, and inputs of all layers, of the embeddings in `residual_`.
void Program::widen(const Batch& batch) {
    const Streams& own = *streams;
    int num_tokens = batch.num_tokens, num_inputs = own.projection.outputs;
    size_t hidden = size_t(hidden_size_), width = size_t(own.num_streams) * hidden, stride = input_stride();
    float* all = (float*)streams_.reserve(size_t(num_tokens) * width * 4);
    float* inputs = (float*)layer_inputs_.reserve(size_t(num_tokens) * stride * 4);
    Normed rows = norm_rows("streams", {}, own.projection, num_tokens, inputs_, nullptr, own.in.codes ? &own.in : nullptr);
    products_.clear();
    products_.push_back({&own.projection, rows.rows, {Finish::store, inputs, stride}});
    if (own.in.codes) products_.push_back({&own.in, rows.other, {Finish::store, all + hidden, width}});
    run_products("streams");
    reserve_scratch(std::max(size_t(num_inputs), size_t(own.num_streams) * size_t(own.num_streams + 1)) * 4);
    each_row("streams", num_tokens, [&](int row, int thread) {
        const float* embedded = residual_.get<float>() + size_t(row) * stride_;
        std::memcpy(streams_of(row), embedded, hidden * 4);
        scale_streams(streams_of(row));
        float *its_inputs = inputs + size_t(row) * stride, *found = (float*)scratch(thread);
        kernels_.bend(its_inputs, num_inputs, 1 / std::sqrt(float(hidden_size_)), 0);
        for (int at = 0; at < num_inputs; at += own.input_size)
            kernels_.norm(its_inputs + at, own.projection_norm, norm_eps_, own.input_size, its_inputs + at);
        int id = batch.token_ids[row];
        own.table.read(kernels_, id < own.table.num_rows ? id : 0, num_inputs, found);
        kernels_.bend(found, num_inputs, std::sqrt(float(own.input_size)), 0);
        kernels_.add_scaled(found, 1, num_inputs, its_inputs);
        kernels_.bend(its_inputs, num_inputs, std::sqrt(0.5f), 0);
        predict_streams(*layers[0].stream, row, thread);
    });
}

// Scales all streams of a token to the size of the first.
void Program::scale_streams(float* its) const {
    float size = std::sqrt(kernels_.mean_square(its, hidden_size_));
    for (int j = 1; j < streams->num_streams; j++) {
        float* stream = its + size_t(j) * size_t(hidden_size_);
        float square = kernels_.mean_square(stream, hidden_size_);
        kernels_.bend(stream, hidden_size_, size / std::sqrt(square < least_square ? least_square : square), 0);
    }
}

// What decides how the streams of a token mix, [num_streams].
void Program::route_streams(const StreamLayer& layer, const float* row, float* normed, float* routed) const {
    int num_streams = streams->num_streams;
    apply(layer.router_norm, row, normed);
    kernels_.dot_rows(layer.router, normed, num_streams, hidden_size_, 1 / float(hidden_size_), routed);
    kernels_.bend(routed, num_streams, 1, 1);  // tanh
}

// Predicts the streams of a token and puts the active one where the block reads it.
void Program::predict_streams(const StreamLayer& layer, int token, int thread) {
    int num_streams = streams->num_streams;
    float *its = streams_of(token), *active = its + size_t(streams->active) * size_t(hidden_size_);
    float *routed = (float*)scratch(thread), *weights = routed + num_streams;
    route_streams(layer, active, normed_.get<float>() + size_t(thread) * stride_, routed);
    kernels_.dot_rows(layer.predict, routed, num_streams * num_streams, num_streams, 1, weights);
    kernels_.predict_streams(its, weights, num_streams, hidden_size_);
    std::memcpy(residual_.get<float>() + size_t(token) * stride_, active, size_t(hidden_size_) * 4);
}

// The low-rank path beside attention, of the same rows.
void Program::laurel(const StreamLayer& layer, const Rows& inputs) {
    int num_tokens = inputs.num_rows, rank = layer.laurel_right.inputs;
    size_t stride = size_t(layer.laurel_left.panels) * panel_width;
    float* low = (float*)low_.reserve(size_t(num_tokens) * stride * 4);
    product("laurel", layer.laurel_left, inputs, {Finish::store, low, stride});
    Rows rows = shape_rows(next_inputs_, layer.laurel_right.form(), num_tokens, rank);
    each_row("round", num_tokens, [&](int row, int) { kernels_.put_row(low + size_t(row) * stride, rank, rows, row); });
    float* out = (float*)laurel_.reserve(size_t(num_tokens) * stride_ * 4);
    product("laurel", layer.laurel_right, rows, {Finish::store, out, stride_});
}

// One block, whose streams are predicted already; those of the next one, if any, are predicted at its end.
void Program::stream_block(const Layer& layer, const Batch& batch, const Layer*& previous, const Layer* next) {
    const StreamLayer& own = *layer.stream;
    int num_tokens = batch.num_tokens, num_streams = streams->num_streams, active = streams->active;
    mix(layer, batch, previous);
    each_row("laurel", num_tokens, [&](int row, int thread) {
        const float* predicted = streams_of(row) + size_t(active) * size_t(hidden_size_);
        float *x = residual_.get<float>() + size_t(row) * stride_, *added = laurel_.get<float>() + size_t(row) * stride_;
        float* normed = normed_.get<float>() + size_t(thread) * stride_;
        apply(own.laurel_norm, added, added);
        apply(layer.attention_norm, predicted, normed);
        kernels_.add_scaled(normed, 1, hidden_size_, added);
        kernels_.add_scaled(added, 1, hidden_size_, x);
        kernels_.bend(x, hidden_size_, std::sqrt(0.5f), 0);
    });
    Normed inputs = norm_rows("mlp_norm", layer.mlp_norm, layer.mlp.up, num_tokens, inputs_);
    feed_forward(layer.mlp, inputs.rows, branch_sink(layer, layer.mlp_post_norm, num_tokens), &layer);
    Rows gate_rows = shape_rows(inputs_, own.input_gate.form(), num_tokens, hidden_size_);
    reserve_scratch(size_t(num_streams) * size_t(num_streams + 1) * 4);
    each_row("streams", num_tokens, [&](int row, int thread) {
        float *x = residual_.get<float>() + size_t(row) * stride_, *its = streams_of(row);
        float *normed = normed_.get<float>() + size_t(thread) * stride_, *routed = (float*)scratch(thread), *weights = routed + num_streams;
        if (!adds_at_once(layer, layer.mlp_post_norm)) add_branch(layer, layer.mlp_post_norm, branch_.get<float>() + size_t(row) * stride_, row);
        route_streams(own, x, normed, routed);
        kernels_.dot_rows(own.correct, routed, num_streams, num_streams, 1, weights);
        for (int j = 0; j < num_streams; j++) weights[j] += 1;
        kernels_.correct_streams(its, x, weights, active, num_streams, hidden_size_);
        std::memcpy(normed, its + size_t(active) * size_t(hidden_size_), size_t(hidden_size_) * 4);
        if (own.scale) kernels_.multiply_by(normed, own.scale, hidden_size_);
        kernels_.put_row(normed, hidden_size_, gate_rows, row);
    });
    add_layer_inputs(layer, gate_rows);
    reserve_scratch(size_t(num_streams) * size_t(num_streams + 1) * 4);
    each_row("streams", num_tokens, [&](int row, int thread) {
        float *added = branch_.get<float>() + size_t(row) * stride_, *its = streams_of(row);
        apply(own.input_norm, added, added);
        for (int j = 1; j < num_streams; j++) kernels_.add_scaled(added, 1, hidden_size_, its + size_t(j) * size_t(hidden_size_));
        if (next) predict_streams(*next->stream, row, thread);
    });
}

// Leaves in `branch_` what the tokens' own inputs of a layer come to, before the norm.
void Program::add_layer_inputs(const Layer& layer, const Rows& gate_rows) {
    const StreamLayer& own = *layer.stream;
    int num_tokens = gate_rows.num_rows, size = streams->input_size;
    size_t stride = size_t(own.input_gate.panels) * panel_width, number = size_t(&layer - layers.data());
    float* gates = (float*)low_.reserve(size_t(num_tokens) * stride * 4);
    product("layer_input", own.input_gate, gate_rows, {Finish::store, gates, stride});
    Rows rows = shape_rows(next_inputs_, own.input_out.form(), num_tokens, size);
    each_row("round", num_tokens, [&](int row, int) {
        float* its = gates + size_t(row) * stride;
        kernels_.activate_row(its, layer.mlp.activation, size);
        kernels_.multiply_by(its, layer_inputs_.get<float>() + size_t(row) * input_stride() + number * size_t(size), size);
        kernels_.put_row(its, size, rows, row);
    });
    product("layer_input", own.input_out, rows, {Finish::store, (float*)branch_.reserve(size_t(num_tokens) * stride_ * 4), stride_});
}

// Joins the streams of some tokens into what the final norm reads, [num_rows][num_streams][hidden_size], the first of each row.
void Program::join_streams(const int32_t* tokens, int num_rows) {
    if (!num_rows) return;  // no product has no rows
    int num_streams = streams->num_streams;
    size_t hidden = size_t(hidden_size_), width = size_t(num_streams) * hidden;
    float* joined = (float*)joined_.reserve(size_t(num_rows) * width * 4);
    for (int j = 1; j < num_streams; j++) {
        const Matrix& out = streams->out[size_t(j) - 1];
        Rows rows = shape_rows(inputs_, out.form(), num_rows, hidden_size_);
        each_row("streams", num_rows, [&](int i, int) { kernels_.put_row(streams_of(tokens[i]) + size_t(j) * hidden, hidden_size_, rows, i); });
        product("streams", out, rows, {Finish::store, joined + size_t(j) * hidden, width});
    }
    each_row("streams", num_rows, [&](int i, int) {
        float* its = joined + size_t(i) * width;
        std::memcpy(its, streams_of(tokens[i]), hidden * 4);
        scale_streams(its);
        for (int j = 1; j < num_streams; j++) kernels_.add_scaled(its + size_t(j) * hidden, 1, hidden_size_, its);
        kernels_.bend(its, hidden_size_, 1 / float(num_streams), 0);
    });
}

}  // namespace cloister
