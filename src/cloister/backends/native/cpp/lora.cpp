#include "lora.hpp"

#include <cstring>

#include "program.hpp"

namespace cloister {

namespace {

constexpr size_t line = 64;

size_t whole_lines(size_t bytes) { return (bytes + line - 1) / line * line; }

size_t rows_bytes(Input input, int length) {
    int per_chunk = chunk_length(input);
    return size_t(block_rows) * size_t((length + per_chunk - 1) / per_chunk) * 64;
}

// Inputs of a product in float32 or bfloat16, which need no scales.
Rows rows_at(uint8_t* at, Input input, int num_rows, int length) {
    Rows rows;
    rows.data = at;
    rows.num_rows = num_rows;
    rows.chunks = (length + chunk_length(input) - 1) / chunk_length(input);
    rows.form = {input};
    return rows;
}

float from_bf16(uint16_t value) {
    uint32_t bits = uint32_t(value) << 16;
    float number;
    std::memcpy(&number, &bits, 4);
    return number;
}

}  // namespace

void Program::list_adapters(const Batch& batch) {
    adapter_tasks_.clear();
    adapter_tokens_.clear();
    if (!batch.adapters) return;
    for (size_t slot = 0; slot < adapters_.size(); slot++) {
        if (!adapters_[slot]) continue;
        int begin = int(adapter_tokens_.size());
        for (int s = 0; s < batch.num_sequences; s++)
            for (int token = batch.query_starts[s]; batch.adapters[s] == int(slot) && token < batch.query_starts[s + 1]; token++)
                adapter_tokens_.push_back(token);
        for (int end = int(adapter_tokens_.size()); begin < end; begin += block_rows)
            adapter_tasks_.push_back({adapters_[slot].get(), begin, std::min(block_rows, end - begin)});
    }
}

bool Program::changes(const Layer& layer, std::initializer_list<UpdatePlace> places) const {
    size_t number = size_t(&layer - layers.data());
    for (const AdapterTask& task : adapter_tasks_)
        for (const UpdatePlace& place : places)
            if (task.adapter->layers[number][size_t(place.site)]) return true;
    return false;
}

// Adds what the rows with adapters gain to `out`, [num_tokens][stride]. `read(token, index, to)` writes the inputs of one of them,
// `index` being its place among those rows; `scale` multiplies what they gain.
void Program::adapt(const Layer& layer, std::initializer_list<UpdatePlace> places, int length, const ReadRow& read, float* out, size_t stride, float scale) {
    if (!changes(layer, places)) return;
    size_t number = size_t(&layer - layers.data()), most_rank = 0;
    for (const AdapterTask& task : adapter_tasks_)
        for (const Update& update : task.adapter->layers[number]) most_rank = std::max(most_rank, size_t(update.a.panels) * panel_width);
    size_t row = whole_lines(size_t(length) * 4), inputs = rows_bytes(Input::f32, length), inner = block_rows * most_rank * 4;
    reserve_scratch(row + inputs + inner + rows_bytes(Input::f32, int(most_rank)) + block_rows * panel_width * 4);
    phase("adapter", int(adapter_tasks_.size()), [&](int i, int thread) {
        const AdapterTask& task = adapter_tasks_[size_t(i)];
        const LayerUpdates& updates = task.adapter->layers[number];
        uint8_t* at = scratch(thread);
        float *from = (float*)at, *low = (float*)(at + row + inputs), *gained = (float*)(at + row + inputs + inner + rows_bytes(Input::f32, int(most_rank)));
        uint8_t *rows_data = at + row, *low_data = at + row + inputs + inner;
        Rows rows;
        bool is_read = false;
        for (const UpdatePlace& place : places) {
            const Update& update = updates[size_t(place.site)];
            if (!update) continue;
            Input input = input_of(update.a.kind);
            if (!is_read) {
                rows = rows_at(rows_data, input, task.count, length);
                for (int r = 0; r < task.count; r++) {
                    read(adapter_tokens_[size_t(task.begin + r)], task.begin + r, from);
                    kernels_.put_row(from, length, rows, r);
                }
                is_read = true;
            }
            int rank = update.a.outputs;
            size_t low_stride = size_t(update.a.panels) * panel_width;
            for (int panel = 0; panel < update.a.panels; panel++)
                kernels_.multiply(update.a, rows, 0, 1, panel, {Finish::store, low, low_stride}, nullptr);
            Rows low_rows = rows_at(low_data, input, task.count, rank);
            for (int r = 0; r < task.count; r++) kernels_.put_row(low + size_t(r) * low_stride, rank, low_rows, r);
            for (int panel = 0; panel < update.b.panels; panel++) {
                kernels_.multiply(update.b, low_rows, 0, 1, panel, {Finish::store, gained - size_t(panel) * panel_width, panel_width}, nullptr);
                add_gained(task, place, gained, panel, update.b.outputs, out, stride, scale);
            }
        }
    });
}

void Program::add_gained(const AdapterTask& task, const UpdatePlace& place, const float* gained, int panel, int outputs, float* out, size_t stride, float scale) {
    int left = std::min(panel_width, outputs - panel * panel_width);
    for (int r = 0; r < task.count; r++) {
        const float* from = gained + r * panel_width;
        float* to = out + size_t(adapter_tokens_[size_t(task.begin + r)]) * stride + place.column;
        if (!place.in_turns) {
            kernels_.add_scaled(from, scale, left, to + panel * panel_width);
            continue;
        }
        for (int half = 0; half * 16 < left; half++)
            kernels_.add_scaled(from + half * 16, scale, std::min(16, left - half * 16), to + size_t(panel * 2 + half) * 32);
    }
}

void Program::adapt_heads(const Layer& layer, float* qkv, size_t stride) {
    if (adapter_tasks_.empty()) return;
    int q_width = layer.shape.num_heads * layer.shape.head_dim, kv_width = layer.key_width();
    auto read = [&](int token, int, float* to) { read_normed(layer.attention_norm, layer.input_scale, token, to); };
    if (layer.latent) adapt(layer, {{Site::q, 0}, {Site::q_a, 0}, {Site::kv_a, layer.latent->key_column}}, hidden_size_, read, qkv, stride);
    else adapt(layer, {{Site::q, 0}, {Site::k, q_width}, {Site::v, q_width + kv_width}, {Site::q_gate, q_width + 2 * kv_width}}, hidden_size_, read, qkv, stride);
}

void Program::adapt_latent_queries(const Layer& layer, const float* latents, size_t stride, float* queries, size_t query_stride) {
    if (adapter_tasks_.empty()) return;
    int rank = layer.latent->query_rank;
    auto read = [&](int token, int, float* to) { std::memcpy(to, latents + size_t(token) * stride, size_t(rank) * 4); };
    adapt(layer, {{Site::q_b, 0}}, rank, read, queries, query_stride);
}

void Program::adapt_output(const Layer& layer, const float* mixed, const Sink& sink) {
    if (adapter_tasks_.empty()) return;
    size_t width = size_t(layer.output.inputs);
    adapt(layer, {{Site::o}}, int(width), [&](int token, int, float* to) { std::memcpy(to, mixed + size_t(token) * width, width * 4); }, sink.out, sink.stride, sink.scale);
}

// The residual stream changes between the norm and the product where a block is parallel: its rows are kept from before.
void Program::keep_normed(const Layer& layer) {
    if (adapter_tasks_.empty() || layer.mixture) return;
    float* kept = (float*)adapter_normed_.reserve(adapter_tokens_.size() * stride_ * 4);
    each_row("adapter", int(adapter_tokens_.size()), [&](int i, int) { read_normed(layer.mlp_norm, 1, adapter_tokens_[size_t(i)], kept + size_t(i) * stride_); });
}

// The first product of a feed-forward where some rows have adapters for it (`adapted`, else null), or where gates are sparse: its outputs
// are kept in float32, added to, and bent.
void Program::product_stored(const FeedForward& mlp, const Rows& inputs, const Sink& sink, const Layer* adapted) {
    const Matrix& up = mlp.up;
    size_t stride = size_t(up.panels) * panel_width, outputs = size_t(up.outputs);
    float* out = (float*)stored_.reserve(size_t(inputs.num_rows) * stride * 4);
    product("gate_up", up, inputs, {Finish::store, out, stride});
    auto read = [&](int token, int index, float* to) {
        if (adapted->parallel) std::memcpy(to, adapter_normed_.get<float>() + size_t(index) * stride_, size_t(hidden_size_) * 4);
        else read_normed(adapted->mlp_norm, 1, token, to);
    };
    if (adapted && mlp.gated) adapt(*adapted, {{Site::gate, 0, true}, {Site::up, 16, true}}, hidden_size_, read, out, stride);
    else if (adapted) adapt(*adapted, {{Site::up}}, hidden_size_, read, out, stride);
    each_row("activate", inputs.num_rows, [&](int row, int) {
        float* from = out + size_t(row) * stride;
        std::memset(from + outputs, 0, (stride - outputs) * 4);
        if (mlp.sparse) kernels_.keep_largest(from, mlp.down.inputs, *mlp.sparse);
        kernels_.bend_outputs(up, from, row, sink);
    });
}

void Program::adapt_down(const Layer& layer, const Rows& next, const Sink& bent, const Sink& sink) {
    if (adapter_tasks_.empty()) return;
    int inner = layer.mlp.down.inputs;
    adapt(layer, {{Site::down}}, inner, [&](int token, int, float* to) {
        if (bent.wide) {
            for (int i = 0; i < inner; i++) to[i] = from_bf16(bent.wide[size_t(token) * bent.stride + size_t(i)]);
            return;
        }
        int per_chunk = chunk_length(bent.next_input);
        for (int i = 0; i < inner; i += per_chunk) {
            const uint8_t* at = next.at(token, i / per_chunk);
            int count = std::min(per_chunk, inner - i);
            if (bent.next_input == Input::f32) std::memcpy(to + i, at, size_t(count) * 4);
            else for (int j = 0; j < count; j++) to[i + j] = from_bf16(((const uint16_t*)at)[j]);
        }
    }, sink.out, sink.stride, sink.scale);
}

void Program::read_normed(const Norm& norm, float scale, int token, float* to) const {
    const float* from = residual_.get<float>() + size_t(token) * stride_;
    if (norm.weight) apply(norm, from, to);
    else std::memcpy(to, from, size_t(hidden_size_) * 4);
    if (scale != 1) kernels_.bend(to, hidden_size_, scale, 0);
}

void Program::load_adapter(size_t slot, std::unique_ptr<Adapter> adapter) {
    if (adapters_.size() <= slot) adapters_.resize(slot + 1);
    adapters_[slot] = std::move(adapter);
}

void Program::unload_adapter(size_t slot) {
    if (slot < adapters_.size()) adapters_[slot].reset();
}

}  // namespace cloister
