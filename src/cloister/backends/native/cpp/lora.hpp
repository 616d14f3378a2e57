// Low-rank adapters (LoRA, Hu et al. 2021): what is added to the products of rows that have one.
#pragma once
#include <array>
#include <memory>
#include <vector>

#include "layout.hpp"

namespace cloister {

enum class Site : int { q = 0, k = 1, v = 2, o = 3, gate = 4, up = 5, down = 6, q_a = 7, q_b = 8, kv_a = 9, q_gate = 10 };
constexpr int num_sites = 11;

// B A of one product, the scale in B; both of one kind, float32 or bfloat16. Without codes: none.
struct Update {
    Matrix a, b;
    explicit operator bool() const { return a.codes != nullptr; }
};

using LayerUpdates = std::array<Update, num_sites>;

struct Adapter {
    std::vector<LayerUpdates> layers;
};

// Where the outputs of one update stand in a row: from `column` on, in runs of 16 with 16 between them where gate and up take turns.
struct UpdatePlace {
    Site site;
    int column = 0;
    bool in_turns = false;
};

// Up to 16 rows of a step that have the same adapter: `count` of the tokens listed, from `begin` on.
struct AdapterTask {
    const Adapter* adapter;
    int begin, count;
};

}  // namespace cloister
