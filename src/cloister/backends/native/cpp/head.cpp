// What comes after the layers: the head, and tokens chosen from its logits.
#include <algorithm>
#include <cstring>
#include <numeric>
#include <stdexcept>
#include <utility>

#include "program.hpp"

namespace cloister {

namespace {

constexpr int logit_piece = 1 << 14;

// A token among the likeliest: before others that are less likely, or no likelier with a higher id.
struct Likely {
    float value;
    int32_t id;
    bool operator<(const Likely& other) const { return value > other.value || (value == other.value && id < other.id); }
};

}  // namespace

void Program::head_logits(const Batch& batch, float* logits) {
    head_rows_.assign(batch.logit_rows, batch.logit_rows + batch.num_rows);
    multiply_head(batch.num_rows, [&](int i, float* to) { read_hidden_row(i, to); }, logits);
}

// Logits of `num_rows` hidden states after the final norm; `read(i, to)` writes one of them.
void Program::multiply_head(int num_rows, const std::function<void(int row, float* to)>& read, float* logits) {
    if (num_rows == 0) return;
    float* normed = (float*)normed_.reserve(size_t(pool_->num_threads()) * stride_ * 4);
    Rows rows = shape_rows(inputs_, head.form(), num_rows, hidden_size_);
    each_row("norm", num_rows, [&](int i, int thread) {
        float* to = normed + size_t(thread) * stride_;
        read(i, to);
        kernels_.put_row(to, hidden_size_, rows, i);
    });
    product("head", head, rows, {Finish::store, logits, size_t(vocab_size_)});
    if (logit_scale == 1 && logit_softcap == 0) return;
    int pieces = (vocab_size_ + logit_piece - 1) / logit_piece;
    phase("head", num_rows * pieces, [&](int task, int) {
        int first = task % pieces * logit_piece, count = std::min(logit_piece, vocab_size_ - first);
        kernels_.bend(logits + size_t(task / pieces) * size_t(vocab_size_) + first, count, logit_scale, logit_softcap);
    });
}

void Program::read_hidden_row(int i, float* to) const {
    if (streams) return apply(norm, joined_.get<float>() + size_t(i) * size_t(streams->num_streams) * size_t(hidden_size_), to);
    apply(norm, residual_.get<float>() + size_t(head_rows_[size_t(i)]) * stride_, to);
}

void Program::read_hidden(float* hidden) {
    each_row("norm", num_head_rows(), [&](int i, int) { read_hidden_row(i, hidden + size_t(i) * size_t(hidden_size_)); });
}

void Program::read_every_hidden(float* hidden) {
    head_rows_.resize(size_t(num_step_tokens_));
    std::iota(head_rows_.begin(), head_rows_.end(), 0);
    if (streams) join_streams(head_rows_.data(), num_step_tokens_);
    read_hidden(hidden);
}

void Program::project(const float* hidden, int num_rows, float* logits) {
    size_t width = size_t(hidden_size_);
    multiply_head(num_rows, [&](int i, float* to) { std::memcpy(to, hidden + size_t(i) * width, width * 4); }, logits);
}

void Program::forward_best(const Batch& batch, int32_t* best) {
    size_t width = size_t(vocab_size_);
    float* logits = (float*)logits_.reserve(size_t(batch.num_rows) * width * 4);
    forward(batch, logits);
    phase("sample", batch.num_rows, [&](int row, int) { best[row] = kernels_.find_best(logits + size_t(row) * width, vocab_size_); });
}

void Program::forward_hidden(const Batch& batch, float* hidden) {
    check(batch);
    Batch layers_only = batch;
    layers_only.num_rows = 0;
    forward(layers_only, nullptr);
    head_rows_.assign(batch.logit_rows, batch.logit_rows + batch.num_rows);
    if (streams) join_streams(batch.logit_rows, batch.num_rows);
    read_hidden(hidden);
}

void Program::forward_draw(const Batch& batch, const Draw* draws, int num_draws, int32_t* tokens) {
    forward_watched(batch, draws, num_draws, tokens, 0, nullptr);
}

void Program::forward_watched(const Batch& batch, const Draw* draws, int num_draws, int32_t* tokens, int num_top, int32_t* top) {
    float* logits = (float*)logits_.reserve(size_t(batch.num_rows) * size_t(vocab_size_) * 4);
    forward(batch, logits);
    if (num_draws == 0 && num_top == 0) return;
    const float* peaks = find_peaks(logits, batch.num_rows, false);
    choose_plain(peaks, logits, draws, num_draws, tokens);
    list_top(peaks, logits, batch.num_rows, num_top, top);
}

void Program::find_top(const float* logits, int num_rows, int num_top, int32_t* top) {
    if (num_top > 0) list_top(find_peaks(logits, num_rows, false), logits, num_rows, num_top, top);
}

// Finds the peaks of rows, cut into pieces for the team: what is found in them does not depend on how they were cut.
template <class Find> float* Program::find_in_pieces(int num_rows, Find&& find) {
    int groups = num_draw_groups(vocab_size_), wanted = (4 * pool_->num_threads() + num_rows - 1) / std::max(1, num_rows);
    pieces_ = std::max(1, std::min(groups / 16, wanted));
    float* peaks = (float*)peaks_.reserve(size_t(num_rows) * size_t(groups) * 4);
    finite_.resize(size_t(num_rows * pieces_));
    phase("sample", num_rows * pieces_, [&](int task, int) {
        int row = task / pieces_, piece = task % pieces_;
        finite_[size_t(task)] = find(row, groups * piece / pieces_, groups * (piece + 1) / pieces_, peaks + size_t(row) * size_t(groups));
    });
    return peaks;
}

bool Program::is_finite(int row) const {
    const uint8_t* pieces = finite_.data() + size_t(row) * size_t(pieces_);
    return std::find(pieces, pieces + pieces_, 0) == pieces + pieces_;
}

// Chooses from rows whose peaks were found; `row_of` says which of them a draw has, and where its logits are.
template <class RowOf> void Program::choose(const float* peaks, const Draw* draws, int num_draws, RowOf&& row_of, int32_t* tokens) {
    size_t groups = size_t(num_draw_groups(vocab_size_)), need = 0;
    for (int i = 0; i < num_draws; i++) need = std::max(need, kernels_.draw_scratch(vocab_size_, draws[i]));
    reserve_scratch(need);
    phase("sample", num_draws, [&](int i, int thread) {
        auto [row, logits] = row_of(i);
        tokens[i] = -1;
        if (!is_finite(row)) return;
        tokens[i] = kernels_.draw(logits, peaks + size_t(row) * groups, vocab_size_, draws[i], scratch(thread));
    });
}

const float* Program::find_peaks(const float* logits, int num_rows, bool barred) {
    return find_in_pieces(num_rows, [&](int row, int first, int last, float* to) {
        return kernels_.find_peaks(logits + size_t(row) * size_t(vocab_size_), vocab_size_, first, last, barred, to);
    });
}

void Program::choose_plain(const float* peaks, const float* logits, const Draw* draws, int num_draws, int32_t* tokens) {
    if (num_draws == 0) return;
    size_t width = size_t(vocab_size_);
    choose(peaks, draws, num_draws, [&](int i) { return std::pair(draws[i].row, logits + size_t(draws[i].row) * width); }, tokens);
}

void Program::draw(const float* logits, int num_rows, const Draw* draws, int num_draws, bool barred, int32_t* tokens) {
    if (num_draws > 0) choose_plain(find_peaks(logits, num_rows, barred), logits, draws, num_draws, tokens);
}

// Writes the ids of each row's largest logits. Those of the `num_top` groups with the highest peaks hold them all: a token of
// another one has at least that many before it.
void Program::list_top(const float* peaks, const float* logits, int num_rows, int num_top, int32_t* top) {
    if (num_top == 0) return;
    int groups = num_draw_groups(vocab_size_), looked_at = std::min(groups, num_top);
    reserve_scratch(size_t(groups) * sizeof(int32_t) + size_t(num_top) * sizeof(Likely));
    phase("sample", num_rows, [&](int row, int thread) {
        int32_t* to = top + size_t(row) * size_t(num_top);
        if (!is_finite(row)) return std::fill(to, to + num_top, -1), void();
        const float *highest = peaks + size_t(row) * size_t(groups), *values = logits + size_t(row) * size_t(vocab_size_);
        Likely* best = (Likely*)scratch(thread);
        int32_t* order = (int32_t*)(best + num_top);
        for (int group = 0; group < groups; group++) order[group] = group;
        std::partial_sort(order, order + looked_at, order + groups, [&](int32_t a, int32_t b) {
            return highest[a] > highest[b] || (highest[a] == highest[b] && a < b);
        });
        int count = 0;
        for (const int32_t* group = order; group < order + looked_at; group++) {
            if (count == num_top && highest[*group] < best[count - 1].value) break;
            for (int id = *group * draw_group; id < std::min(vocab_size_, (*group + 1) * draw_group); id++) {
                Likely found{values[id], id};
                if (count == num_top && !(found < best[count - 1])) continue;
                int place = count < num_top ? count++ : count - 1;
                for (; place > 0 && found < best[place - 1]; place--) best[place] = best[place - 1];
                best[place] = found;
            }
        }
        for (int place = 0; place < num_top; place++) to[place] = best[place].id;
    });
}

void Program::draw_masked(const float* logits, const Draw* draws, int num_draws, const uint32_t* masks, size_t num_words, int32_t* tokens) {
    float* masked = (float*)masked_.reserve(size_t(num_draws) * size_t(vocab_size_) * 4);
    choose_masked(masked, logits, draws, num_draws, masks, num_words, tokens);
}

void Program::forward_keep(const Batch& batch) {
    kept_rows_ = 0;
    forward(batch, (float*)logits_.reserve(size_t(batch.num_rows) * size_t(vocab_size_) * 4));
    kept_rows_ = batch.num_rows;
}

void Program::draw_kept(const Draw* draws, int num_draws, const uint32_t* masks, size_t num_words, int32_t* tokens) {
    std::vector<uint8_t> is_drawn(size_t(kept_rows_), 0);
    bool is_shared = false;  // several draws of one row, each with a mask of its own, need copies of it
    for (int i = 0; i < num_draws; i++) {
        if (draws[i].row >= kept_rows_) throw std::invalid_argument("a draw names a row of logits that was not kept");
        is_shared = std::exchange(is_drawn[size_t(draws[i].row)], 1) || is_shared;
    }
    kept_rows_ = 0;
    const float* logits = logits_.get<float>();
    if (is_shared) draw_masked(logits, draws, num_draws, masks, num_words, tokens);
    else choose_masked(nullptr, logits, draws, num_draws, masks, num_words, tokens);
}

// Bars tokens in a row of `masked` for each draw, or in the draw's row of the kept logits if there is none, and chooses.
void Program::choose_masked(float* masked, const float* logits, const Draw* draws, int num_draws, const uint32_t* masks,
                            size_t num_words, int32_t* tokens) {
    if (num_draws == 0) return;
    size_t width = size_t(vocab_size_);
    auto target = [&](int i) {
        return masked ? masked + size_t(i) * width : logits_.get<float>() + size_t(draws[i].row) * width;
    };
    const float* peaks = find_in_pieces(num_draws, [&](int i, int first, int last, float* to) {
        const float* from = logits + size_t(draws[i].row) * width;
        return kernels_.mask_peaks(from, target(i), masks + size_t(i) * num_words, vocab_size_, first, last, to);
    });
    choose(peaks, draws, num_draws, [&](int i) { return std::pair(i, (const float*)target(i)); }, tokens);
}

}  // namespace cloister
