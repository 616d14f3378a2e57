#include "program.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <new>
#include <stdexcept>
#include <utility>

namespace cloister {

std::atomic<uint64_t> step_number{0};

namespace {

constexpr size_t inputs_in_cache = size_t(5) << 18;  // inputs of a product that stay in a core's second-level cache
constexpr int rope_chunk = 1024;
constexpr int most_turns = 1 << 22;  // positions that a token may be turned by
constexpr size_t wipe_piece = size_t(1) << 18;
constexpr size_t most_partial_bytes = size_t(64) << 20;  // packing.py counts on it
constexpr size_t most_shared_bytes = size_t(16) << 20;    // of these, of splits that sequences share
constexpr int most_sharing_tokens = 8;  // of a sequence that has splits of keys computed with others: one that decodes, or verifies drafts

void require(bool fits, const char* otherwise) {
    if (!fits) throw std::invalid_argument(otherwise);
}

bool within(int32_t value, int end) { return uint32_t(value) < uint32_t(end); }

// The first entry of a block table that a token at `position` sees.
int first_entry(const KVGroup& group, int position, int block_size) {
    return group.window ? std::max(0, position - group.window + 1) / block_size : 0;
}

// Whether attention of two layers has the same list of tasks.
bool same_tasks(const Layer& one, const Layer& other) {
    const AttentionShape &a = one.shape, &b = other.shape;
    return a.num_heads == b.num_heads && a.num_kv_heads == b.num_kv_heads && a.padded_dim == b.padded_dim && a.value_dim == b.value_dim && a.window == b.window && a.chunked == b.chunked;
}

// What a token sees further than its own position are tokens of this step, one after the other in its sequence, which see as much or more.
void check_last_seen(const Batch& batch, int first, int end, int context) {
    int start = context - (end - first), chain = first;  // tokens before `chain` stand in a row
    while (chain < end && batch.positions[chain] == start + chain - first && (!batch.parents || batch.parents[chain] == (chain > first ? chain - 1 : -1))) chain++;
    for (int i = first; i < end; i++) {
        int seen = batch.last_seen[i], position = batch.positions[i];
        require(seen == position || (i < chain && seen > position && seen < start + chain - first), "a batch has a token that sees what is not in its step");
        require(i == first || i >= chain || seen >= batch.last_seen[i - 1], "a batch has a token that sees less than the one before it");
    }
}

// Documents stand before every token that weighs them.
void check_documents(const Batch& batch, int sequence, int num_before) {
    const int32_t* range = batch.document_ranges + 2 * sequence;
    const float* weights = batch.document_weights + 2 * sequence;
    if (range[0] == range[1]) return;
    require(range[0] >= 0 && range[0] < range[1] && range[1] <= num_before, "a batch weighs documents that do not stand before its tokens");
    require(std::isfinite(weights[0]) && weights[0] > 0 && std::isfinite(weights[1]) && weights[1] > 0, "a batch weighs documents by what is not above 0");
}

}  // namespace

float QueryGrowth::operator()(int position) const {
    return period ? float(1 + double(beta) * std::log1p(double((int64_t(position) + first) / period))) : 1.0f;
}

Program::Program(const Kernels& kernels, std::shared_ptr<Pool> pool, int vocab_size, int hidden_size, float norm_eps)
    : kernels_(kernels), pool_(std::move(pool)), vocab_size_(vocab_size), hidden_size_(hidden_size), norm_eps_(norm_eps),
      stride_(size_t(hidden_size + 31) / 32 * 32), scratch_(size_t(pool_->num_threads())) {}

std::vector<Buffer*> Program::buffers() {
    std::vector<Buffer*> all{&residual_, &normed_, &inputs_, &next_inputs_, &qkv_, &queries_, &mixed_, &wide_, &partial_, &logits_, &masked_, &peaks_,
                             &branch_, &parallel_, &beside_, &exact_, &other_inputs_, &scores_, &routes_, &gathered_, &expert_outputs_, &latent_, &adapter_normed_, &stored_, &guesses_, &drafts_,
                             &streams_, &layer_inputs_, &laurel_, &low_, &joined_, &merged_};
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
    products_.assign(products_.capacity(), {});  // how many rows chose which expert
    cuts_.assign(cuts_.capacity(), 0);
    nexts_.assign(nexts_.capacity(), {});
    head_rows_.clear();
    num_drafts_ = num_step_tokens_ = 0;
    if (pieces.empty()) return;
    phase("wipe", int(pieces.size()), [&](int i, int) { overwrite(pieces[size_t(i)].first, pieces[size_t(i)].second); });
    pool_->run_on_each([](int) { overwrite_stack(); });
}

// A step of one layer reads and writes KV in blocks of any layer's memory, which are numbered through: layer 0's first.
void Program::check_layer_batch(const Batch& batch) const {
    require(within(batch.layer, int(layers.size())), "a batch names a layer that the model does not have");
    require(!batch.num_rows || batch.layer + 1 == int(layers.size()), "only the last layer has logits");
    require(groups.size() == 1 && !streams && !merge.codes && !batch.num_embeddings, "this model cannot be computed layer by layer");
    size_t layer_bytes = size_t(groups[0].num_blocks) * layers[0].cache.block_bytes;
    for (size_t i = 0; i < layers.size(); i++)
        require(layers[i].attends() && !layers[i].beside && layers[i].cache.block_bytes == layers[0].cache.block_bytes && layers[i].cache.base == layers[0].cache.base + i * layer_bytes,
                "this model cannot be computed layer by layer");
}

void Program::check(const Batch& batch) const {
    const int32_t *starts = batch.query_starts, *contexts = batch.context_lens;
    require(!streams || !layers.empty(), "residual streams need layers");
    require(!merge.codes || batch.hidden, "a batch lacks the hidden states that its program merges with embeddings");
    require(starts[0] == 0 && starts[batch.num_sequences] == batch.num_tokens, "the sequences of a batch do not make up its tokens");
    int block_size = layers.empty() ? 1 : layers[0].cache.block_size, num_groups = int(groups.size());
    for (int s = 0; s < batch.num_sequences; s++) {
        int first = starts[s], end = starts[s + 1], context = contexts[s];
        require(first <= end && end <= batch.num_tokens, "the sequences of a batch do not make up its tokens");
        require(context >= end - first, "a sequence of a batch has more tokens than its context");
        for (int i = first; i < end; i++) require(within(batch.positions[i], context), "a batch has a position outside of its sequence's context");
        if (!layers.empty()) {
            int blocks = int((int64_t(context) + block_size - 1) / block_size);
            require(int64_t(blocks) * num_groups <= batch.table_stride, "a block table of a batch is shorter than its sequence's context");
            const int32_t* table = batch.tables + size_t(s) * size_t(batch.table_stride);
            for (int g = 0; g < num_groups; g++) {
                const KVGroup& group = groups[size_t(g)];
                if (group.is_state) continue;
                for (int b = first_entry(group, context - (end - first), block_size); b < blocks; b++)
                    require(within(table[size_t(b) * size_t(num_groups) + size_t(g)] - group.first_block, batch.residual ? group.num_blocks * int(layers.size()) : group.num_blocks),
                            "a batch names a block that the cache does not have");
            }
        }
        for (int i = first; batch.parents && i < end; i++) {
            int parent = batch.parents[i];
            require(parent == -1 || (parent >= first && parent < i), "a batch has a token whose parent is not before it in its sequence");
        }
        if (batch.last_seen) check_last_seen(batch, first, end, context);
        if (batch.document_ranges) check_documents(batch, s, context - (end - first));
    }
    for (int s = 0; recent_group() >= 0 && batch.parents && s < batch.num_sequences; s++)
        for (int i = starts[s]; i < starts[s + 1]; i++)
            require(batch.positions[i] - (contexts[s] - (starts[s + 1] - starts[s])) < groups[size_t(recent_group())].window || batch.parents[i] == i - 1,
                    "a token tree is deeper than the window of recent keys");
    for (int i = 0; i < batch.num_tokens; i++) require(within(batch.token_ids[i], vocab_size_), "a batch has a token id outside of the vocabulary");
    for (int i = 0; positions.codes && i < batch.num_tokens; i++)
        require(within(batch.positions[i], positions.outputs), "a batch has a position beyond those that the model learned");
    check_states(batch);
    if (batch.residual) check_layer_batch(batch);
    bool has_axes = std::all_of(ropes.begin(), ropes.end(), [](const Rope& rope) { return !rope.axes.empty(); });
    for (int i = 0; batch.rope_positions && i < 3 * batch.num_tokens; i++) {
        require(within(batch.rope_positions[i], most_turns), "a batch turns a token by a position that no model has");
        require(has_axes || batch.rope_positions[i] == batch.rope_positions[i % batch.num_tokens],
                "tokens with three positions need a rotation that says which of them turns each frequency");
    }
    require(batch.num_parts == 1 || (!streams && size_t(batch.num_parts) <= layers.size() + 1), "a batch has embeddings for more layers than the model has");
    for (int i = 0; i < batch.num_embeddings; i++) require(within(batch.embedding_rows[i], batch.num_tokens), "a batch has an embedding of a token that it does not have");
    for (int i = 0; i < batch.num_rows; i++) require(within(batch.logit_rows[i], batch.num_tokens), "a batch asks for logits of a token that it does not have");
}

// For every thread, whether or not it gets to work in this step: later steps then allocate nothing.
void Program::reserve_scratch(size_t size) {
    for (Buffer& buffer : scratch_) buffer.reserve(size);
}

uint8_t* Program::scratch(int thread) const { return scratch_[size_t(thread)].get<uint8_t>(); }

Rows Program::shape_rows(Buffer& buffer, const InputForm& form, int num_rows, int length) {
    int per_chunk = chunk_length(form.type), chunks = (length + per_chunk - 1) / per_chunk, groups = form.group ? length / form.group : 1;
    auto lines = [](size_t bytes) { return (bytes + 63) / 64 * 64; };
    size_t data = size_t(num_rows) * chunks * 64, scales = lines(size_t(num_rows) * groups * 4), totals = lines(size_t(num_rows) * 4);
    uint8_t* at = buffer.reserve(data + scales + totals + size_t(num_rows) * chunks * 8);
    return {at, (float*)(at + data), (int32_t*)(at + data + scales), (int32_t*)(at + data + scales + totals), num_rows, chunks, form, groups};
}

// How many blocks of rows a task takes at once: an even number, whose inputs stay in a core's second-level cache.
static int blocks_at_once(const Matrix& w, int blocks) {
    int most = std::max(2, int(inputs_in_cache / (size_t(w.chunks) * 64 * block_rows)) / 2 * 2);
    int parts = (blocks + most - 1) / most;
    return ((blocks + parts - 1) / parts + 1) / 2 * 2;
}

void Program::product(const char* name, const Matrix& w, const Rows& x, const Sink& sink) {
    int blocks = (x.num_rows + block_rows - 1) / block_rows, at_once = blocks_at_once(w, blocks), parts = (blocks + at_once - 1) / at_once;
    reserve_scratch(kernels_.multiply_scratch(w));
    phase(name, parts * w.panels, [&](int task, int thread) {
        int part = task / w.panels, panel = task % w.panels;
        int begin = part * at_once, end = std::min(blocks, begin + at_once);
        kernels_.multiply(w, x, begin, end, panel, sink, scratch(thread));
    });
}

// All of `products_` in one list of tasks.
void Program::run_products(const char* name) {
    size_t scratch_size = 0;
    int num_tasks = 0;
    cuts_.clear();
    for (const Product& each : products_) {
        int blocks = (each.x.num_rows + block_rows - 1) / block_rows, at_once = blocks_at_once(*each.w, blocks);
        cuts_.push_back(num_tasks += (blocks + at_once - 1) / at_once * each.w->panels);
        scratch_size = std::max(scratch_size, kernels_.multiply_scratch(*each.w));
    }
    reserve_scratch(scratch_size);
    phase(name, num_tasks, [&](int task, int thread) {
        size_t i = size_t(std::upper_bound(cuts_.begin(), cuts_.end(), task) - cuts_.begin());
        const Product& each = products_[i];
        int place = i ? task - cuts_[i - 1] : task, panel = place % each.w->panels, part = place / each.w->panels;
        int blocks = (each.x.num_rows + block_rows - 1) / block_rows, at_once = blocks_at_once(*each.w, blocks);
        kernels_.multiply(*each.w, each.x, part * at_once, std::min(blocks, (part + 1) * at_once), panel, each.sink, scratch(thread));
    });
}

void Program::extend_ropes(const Batch& batch) {
    int last = 0;
    for (int i = 0; i < batch.num_tokens; i++) last = std::max(last, batch.positions[i]);
    for (int i = 0; batch.rope_positions && i < 3 * batch.num_tokens; i++) last = std::max(last, batch.rope_positions[i]);
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

// Returns the cosines and sines that turn a token, [2][inv_freq]: of one position, or put together in `chosen` of as many numbers.
const float* Program::angles(const Rope& rope, const Batch& batch, int row, float* chosen) const {
    size_t half = rope.inv_freq.size(), num_tokens = size_t(batch.num_tokens);
    auto of = [&](int position) { return rope.table.data() + size_t(position) * 2 * half; };
    if (!batch.rope_positions) return of(batch.positions[row]);
    const int32_t* turns = batch.rope_positions + row;
    const float* of_axis[3] = {of(turns[0]), of(turns[num_tokens]), of(turns[2 * num_tokens])};
    if (of_axis[0] == of_axis[1] && of_axis[0] == of_axis[2]) return of_axis[0];
    for (size_t d = 0; d < half; d++) {
        const float* from = of_axis[rope.axes[d]];
        chosen[d] = from[d];
        chosen[half + d] = from[half + d];
    }
    return chosen;
}

// Finds the slot of each token, and which sequences are trees.
void Program::place_tokens(const Batch& batch) {
    sequences_.clear();
    paths_.clear();
    completed_.clear();
    sequence_of_.resize(size_t(batch.num_tokens));
    slot_of_.resize(size_t(batch.num_tokens));
    if (batch.parents) nodes_.resize(size_t(batch.num_tokens));
    document_weights_.resize(batch.document_ranges ? size_t(batch.num_sequences) : 0);
    for (int s = 0; s < batch.num_sequences; s++) {
        int first = batch.query_starts[s], count = batch.query_starts[s + 1] - first;
        Sequence sequence;
        sequence.first_token = first;
        sequence.num_tokens = count;
        sequence.first_position = batch.context_lens[s] - count;
        if (batch.last_seen) sequence.last_seen = batch.last_seen + first;
        if (batch.document_ranges && batch.document_ranges[2 * s] < batch.document_ranges[2 * s + 1]) {
            float temperature = batch.document_weights[2 * s], scale = batch.document_weights[2 * s + 1];
            document_weights_[size_t(s)] = {batch.document_ranges[2 * s], batch.document_ranges[2 * s + 1], 1.0f / temperature, scale * temperature};
            sequence.documents = &document_weights_[size_t(s)];
        }
        int size = layers.empty() ? 1 : layers[0].cache.block_size;
        for (int entry = sequence.first_position / size; recent_group() >= 0 && entry < batch.context_lens[s] / size; entry++) completed_.push_back({s, entry});
        bool is_tree = false;
        for (int i = 0; i < count; i++) {
            sequence_of_[size_t(first + i)] = s;
            slot_of_[size_t(first + i)] = sequence.first_position + i;
            is_tree = is_tree || (batch.parents && batch.parents[first + i] != (i ? first + i - 1 : -1));
        }
        if (is_tree) {
            sequence.nodes = nodes_.data() + first;
            list_paths(batch, sequence);
        }
        sequences_.push_back(sequence);
    }
    for (Sequence& sequence : sequences_) sequence.paths = paths_.data();
}

// Where the keys lie that the layers of a group read and write.
void Program::enter_group(const Batch& batch, int number) {
    const KVGroup& group = groups[size_t(number)];
    for (size_t s = 0; s < sequences_.size(); s++) {
        Sequence& sequence = sequences_[s];
        sequence.table = batch.tables + s * size_t(batch.table_stride) + number;
        sequence.num_groups = int(groups.size());
        sequence.first_block = group.first_block;
        sequence.first_entry = first_entry(group, sequence.first_position, layers[0].cache.block_size);
        sequence.empty_block = group.num_blocks;
        if (recent_group() < 0) continue;
        const KVGroup& recent = groups[size_t(recent_group())];
        sequence.recent_table = recent_group() - number;
        sequence.first_recent_block = recent.first_block;
        sequence.first_recent_entry = first_entry(recent, sequence.first_position, layers[0].cache.block_size);
        sequence.empty_recent_block = recent.num_blocks;
    }
}

int Program::recent_group() const {
    for (size_t i = 0; i < groups.size(); i++)
        if (groups[i].is_recent) return int(i);
    return -1;
}

// A node's path is its parent's and its own slot.
void Program::list_paths(const Batch& batch, const Sequence& sequence) {
    for (int token = sequence.first_token; token < sequence.first_token + sequence.num_tokens; token++) {
        int parent = batch.parents[token], depth = parent < 0 ? 0 : nodes_[size_t(parent)].position - sequence.first_position + 1;
        nodes_[size_t(token)] = {int(paths_.size()), sequence.first_position + depth};
        for (int i = 0; i < depth; i++) paths_.push_back(int32_t(paths_[size_t(nodes_[size_t(parent)].path + i)]));
        paths_.push_back(slot_of_[size_t(token)]);
    }
}

// How many rows of a sequence a task of attention has at most. A tree is computed node by node at its end, which the team shares.
int Program::rows_at_once(const Sequence& sequence, const AttentionShape& shape) const {
    int parts = sequence.nodes && sequences_.size() == 1 ? std::max(1, pool_->num_threads() / shape.num_kv_heads) : 1;
    return std::min(task_rows, (sequence.num_tokens + parts - 1) / parts * shape.group());
}

// Finds the splits of keys that several sequences share, which are those whose blocks are the same: a tree of prefixes.
void Program::find_shared_splits(const AttentionShape& shape) {
    shared_units_.clear();
    shared_members_.clear();
    shared_rows_.clear();
    for (Sequence& sequence : sequences_) sequence.num_shared = 0;
    if (shape.window) return;
    std::vector<int> members;
    for (int s = 0; s < int(sequences_.size()); s++)
        if (within(sequences_[size_t(s)].num_tokens - 1, most_sharing_tokens) && !sequences_[size_t(s)].documents) members.push_back(s);
    share_split(shape, std::move(members), 0);
}

// Those of `members` that have the same blocks at a split share it, and perhaps the next ones.
void Program::share_split(const AttentionShape& shape, std::vector<int> members, int split) {
    int block_size = layers[0].cache.block_size, first = split * split_keys, end = first + split_keys, recent = recent_group();
    auto alike = [&](int a, int b) {
        const Sequence &one = sequences_[size_t(a)], &other = sequences_[size_t(b)];
        for (int entry = first / block_size; entry <= (end - 1) / block_size; entry++)
            if (one.block(entry) != other.block(entry)) return false;
        return true;
    };
    auto rest = std::partition(members.begin(), members.end(), [&](int s) { return (recent < 0 ? sequences_[size_t(s)].first_position : sequences_[size_t(s)].first_position - groups[size_t(recent)].window + 1) >= end; });
    members.erase(rest, members.end());
    while (members.size() > 1) {
        auto others = std::stable_partition(members.begin(), members.end(), [&](int s) { return alike(members.front(), s); });
        std::vector<int> sharing(members.begin(), others);
        members.erase(members.begin(), others);
        if (sharing.size() == 1) continue;
        SharedUnit unit{split, int(shared_members_.size()), int(sharing.size()), int(shared_rows_.size()), 0, 0};
        for (int s : sharing) {
            Sequence& sequence = sequences_[size_t(s)];
            sequence.num_shared = split + 1;
            shared_members_.push_back(s);
            for (int row = 0; row < sequence.num_tokens * shape.group(); row++) shared_rows_.push_back(sequence.first_token * shape.group() + row);
        }
        unit.num_rows = int(shared_rows_.size()) - unit.first_row;
        shared_units_.push_back(unit);
        share_split(shape, std::move(sharing), split + 1);
    }
}

// How many floats the results of shared splits take. If these are too many, the last splits are not shared.
size_t Program::count_shared_floats(const AttentionShape& shape) {
    auto floats_of = [&](const SharedUnit& unit) { return size_t(unit.num_rows) * size_t(shape.num_kv_heads) * partial_row(shape); };
    std::vector<size_t> of_split;
    for (const SharedUnit& unit : shared_units_) {
        of_split.resize(std::max(of_split.size(), size_t(unit.split) + 1));
        of_split[size_t(unit.split)] += floats_of(unit);
    }
    int num_splits = 0;
    size_t floats = 0;
    while (num_splits < int(of_split.size()) && (floats + of_split[size_t(num_splits)]) * 4 <= most_shared_bytes) floats += of_split[size_t(num_splits++)];
    auto is_last = [&](const SharedUnit& unit) { return unit.split >= num_splits; };
    shared_units_.erase(std::remove_if(shared_units_.begin(), shared_units_.end(), is_last), shared_units_.end());
    for (Sequence& sequence : sequences_) sequence.num_shared = std::min(sequence.num_shared, num_splits);
    size_t next = 0;
    for (SharedUnit& unit : shared_units_) {
        unit.first_float = next;
        next += floats_of(unit);
    }
    return floats;
}

void Program::list_shared_tasks(const AttentionShape& shape, float* partial) {
    shared_tasks_.clear();
    size_t length = partial_row(shape), num_splits = 0;
    for (const Sequence& sequence : sequences_) num_splits += size_t(sequence.num_shared);
    shared_splits_.resize(num_splits);
    SharedSplit* next = shared_splits_.data();
    for (Sequence& sequence : sequences_) {
        sequence.shared = next;
        next += sequence.num_shared;
    }
    for (const SharedUnit& unit : shared_units_) {
        float* at = partial + unit.first_float;
        size_t head_stride = size_t(unit.num_rows) * length, row = 0;
        for (int i = 0; i < unit.num_members; i++) {
            const Sequence& sequence = sequences_[size_t(shared_members_[size_t(unit.first_member + i)])];
            shared_splits_[size_t(sequence.shared - shared_splits_.data()) + size_t(unit.split)] = {at + row * length, head_stride};
            row += size_t(sequence.num_tokens * shape.group());
        }
        for (int head = 0; head < shape.num_kv_heads; head++) {
            for (int begin = 0; begin < unit.num_rows; begin += task_rows) {
                AttentionTask task;
                task.sequence = shared_members_[size_t(unit.first_member)];
                task.kv_head = head;
                task.begin = begin;
                task.end = std::min(unit.num_rows, begin + task_rows);
                task.rows = shared_rows_.data() + unit.first_row;
                task.first_split = task.last_split = unit.split;
                task.partial = at + size_t(head) * head_stride + size_t(begin) * length;
                task.cost = task.end - begin + 16;
                shared_tasks_.push_back(task);
            }
        }
    }
}

void Program::list_tasks(const Layer& layer) {
    const AttentionShape& shape = layer.shape;
    find_shared_splits(shape);
    size_t shared_floats = count_shared_floats(shape);
    tasks_.clear();
    for (int s = 0; s < int(sequences_.size()); s++) list_own_tasks(shape, s);
    size_t floats = count_cut_floats(shape, most_partial_bytes / 4 - shared_floats);
    float* partial = (float*)partial_.reserve((shared_floats + floats) * 4 + 64);
    list_shared_tasks(shape, partial);
    joins_.clear();
    if (floats) cut_tasks(shape, partial + shared_floats);
    deal(shared_tasks_);
    deal(tasks_);
}

// Tasks of the splits that a sequence does not share.
void Program::list_own_tasks(const AttentionShape& shape, int s) {
    const Sequence& sequence = sequences_[size_t(s)];
    int rows = sequence.num_tokens * shape.group(), most = rows_at_once(sequence, shape);
    for (int head = 0; head < shape.num_kv_heads; head++) {
        for (int begin = 0; begin < rows; begin += most) {
            AttentionTask task;
            task.sequence = s;
            task.kv_head = head;
            task.begin = begin;
            task.end = std::min(rows, begin + most);
            auto [lowest, end] = sequence.range(begin / shape.group(), (task.end - 1) / shape.group() + 1);
            task.first_split = std::max(sequence.num_shared, shape.first_seen(lowest) / split_keys);
            task.last_split = (end - 1) / split_keys;
            task.cost = double(task.last_split - task.first_split + 1) * (task.end - begin + 16);
            if (sequence.nodes) task.cost += task.end - begin;  // its last split is computed node by node
            tasks_.push_back(task);
        }
    }
}

// In how many splits a task may be cut. Where documents are weighed, their splits come before others.
int Program::count_cuts(const AttentionTask& task) const {
    return sequences_[size_t(task.sequence)].documents ? 1 : task.last_split - task.first_split + 1;
}

// How many floats the results of single splits take, if there are too few tasks for the team and the longest shall be cut; else 0.
size_t Program::count_cut_floats(const AttentionShape& shape, size_t most) const {
    if (pool_->num_threads() == 1 || int(tasks_.size()) >= 4 * pool_->num_threads()) return 0;
    size_t floats = 0;
    for (const AttentionTask& task : tasks_)
        if (int splits = count_cuts(task); splits > 1) floats += size_t(splits) * size_t(task.end - task.begin) * partial_row(shape);
    return floats <= most ? floats : 0;
}

// Cuts the longest tasks into splits, which are joined afterwards.
void Program::cut_tasks(const AttentionShape& shape, float* partial) {
    int num_tasks = int(tasks_.size());
    for (int i = 0; i < num_tasks; i++) {
        AttentionTask whole = tasks_[size_t(i)];
        int splits = count_cuts(whole), per_task = std::max(1, splits / (2 * pool_->num_threads()));
        if (splits == 1) continue;
        size_t length = size_t(whole.end - whole.begin) * partial_row(shape);
        joins_.push_back({whole, partial, splits});
        for (int first = 0; first < splits; first += per_task) {
            AttentionTask part = whole;
            part.first_split = whole.first_split + first;
            part.last_split = std::min(whole.last_split, part.first_split + per_task - 1);
            part.partial = partial + size_t(first) * length;
            part.cost = double(part.last_split - part.first_split + 1) * (part.end - part.begin + 16);
            if (first == 0) tasks_[size_t(i)] = part;
            else tasks_.push_back(part);
        }
        partial += size_t(splits) * length;
    }
}

// The dear ones first, prefill and decode in one list dealt out in turn, so that the team ends together (POD-Attention's aim,
// Kamath et al. 2025, on a CPU).
void Program::deal(std::vector<AttentionTask>& tasks) {
    std::sort(tasks.begin(), tasks.end(), [](const AttentionTask& a, const AttentionTask& b) { return a.cost > b.cost; });
    dealt_.clear();
    size_t threads = size_t(pool_->num_threads());
    for (size_t thread = 0; thread < threads; thread++)
        for (size_t i = thread; i < tasks.size(); i += threads) dealt_.push_back(tasks[i]);
    tasks.swap(dealt_);
}

void Program::attention(const Layer& layer, const Batch& batch) {
    const AttentionShape& shape = layer.shape;
    size_t width = size_t(shape.num_heads) * shape.values();
    reserve_scratch(kernels_.attend_scratch(shape));
    float* mixed = (float*)mixed_.reserve(size_t(batch.num_tokens) * width * 4);
    const uint8_t* queries = queries_.get<uint8_t>();
    auto attend = [&](const char* name, const std::vector<AttentionTask>& tasks) {
        phase(name, int(tasks.size()), [&](int i, int thread) {
            const AttentionTask& task = tasks[size_t(i)];
            kernels_.attend(task, sequences_[size_t(task.sequence)], shape, layer.cache, queries, mixed, width, scratch(thread));
        });
    };
    if (!shared_tasks_.empty()) attend("attention, shared", shared_tasks_);
    attend("attention", tasks_);
    if (joins_.empty()) return;
    phase("attention", int(joins_.size()), [&](int i, int thread) {
        const Join& join = joins_[size_t(i)];
        kernels_.join(join.task, sequences_[size_t(join.task.sequence)], shape, layer.cache.kind, join.partial, join.num_splits, mixed, width, scratch(thread));
    });
}

void Program::move_positions(const int32_t* moves, int num_moves) {
    auto lies_in = [&](const KVGroup& group, int slot) { return within(slot / layers[0].cache.block_size - group.first_block, group.num_blocks); };
    for (int i = 0; i < num_moves && !layers.empty(); i++)
        require(std::any_of(groups.begin(), groups.end(), [&](const KVGroup& group) {
            return !group.is_state && moves[2 * i] >= 0 && moves[2 * i + 1] >= 0 && lies_in(group, moves[2 * i]) && lies_in(group, moves[2 * i + 1]);
        }), "a move names a position that the cache does not have");
    phase("move", int(layers.size()), [&](int i, int) {
        const Layer& layer = layers[size_t(i)];
        if (!layer.attends() || layer.shares_kv) return;
        const KVGroup& group = groups[size_t(layer.group)];
        if (layer.cache.recent_window) return move_recent(layer, moves, num_moves);
        int first = group.first_block * layer.cache.block_size;
        for (int move = 0; move < num_moves; move++)
            if (lies_in(group, moves[2 * move])) kernels_.move_keys(layer.shape, layer.cache, moves[2 * move] - first, moves[2 * move + 1] - first);
    });
}

// Moves keys in the recent cache and packs the blocks that they went to again, as some may be full now. Moves of all groups come in the
// same order.
void Program::move_recent(const Layer& layer, const int32_t* moves, int num_moves) const {
    const KVGroup &group = groups[size_t(layer.group)], &recent = groups[size_t(recent_group())];
    int size = layer.cache.block_size, first = recent.first_block * size;
    std::vector<int> packed, source;
    for (int move = 0; move < num_moves; move++) {
        int from = moves[2 * move] / size, to = moves[2 * move + 1] / size;
        if (within(to - group.first_block, group.num_blocks)) packed.push_back(to - group.first_block);
        if (!within(from - recent.first_block, recent.num_blocks)) continue;
        kernels_.move_keys(layer.shape, layer.cache.recent(), moves[2 * move] - first, moves[2 * move + 1] - first);
        source.push_back(to - recent.first_block);
    }
    for (size_t i = 0; i < std::min(packed.size(), source.size()); i++)
        if (i + 1 == source.size() || source[i + 1] != source[i]) kernels_.pack_block(layer.shape, layer.cache, source[i], packed[i]);
}

void Program::embed(const Batch& batch) {
    float* x = (float*)residual_.reserve(size_t(batch.num_tokens) * stride_ * 4);
    float* learned = normed_.get<float>();
    given_.assign(batch.num_embeddings ? size_t(batch.num_tokens) : 0, -1);
    for (int i = 0; i < batch.num_embeddings; i++) given_[size_t(batch.embedding_rows[i])] = i;
    each_row("embed", batch.num_tokens, [&](int row, int thread) {
        float *to = x + size_t(row) * stride_, *position = learned + size_t(thread) * stride_;
        int given = given_.empty() ? -1 : given_[size_t(row)];
        if (given >= 0) {
            std::copy_n(batch.embeddings + size_t(given) * size_t(batch.num_parts) * size_t(hidden_size_), hidden_size_, to);
        } else {
            kernels_.read_row(embedding, batch.token_ids[row], to);
            if (embedding_scale != 1) kernels_.bend(to, hidden_size_, embedding_scale, 0);
        }
        if (!positions.codes) return;
        kernels_.read_row(positions, batch.positions[row], position);
        kernels_.add_scaled(position, 1, hidden_size_, to);
    });
}

// Adds what stands at some tokens behind a layer, counted from 0.
void Program::add_deepstack(const Batch& batch, int number) {
    if (number + 1 >= batch.num_parts) return;
    const float* added = batch.embeddings + size_t(number + 1) * size_t(hidden_size_);
    float* x = residual_.get<float>();
    each_row("deepstack", batch.num_embeddings, [&](int i, int) {
        kernels_.add_scaled(added + size_t(i) * size_t(batch.num_parts) * size_t(hidden_size_), 1, hidden_size_, x + size_t(batch.embedding_rows[i]) * stride_);
    });
}

// Puts the product of both, normed, where embeddings are (DeepSeek-V3, arXiv:2412.19437, equation 21).
void Program::merge_hidden(const Batch& batch) {
    size_t width = size_t(hidden_size_);
    float *x = residual_.get<float>(), *joined = (float*)merged_.reserve(size_t(pool_->num_threads()) * 2 * stride_ * 4);
    Rows inputs = shape_rows(inputs_, merge.form(), batch.num_tokens, 2 * hidden_size_);
    each_row("merge", batch.num_tokens, [&](int row, int thread) {
        float* to = joined + size_t(thread) * 2 * stride_;
        apply(merge_embedding_norm, x + size_t(row) * stride_, to);
        apply(merge_hidden_norm, batch.hidden + size_t(row) * width, to + width);
        kernels_.put_row(to, 2 * hidden_size_, inputs, row);
    });
    product("merge", merge, inputs, {Finish::store, x, stride_});
}

void Program::apply(const Norm& norm, const float* row, float* out) const {
    if (centres) return kernels_.layer_norm(row, norm.weight, norm.bias, norm_eps_, hidden_size_, out);
    kernels_.norm(row, norm.weight, norm_eps_, hidden_size_, out);
    if (norm.bias) kernels_.add_scaled(norm.bias, 1, hidden_size_, out);
}

// The residual stream, normed and scaled, as inputs of products with `w` and `other`, and of what else a mixture multiplies.
Program::Normed Program::norm_rows(const char* name, const Norm& norm, const Matrix& w, int num_tokens, Buffer& buffer, const Mixture* mixture,
                                   const Matrix* other, float scale) {
    if (mixture && mixture->shared) other = &mixture->shared->up;
    InputForm form = w.form(), other_form = other ? other->form() : form;
    Normed inputs;
    inputs.rows = inputs.other = shape_rows(buffer, form, num_tokens, hidden_size_);
    if (mixture) inputs.exact = shape_rows(exact_, {Input::f32}, num_tokens, hidden_size_);
    if (other_form != form) inputs.other = shape_rows(other_inputs_, other_form, num_tokens, hidden_size_);
    const float* x = residual_.get<float>();
    float* normed = normed_.get<float>();
    each_row(name, num_tokens, [&](int row, int thread) {
        const float* from = x + size_t(row) * stride_;
        float* to = normed + size_t(thread) * stride_;
        if (norm.weight) {
            apply(norm, from, to);
            from = to;
        }
        if (scale != 1) {
            if (from != to) std::memcpy(to, from, size_t(hidden_size_) * 4);
            kernels_.bend(to, hidden_size_, scale, 0);
            from = to;
        }
        kernels_.put_row(from, hidden_size_, inputs.rows, row);
        if (mixture) kernels_.put_row(from, hidden_size_, inputs.exact, row);
        if (other_form != form) kernels_.put_row(from, hidden_size_, inputs.other, row);
    });
    return inputs;
}

// Norms and turns q and k of each token, and puts queries, keys and values where attention reads them.
void Program::place_heads(const Layer& layer, const Batch& batch, float* qkv, size_t stride) {
    const AttentionShape& shape = layer.shape;
    int dim = shape.head_dim, q_width = shape.num_heads * dim, kv_width = layer.key_width();
    size_t query_bytes = size_t(shape.num_heads) * shape.padded_dim * (layer.cache.kind == KVKind::f32 ? 4 : 2);
    uint8_t* queries = queries_.reserve(size_t(batch.num_tokens) * query_bytes);
    const Rope* rope = layer.rope < 0 ? nullptr : &ropes[size_t(layer.rope)];
    auto norm_heads = [&](float* heads, const float* weight, int width) {
        int length = layer.norms_projection ? width : dim;
        for (int at = 0; weight && at < width; at += length) kernels_.norm(heads + at, weight, norm_eps_, length, heads + at);
    };
    if (rope) reserve_scratch(rope->inv_freq.size() * 8);
    each_row("rope", batch.num_tokens, [&](int row, int thread) {
        float* q = qkv + size_t(row) * stride;
        float *k = q + q_width, *v = k + kv_width;
        norm_heads(q, layer.q_norm, q_width);
        norm_heads(k, layer.k_norm, kv_width);
        for (int at = 0; layer.v_norm && at < kv_width; at += dim) kernels_.norm(v + at, layer.v_norm, norm_eps_, dim, v + at);
        if (rope) {
            int half = int(rope->inv_freq.size());
            const float* cos = angles(*rope, batch, row, (float*)scratch(thread));
            kernels_.rotate(q, shape.num_heads, dim, half, cos, cos + half);
            if (!layer.shares_kv) kernels_.rotate(k, shape.num_kv_heads, dim, half, cos, cos + half);
        }
        kernels_.put_queries(q, shape, layer.scale * layer.growth(batch.positions[row]), layer.cache.kind, queries + size_t(row) * query_bytes);
        if (layer.shares_kv) return;
        int slot = slot_of_[size_t(row)], size = layer.cache.block_size;
        const Sequence& sequence = sequences_[size_t(sequence_of_[size_t(row)])];
        if (layer.cache.recent_window) kernels_.put_keys(k, v, shape, layer.cache.recent(), sequence.recent().block(slot / size), slot % size);
        else kernels_.put_keys(k, v, shape, layer.cache, sequence.block(slot / size), slot % size);
    });
    if (!layer.cache.recent_window || layer.shares_kv || completed_.empty()) return;
    phase("pack", int(completed_.size()), [&](int i, int) {
        auto [s, entry] = completed_[size_t(i)];
        const Sequence& sequence = sequences_[size_t(s)];
        kernels_.pack_block(shape, layer.cache, sequence.recent().block(entry), sequence.block(entry));
    });
}

void Program::attention_block(const Layer& layer, const Batch& batch, const Rows& inputs, const Sink& sink) {
    int num_tokens = batch.num_tokens, width = layer.output.inputs;
    size_t stride = size_t(layer.qkv.panels) * 32;
    float* qkv = (float*)qkv_.reserve(size_t(num_tokens) * stride * 4);
    product("qkv", layer.qkv, inputs, {Finish::store, qkv, stride});
    adapt_heads(layer, qkv, stride);
    if (layer.latent) place_latents(layer, batch, qkv, stride);
    else place_heads(layer, batch, qkv, stride);
    attention(layer, batch);
    const float* mixed = layer.latent ? expand_latents(layer, num_tokens) : mixed_.get<float>();
    Rows rows = shape_rows(inputs_, layer.output.form(), num_tokens, width);
    const float* gates = qkv + layer.shape.num_heads * layer.shape.head_dim + 2 * layer.key_width();
    each_row("round", num_tokens, [&](int row, int) {
        if (layer.gated) kernels_.gate(mixed_.get<float>() + size_t(row) * width, gates + size_t(row) * stride, width, false);
        kernels_.put_row(mixed + size_t(row) * width, width, rows, row);
    });
    product("output", layer.output, rows, sink);
    adapt_output(layer, mixed, sink);
}

// What mixes tokens: attention, a mixer with a state, or both side by side, whose outputs are added in that order.
void Program::mix(const Layer& layer, const Batch& batch, const Layer*& previous) {
    int num_tokens = batch.num_tokens;
    const Layer* beside = layer.beside.get();
    auto norm = [&](const Layer& mixer, Buffer& buffer) {
        const Matrix* other = mixer.delta_net ? &mixer.delta_net->steps : mixer.stream ? &mixer.stream->laurel_left : nullptr;
        return norm_rows("norm", layer.attention_norm, mixer.qkv, num_tokens, buffer, nullptr, other, mixer.input_scale);
    };
    Normed inputs = norm(layer, inputs_), others;
    if (beside) others = norm(*beside, beside_);
    if (layer.stream) laurel(*layer.stream, inputs.other);
    Sink sink = branch_sink(layer, layer.attention_post_norm, num_tokens);
    sink.scale = layer.output_scale;
    if (layer.attends()) {
        bool enters = !previous || previous->group != layer.group;
        if (enters) enter_group(batch, layer.group);
        if (enters || !same_tasks(*previous, layer)) list_tasks(layer);
        previous = &layer;
        attention_block(layer, batch, inputs.rows, sink);
    } else {
        mix_states(layer, batch, inputs, sink);
    }
    if (beside) {
        sink.finish = Finish::add;
        sink.scale = beside->output_scale;
        mix_states(*beside, batch, others, sink);
    }
    join_branch(layer, layer.attention_post_norm, num_tokens);
}

void Program::mix_states(const Layer& layer, const Batch& batch, const Normed& inputs, const Sink& sink) {
    if (layer.delta_net) delta_net_block(layer, batch, inputs, sink);
    else if (layer.mamba2) mamba2_block(layer, batch, inputs.rows, sink);
    else short_conv_block(layer, batch, inputs.rows, sink);
}

// Where a branch's last product goes: onto the residual stream at once, or beside it where a norm or a scale comes between.
Sink Program::branch_sink(const Layer& layer, const Norm& post, int num_tokens) {
    if (adds_at_once(layer, post)) return {Finish::add, residual_.get<float>(), stride_};
    return {Finish::store, (float*)branch_.reserve(size_t(num_tokens) * stride_ * 4), stride_};
}

void Program::join_branch(const Layer& layer, const Norm& post, int num_tokens) {
    if (adds_at_once(layer, post)) return;
    float* branch = branch_.get<float>();
    each_row("residual", num_tokens, [&](int row, int) { add_branch(layer, post, branch + size_t(row) * stride_, row); });
}

void Program::add_branch(const Layer& layer, const Norm& post, float* branch, int row) {
    if (post.weight) apply(post, branch, branch);
    kernels_.add_scaled(branch, layer.residual_scale, hidden_size_, residual_.get<float>() + size_t(row) * stride_);
}

Sink Program::up_sink(const FeedForward& mlp, Rows& next, uint16_t* wide) const {
    size_t stride = size_t(mlp.up.panels) * (mlp.gated ? 16 : 32);
    return {mlp.gated ? Finish::glu : Finish::activate, nullptr, stride, mlp.activation, &next, input_of(mlp.down.kind), wide, mlp.gate_scale, mlp.clipping};
}

void Program::feed_forward(const FeedForward& mlp, const Rows& inputs, Sink end, const Layer* adapted) {
    end.scale = mlp.output_scale;
    const Layer* adapted_up = adapted;
    int num_tokens = inputs.num_rows, inner = mlp.down.inputs;
    Input input = input_of(mlp.down.kind);
    Rows next = shape_rows(next_inputs_, mlp.down.form(), num_tokens, inner);
    Sink sink = up_sink(mlp, next, nullptr);
    if (input == Input::int8) sink.wide = (uint16_t*)wide_.reserve(size_t(num_tokens) * sink.stride * 2);
    if (adapted && !changes(*adapted, {{Site::gate}, {Site::up}})) adapted_up = nullptr;
    if (adapted_up || mlp.sparse) product_stored(mlp, inputs, sink, adapted_up);
    else product("gate_up", mlp.up, inputs, sink);
    if (sink.wide)
        each_row("round", num_tokens, [&](int row, int) { kernels_.put_wide_row(sink.wide + size_t(row) * sink.stride, inner, next, row); });
    product("down", mlp.down, next, end);
    if (adapted) adapt_down(*adapted, next, sink, end);
}

void Program::decode_layer(const Layer& layer, const Batch& batch, const Layer*& previous) {
    if (layer.stream) return stream_block(layer, batch, previous, &layer == &layers.back() ? nullptr : &layer + 1);
    if (!layer.feeds()) {
        if (layer.mixes()) mix(layer, batch, previous);
        return;
    }
    int num_tokens = batch.num_tokens;
    const Mixture* experts = layer.mixture ? &*layer.mixture : nullptr;
    const Matrix& up = experts ? experts->experts[0].up : layer.mlp.up;
    Normed inputs;
    if (layer.parallel) {
        inputs = norm_rows("mlp_norm", layer.mlp_norm, up, num_tokens, parallel_, experts);
        keep_normed(layer);
    }
    if (layer.mixes()) mix(layer, batch, previous);
    if (!layer.parallel) inputs = norm_rows("mlp_norm", layer.mlp_norm, up, num_tokens, inputs_, experts);
    if (experts) return mixture(layer, inputs);
    feed_forward(layer.mlp, inputs.rows, branch_sink(layer, layer.mlp_post_norm, num_tokens), &layer);
    join_branch(layer, layer.mlp_post_norm, num_tokens);
}

void Program::forward_layer(const Batch& batch, float* logits) {
    size_t width = size_t(hidden_size_);
    if (batch.layer == 0) {
        embed(batch);
    } else {
        float* x = (float*)residual_.reserve(size_t(batch.num_tokens) * stride_ * 4);
        each_row("residual", batch.num_tokens, [&](int row, int) { std::copy_n(batch.residual + size_t(row) * width, width, x + size_t(row) * stride_); });
    }
    struct Lent {  // the layer uses memory of all layers until it is done, or has failed
        Layer& layer;
        uint8_t* own;
        ~Lent() { layer.cache.base = own; }
    } lent{layers[size_t(batch.layer)], layers[size_t(batch.layer)].cache.base};
    lent.layer.cache.base = layers[0].cache.base;
    const Layer* previous = nullptr;
    decode_layer(lent.layer, batch, previous);
    if (batch.layer + 1 == int(layers.size())) return head_logits(batch, logits);
    const float* x = residual_.get<float>();
    each_row("residual", batch.num_tokens, [&](int row, int) { std::copy_n(x + size_t(row) * stride_, width, batch.residual + size_t(row) * width); });
}

void Program::forward(const Batch& batch, float* logits) {
    check(batch);
    head_rows_.clear();
    num_step_tokens_ = batch.num_tokens;
    step_number.fetch_add(1);
    extend_ropes(batch);
    place_tokens(batch);
    place_states(batch);
    list_adapters(batch);
    normed_.reserve(size_t(pool_->num_threads()) * stride_ * 4);
    if (batch.residual) return forward_layer(batch, logits);
    embed(batch);
    if (merge.codes) merge_hidden(batch);
    if (streams) widen(batch);
    const Layer* previous = nullptr;  // with attention
    for (size_t number = 0; number < layers.size(); number++) {
        decode_layer(layers[number], batch, previous);
        add_deepstack(batch, int(number));
    }
    if (streams) join_streams(batch.logit_rows, batch.num_rows);
    head_logits(batch, logits);
}

}  // namespace cloister
