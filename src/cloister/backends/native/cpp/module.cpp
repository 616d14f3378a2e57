// The face of the kernels to Python.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>

#include "cpu.hpp"
#include "pack.hpp"
#include "program.hpp"

namespace nb = nanobind;
using namespace cloister;

namespace {

template <class T> using Array1 = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T> using Array2 = nb::ndarray<T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Bytes = Array1<uint8_t>;

// A matrix as Python describes it; the arrays must outlive the program.
Matrix make_matrix(int kind, int outputs, int inputs, int group, int zero_point, const Array1<const uint8_t>& codes, nb::object channel_scales,
                   nb::object scales, bool wide_scales, nb::object zeros, nb::object offsets, nb::object group_scales, nb::object bias) {
    auto floats = [](const nb::object& o) { return o.is_none() ? nullptr : (const float*)nb::cast<Array1<const float>>(o).data(); };
    auto bytes = [](const nb::object& o) { return o.is_none() ? nullptr : (const uint8_t*)nb::cast<Array1<const uint8_t>>(o).data(); };
    Matrix m;
    m.kind = Kind(kind);
    m.outputs = outputs;
    m.inputs = inputs;
    m.panels = (outputs + panel_width - 1) / panel_width;
    m.chunks = (inputs + chunk_length(m.kind) - 1) / chunk_length(m.kind);
    m.group = group;
    m.groups = group ? inputs / group : 0;
    m.zero_point = zero_point;
    m.codes = codes.data();
    m.channel_scales = floats(channel_scales);
    m.scales = bytes(scales);
    m.wide_scales = wide_scales;
    m.zeros = bytes(zeros);
    m.offsets = floats(offsets);
    m.group_scales = bytes(group_scales);
    m.bias = floats(bias);
    if (codes.size() < size_t(m.panels) * m.panel_bytes()) throw std::invalid_argument("a packed matrix is shorter than its shape asks for");
    return m;
}

#define STEP_ARRAYS Array1<const int32_t> token_ids, Array1<const int32_t> positions, Array1<const int32_t> query_starts, \
    Array1<const int32_t> context_lens, Array2<const int32_t> tables, Array1<const int32_t> logit_rows, nb::object parents
#define STEP_NAMES token_ids, positions, query_starts, context_lens, tables, logit_rows, parents
#define STEP_ARGUMENTS nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg().none()

Batch make_batch(const Array1<const int32_t>& token_ids, const Array1<const int32_t>& positions, const Array1<const int32_t>& query_starts,
                 const Array1<const int32_t>& context_lens, const Array2<const int32_t>& tables, const Array1<const int32_t>& logit_rows,
                 const nb::object& parents) {
    Batch batch{token_ids.data(), positions.data(), query_starts.data(), context_lens.data(), tables.data(), logit_rows.data(),
                int(token_ids.size()), int(context_lens.size()), int(tables.shape(1)), int(logit_rows.size()), nullptr};
    if (!parents.is_none()) batch.parents = nb::cast<Array1<const int32_t>>(parents).data();
    return batch;
}

// Draws as Python's records.
std::pair<const Draw*, int> read_draws(const Bytes& bytes, int num_rows, size_t num_tokens) {
    static_assert(sizeof(Draw) == 56);
    const Draw* draws = (const Draw*)bytes.data();
    size_t count = bytes.size() / sizeof(Draw);
    if (bytes.size() % sizeof(Draw) || count != num_tokens) throw std::invalid_argument("the draws do not have the size of their records");
    for (size_t i = 0; i < count; i++)
        if (draws[i].row < 0 || draws[i].row >= num_rows) throw std::invalid_argument("a draw names a row of logits that is not there");
    return {draws, int(count)};
}

const float* floats_or_null(const nb::object& o) {
    return o.is_none() ? nullptr : nb::cast<Array1<const float>>(o).data();
}

}  // namespace

