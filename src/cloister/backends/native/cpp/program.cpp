#include "program.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <new>
#include <stdexcept>

namespace cloister {

std::atomic<uint64_t> step_number{0};

namespace {

constexpr size_t inputs_in_cache = size_t(5) << 18;  // inputs of a product that stay in a core's second-level cache
constexpr int rope_chunk = 1024;
constexpr size_t wipe_piece = size_t(1) << 18;
constexpr size_t most_partial_bytes = size_t(64) << 20;  // backend.py counts on it

double now_s() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void require(bool fits, const char* otherwise) {
    if (!fits) throw std::invalid_argument(otherwise);
}

bool within(int32_t value, int end) { return uint32_t(value) < uint32_t(end); }

}  // namespace

Program::Program(const Kernels& kernels, std::shared_ptr<Pool> pool, int vocab_size, int hidden_size, float norm_eps)
    : kernels_(kernels), pool_(std::move(pool)), vocab_size_(vocab_size), hidden_size_(hidden_size), norm_eps_(norm_eps),
      stride_(size_t(hidden_size + 31) / 32 * 32), scratch_(size_t(pool_->num_threads())) {}

std::vector<Buffer*> Program::buffers() {
    std::vector<Buffer*> all{&residual_, &normed_, &inputs_, &next_inputs_, &qkv_, &queries_, &mixed_, &wide_, &partial_, &logits_, &peaks_};
    for (Buffer& buffer : scratch_) all.push_back(&buffer);
    return all;
}

size_t Program::buffer_bytes() {
    size_t total = 0;
    for (const Buffer* buffer : buffers()) total += buffer->size();
    return total;
}

void Program::wipe() {
    std::vector<std::pair<uint8_t*, size_t>> pieces;
    for (Buffer* buffer : buffers()) {
        for (size_t at = 0; at < buffer->used(); at += wipe_piece)
            pieces.emplace_back(buffer->get<uint8_t>() + at, std::min(wipe_piece, buffer->used() - at));
        buffer->clean();
    }
    if (pieces.empty()) return;
    phase("wipe", int(pieces.size()), [&](int i, int) { overwrite(pieces[size_t(i)].first, pieces[size_t(i)].second); });
    pool_->run_on_each([](int) { overwrite_stack(); });
}

void Program::check(const Batch& batch) const {
    const int32_t *starts = batch.query_starts, *contexts = batch.context_lens, *positions = batch.positions;
    require(starts[0] == 0 && starts[batch.num_sequences] == batch.num_tokens, "the sequences of a batch do not make up its tokens");
    int block_size = layers.empty() ? 1 : layers[0].cache.block_size, num_blocks = INT32_MAX;
    for (const Layer& layer : layers) num_blocks = std::min(num_blocks, layer.num_blocks);
    for (int s = 0; s < batch.num_sequences; s++) {
        int first = starts[s], end = starts[s + 1], context = contexts[s];
        require(first <= end && end <= batch.num_tokens, "the sequences of a batch do not make up its tokens");
        require(context >= end - first, "a sequence of a batch has more tokens than its context");
        for (int i = first; i < end; i++) require(within(positions[i], context), "a batch has a position outside of its sequence's context");
        if (!layers.empty()) {
            int blocks = int((int64_t(context) + block_size - 1) / block_size);
            require(blocks <= batch.table_stride, "a block table of a batch is shorter than its sequence's context");
            const int32_t* table = batch.tables + size_t(s) * size_t(batch.table_stride);
            for (int b = 0; b < blocks; b++) require(within(table[b], num_blocks), "a batch names a block that the cache does not have");
        }
        if (!batch.parents) continue;
        for (int i = first; i < end; i++) {
            int parent = batch.parents[i];
            require(parent == -1 || (parent >= first && parent < i), "a batch has a token whose parent is not before it in its sequence");
        }
    }
    for (int i = 0; i < batch.num_tokens; i++) require(within(batch.token_ids[i], vocab_size_), "a batch has a token id outside of the vocabulary");
    for (int i = 0; i < batch.num_rows; i++) require(within(batch.logit_rows[i], batch.num_tokens), "a batch asks for logits of a token that it does not have");
}

template <class Work> void Program::phase(const char* name, int num_tasks, Work&& work, int grain) {
    num_phases_++;
    if (!recording_) return pool_->run(num_tasks, work, grain);
    std::vector<std::pair<double, double>> times(size_t(pool_->num_threads()), {0, 0});
    pool_->run(num_tasks, [&](int task, int thread) {
        auto& [start, end] = times[size_t(thread)];
        if (start == 0) start = now_s();
        work(task, thread);
        end = now_s();
    }, grain);
    for (size_t thread = 0; thread < times.size(); thread++)
        if (times[thread].first != 0) spans_.push_back({name, int(thread), times[thread].first, times[thread].second - times[thread].first});
}

template <class Work> void Program::each_row(const char* name, int num_rows, Work&& work) {
    phase(name, num_rows, work, std::max(1, num_rows / (4 * pool_->num_threads())));
}

// For every thread, whether or not it gets to work in this step: later steps then allocate nothing.
void Program::reserve_scratch(size_t size) {
    for (Buffer& buffer : scratch_) buffer.reserve(size);
}

uint8_t* Program::scratch(int thread) const { return scratch_[size_t(thread)].get<uint8_t>(); }

Rows Program::shape_rows(Buffer& buffer, Input input, int num_rows, int length) {
    int per_chunk = chunk_length(input), chunks = (length + per_chunk - 1) / per_chunk;
    size_t data = size_t(num_rows) * chunks * 64, scales = (size_t(num_rows) * 4 + 63) / 64 * 64, sums = size_t(num_rows) * chunks * 8;
    uint8_t* at = buffer.reserve(data + 2 * scales + sums);
    return {at, (float*)(at + data), (int32_t*)(at + data + scales), (int32_t*)(at + data + 2 * scales), num_rows, chunks};
}

void Program::product(const char* name, const Matrix& w, const Rows& x, const Sink& sink) {
    int blocks = (x.num_rows + block_rows - 1) / block_rows;
    int at_once = int(inputs_in_cache / (size_t(w.chunks) * 64 * block_rows)) / 2 * 2;
    at_once = std::max(2, at_once);
    int parts = (blocks + at_once - 1) / at_once;
    at_once = ((blocks + parts - 1) / parts + 1) / 2 * 2;
    reserve_scratch(kernels_.multiply_scratch(w));
    phase(name, parts * w.panels, [&](int task, int thread) {
        int part = task / w.panels, panel = task % w.panels;
        int begin = part * at_once, end = std::min(blocks, begin + at_once);
        if (begin < end) kernels_.multiply(w, x, begin, end, panel, sink, scratch(thread));
    });
}

void Program::extend_ropes(const Batch& batch) {
    int last = 0;
    for (int i = 0; i < batch.num_tokens; i++) last = std::max(last, batch.positions[i]);
    for (Rope& rope : ropes) {
        size_t half = rope.inv_freq.size();
        for (; rope.num_positions <= last; rope.num_positions += rope_chunk) {
            rope.table.resize(size_t(rope.num_positions + rope_chunk) * 2 * half);
            int first = rope.num_positions;
            each_row("rope table", rope_chunk, [&](int i, int) {
                float* at = rope.table.data() + size_t(first + i) * 2 * half;
                for (size_t d = 0; d < half; d++) {
                    float angle = float(first + i) * rope.inv_freq[d];  // rounded to float32, as models were trained
                    at[d] = float(std::cos(double(angle))) * rope.scale;
                    at[half + d] = float(std::sin(double(angle))) * rope.scale;
                }
            });
        }
    }
}

// Finds the slot of each token, and what is one run of queries for attention: a sequence's tokens, or one node of a tree.
void Program::place_tokens(const Batch& batch) {
    sequences_.clear();
    paths_.clear();
    paths_.reserve(size_t(batch.num_tokens));  // nodes point into them
    table_of_.resize(size_t(batch.num_tokens));
    slot_of_.resize(size_t(batch.num_tokens));
    for (int s = 0; s < batch.num_sequences; s++) {
        int first = batch.query_starts[s], count = batch.query_starts[s + 1] - first;
        Sequence sequence;
        sequence.table = batch.tables + size_t(s) * batch.table_stride;
        sequence.first_token = first;
        sequence.num_tokens = count;
        sequence.first_position = batch.context_lens[s] - count;
        bool is_tree = false;
        for (int i = 0; i < count; i++) {
            table_of_[size_t(first + i)] = sequence.table;
            slot_of_[size_t(first + i)] = sequence.first_position + i;
            is_tree = is_tree || (batch.parents && batch.parents[first + i] != (i ? first + i - 1 : -1));
        }
        if (is_tree) add_tree(batch, sequence);
        else sequences_.push_back(sequence);
    }
}

void Program::add_tree(const Batch& batch, Sequence sequence) {
    for (int token = sequence.first_token; token < sequence.first_token + sequence.num_tokens; token++) {
        std::vector<int32_t>& path = paths_.emplace_back();
        for (int node = token; node >= 0; node = batch.parents[node]) path.push_back(slot_of_[size_t(node)]);
        std::reverse(path.begin(), path.end());
        Sequence node = sequence;
        node.first_token = token;
        node.num_tokens = 1;
        node.branch = sequence.first_position;
        node.first_position = sequence.first_position + int(path.size()) - 1;
        node.path = path.data();
        sequences_.push_back(node);
    }
}

void Program::list_tasks(const Layer& layer) {
    const AttentionShape& shape = layer.shape;
    tasks_.clear();
    joins_.clear();
    for (int s = 0; s < int(sequences_.size()); s++) {
        const Sequence& sequence = sequences_[size_t(s)];
        int rows = sequence.num_tokens * shape.group();
        for (int head = 0; head < shape.num_kv_heads; head++) {
            for (int begin = 0; begin < rows; begin += task_rows) {
                AttentionTask task;
                task.sequence = s;
                task.kv_head = head;
                task.begin = begin;
                task.end = std::min(rows, begin + task_rows);
                int lowest = sequence.first_position + begin / shape.group(), highest = sequence.first_position + (task.end - 1) / shape.group();
                task.first_split = shape.window ? std::max(0, lowest - shape.window + 1) / split_keys : 0;
                task.last_split = highest / split_keys;
                task.cost = double(task.last_split - task.first_split + 1) * (task.end - begin + 16);
                tasks_.push_back(task);
            }
        }
    }
    // Too few tasks for the team: cut the longest into splits, and join those afterwards.
    int threads = pool_->num_threads(), num_tasks = int(tasks_.size());
    size_t floats = 0;
    std::vector<size_t> places;
    for (AttentionTask& task : tasks_) {
        places.push_back(floats);
        int splits = task.last_split - task.first_split + 1;
        if (splits > 1) floats += size_t(splits) * size_t(task.end - task.begin) * partial_row(shape);
    }
    if (threads > 1 && num_tasks < 4 * threads && floats * 4 <= most_partial_bytes) {
        float* partial = (float*)partial_.reserve(floats * 4 + 64);
        for (int i = 0; i < num_tasks; i++) {
            AttentionTask whole = tasks_[size_t(i)];
            int splits = whole.last_split - whole.first_split + 1;
            if (splits == 1) continue;
            float* at = partial + places[size_t(i)];
            size_t length = size_t(whole.end - whole.begin) * partial_row(shape);
            joins_.push_back({whole, at, splits});
            int per_task = std::max(1, splits / (2 * threads));
            for (int first = 0; first < splits; first += per_task) {
                AttentionTask part = whole;
                part.first_split = whole.first_split + first;
                part.last_split = std::min(whole.last_split, part.first_split + per_task - 1);
                part.partial = at + size_t(first) * length;
                part.cost = double(part.last_split - part.first_split + 1) * (part.end - part.begin + 16);
                if (first == 0) tasks_[size_t(i)] = part;
                else tasks_.push_back(part);
            }
        }
    }
    // The dear ones first, prefill and decode in one list dealt out in turn, so that the team ends together (POD-Attention's aim,
    // Kamath et al. 2025, on a CPU).
    std::sort(tasks_.begin(), tasks_.end(), [](const AttentionTask& a, const AttentionTask& b) { return a.cost > b.cost; });
    dealt_.clear();
    for (int thread = 0; thread < threads; thread++)
        for (size_t i = size_t(thread); i < tasks_.size(); i += size_t(threads)) dealt_.push_back(tasks_[i]);
    tasks_.swap(dealt_);
}

void Program::attention(const Layer& layer, const Batch& batch) {
    const AttentionShape& shape = layer.shape;
    size_t width = size_t(shape.num_heads) * shape.head_dim;
    reserve_scratch(kernels_.attend_scratch(shape));
    float* mixed = (float*)mixed_.reserve(size_t(batch.num_tokens) * width * 4);
    const uint8_t* queries = queries_.get<uint8_t>();
    phase("attention", int(tasks_.size()), [&](int i, int thread) {
        const AttentionTask& task = tasks_[size_t(i)];
        kernels_.attend(task, sequences_[size_t(task.sequence)], shape, layer.cache, queries, mixed, width, scratch(thread));
    });
    if (joins_.empty()) return;
    phase("attention", int(joins_.size()), [&](int i, int thread) {
        const Join& join = joins_[size_t(i)];
        kernels_.join(join.task, sequences_[size_t(join.task.sequence)], shape, join.partial, join.num_splits, mixed, width, scratch(thread));
    });
}

void Program::forward(const Batch& batch, float* logits) {
    check(batch);
    int num_tokens = batch.num_tokens;
    step_number.fetch_add(1);
    extend_ropes(batch);
    place_tokens(batch);
    float* x = (float*)residual_.reserve(size_t(num_tokens) * stride_ * 4);
    float* normed = (float*)normed_.reserve(size_t(pool_->num_threads()) * stride_ * 4);
    each_row("embed", num_tokens, [&](int row, int) { kernels_.read_row(embedding, batch.token_ids[row], x + size_t(row) * stride_); });

    auto norm_into = [&](const char* name, const float* weight, const Matrix& w) {
        Rows rows = shape_rows(inputs_, input_of(w.kind), num_tokens, hidden_size_);
        each_row(name, num_tokens, [&](int row, int thread) {
            float* to = normed + size_t(thread) * stride_;
            kernels_.norm(x + size_t(row) * stride_, weight, norm_eps_, hidden_size_, to);
            kernels_.put_row(to, hidden_size_, input_of(w.kind), rows, row);
        });
        return rows;
    };

    const Layer* previous = nullptr;
    for (const Layer& layer : layers) {
        const AttentionShape& shape = layer.shape;
        int dim = shape.head_dim, q_width = shape.num_heads * dim, kv_width = shape.num_kv_heads * dim;
        Rows inputs = norm_into("norm", layer.attention_norm, layer.qkv);
        size_t qkv_stride = size_t(layer.qkv.panels) * 32;
        float* qkv = (float*)qkv_.reserve(size_t(num_tokens) * qkv_stride * 4);
        product("qkv", layer.qkv, inputs, {Finish::store, qkv, qkv_stride});

        size_t query_bytes = size_t(shape.num_heads) * shape.padded_dim * (layer.cache.kind == KVKind::f32 ? 4 : 2);
        uint8_t* queries = queries_.reserve(size_t(num_tokens) * query_bytes);
        const Rope& rope = ropes[size_t(layer.rope)];
        each_row("rope", num_tokens, [&](int row, int) {
            float* q = qkv + size_t(row) * qkv_stride;
            float *k = q + q_width, *v = k + kv_width;
            if (layer.q_norm)
                for (int h = 0; h < shape.num_heads; h++) kernels_.norm(q + h * dim, layer.q_norm, norm_eps_, dim, q + h * dim);
            if (layer.k_norm)
                for (int h = 0; h < shape.num_kv_heads; h++) kernels_.norm(k + h * dim, layer.k_norm, norm_eps_, dim, k + h * dim);
            const float* cos = rope.table.data() + size_t(batch.positions[row]) * 2 * rope.inv_freq.size();
            kernels_.rotate(q, shape.num_heads, dim, cos, cos + rope.inv_freq.size());
            kernels_.rotate(k, shape.num_kv_heads, dim, cos, cos + rope.inv_freq.size());
            kernels_.put_queries(q, shape, layer.scale, layer.cache.kind, queries + size_t(row) * query_bytes);
            int slot = slot_of_[size_t(row)], size = layer.cache.block_size;
            kernels_.put_keys(k, v, shape, layer.cache, table_of_[size_t(row)][slot / size], slot % size);
        });

        bool same = previous && previous->shape.num_heads == shape.num_heads && previous->shape.num_kv_heads == shape.num_kv_heads &&
                    previous->shape.padded_dim == shape.padded_dim && previous->shape.window == shape.window;
        if (!same) list_tasks(layer);
        previous = &layer;
        attention(layer, batch);

        Input output_input = input_of(layer.output.kind);
        Rows mixed_rows = shape_rows(inputs_, output_input, num_tokens, q_width);
        const float* mixed = mixed_.get<float>();
        each_row("round", num_tokens, [&](int row, int) { kernels_.put_row(mixed + size_t(row) * q_width, q_width, output_input, mixed_rows, row); });
        product("output", layer.output, mixed_rows, {Finish::add, x, stride_});

        inputs = norm_into("mlp_norm", layer.mlp_norm, layer.gate_up);
        int inner = layer.down.inputs;
        Input down_input = input_of(layer.down.kind);
        Rows down_rows = shape_rows(next_inputs_, down_input, num_tokens, inner);
        Sink sink{Finish::glu, nullptr, size_t(layer.gate_up.panels) * 16, layer.activation, &down_rows, down_input, nullptr};
        if (down_input == Input::int8) sink.wide = (uint16_t*)wide_.reserve(size_t(num_tokens) * sink.stride * 2);
        product("gate_up", layer.gate_up, inputs, sink);
        if (sink.wide)
            each_row("round", num_tokens, [&](int row, int) { kernels_.put_wide_row(sink.wide + size_t(row) * sink.stride, inner, down_rows, row); });
        product("down", layer.down, down_rows, {Finish::add, x, stride_});
    }

    if (batch.num_rows == 0) return;
    Input head_input = input_of(head.kind);
    Rows rows = shape_rows(inputs_, head_input, batch.num_rows, hidden_size_);
    each_row("norm", batch.num_rows, [&](int i, int thread) {
        float* to = normed + size_t(thread) * stride_;
        kernels_.norm(x + size_t(batch.logit_rows[i]) * stride_, norm_weight, norm_eps_, hidden_size_, to);
        kernels_.put_row(to, hidden_size_, head_input, rows, i);
    });
    product("head", head, rows, {Finish::store, logits, size_t(vocab_size_)});
}

void Program::forward_best(const Batch& batch, int32_t* best) {
    size_t width = size_t(vocab_size_);
    float* logits = (float*)logits_.reserve(size_t(batch.num_rows) * width * 4);
    forward(batch, logits);
    phase("sample", batch.num_rows, [&](int row, int) { best[row] = kernels_.find_best(logits + size_t(row) * width, vocab_size_); });
}

void Program::forward_draw(const Batch& batch, const Draw* draws, int num_draws, int32_t* tokens) {
    float* logits = (float*)logits_.reserve(size_t(batch.num_rows) * size_t(vocab_size_) * 4);
    forward(batch, logits);
    draw(logits, batch.num_rows, draws, num_draws, false, tokens);
}

void Program::draw(const float* logits, int num_rows, const Draw* draws, int num_draws, bool barred, int32_t* tokens) {
    if (num_draws == 0) return;
    size_t width = size_t(vocab_size_);
    int groups = num_draw_groups(vocab_size_), wanted = (4 * pool_->num_threads() + num_rows - 1) / num_rows;
    int pieces = std::max(1, std::min(groups / 16, wanted));  // of a row: what is found in them does not depend on how it was cut
    float* peaks = (float*)peaks_.reserve(size_t(num_rows) * size_t(groups) * 4);
    finite_.resize(size_t(num_rows * pieces));
    phase("sample", num_rows * pieces, [&](int task, int) {
        int row = task / pieces, piece = task % pieces, first = groups * piece / pieces, last = groups * (piece + 1) / pieces;
        float* to = peaks + size_t(row) * size_t(groups);
        finite_[size_t(task)] = kernels_.find_peaks(logits + size_t(row) * width, vocab_size_, first, last, barred, to);
    });
    size_t need = 0;
    for (int i = 0; i < num_draws; i++) need = std::max(need, kernels_.draw_scratch(vocab_size_, draws[i]));
    reserve_scratch(need);
    phase("sample", num_draws, [&](int i, int thread) {
        const Draw& one = draws[i];
        const uint8_t* finite = finite_.data() + size_t(one.row) * size_t(pieces);
        tokens[i] = -1;
        if (std::find(finite, finite + pieces, 0) != finite + pieces) return;
        const float *row = logits + size_t(one.row) * width, *its_peaks = peaks + size_t(one.row) * size_t(groups);
        tokens[i] = kernels_.draw(row, its_peaks, vocab_size_, one, scratch(thread));
    });
}

}  // namespace cloister
