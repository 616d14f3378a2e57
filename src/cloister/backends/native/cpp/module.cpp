// The face of the kernels to Python.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <limits>
#include <stdexcept>

#include "cpu.hpp"
#include "pack.hpp"
#include "processor.hpp"
#include "program.hpp"

namespace nb = nanobind;
using namespace cloister;

namespace cloister {
void bind_kv_codec(nb::module_& m);      // kv_codec.cpp
void bind_kv_copies(nb::module_& m);     // kv_copies.cpp
void bind_block_opener(nb::module_& m);  // block_opener.cpp
}

namespace {

template <class T> using Array1 = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T> using Array2 = nb::ndarray<T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Bytes = Array1<uint8_t>;

void require(bool fits, const char* otherwise) {
    if (!fits) throw std::invalid_argument(otherwise);
}

// An array that the kernels keep a pointer into, or null: a copy that nanobind made of it would be gone when they read it.
template <class T> const T* kept(const nb::object& o, size_t size, const char* otherwise) {
    if (o.is_none()) return nullptr;
    Array1<const T> array;
    require(nb::try_cast(o, array, false) && array.size() >= size, otherwise);
    return array.data();
}

// A matrix as Python describes it; the arrays must outlive the program.
Matrix make_matrix(int kind, int outputs, int inputs, int group, int zero_point, bool group_inputs, int rotation, bool e2m1, const Array1<const uint8_t>& codes, nb::object channel_scales,
                   nb::object scales, int scale_bytes, nb::object output_scales, nb::object zeros, nb::object offsets, nb::object group_scales, nb::object bias) {
    const char* too_short = "a packed matrix is shorter than its shape asks for";
    require(kind >= int(Kind::f32) && kind <= int(Kind::w4a16) && outputs > 0 && inputs > 0, "a packed matrix has no such kind or shape");
    bool halves = group == 16 && Kind(kind) == Kind::w4a16 && e2m1;
    require(group == 0 || (group > 0 && (group % sum_length == 0 || halves) && inputs % group == 0), "a packed matrix has groups that no kernel has");
    Matrix m;
    m.kind = Kind(kind);
    m.outputs = outputs;
    m.inputs = inputs;
    m.panels = (outputs + panel_width - 1) / panel_width;
    m.chunks = (inputs + chunk_length(m.kind) - 1) / chunk_length(m.kind);
    m.group = group;
    m.groups = group ? inputs / group : 0;
    m.zero_point = zero_point;
    m.group_inputs = group_inputs;
    m.rotation = rotation;
    m.e2m1 = e2m1;
    require(!e2m1 || ((m.kind == Kind::int4 || m.kind == Kind::w4a16) && zero_point == 12 && zeros.is_none() && offsets.is_none()), "a packed matrix has no such floats");
    bool turns = input_of(m.kind) == Input::int8 && !group_inputs && (rotation == 16 || rotation == 64 || rotation == 128) && inputs % rotation == 0;
    require(rotation == 0 || turns, "a packed matrix has inputs that cannot be rotated");
    require(!group_inputs || (group && input_of(m.kind) == Input::int8), "a packed matrix has no groups that its inputs could share");
    size_t rows = size_t(m.panels) * panel_width, pairs = rows * size_t(m.groups);
    m.codes = codes.data();
    m.channel_scales = kept<float>(channel_scales, rows, too_short);
    require(scale_bytes == 1 || scale_bytes == 2 || scale_bytes == 4, "a packed matrix has no such scales");
    m.scales = kept<uint8_t>(scales, pairs * size_t(scale_bytes), too_short);
    m.scale_bytes = scale_bytes;
    require(output_scales.is_none() || (e2m1 && scale_bytes == 1), "a packed matrix has no such scales");
    m.output_scales = kept<float>(output_scales, rows, too_short);
    m.zeros = kept<uint8_t>(zeros, pairs, too_short);
    m.offsets = kept<float>(offsets, pairs, too_short);
    m.group_scales = kept<uint8_t>(group_scales, pairs, too_short);
    m.bias = kept<float>(bias, rows, too_short);
    require(codes.size() >= size_t(m.panels) * m.panel_bytes(), too_short);
    bool scaled = m.channel_scales || (m.scales && m.groups), unfolds = m.channel_scales && m.group_scales && m.zeros && m.groups;
    bool coded = input_of(m.kind) == Input::int8 || m.kind == Kind::w4a16;
    require(!coded || (m.kind == Kind::qoq ? unfolds : scaled), "a packed matrix has codes without their scales");
    return m;
}

#define STEP_ARRAYS Array1<const int32_t> token_ids, Array1<const int32_t> positions, Array1<const int32_t> query_starts, \
    Array1<const int32_t> context_lens, Array2<const int32_t> tables, Array1<const int32_t> logit_rows, nb::object parents, nb::object adapters, nb::object state_spans, \
    nb::object embeddings, nb::object embedding_rows, nb::object rope_positions, nb::object last_seen, nb::object hidden_states, int layer, nb::object residual, \
    nb::object document_ranges, nb::object document_weights
#define STEP_NAMES self.hidden_size(), token_ids, positions, query_starts, context_lens, tables, logit_rows, parents, adapters, state_spans, embeddings, embedding_rows, rope_positions, last_seen, hidden_states, layer, residual, document_ranges, document_weights
#define STEP_ARGUMENTS nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg().none(), nb::arg().none(), nb::arg().none(), \
    nb::arg().none(), nb::arg().none(), nb::arg().none(), nb::arg().none(), nb::arg().none(), nb::arg(), nb::arg().none(), \
    nb::arg().none(), nb::arg().none()

Batch make_batch(int hidden_size, const Array1<const int32_t>& token_ids, const Array1<const int32_t>& positions, const Array1<const int32_t>& query_starts,
                 const Array1<const int32_t>& context_lens, const Array2<const int32_t>& tables, const Array1<const int32_t>& logit_rows,
                 const nb::object& parents, const nb::object& adapters, const nb::object& state_spans,
                 const nb::object& embeddings, const nb::object& embedding_rows, const nb::object& rope_positions, const nb::object& last_seen, const nb::object& hidden_states,
                 int layer, const nb::object& residual, const nb::object& document_ranges, const nb::object& document_weights) {
    Batch batch{token_ids.data(), positions.data(), query_starts.data(), context_lens.data(), tables.data(), logit_rows.data(),
                int(token_ids.size()), int(context_lens.size()), int(tables.shape(1)), int(logit_rows.size()), nullptr};
    if (!adapters.is_none()) batch.adapters = kept<int32_t>(adapters, context_lens.size(), "a batch has fewer adapters than sequences");
    if (!parents.is_none()) batch.parents = kept<int32_t>(parents, token_ids.size(), "a batch has fewer parents than tokens");
    if (!state_spans.is_none()) {
        Array2<const int32_t> spans;
        require(nb::try_cast(state_spans, spans, false) && spans.shape(1) == 4, "a state span is not of four numbers");
        static_assert(sizeof(StateSpan) == 16);
        batch.state_spans = (const StateSpan*)spans.data();
        batch.num_state_spans = int(spans.shape(0));
    }
    if (!embeddings.is_none()) {
        Array2<const float> rows;
        require(nb::try_cast(embeddings, rows, false) && rows.shape(1) > 0 && int(rows.shape(1)) % hidden_size == 0, "the embeddings of a batch do not have the size of the model's");
        batch.num_parts = int(rows.shape(1)) / hidden_size;
        batch.embeddings = rows.data();
        batch.embedding_rows = kept<int32_t>(embedding_rows, rows.shape(0), "a batch has more embeddings than places for them");
        batch.num_embeddings = batch.embedding_rows ? int(rows.shape(0)) : 0;
    }
    if (!rope_positions.is_none()) {
        Array2<const int32_t> turns;
        require(nb::try_cast(rope_positions, turns, false) && turns.shape(0) == 3 && turns.shape(1) == token_ids.size(), "a batch does not have three positions for each token");
        batch.rope_positions = turns.data();
    }
    if (!last_seen.is_none()) batch.last_seen = kept<int32_t>(last_seen, token_ids.size(), "a batch has fewer last positions than tokens");
    if (!hidden_states.is_none()) {
        Array2<const float> rows;
        require(nb::try_cast(hidden_states, rows, false) && int(rows.shape(0)) == batch.num_tokens && int(rows.shape(1)) == hidden_size,
                "a batch has no hidden state of the model's size for each token");
        batch.hidden = rows.data();
    }
    if (!document_ranges.is_none()) {
        Array2<const int32_t> ranges;
        Array2<const float> weights;
        require(nb::try_cast(document_ranges, ranges, false) && ranges.shape(0) == context_lens.size() && ranges.shape(1) == 2 &&
                nb::try_cast(document_weights, weights, false) && weights.shape(0) == context_lens.size() && weights.shape(1) == 2,
                "a batch has no range and weights of documents for each sequence");
        batch.document_ranges = ranges.data();
        batch.document_weights = weights.data();
    }
    if (!residual.is_none()) {
        Array2<float> rows;
        require(nb::try_cast(residual, rows, false) && int(rows.shape(0)) == batch.num_tokens && int(rows.shape(1)) == hidden_size,
                "a batch has no residual of the model's size for each token");
        batch.residual = rows.data();
        batch.layer = layer;
    }
    require(batch.num_tokens > 0 && positions.size() == token_ids.size() && query_starts.size() == context_lens.size() + 1 &&
            tables.shape(0) == context_lens.size(), "the arrays of a batch do not have the sizes of each other");
    return batch;
}

// What a call has while it computes: the team, and not the GIL. Who waits for the team has given up the GIL before.
struct Turn {
    explicit Turn(Pool& pool) : team(pool.take_turn()) {}
    nb::gil_scoped_release without_gil;
    std::unique_lock<std::mutex> team;
};

// Draws as Python's records.
std::pair<const Draw*, int> read_draws(const Bytes& bytes, int num_rows, size_t num_tokens) {
    static_assert(sizeof(Draw) == 56);
    const Draw* draws = (const Draw*)bytes.data();
    size_t count = bytes.size() / sizeof(Draw);
    require(bytes.size() % sizeof(Draw) == 0 && count == num_tokens, "the draws do not have the size of their records");
    for (size_t i = 0; i < count; i++) require(draws[i].row >= 0 && draws[i].row < num_rows, "a draw names a row of logits that is not there");
    return {draws, int(count)};
}

void check_top(const Program& program, const Array2<int32_t>& top, int num_rows) {
    require(int(top.shape(0)) == num_rows && int(top.shape(1)) <= program.vocab_size(), "there is no room for the largest logits of each row, or not so many");
}

// A norm as Python describes it.
struct GivenNorm {
    Norm norm;
    size_t size;
};

Norm norm_of(const GivenNorm* given, int size) {
    require(!given || given->size >= size_t(size), "a norm is shorter than its rows");
    return given ? given->norm : Norm{};
}

void check_feed_forward(const FeedForward& mlp, int hidden) {
    int inner = mlp.down.inputs, panels = mlp.gated ? (inner + 15) / 16 : (inner + 31) / 32;
    require(mlp.up.inputs == hidden && mlp.up.panels == panels && mlp.down.outputs == hidden, "the matrices of a layer do not fit together");
}

void check_mixture(const Mixture& mixture, int hidden) {
    const char* unlike = "the experts of a layer are not of one shape and number format";
    const Routing& routing = mixture.routing;
    int num_experts = routing.num_experts;
    require(num_experts > 0 && routing.num_chosen > 0 && routing.num_chosen <= num_experts, "a mixture chooses more experts than it has");
    require(routing.num_groups == 1 || (routing.num_groups > 1 && num_experts % routing.num_groups == 0 && routing.num_chosen_groups > 0 && routing.num_chosen_groups <= routing.num_groups &&
            routing.num_chosen <= routing.num_chosen_groups * (num_experts / routing.num_groups) && routing.num_group_scores > 0 &&
            routing.num_group_scores <= num_experts / routing.num_groups), "a mixture has no such groups of experts");
    require(mixture.router.kind == Kind::f32 && mixture.router.inputs == hidden && mixture.router.outputs == num_experts + mixture.shared_gate,
            "a router does not have the size of its mixture");
    const FeedForward& first = mixture.experts[0];
    for (const FeedForward& each : mixture.experts) {
        require(each.up.kind == first.up.kind && each.down.kind == first.down.kind && each.up.form() == first.up.form() && each.down.form() == first.down.form() && each.gated == first.gated && each.down.inputs == first.down.inputs, unlike);
        check_feed_forward(each, hidden);
    }
    if (!mixture.shared) return require(!mixture.shared_gate, "a mixture has a gate for nothing shared");
    check_feed_forward(*mixture.shared, hidden);
}

// Inputs and outputs of a product that an adapter may change; none where the layer has no such product.
std::pair<int, int> adapted_shape(const Layer& layer, Site site, int hidden) {
    const AttentionShape& shape = layer.shape;
    const Latent* latent = layer.latent ? &*layer.latent : nullptr;
    int kv_width = layer.key_width(), inner = layer.mixture ? 0 : layer.mlp.down.inputs;
    std::pair<int, int> none{0, 0};
    if (!layer.attends() && site <= Site::o) return none;
    switch (site) {
        case Site::q: return !latent ? std::pair(hidden, shape.num_heads * shape.head_dim) : latent->query_rank ? none : std::pair(hidden, latent->key_column);
        case Site::k: case Site::v: return latent || layer.shares_kv ? none : std::pair(hidden, kv_width);
        case Site::o: return {layer.output.inputs, hidden};
        case Site::gate: return layer.mlp.gated ? std::pair(inner ? hidden : 0, inner) : none;
        case Site::up: return {inner ? hidden : 0, inner};
        case Site::down: return {inner, hidden};
        case Site::q_a: return latent && latent->query_rank ? std::pair(hidden, latent->query_rank) : none;
        case Site::q_b: return latent && latent->query_rank ? std::pair(latent->query_rank, latent->queries.outputs) : none;
        case Site::kv_a: return latent ? std::pair(hidden, shape.head_dim) : none;
        case Site::q_gate: return layer.gated ? std::pair(hidden, shape.num_heads * shape.head_dim) : none;
    }
    return none;
}

// An adapter of (layer, site, A, B); the arrays must outlive it.
std::unique_ptr<Adapter> make_adapter(const Program& program, const std::vector<std::tuple<int, int, Matrix, Matrix>>& updates) {
    auto adapter = std::make_unique<Adapter>();
    adapter->layers.resize(program.layers.size());
    for (const auto& [layer, site, a, b] : updates) {
        require(layer >= 0 && size_t(layer) < program.layers.size() && site >= 0 && site < num_sites, "an adapter changes a product that is not there");
        const Layer& changed = program.layers[size_t(layer)];
        auto [inputs, outputs] = adapted_shape(changed, Site(site), program.hidden_size());
        require(inputs > 0, "an adapter changes a product that is not there");
        require(a.inputs == inputs && b.outputs == outputs && a.outputs == b.inputs, "an adapter does not fit the product that it changes");
        require(a.kind == b.kind && (a.kind == Kind::f32 || a.kind == Kind::bf16) && !a.bias && !b.bias, "an adapter is of a kind that no kernel has");
        adapter->layers[size_t(layer)][size_t(site)] = {a, b};
    }
    return adapter;
}

void check_heads(const DraftHeads& heads, int hidden) {
    require(!heads.empty() && !heads[0].empty(), "there is no draft head");
    for (const std::vector<FeedForward>& head : heads) {
        require(head.size() == heads[0].size(), "draft heads do not have as many blocks");
        for (size_t block = 0; block < head.size(); block++) {
            const FeedForward &one = head[block], &first = heads[0][block];
            check_feed_forward(one, hidden);
            for (const Matrix* matrix : {&one.up, &one.down})
                require(matrix->kind == Kind::f32 || matrix->kind == Kind::bf16, "a draft head is of a kind that no kernel has");
            require(!one.gated && one.down.inputs == first.down.inputs && one.up.kind == first.up.kind && one.down.kind == first.down.kind,
                    "draft heads are not of one shape and number format");
        }
    }
}

// One head's part of matrices that stand one below the other, each from a whole panel on.
std::vector<Matrix> cut_heads(const Matrix& all, int num_heads, int outputs) {
    int panels = (outputs + panel_width - 1) / panel_width;
    require(num_heads > 0 && outputs > 0 && all.panels == num_heads * panels && (all.kind == Kind::f32 || all.kind == Kind::bf16) && !all.bias,
            "matrices of heads do not have the size of their shape");
    std::vector<Matrix> heads(size_t(num_heads), all);
    for (size_t h = 0; h < heads.size(); h++) {
        heads[h].codes += h * size_t(panels) * all.panel_bytes();
        heads[h].panels = panels;
        heads[h].outputs = outputs;
    }
    return heads;
}

void check_latent(const Layer& layer) {
    const AttentionShape& s = layer.shape;
    const Latent& latent = *layer.latent;
    const char* unfit = "the matrices of latent attention do not fit together";
    int queries = s.num_heads * (latent.plain_dim + s.head_dim - s.value_dim);
    require(s.num_kv_heads == 1 && s.window == 0 && s.value_dim > 0 && s.value_dim <= s.head_dim && latent.plain_dim > 0 && latent.key_norm, unfit);
    require(int(latent.absorb.size()) == s.num_heads && int(latent.expand.size()) == s.num_heads, unfit);
    require(latent.absorb[0].inputs == latent.plain_dim && latent.absorb[0].outputs == s.value_dim && latent.expand[0].inputs == s.value_dim, unfit);
    if (latent.query_rank) require(latent.query_norm && latent.queries.inputs == latent.query_rank && latent.queries.outputs == queries, unfit);
    require(latent.key_column == (latent.query_rank ? latent.query_rank : queries), unfit);
    require(layer.cache.kind == KVKind::f32 || layer.cache.kind == KVKind::bf16, "latents are kept in float32 or bfloat16");
}

void check_delta_net(const Program& program, const Layer& layer) {
    const ShortConv& conv = *layer.short_conv;
    const DeltaHeads& heads = layer.delta_net->heads;
    const Matrix& steps = layer.delta_net->steps;
    size_t hidden = size_t(program.hidden_size());
    require(!layer.mamba2 && !conv.bias && size_t(conv.size) == 2 * heads.keys() + heads.values() && size_t(layer.qkv.outputs) == size_t(conv.size) + heads.values() &&
            size_t(layer.qkv.inputs) == hidden && size_t(steps.inputs) == hidden && steps.outputs == 2 * heads.num_value_heads &&
            size_t(layer.output.inputs) == heads.values() && size_t(layer.output.outputs) == hidden, "the matrices of a layer do not fit together");
}

void check_short_conv(const Program& program, const Layer& layer) {
    const ShortConv& conv = *layer.short_conv;
    int hidden = program.hidden_size();
    int size = layer.mamba2 ? int(layer.mamba2->inner()) : hidden, beside = layer.mamba2 ? 2 * layer.mamba2->num_groups * layer.mamba2->d_state : 0;
    int outputs = layer.mamba2 ? size + conv.size + layer.mamba2->num_heads : 3 * hidden;
    require(conv.kernel_size > 1, "a convolution is of one position");
    if (layer.delta_net) check_delta_net(program, layer);
    else require(conv.size == size + beside && layer.qkv.inputs == hidden && layer.qkv.outputs == outputs && layer.output.inputs == size &&
            layer.output.outputs == hidden, "the matrices of a layer do not fit together");
    require(conv.first_block >= 0 && conv.num_blocks > 0, "a cache has no block");
    for (const Layer& other : program.layers)
        require(!other.stateful() || (other.stateful()->short_conv->first_block == conv.first_block && other.stateful()->short_conv->num_blocks == conv.num_blocks),
                "layers have their states in different blocks");
}

void check_attention(const Program& program, const Layer& layer) {
    const AttentionShape& s = layer.shape;
    int hidden = program.hidden_size();
    require(s.num_kv_heads > 0 && s.num_heads % s.num_kv_heads == 0 && s.head_dim > 0 && s.window >= 0, "a layer has no such heads");
    require(layer.rope < 0 || (size_t(layer.rope) < program.ropes.size() && int(program.ropes[size_t(layer.rope)].inv_freq.size()) * 2 <= s.head_dim - s.value_dim),
            "a layer has a rotation that is larger than its heads");
    int first = layer.latent ? layer.latent->key_column + s.head_dim : s.num_heads * (layer.gated ? 2 : 1) * s.head_dim + 2 * layer.key_width();
    require(!layer.latent || (!layer.gated && !layer.shares_kv), "latent attention has no gates, and keys of its own");
    int width = layer.latent ? s.num_heads * layer.latent->expand[0].outputs : s.num_heads * s.head_dim;
    require(layer.qkv.inputs == hidden && layer.qkv.outputs == first && layer.output.inputs == width && layer.output.outputs == hidden,
            "the matrices of a layer do not fit together");
    if (layer.latent) check_latent(layer);
    require(size_t(layer.group) < program.groups.size(), "a layer is of a group that was not added");
    const KVGroup& group = program.groups[size_t(layer.group)];
    require(group.num_blocks > 0 && layer.num_blocks >= group.num_blocks + (group.window ? 1 : 0), "a cache has fewer blocks than its group");
    require(!layer.shares_kv || std::any_of(program.layers.begin(), program.layers.end(), [&](const Layer& other) {
        return other.attends() && other.cache.base == layer.cache.base && other.cache.block_bytes == layer.cache.block_bytes && other.group == layer.group &&
               other.shape.num_kv_heads == s.num_kv_heads && other.shape.head_dim == s.head_dim;
    }), "a layer reads keys and values that no earlier layer writes");
}

void check_streams(const Program& program, const Streams& streams) {
    int hidden = program.hidden_size(), others = streams.num_streams - 1, inputs = streams.projection.outputs;
    const char* unfit = "the matrices of several residual streams do not fit together";
    require(streams.num_streams > 0 && streams.num_streams <= most_streams && streams.active >= 0 && streams.active < streams.num_streams, "there are no such residual streams");
    require(int(streams.out.size()) == others && (!others || (streams.in.inputs == hidden && streams.in.outputs == others * hidden)), unfit);
    for (const Matrix& out : streams.out) require(out.inputs == hidden && out.outputs == hidden, unfit);
    require(streams.input_size > 0 && streams.projection.inputs == hidden && inputs % streams.input_size == 0, unfit);
    require(streams.table.num_rows > 0 && (!streams.table.packed.codes || streams.table.packed.inputs == inputs), unfit);
}

void check_stream_layer(const Program& program, const Layer& layer) {
    const StreamLayer& its = *layer.stream;
    int hidden = program.hidden_size(), size = program.streams->input_size, rank = its.laurel_right.inputs;
    require(layer.attends() && !layer.beside && layer.attention_norm.weight && layer.mlp_norm.weight && !layer.mixture && layer.feeds() && !layer.parallel && layer.input_scale == 1,
            "a layer of several residual streams has no such parts");
    require(int(program.layers.size()) < program.streams->projection.outputs / size, "there are more layers than inputs of layers");
    require(its.laurel_left.inputs == hidden && its.laurel_left.outputs == rank && its.laurel_right.outputs == hidden && its.input_gate.inputs == hidden &&
            its.input_gate.outputs == size && its.input_out.inputs == size && its.input_out.outputs == hidden, "the matrices of a layer do not fit together");
}

// The cache of the newest keys of a layer that packs the others.
void set_recent(const Program& program, Layer& layer, const nb::object& cache) {
    Bytes memory;
    require(program.recent_group() >= 0 && nb::try_cast(cache, memory, false), "a layer that packs its keys has no cache of the newest ones");
    require(layer.cache.block_size % kivi_group == 0, "keys are packed in blocks of a multiple of 32");
    const KVGroup& group = program.groups[size_t(program.recent_group())];
    layer.cache.recent_base = memory.data();
    layer.cache.recent_bytes = kv_block_bytes(layer.shape, KVKind::bf16, layer.cache.block_size);
    layer.cache.recent_window = group.window;
    require(memory.size() / layer.cache.recent_bytes >= size_t(group.num_blocks) + 1, "a cache has fewer blocks than its group");
}

void check_layer(const Program& program, const Layer& layer) {
    require(!program.streams == !layer.stream, "all layers have several residual streams, or none");
    if (layer.stream) check_stream_layer(program, layer);
    if (layer.short_conv) check_short_conv(program, layer);
    else if (layer.mixes()) check_attention(program, layer);
    if (layer.mixture) check_mixture(*layer.mixture, program.hidden_size());
    else if (layer.feeds()) check_feed_forward(layer.mlp, program.hidden_size());
    require(layer.cache.block_size > 0, "a cache has no block");
    require(program.layers.empty() || layer.cache.block_size == program.layers[0].cache.block_size, "the caches have blocks of several sizes");
}

std::vector<std::string> names_of(const std::vector<const Kernels*>& tables) {
    std::vector<std::string> names;
    for (const Kernels* kernels : tables) names.push_back(kernels->name);
    return names;
}

}  // namespace