NB_MODULE(_native, m) {
    nb::set_leak_warnings(false);  // a program that lives until the interpreter ends is no leak
    m.def("kernel_names", [] {
        std::vector<std::string> names;
        for (const Kernels* kernels : usable_kernels()) names.push_back(kernels->name);
        return names;
    }, "Names of the instruction sets that this processor runs, best first.");
    m.def("packed_bytes", [](int kind, int outputs, int inputs) {
        int length = chunk_length(Kind(kind));
        return size_t((outputs + 31) / 32) * size_t((inputs + length - 1) / length) * 2 * size_t(tile_bytes(Kind(kind)));
    });
    m.def("kv_block_bytes", [](int kind, int num_kv_heads, int head_dim, int block_size) {
        AttentionShape shape;
        shape.num_kv_heads = num_kv_heads;
        shape.padded_dim = (head_dim + 31) / 32 * 32;
        return kv_block_bytes(shape, KVKind(kind), block_size);
    });

    nb::class_<Pool>(m, "Pool").def(nb::init<int>()).def_prop_ro("num_threads", &Pool::num_threads);

    m.def("pack", [](Pool& pool, int kind, int source, Array1<const uint8_t> data, int num_rows, int inputs, Array1<const int32_t> places, Bytes codes) {
        const size_t widths[] = {4, 2, 2, 1};
        if (data.size() != size_t(num_rows) * inputs * widths[source] || places.size() != size_t(num_rows))
            throw std::invalid_argument("the data to pack does not have the size of its shape");
        nb::gil_scoped_release release;
        pack(pool, Kind(kind), Source(source), data.data(), num_rows, inputs, places.data(), codes.data());
    });

    nb::class_<Matrix>(m, "Matrix").def("__init__", [](Matrix* self, int kind, int outputs, int inputs, int group, int zero_point, Array1<const uint8_t> codes,
            nb::object channel_scales, nb::object scales, bool wide_scales, nb::object zeros, nb::object offsets, nb::object group_scales, nb::object bias) {
        new (self) Matrix(make_matrix(kind, outputs, inputs, group, zero_point, codes, channel_scales, scales, wide_scales, zeros, offsets, group_scales, bias));
    }, nb::arg("kind"), nb::arg("outputs"), nb::arg("inputs"), nb::arg("group"), nb::arg("zero_point"), nb::arg("codes"), nb::arg("channel_scales").none(),
       nb::arg("scales").none(), nb::arg("wide_scales"), nb::arg("zeros").none(), nb::arg("offsets").none(), nb::arg("group_scales").none(), nb::arg("bias").none());

    nb::class_<Program>(m, "Program")
        .def("__init__", [](Program* self, const std::string& kernels, std::shared_ptr<Pool> pool, int vocab_size, int hidden_size, float norm_eps) {
            new (self) Program(find_kernels(kernels), std::move(pool), vocab_size, hidden_size, norm_eps);
        })
        .def("set_ends", [](Program& self, const Matrix& embedding, const Matrix& head, Array1<const float> norm) {
            self.embedding = embedding;
            self.head = head;
            self.norm_weight = norm.data();
        })
        .def("add_rope", [](Program& self, std::vector<float> inv_freq, float scale) {
            self.ropes.push_back({std::move(inv_freq), scale, {}, 0});
        })
        .def("add_layer", [](Program& self, std::tuple<int, int, int, int> shape, float scale, int rope, int activation, const Matrix& qkv, const Matrix& output,
                             const Matrix& gate_up, const Matrix& down, Array1<const float> attention_norm, Array1<const float> mlp_norm, nb::object q_norm,
                             nb::object k_norm, Bytes cache, int kv_kind, int block_size) {
            Layer layer;
            auto [heads, kv_heads, dim, window] = shape;
            layer.shape = {heads, kv_heads, dim, (dim + 31) / 32 * 32, window};
            layer.scale = scale;
            layer.rope = rope;
            layer.activation = Activation(activation);
            layer.qkv = qkv;
            layer.output = output;
            layer.gate_up = gate_up;
            layer.down = down;
            layer.attention_norm = attention_norm.data();
            layer.mlp_norm = mlp_norm.data();
            layer.q_norm = floats_or_null(q_norm);
            layer.k_norm = floats_or_null(k_norm);
            layer.cache = {cache.data(), kv_block_bytes(layer.shape, KVKind(kv_kind), block_size), block_size, KVKind(kv_kind)};
            self.layers.push_back(layer);
        }, nb::arg("shape"), nb::arg("scale"), nb::arg("rope"), nb::arg("activation"), nb::arg("qkv"), nb::arg("output"), nb::arg("gate_up"), nb::arg("down"),
           nb::arg("attention_norm"), nb::arg("mlp_norm"), nb::arg("q_norm").none(), nb::arg("k_norm").none(), nb::arg("cache"), nb::arg("kv_kind"), nb::arg("block_size"))
        .def("forward", [](Program& self, STEP_ARRAYS, Array2<float> logits) {
            Batch batch = make_batch(STEP_NAMES);
            nb::gil_scoped_release release;
            self.forward(batch, logits.data());
        }, STEP_ARGUMENTS, nb::arg())
        .def("forward_best", [](Program& self, STEP_ARRAYS, Array1<int32_t> best) {
            Batch batch = make_batch(STEP_NAMES);
            nb::gil_scoped_release release;
            self.forward_best(batch, best.data());
        }, STEP_ARGUMENTS, nb::arg())
        .def("forward_draw", [](Program& self, STEP_ARRAYS, Bytes draws, Array1<int32_t> tokens) {
            Batch batch = make_batch(STEP_NAMES);
            auto [first, count] = read_draws(draws, batch.num_rows, tokens.size());
            nb::gil_scoped_release release;
            self.forward_draw(batch, first, count, tokens.data());
        }, STEP_ARGUMENTS, nb::arg(), nb::arg())
        .def("draw", [](Program& self, Array2<const float> logits, Bytes draws, Array1<int32_t> tokens) {
            if (int(logits.shape(1)) != self.vocab_size()) throw std::invalid_argument("the logits do not have the width of the vocabulary");
            auto [first, count] = read_draws(draws, int(logits.shape(0)), tokens.size());
            nb::gil_scoped_release release;
            self.draw(logits.data(), int(logits.shape(0)), first, count, true, tokens.data());
        })
        .def("record", &Program::record)
        .def("spans", [](const Program& self) {
            std::vector<std::tuple<std::string, int, double, double>> spans;
            for (const Span& span : self.spans()) spans.emplace_back(span.name, span.thread, span.start_s, span.duration_s);
            return spans;
        })
        .def_prop_ro("num_phases", &Program::num_phases)
        .def_prop_ro("buffer_bytes", &Program::buffer_bytes);
}
