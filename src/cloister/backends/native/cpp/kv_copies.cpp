// Copies of whole KV blocks, in every layer that has them: out as bytes, in again, or zeros, with one call for
// many blocks.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <memory>
#include <stdexcept>
#include <tuple>
#include <vector>

namespace nb = nanobind;

namespace cloister {

namespace {

using Rows = nb::ndarray<uint8_t, nb::ndim<2>, nb::device::cpu>;

// The cache of a layer: a row for each of its blocks.
struct LayerRows {
    uint8_t* first;
    size_t stride, num_bytes;
    int64_t start, stop;  // blocks

    bool has(int64_t block) const { return block >= start && block < stop; }
    uint8_t* row(int64_t block) const { return first + size_t(block - start) * stride; }
};

constexpr size_t worth_releasing = 4 << 20;  // bytes: copied in about a third of a millisecond

class KVCopies {
public:
    // Caches with the blocks that they hold, from the first one to before the last; they must outlive this.
    explicit KVCopies(const std::vector<std::tuple<Rows, int64_t, int64_t>>& caches) {
        for (const auto& [rows, start, stop] : caches) {
            if (rows.shape(1) > 1 && rows.stride(1) != 1) throw std::invalid_argument("the bytes of a block do not lie side by side");
            if (stop - start > int64_t(rows.shape(0))) throw std::invalid_argument("a cache has fewer rows than blocks");
            layers_.push_back({rows.data(), size_t(rows.stride(0)), rows.shape(1), start, stop});
        }
    }

    // Lets other threads of Python run while these are copied, if that takes longer than getting the lock back may.
    std::unique_ptr<nb::gil_scoped_release> release_for(const std::vector<int64_t>& blocks) const {
        size_t total = 0;
        for (int64_t block : blocks) total += count_bytes(block);
        return total < worth_releasing ? nullptr : std::make_unique<nb::gil_scoped_release>();
    }

    size_t count_bytes(int64_t block) const {
        size_t total = 0;
        for (const LayerRows& layer : layers_) total += layer.has(block) ? layer.num_bytes : 0;
        return total;
    }

    void copy_out(int64_t block, uint8_t* out) const {
        for (const LayerRows& layer : layers_)
            if (layer.has(block)) std::memcpy(out, layer.row(block), layer.num_bytes), out += layer.num_bytes;
    }

    void copy_in(int64_t block, const uint8_t* content) const {
        for (const LayerRows& layer : layers_)
            if (layer.has(block)) std::memcpy(layer.row(block), content, layer.num_bytes), content += layer.num_bytes;
    }

    void wipe(int64_t block) const {
        for (const LayerRows& layer : layers_)
            if (layer.has(block)) std::memset(layer.row(block), 0, layer.num_bytes);
    }

private:
    std::vector<LayerRows> layers_;
};

// Contents that Python holds, for as long as this lives; it is destroyed with the GIL.
class Contents {
public:
    explicit Contents(size_t most) { views_.reserve(most); }
    Contents(const Contents&) = delete;
    ~Contents() {
        for (Py_buffer& view : views_) PyBuffer_Release(&view);
    }
    void add(nb::handle content) {
        Py_buffer view;
        if (PyObject_GetBuffer(content.ptr(), &view, PyBUF_SIMPLE)) throw nb::python_error();
        views_.push_back(view);
    }
    const Py_buffer& operator[](size_t i) const { return views_[i]; }

private:
    std::vector<Py_buffer> views_;
};

}  // namespace

void bind_kv_copies(nb::module_& m) {
    nb::class_<KVCopies>(m, "KVCopies")
        .def(nb::init<const std::vector<std::tuple<Rows, int64_t, int64_t>>&>(), nb::arg("caches").noconvert())
        .def("export", [](const KVCopies& self, const std::vector<int64_t>& blocks) {
            nb::list contents;
            std::vector<uint8_t*> places;
            for (int64_t block : blocks) {
                PyObject* bytes = PyBytes_FromStringAndSize(nullptr, Py_ssize_t(self.count_bytes(block)));
                if (!bytes) throw nb::python_error();
                contents.append(nb::steal(bytes));
                places.push_back(reinterpret_cast<uint8_t*>(PyBytes_AS_STRING(bytes)));
            }
            auto without_gil = self.release_for(blocks);
            for (size_t i = 0; i < blocks.size(); i++) self.copy_out(blocks[i], places[i]);
            return contents;
        })
        .def("import_", [](const KVCopies& self, const std::vector<int64_t>& blocks, const nb::sequence& contents) {
            if (nb::len(contents) != blocks.size()) throw std::invalid_argument("blocks cannot hold contents of another number");
            Contents views(blocks.size());
            for (size_t i = 0; i < blocks.size(); i++) {
                views.add(contents[i]);
                if (size_t(views[i].len) != self.count_bytes(blocks[i])) throw std::invalid_argument("a block cannot hold contents of another size");
            }
            auto without_gil = self.release_for(blocks);
            for (size_t i = 0; i < blocks.size(); i++) self.copy_in(blocks[i], static_cast<const uint8_t*>(views[i].buf));
        })
        .def("wipe", [](const KVCopies& self, const std::vector<int64_t>& blocks) {
            auto without_gil = self.release_for(blocks);
            for (int64_t block : blocks) self.wipe(block);
        });
}

}  // namespace cloister
