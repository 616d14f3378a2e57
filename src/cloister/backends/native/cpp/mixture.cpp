// A mixture of experts inside a step (Shazeer et al. 2017): tokens are routed, their rows gathered by expert, and only the experts
// that somebody chose are read. A row of a product does not depend on the rows beside it, so an answer does not depend on who else
// chose the same expert.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "program.hpp"

namespace cloister {

void Program::mixture(const Layer& layer, const Normed& inputs) {
    const Mixture& mixture = *layer.mixture;
    int num_tokens = inputs.rows.num_rows, each = mixture.routing.num_chosen;
    Routes routes = route(mixture, inputs.exact);
    float* shared = nullptr;
    if (mixture.shared) {
        shared = (float*)branch_.reserve(size_t(num_tokens) * stride_ * 4);
        feed_forward(*mixture.shared, inputs.other, {Finish::store, shared, stride_});
    }
    const float* outputs = run_experts(mixture, inputs, routes);
    float* sums = normed_.get<float>();
    each_row("combine", num_tokens, [&](int row, int thread) {
        float* sum = sums + size_t(thread) * stride_;
        memset(sum, 0, stride_ * 4);
        for (int pair = row * each; pair < (row + 1) * each; pair++)  // in the order of their weights, whatever the company
            kernels_.add_scaled(outputs + size_t(routes.places[pair]) * stride_, mixture.weighs_inputs ? 1.0f : routes.weights[pair], hidden_size_, sum);
        if (shared) kernels_.add_scaled(shared + size_t(row) * stride_, routes.shares[row], hidden_size_, sum);
        add_branch(layer, layer.mlp_post_norm, sum, row);
    });
}

Program::Routes Program::route(const Mixture& mixture, const Rows& inputs) {
    const Routing& routing = mixture.routing;
    int num_tokens = inputs.num_rows, num_experts = routing.num_experts, each = routing.num_chosen;
    size_t outputs = size_t(mixture.router.panels) * 32, stride = outputs + (routing.num_groups > 1 ? size_t(routing.num_groups) : 0);
    size_t pairs = size_t(num_tokens) * size_t(each);
    float* scores = (float*)scores_.reserve(size_t(num_tokens) * stride * 4);
    product("router", mixture.router, inputs, {Finish::store, scores, stride});

    int32_t* at = (int32_t*)routes_.reserve((3 * pairs + size_t(num_tokens) + size_t(num_experts) + 1) * 4);
    Routes routes;
    routes.num_pairs = int(pairs);
    routes.chosen = at;
    routes.weights = (float*)(at + pairs);
    routes.places = at + 2 * pairs;
    routes.shares = (float*)(at + 3 * pairs);
    routes.starts = at + 3 * pairs + num_tokens;
    each_row("route", num_tokens, [&](int row, int) {
        float* its_scores = scores + size_t(row) * stride;
        routes.shares[row] = mixture.shared_gate ? 1.0f / (1.0f + std::exp(-its_scores[num_experts])) : 1.0f;
        size_t first = size_t(row) * size_t(each);
        kernels_.choose(its_scores, its_scores + outputs, routing, routes.chosen + first, routes.weights + first);
    });
    sort_pairs(mixture, routes);
    return routes;
}

// Gathers pairs by expert, inside of one in the order of tokens.
void Program::sort_pairs(const Mixture& mixture, const Routes& routes) {
    int num_experts = int(mixture.experts.size());
    int32_t* starts = routes.starts;
    std::fill(starts, starts + num_experts + 1, 0);
    for (int pair = 0; pair < routes.num_pairs; pair++) starts[routes.chosen[pair] + 1]++;
    for (int expert = 0; expert < num_experts; expert++) starts[expert + 1] += starts[expert];
    // an expert's start runs to its end, which is the next one's start
    for (int pair = 0; pair < routes.num_pairs; pair++) routes.places[pair] = starts[routes.chosen[pair]]++;
    std::copy_backward(starts, starts + num_experts, starts + num_experts + 1);
    starts[0] = 0;
}

// Returns the outputs of all pairs, gathered: [num_pairs][stride].
float* Program::run_experts(const Mixture& mixture, const Normed& inputs, const Routes& routes) {
    size_t num_experts = mixture.experts.size();
    const FeedForward& alike = mixture.experts[0];
    int inner = alike.down.inputs;
    bool alone = inputs.rows.num_rows == 1 && !mixture.weighs_inputs;  // then every expert reads the one row where it is
    Rows gathered = alone ? inputs.rows : mixture.weighs_inputs ? gather_weighted(mixture, inputs.exact, routes) : gather(mixture, inputs.rows, routes);
    Rows next = shape_rows(next_inputs_, alike.down.form(), routes.num_pairs, inner);
    nexts_.resize(num_experts);
    size_t wide_stride = up_sink(alike, next, nullptr).stride;
    uint16_t* wide = nullptr;
    if (input_of(alike.down.kind) == Input::int8) wide = (uint16_t*)wide_.reserve(size_t(routes.num_pairs) * wide_stride * 2);
    products_.clear();
    for (size_t e = 0; e < num_experts; e++) {
        int first = routes.starts[e], count = routes.count(e);
        if (count == 0) continue;
        nexts_[e] = next.slice(first, count);
        Rows rows = alone ? inputs.rows : gathered.slice(first, count);
        products_.push_back({&mixture.experts[e].up, rows, up_sink(mixture.experts[e], nexts_[e], wide ? wide + size_t(first) * wide_stride : nullptr)});
    }
    run_products("gate_up");
    if (wide) {
        each_row("round", routes.num_pairs, [&](int pair, int) {
            size_t e = size_t(routes.chosen[pair]);
            int place = routes.places[pair];
            kernels_.put_wide_row(wide + size_t(place) * wide_stride, inner, nexts_[e], place - routes.starts[e]);
        });
    }
    float* outputs = (float*)expert_outputs_.reserve(size_t(routes.num_pairs) * stride_ * 4);
    products_.clear();
    for (size_t e = 0; e < num_experts; e++) {
        if (routes.count(e) == 0) continue;
        Sink sink{Finish::store, outputs + size_t(routes.starts[e]) * stride_, stride_};
        sink.scale = mixture.experts[e].output_scale;
        products_.push_back({&mixture.experts[e].down, nexts_[e], sink});
    }
    run_products("down");
    return outputs;
}

// Copies rows of inputs, as they were rounded, to where their experts read them.
Rows Program::gather(const Mixture& mixture, const Rows& inputs, const Routes& routes) {
    InputForm form = mixture.experts[0].up.form();
    Rows all = shape_rows(gathered_, form, routes.num_pairs, hidden_size_);
    each_row("gather", routes.num_pairs, [&](int pair, int) {
        size_t e = size_t(routes.chosen[pair]);
        int from = pair / mixture.routing.num_chosen, to = routes.places[pair] - routes.starts[e];
        Rows rows = all.slice(routes.starts[e], routes.count(e));
        for (int chunk = 0; chunk < rows.chunks; chunk++) memcpy(rows.at(to, chunk), inputs.at(from, chunk), 64);
        if (form.type != Input::int8) return;
        size_t groups = size_t(rows.num_groups);
        memcpy(rows.scales + size_t(to) * groups, inputs.scales + size_t(from) * groups, groups * 4);
        rows.totals[to] = inputs.totals[from];
        memcpy(rows.sums_of(to), inputs.sums_of(from), size_t(rows.chunks) * 8);
    });
    return all;
}

// The same of rows that are multiplied by their weights before they are rounded.
Rows Program::gather_weighted(const Mixture& mixture, const Rows& exact, const Routes& routes) {
    Rows all = shape_rows(gathered_, mixture.experts[0].up.form(), routes.num_pairs, hidden_size_);
    each_row("gather", routes.num_pairs, [&](int pair, int thread) {
        size_t e = size_t(routes.chosen[pair]);
        float* row = normed_.get<float>() + size_t(thread) * stride_;
        for (int i = 0; i < hidden_size_; i += 16)
            memcpy(row + i, exact.at(pair / mixture.routing.num_chosen, i / 16), size_t(std::min(16, hidden_size_ - i)) * 4);
        kernels_.bend(row, hidden_size_, routes.weights[pair], 0);
        Rows rows = all.slice(routes.starts[e], routes.count(e));
        kernels_.put_row(row, hidden_size_, rows, routes.places[pair] - routes.starts[e]);
    });
    return all;
}

}  // namespace cloister