NB_MODULE(_native, m) {
    nb::set_leak_warnings(false);  // a program that lives until the interpreter ends is no leak
    m.def("kernel_names", [] { return names_of(usable_kernels()); },
          "Names of the instruction sets that were compiled and this processor runs, best first.");
    m.def("compiled_names", [] { return names_of(compiled_kernels()); }, "Names of the instruction sets that were compiled.");
    m.def("runnable_names", &runnable_sets, "Names of the instruction sets that this processor runs, compiled or not, best first.");
    m.def("packed_bytes", [](int kind, int outputs, int inputs) {
        int length = chunk_length(Kind(kind));
        return size_t((outputs + 31) / 32) * size_t((inputs + length - 1) / length) * 2 * size_t(tile_bytes(Kind(kind)));
    });
    m.def("kv_block_bytes", [](int kind, int num_kv_heads, int head_dim, int value_dim, int block_size) {
        AttentionShape shape;
        shape.value_dim = value_dim;
        shape.num_kv_heads = num_kv_heads;
        shape.head_dim = head_dim;
        shape.padded_dim = (head_dim + 31) / 32 * 32;
        return kv_block_bytes(shape, KVKind(kind), block_size);
    });

    bind_kv_codec(m);
    bind_kv_copies(m);
    bind_block_opener(m);

    m.def("scratch_bytes", [](const std::string& kernels, int num_heads, int num_kv_heads, int head_dim, int value_dim, int inputs, int vocab_size) {
        const Kernels& table = find_kernels(kernels);
        AttentionShape shape;
        shape.value_dim = value_dim;
        shape.num_heads = num_heads;
        shape.num_kv_heads = num_kv_heads;
        shape.head_dim = head_dim;
        shape.padded_dim = (head_dim + 31) / 32 * 32;
        Draw draw{};
        draw.top_k = 1;
        size_t most = std::max(table.attend_scratch(shape), table.draw_scratch(vocab_size, draw));
        for (Kind kind : {Kind::f32, Kind::bf16, Kind::int8, Kind::int4, Kind::qoq, Kind::w4a16}) {
            Matrix m;
            m.kind = kind;
            m.inputs = inputs;
            m.chunks = (inputs + chunk_length(kind) - 1) / chunk_length(kind);
            most = std::max(most, table.multiply_scratch(m));
        }
        return most;
    }, "Bytes that one thread works in, at most: attention of such heads, a product of so many inputs, a draw of so many tokens.");

    nb::class_<Pool>(m, "Pool").def(nb::init<int>()).def_prop_ro("num_threads", &Pool::num_threads);

    m.def("pack", [](Pool& pool, int kind, int source, Array1<const uint8_t> data, int num_rows, int inputs, Array1<const int32_t> places, Bytes codes) {
        const size_t widths[] = {4, 2, 2, 1};
        require(data.size() == size_t(num_rows) * inputs * widths[source] && places.size() == size_t(num_rows),
                "the data to pack does not have the size of its shape");
        Turn turn(pool);
        pack(pool, Kind(kind), Source(source), data.data(), num_rows, inputs, places.data(), codes.data());
    }, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg().noconvert());

    nb::class_<Matrix>(m, "Matrix").def("__init__", [](Matrix* self, int kind, int outputs, int inputs, int group, int zero_point, bool group_inputs, int rotation, bool e2m1, Array1<const uint8_t> codes,
            nb::object channel_scales, nb::object scales, int scale_bytes, nb::object output_scales, nb::object zeros, nb::object offsets, nb::object group_scales, nb::object bias) {
        new (self) Matrix(make_matrix(kind, outputs, inputs, group, zero_point, group_inputs, rotation, e2m1, codes, channel_scales, scales, scale_bytes, output_scales, zeros, offsets, group_scales, bias));
    }, nb::arg("kind"), nb::arg("outputs"), nb::arg("inputs"), nb::arg("group"), nb::arg("zero_point"), nb::arg("group_inputs"), nb::arg("rotation"), nb::arg("e2m1"), nb::arg("codes").noconvert(), nb::arg("channel_scales").none(),
       nb::arg("scales").none(), nb::arg("scale_bytes"), nb::arg("output_scales").none(), nb::arg("zeros").none(), nb::arg("offsets").none(), nb::arg("group_scales").none(), nb::arg("bias").none());

    nb::class_<GivenNorm>(m, "Norm").def("__init__", [](GivenNorm* self, Array1<const float> weight, nb::object bias) {
        new (self) GivenNorm{{weight.data(), kept<float>(bias, weight.size(), "a norm's bias is shorter than its weight")}, weight.size()};
    }, nb::arg("weight").noconvert(), nb::arg("bias").none());

    nb::class_<FeedForward>(m, "FeedForward").def("__init__", [](FeedForward* self, const Matrix& up, const Matrix& down, int activation, bool gated,
                                                               std::tuple<float, float> scales, std::tuple<float, float> clipping, nb::object sparse) {
        require(activation >= int(Activation::silu) && activation <= int(Activation::relu2), "there is no such activation");
        auto [gate_scale, output_scale] = scales;
        auto [alpha, limit] = clipping;
        require(limit >= 0, "a feed-forward has no such clipping");
        new (self) FeedForward{up, down, Activation(activation), gated, gate_scale, output_scale, {alpha, limit}};
        if (gated && !sparse.is_none()) self->sparse = nb::cast<float>(sparse);
    }, nb::arg("up"), nb::arg("down"), nb::arg("activation"), nb::arg("gated"), nb::arg("scales") = std::tuple(1.0f, 1.0f),
       nb::arg("clipping") = std::tuple(0.0f, 0.0f), nb::arg("sparse") = nb::none());

    nb::class_<StreamLayer>(m, "StreamLayer").def("__init__", [](StreamLayer* self, int num_streams, int hidden, nb::object router, nb::object predict, nb::object correct, nb::object scale,
                                                                 const GivenNorm& router_norm, const GivenNorm& laurel_norm, const GivenNorm& input_norm,
                                                                 const Matrix& laurel_left, const Matrix& laurel_right, const Matrix& input_gate, const Matrix& input_out) {
        const char* too_short = "a matrix of residual streams is shorter than its shape asks for";
        require(num_streams > 0 && num_streams <= most_streams && hidden > 0, "there are no such residual streams");
        size_t n = size_t(num_streams);
        StreamLayer layer;
        layer.router = kept<float>(router, n * size_t(hidden), too_short);
        layer.predict = kept<float>(predict, n * n * n, too_short);
        layer.correct = kept<float>(correct, n * n, too_short);
        layer.scale = kept<float>(scale, size_t(hidden), too_short);
        require(layer.router && layer.predict && layer.correct, too_short);
        layer.router_norm = norm_of(&router_norm, hidden);
        layer.laurel_norm = norm_of(&laurel_norm, hidden);
        layer.input_norm = norm_of(&input_norm, hidden);
        layer.laurel_left = laurel_left;
        layer.laurel_right = laurel_right;
        layer.input_gate = input_gate;
        layer.input_out = input_out;
        new (self) StreamLayer(layer);
    }, nb::arg("num_streams"), nb::arg("hidden"), nb::arg("router"), nb::arg("predict"), nb::arg("correct"), nb::arg("scale").none(), nb::arg("router_norm"),
       nb::arg("laurel_norm"), nb::arg("input_norm"), nb::arg("laurel_left"), nb::arg("laurel_right"), nb::arg("input_gate"), nb::arg("input_out"));

    nb::class_<Routing>(m, "Routing").def("__init__", [](Routing* self, int num_experts, int num_chosen, bool renormalize, bool sigmoid, nb::object correction,
                                                         std::tuple<int, int, int> groups, float scale) {
        auto [num_groups, num_chosen_groups, num_group_scores] = groups;
        const float* biases = kept<float>(correction, size_t(std::max(num_experts, 0)), "a router has fewer correction biases than experts");
        new (self) Routing{num_experts, num_chosen, renormalize, sigmoid, biases, num_groups, num_chosen_groups, num_group_scores, scale};
    }, nb::arg("num_experts"), nb::arg("num_chosen"), nb::arg("renormalize"), nb::arg("sigmoid"), nb::arg("correction").none(), nb::arg("groups"), nb::arg("scale"));

    nb::class_<Mixture>(m, "Mixture").def("__init__", [](Mixture* self, const Matrix& router, const std::vector<FeedForward>& experts, const Routing& routing,
                                                         const FeedForward* shared, bool shared_gate, bool weighs_inputs) {
        require(int(experts.size()) == routing.num_experts, "a mixture has other experts than it routes to");
        new (self) Mixture{router, experts, routing, shared_gate, shared ? std::optional(*shared) : std::nullopt, weighs_inputs};
    }, nb::arg("router"), nb::arg("experts"), nb::arg("routing"), nb::arg("shared").none(), nb::arg("shared_gate"), nb::arg("weighs_inputs"));

    nb::class_<Latent>(m, "Latent").def("__init__", [](Latent* self, const Matrix* queries, const Matrix& absorb, const Matrix& expand, nb::object query_norm,
                                                       Array1<const float> key_norm, float eps, std::tuple<int, int, int, int, int> sizes) {
        auto [heads, plain_dim, turned_dim, rank, value_dim] = sizes;
        require(int(key_norm.size()) >= rank, "a norm is shorter than its rows");
        Latent latent;
        if (queries) latent.queries = *queries;
        latent.absorb = cut_heads(absorb, heads, rank);
        latent.expand = cut_heads(expand, heads, value_dim);
        latent.query_rank = queries ? queries->inputs : 0;
        latent.query_norm = kept<float>(query_norm, size_t(latent.query_rank), "a norm is shorter than its rows");
        latent.key_norm = key_norm.data();
        latent.eps = eps;
        latent.plain_dim = plain_dim;
        latent.key_column = latent.query_rank ? latent.query_rank : heads * (plain_dim + turned_dim);
        new (self) Latent(std::move(latent));
    }, nb::arg("queries").none(), nb::arg("absorb"), nb::arg("expand"), nb::arg("query_norm").none(), nb::arg("key_norm").noconvert(), nb::arg("eps"),
       nb::arg("sizes"));

    nb::class_<ShortConv>(m, "ShortConv").def("__init__", [](ShortConv* self, Array1<const float> filters, nb::object bias, std::tuple<int, int> shape,
                                                             std::tuple<int, int> blocks) {
        auto [kernel_size, size] = shape;
        auto [first_block, num_blocks] = blocks;
        require(kernel_size > 0 && size > 0 && num_blocks > 0 && filters.size() >= size_t(kernel_size) * size_t(size), "a convolution has no filter for each channel");
        ShortConv conv;
        conv.filters = filters.data();
        conv.bias = kept<float>(bias, size_t(size), "a convolution has fewer biases than channels");
        conv.kernel_size = kernel_size;
        conv.size = size;
        conv.first_block = first_block;
        conv.num_blocks = num_blocks;
        new (self) ShortConv(conv);
    }, nb::arg("filters").noconvert(), nb::arg("bias").none(), nb::arg("shape"), nb::arg("blocks"));

    nb::class_<Mamba2>(m, "Mamba2").def("__init__", [](Mamba2* self, std::tuple<int, int, int, int> shape, std::tuple<float, float> dt_limits,
                                                       Array1<const float> a_log, Array1<const float> skip, Array1<const float> dt_bias, nb::object norm, bool norms_before_gate, int activation,
                                                       std::tuple<float, float, float, float, float> scales) {
        Mamba2 mamba;
        std::tie(mamba.num_heads, mamba.head_dim, mamba.num_groups, mamba.d_state) = shape;
        std::tie(mamba.least_dt, mamba.greatest_dt) = dt_limits;
        require(mamba.num_heads > 0 && mamba.head_dim > 0 && mamba.num_groups > 0 && mamba.num_heads % mamba.num_groups == 0 && mamba.d_state > 0, "a layer has no such heads");
        size_t heads = size_t(mamba.num_heads);
        require(a_log.size() >= heads && skip.size() >= heads && dt_bias.size() >= heads, "a layer has fewer time steps than heads");
        mamba.a_log = a_log.data();
        mamba.skip = skip.data();
        mamba.dt_bias = dt_bias.data();
        mamba.norm = kept<float>(norm, mamba.inner(), "a norm is shorter than its rows");
        require(activation >= int(Activation::silu) && activation <= int(Activation::relu2), "there is no such activation");
        mamba.activation = Activation(activation);
        mamba.norms_before_gate = norms_before_gate;
        std::tie(mamba.scales[0], mamba.scales[1], mamba.scales[2], mamba.scales[3], mamba.scales[4]) = scales;
        new (self) Mamba2(mamba);
    }, nb::arg("shape"), nb::arg("dt_limits"), nb::arg("a_log").noconvert(), nb::arg("skip").noconvert(), nb::arg("dt_bias").noconvert(), nb::arg("norm").none(), nb::arg("norms_before_gate"), nb::arg("activation"), nb::arg("scales"));

    nb::class_<DeltaNet>(m, "DeltaNet").def("__init__", [](DeltaNet* self, const Matrix& steps, std::tuple<int, int, int, int> shape, Array1<const float> a_log,
                                                           Array1<const float> dt_bias, Array1<const float> norm, int activation) {
        DeltaHeads heads;
        std::tie(heads.num_key_heads, heads.num_value_heads, heads.key_dim, heads.value_dim) = shape;
        require(heads.num_key_heads > 0 && heads.num_value_heads > 0 && heads.num_value_heads % heads.num_key_heads == 0 && heads.key_dim > 0 &&
                heads.key_dim <= most_delta_dim && heads.value_dim > 0, "a layer has no such heads");
        require(a_log.size() >= size_t(heads.num_value_heads) && dt_bias.size() >= size_t(heads.num_value_heads), "a layer has fewer time steps than heads");
        require(norm.size() >= size_t(heads.value_dim), "a norm is shorter than its rows");
        require(activation >= int(Activation::silu) && activation <= int(Activation::relu2), "there is no such activation");
        heads.a_log = a_log.data();
        heads.dt_bias = dt_bias.data();
        new (self) DeltaNet{heads, steps, norm.data(), Activation(activation)};
    }, nb::arg("steps"), nb::arg("shape"), nb::arg("a_log").noconvert(), nb::arg("dt_bias").noconvert(), nb::arg("norm").noconvert(), nb::arg("activation"));

    nb::class_<Program>(m, "Program")
        .def("__init__", [](Program* self, const std::string& kernels, std::shared_ptr<Pool> pool, int vocab_size, int hidden_size, float norm_eps) {
            new (self) Program(find_kernels(kernels), std::move(pool), vocab_size, hidden_size, norm_eps);
        })
        .def("set_ends", [](Program& self, const Matrix& embedding, const Matrix& head, const GivenNorm& norm, const Matrix* positions, bool centres,
                            float embedding_scale, float logit_scale, float logit_softcap) {
            int hidden = self.hidden_size(), vocab = self.vocab_size();
            require(embedding.inputs == hidden && head.inputs == hidden && embedding.outputs >= vocab && head.outputs == vocab &&
                    (!positions || positions->inputs == hidden), "embedding, positions and head do not have the size of the model");
            self.embedding = embedding;
            self.head = head;
            self.norm = norm_of(&norm, hidden);
            if (positions) self.positions = *positions;
            self.centres = centres;
            self.embedding_scale = embedding_scale;
            self.logit_scale = logit_scale;
            self.logit_softcap = logit_softcap;
        }, nb::arg("embedding"), nb::arg("head"), nb::arg("norm"), nb::arg("positions").none(), nb::arg("centres"), nb::arg("embedding_scale"),
           nb::arg("logit_scale"), nb::arg("logit_softcap"))
        .def("set_merge", [](Program& self, const Matrix& merge, const GivenNorm& embedding_norm, const GivenNorm& hidden_norm) {
            int hidden = self.hidden_size();
            require(merge.inputs == 2 * hidden && merge.outputs == hidden, "a merge does not have the size of the model");
            self.merge = merge;
            self.merge_embedding_norm = norm_of(&embedding_norm, hidden);
            self.merge_hidden_norm = norm_of(&hidden_norm, hidden);
        }, nb::arg("merge"), nb::arg("embedding_norm"), nb::arg("hidden_norm"))
        .def("set_streams", [](Program& self, int num_streams, int active, int input_size, const Matrix* in, const std::vector<Matrix>& out, const Matrix& projection,
                               Array1<const float> projection_norm, const Matrix* packed, nb::object numbers, int number_type, int num_rows) {
            require(self.layers.empty(), "residual streams come before layers");
            require(int(projection_norm.size()) >= input_size, "a norm is shorter than its rows");
            Streams streams;
            streams.num_streams = num_streams;
            streams.active = active;
            streams.input_size = input_size;
            if (in) streams.in = *in;
            streams.out = out;
            streams.projection = projection;
            streams.projection_norm = projection_norm.data();
            require(number_type >= int(NumberType::f32) && number_type <= int(NumberType::f16), "a table has no such numbers");
            streams.table.type = NumberType(number_type);
            streams.table.num_rows = packed ? packed->outputs : num_rows;
            if (packed) streams.table.packed = *packed;
            check_streams(self, streams);
            size_t row_bytes = size_t(projection.outputs) * (streams.table.type == NumberType::f32 ? 4 : 2);
            streams.table.numbers = kept<uint8_t>(numbers, size_t(num_rows) * row_bytes, "a table is shorter than its rows");
            require(packed || streams.table.numbers, "inputs of layers have no table");
            self.streams = std::move(streams);
        }, nb::arg("num_streams"), nb::arg("active"), nb::arg("input_size"), nb::arg("streams_in").none(), nb::arg("streams_out"), nb::arg("projection"),
           nb::arg("projection_norm").noconvert(), nb::arg("packed").none(), nb::arg("numbers").none(), nb::arg("number_type"), nb::arg("num_rows"))
        .def("add_rope", [](Program& self, std::vector<float> inv_freq, float scale, std::vector<int> axes) {
            bool fits = axes.empty() || axes.size() == inv_freq.size();
            require(fits && std::all_of(axes.begin(), axes.end(), [](int axis) { return axis >= 0 && axis < 3; }), "a rotation does not have an axis for each frequency");
            self.ropes.push_back({std::move(inv_freq), scale, std::move(axes)});
        })
        .def("add_group", [](Program& self, int first_block, int num_blocks, int window, bool is_state, bool is_recent) {
            require(first_block >= 0 && num_blocks > 0 && window >= 0, "a group of layers has no such blocks");
            require(!is_recent || (window > 0 && self.recent_group() < 0), "a program has one group of recent keys at most, with a window");
            self.groups.push_back({first_block, num_blocks, window, is_state, is_recent});
        }, nb::arg("first_block"), nb::arg("num_blocks"), nb::arg("window"), nb::arg("is_state"), nb::arg("is_recent"))
        .def("add_layer", [](Program& self, std::tuple<int, int, int, int, int> shape, float scale, float softcap, int rope, const Matrix* qkv, const Latent* latent, const ShortConv* short_conv, const Mamba2* mamba2, const DeltaNet* delta_net, bool gated, const Matrix* output, std::tuple<float, float> scales,
                             const FeedForward* mlp, const Mixture* mixture, const GivenNorm* attention_norm, const GivenNorm* mlp_norm,
                             const GivenNorm* attention_post_norm, const GivenNorm* mlp_post_norm, nb::object q_norm, nb::object k_norm, nb::object v_norm,
                             bool norms_projection, bool shares_kv, const StreamLayer* stream, nb::object sinks, bool chunked, std::tuple<float, int, int> growth, bool parallel, float residual_scale, nb::object cache, size_t block_stride, nb::object recent_cache, int kv_kind, int block_size, int group, bool beside) {
            Layer layer;
            Bytes memory;
            require((qkv != nullptr) == (output != nullptr), "a layer mixes tokens with two matrices, or not at all");
            require(!qkv || nb::try_cast(cache, memory, false), "a layer that mixes tokens has no cache");
            auto [heads, kv_heads, dim, value_dim, window] = shape;
            layer.shape = {heads, kv_heads, dim, (dim + 31) / 32 * 32, window, softcap, value_dim};
            require((value_dim > 0) == (latent != nullptr), "only latent attention has values that are part of their keys");
            if (latent) layer.latent = *latent;
            require(qkv || !short_conv, "a layer with a state has no matrices");
            if (short_conv) {
                ShortConv conv = *short_conv;
                conv.state_size = conv.window() + (mamba2 ? mamba2->inner() * size_t(mamba2->d_state) : 0);
                conv.draft_size = size_t(conv.size) + (mamba2 ? size_t(mamba2->num_heads) : 0);
                if (delta_net) {
                    const DeltaHeads& its = delta_net->heads;
                    conv.state_size += its.values() * size_t(its.key_dim);
                    conv.draft_size = size_t(qkv->panels) * panel_width - std::min(size_t(qkv->outputs), its.values()) + 2 * size_t(its.num_value_heads);
                }
                for (const Layer& each : self.layers)
                    if (each.stateful()) conv.draft_start += each.stateful()->short_conv->draft_size;
                require(memory.size() >= size_t(conv.num_blocks) * conv.state_size * 4, "a cache has fewer blocks than its group");
                conv.states = (float*)memory.data();
                layer.short_conv = conv;
            }
            require(short_conv || (!mamba2 && !delta_net), "a layer with states of heads has no convolution");
            if (mamba2) layer.mamba2 = *mamba2;
            if (delta_net) layer.delta_net = *delta_net;
            layer.gated = gated;
            layer.scale = scale;
            layer.rope = rope;
            if (qkv) layer.qkv = *qkv;
            if (output) layer.output = *output;
            std::tie(layer.input_scale, layer.output_scale) = scales;
            if (mlp) layer.mlp = *mlp;
            if (mixture) layer.mixture = *mixture;
            int hidden = self.hidden_size();
            layer.attention_norm = norm_of(attention_norm, hidden);
            layer.mlp_norm = norm_of(mlp_norm, hidden);
            layer.attention_post_norm = norm_of(attention_post_norm, hidden);
            layer.mlp_post_norm = norm_of(mlp_post_norm, hidden);
            layer.q_norm = kept<float>(q_norm, size_t(norms_projection ? heads * dim : dim), "a norm is shorter than its rows");
            layer.k_norm = kept<float>(k_norm, size_t(norms_projection ? kv_heads * dim : dim), "a norm is shorter than its rows");
            layer.v_norm = kept<float>(v_norm, size_t(dim), "a norm is shorter than its rows");
            layer.norms_projection = norms_projection;
            layer.shares_kv = shares_kv;
            if (stream) layer.stream = std::make_shared<StreamLayer>(*stream);
            layer.shape.sinks = kept<float>(sinks, size_t(heads), "a layer has fewer sinks than heads");
            layer.shape.chunked = chunked;
            std::tie(layer.growth.beta, layer.growth.period, layer.growth.first) = growth;
            require(layer.growth.period >= 0 && layer.growth.first >= 0, "a layer's queries cannot grow so");
            layer.parallel = parallel;
            layer.residual_scale = residual_scale;
            layer.cache = {qkv ? memory.data() : nullptr, layer.attends() ? kv_block_bytes(layer.shape, KVKind(kv_kind), block_size) : 0, block_size, KVKind(kv_kind)};
            require(!block_stride || block_stride >= layer.cache.block_bytes, "blocks of a cache lie over each other");
            if (block_stride && layer.attends()) layer.cache.block_bytes = block_stride;
            layer.num_blocks = layer.attends() ? int(std::min(memory.size() / layer.cache.block_bytes, size_t(INT32_MAX))) : short_conv ? short_conv->num_blocks : 0;
            layer.group = group;
            if (layer.attends() && KVKind(kv_kind) == KVKind::kivi2) set_recent(self, layer, recent_cache);
            check_layer(self, layer);
            if (!beside) return self.layers.push_back(layer);
            require(layer.short_conv && !layer.feeds() && !self.layers.empty() && self.layers.back().attends() && !self.layers.back().beside,
                    "a mixer with a state is beside no attention");
            self.layers.back().beside = std::make_shared<Layer>(std::move(layer));
        }, nb::arg("shape"), nb::arg("scale"), nb::arg("softcap"), nb::arg("rope"), nb::arg("qkv").none(), nb::arg("latent").none(), nb::arg("short_conv").none(), nb::arg("mamba2").none(), nb::arg("delta_net").none(), nb::arg("gated"), nb::arg("output").none(), nb::arg("scales"), nb::arg("mlp").none(), nb::arg("mixture").none(),
           nb::arg("attention_norm").none(), nb::arg("mlp_norm").none(), nb::arg("attention_post_norm").none(), nb::arg("mlp_post_norm").none(),
           nb::arg("q_norm").none(), nb::arg("k_norm").none(), nb::arg("v_norm").none(), nb::arg("norms_projection"), nb::arg("shares_kv"), nb::arg("stream").none(), nb::arg("sinks").none(), nb::arg("chunked"), nb::arg("growth"), nb::arg("parallel"), nb::arg("residual_scale"), nb::arg("cache").none(), nb::arg("block_stride"), nb::arg("recent_cache").none(), nb::arg("kv_kind"), nb::arg("block_size"), nb::arg("group"), nb::arg("beside"))
        .def("forward", [](Program& self, STEP_ARRAYS, Array2<float> logits) {
            Batch batch = make_batch(STEP_NAMES);
            require(int(logits.shape(0)) == batch.num_rows && int(logits.shape(1)) == self.vocab_size(), "there is no room for the logits");
            Turn turn(self.pool());
            self.forward(batch, logits.data());
        }, STEP_ARGUMENTS, nb::arg().noconvert())
        .def("forward_best", [](Program& self, STEP_ARRAYS, Array1<int32_t> best) {
            Batch batch = make_batch(STEP_NAMES);
            require(int(best.size()) == batch.num_rows, "there is no room for the tokens");
            Turn turn(self.pool());
            self.forward_best(batch, best.data());
        }, STEP_ARGUMENTS, nb::arg().noconvert())
        .def("forward_hidden", [](Program& self, STEP_ARRAYS, Array2<float> hidden) {
            Batch batch = make_batch(STEP_NAMES);
            require(int(hidden.shape(0)) == batch.num_rows && int(hidden.shape(1)) == self.hidden_size(), "there is no room for the hidden states");
            Turn turn(self.pool());
            self.forward_hidden(batch, hidden.data());
        }, STEP_ARGUMENTS, nb::arg().noconvert())
        .def("forward_draw", [](Program& self, STEP_ARRAYS, Bytes draws, Array1<int32_t> tokens) {
            Batch batch = make_batch(STEP_NAMES);
            auto [first, count] = read_draws(draws, batch.num_rows, tokens.size());
            Turn turn(self.pool());
            self.forward_draw(batch, first, count, tokens.data());
        }, STEP_ARGUMENTS, nb::arg(), nb::arg().noconvert())
        .def("forward_watched", [](Program& self, STEP_ARRAYS, Bytes draws, Array1<int32_t> tokens, Array2<int32_t> top) {
            Batch batch = make_batch(STEP_NAMES);
            auto [first, count] = read_draws(draws, batch.num_rows, tokens.size());
            check_top(self, top, batch.num_rows);
            Turn turn(self.pool());
            self.forward_watched(batch, first, count, tokens.data(), int(top.shape(1)), top.data());
        }, STEP_ARGUMENTS, nb::arg(), nb::arg().noconvert(), nb::arg().noconvert())
        .def("find_top", [](Program& self, Array2<const float> logits, Array2<int32_t> top) {
            require(int(logits.shape(1)) == self.vocab_size(), "the logits do not have the width of the vocabulary");
            check_top(self, top, int(logits.shape(0)));
            Turn turn(self.pool());
            self.find_top(logits.data(), int(logits.shape(0)), int(top.shape(1)), top.data());
        }, nb::arg(), nb::arg().noconvert())
        .def_prop_ro("num_head_rows", &Program::num_head_rows)
        .def("read_hidden", [](Program& self, Array2<float> hidden) {
            Turn turn(self.pool());
            require(int(hidden.shape(0)) == self.num_head_rows() && int(hidden.shape(1)) == self.hidden_size(), "there is no room for the hidden states");
            self.read_hidden(hidden.data());
        }, nb::arg().noconvert())
        .def_prop_ro("num_step_tokens", &Program::num_step_tokens)
        .def("read_every_hidden", [](Program& self, Array2<float> hidden) {
            Turn turn(self.pool());
            require(int(hidden.shape(0)) == self.num_step_tokens() && int(hidden.shape(1)) == self.hidden_size(), "there is no room for the hidden states");
            self.read_every_hidden(hidden.data());
        }, nb::arg().noconvert())
        .def("project", [](Program& self, Array2<const float> hidden, Array2<float> logits) {
            require(int(hidden.shape(1)) == self.hidden_size(), "the hidden states do not have the size of the model's");
            require(logits.shape(0) == hidden.shape(0) && int(logits.shape(1)) == self.vocab_size(), "there is no room for the logits");
            Turn turn(self.pool());
            self.project(hidden.data(), int(hidden.shape(0)), logits.data());
        }, nb::arg(), nb::arg().noconvert())
        .def("load_heads", [](Program& self, const DraftHeads& heads) {
            check_heads(heads, self.hidden_size());
            Turn turn(self.pool());
            return self.load_heads(heads);
        }, nb::arg())
        .def("guess", [](Program& self, size_t loaded, Array2<const float> hidden, int num_heads, Array2<int32_t> top) {
            require(num_heads > 0 && size_t(num_heads) <= self.num_heads(loaded), "there are no such draft heads");
            require(int(hidden.shape(1)) == self.hidden_size(), "the hidden states do not have the size of the model's");
            check_top(self, top, num_heads * int(hidden.shape(0)));
            Turn turn(self.pool());
            self.guess(loaded, hidden.data(), int(hidden.shape(0)), num_heads, int(top.shape(1)), top.data());
        }, nb::arg(), nb::arg(), nb::arg(), nb::arg().noconvert())
        .def("move_positions", [](Program& self, Array2<const int32_t> moves) {
            require(moves.shape(1) == 2, "a move is not a source and a target");
            Turn turn(self.pool());
            self.move_positions(moves.data(), int(moves.shape(0)));
        })
        .def("accept_drafts", [](Program& self, Array2<const int32_t> accepted) {
            require(accepted.shape(1) == 2, "an accepted draft is not a token and a block");
            Turn turn(self.pool());
            self.accept_drafts(accepted.data(), int(accepted.shape(0)));
        })
        .def("draw", [](Program& self, Array2<const float> logits, Bytes draws, Array1<int32_t> tokens) {
            require(int(logits.shape(1)) == self.vocab_size(), "the logits do not have the width of the vocabulary");
            auto [first, count] = read_draws(draws, int(logits.shape(0)), tokens.size());
            Turn turn(self.pool());
            self.draw(logits.data(), int(logits.shape(0)), first, count, true, tokens.data());
        }, nb::arg(), nb::arg(), nb::arg().noconvert())
        .def("draw_masked", [](Program& self, Array2<const float> logits, Bytes draws, Array2<const uint32_t> masks, Array1<int32_t> tokens) {
            require(int(logits.shape(1)) == self.vocab_size(), "the logits do not have the width of the vocabulary");
            auto [first, count] = read_draws(draws, int(logits.shape(0)), tokens.size());
            require(int(masks.shape(0)) == count && int(masks.shape(1)) * 32 >= self.vocab_size(), "the masks do not have a bit for each token");
            Turn turn(self.pool());
            self.draw_masked(logits.data(), first, count, masks.data(), masks.shape(1), tokens.data());
        }, nb::arg(), nb::arg(), nb::arg(), nb::arg().noconvert())
        .def("forward_keep", [](Program& self, STEP_ARRAYS) {
            Batch batch = make_batch(STEP_NAMES);
            Turn turn(self.pool());
            self.forward_keep(batch);
        }, STEP_ARGUMENTS)
        .def("draw_kept", [](Program& self, Bytes draws, Array2<const uint32_t> masks, Array1<int32_t> tokens) {
            auto [first, count] = read_draws(draws, std::numeric_limits<int>::max(), tokens.size());
            require(int(masks.shape(0)) == count && int(masks.shape(1)) * 32 >= self.vocab_size(), "the masks do not have a bit for each token");
            Turn turn(self.pool());
            self.draw_kept(first, count, masks.data(), masks.shape(1), tokens.data());
        }, nb::arg(), nb::arg(), nb::arg().noconvert())
        .def("load_adapter", [](Program& self, size_t slot, const std::vector<std::tuple<int, int, Matrix, Matrix>>& updates) {
            auto adapter = make_adapter(self, updates);
            Turn turn(self.pool());
            self.load_adapter(slot, std::move(adapter));
        })
        .def("unload_adapter", [](Program& self, size_t slot) {
            Turn turn(self.pool());
            self.unload_adapter(slot);
        })
        .def("wipe", [](Program& self) {
            Turn turn(self.pool());
            self.wipe();
        })
        .def("record", [](Program& self, bool on) {
            Turn turn(self.pool());
            self.record(on);
        })
        .def("spans", [](const Program& self) {
            std::vector<std::tuple<std::string, int, double, double>> spans;
            Turn turn(self.pool());
            for (const Span& span : self.spans()) spans.emplace_back(span.name, span.thread, span.start_s, span.duration_s);
            return spans;
        })
        .def_prop_ro("num_phases", &Program::num_phases)
        .def_prop_ro("buffer_bytes", &Program::buffer_bytes);
}
