// Draft heads: residual blocks on hidden states, read by the model's own head.
#include <cstring>

#include "program.hpp"

namespace cloister {

size_t Program::load_heads(DraftHeads heads) {
    draft_heads_.push_back(std::move(heads));
    return draft_heads_.size() - 1;
}

void Program::guess(size_t loaded, const float* hidden, int num_rows, int num_heads, int num_top, int32_t* top) {
    const DraftHeads& heads = draft_heads_[loaded];
    int num_states = num_heads * num_rows;
    if (num_states == 0) return;
    size_t width = size_t(hidden_size_);
    float* states = (float*)guesses_.reserve(size_t(num_states) * stride_ * 4);  // [num_heads][num_rows][stride]
    each_row("guess", num_states, [&](int i, int) {
        std::memcpy(states + size_t(i) * stride_, hidden + size_t(i % num_rows) * width, width * 4);
    });
    for (size_t block = 0; block < heads[0].size(); block++) guess_block(heads, block, states, num_heads, num_rows);
    float* logits = (float*)logits_.reserve(size_t(num_states) * size_t(vocab_size_) * 4);
    multiply_head(num_states, [&](int i, float* to) { std::memcpy(to, states + size_t(i) * stride_, width * 4); }, logits);
    find_top(logits, num_states, num_top, top);
}

// One block of each head in two lists of tasks. In the first block all heads read the same rows.
void Program::guess_block(const DraftHeads& heads, size_t block, float* states, int num_heads, int num_rows) {
    const FeedForward& first = heads[0][block];
    bool is_alike = block == 0, shares_up = is_alike && num_heads > 1 && heads[1][block].up.codes == first.up.codes;
    int num_inputs = is_alike ? num_rows : num_heads * num_rows, num_inner = (shares_up ? 1 : num_heads) * num_rows;
    Rows inputs = shape_rows(inputs_, first.up.form(), num_inputs, hidden_size_);
    each_row("round", num_inputs, [&](int i, int) {
        Rows of_head = inputs.slice(i / num_rows * num_rows, num_rows);
        kernels_.put_row(states + size_t(i) * stride_, hidden_size_, of_head, i % num_rows);
    });
    Rows inner = shape_rows(next_inputs_, first.down.form(), num_inner, first.down.inputs);
    nexts_.resize(size_t(num_heads));
    products_.clear();
    for (int head = 0; head < num_heads; head++) {
        Rows& next = nexts_[size_t(head)];
        next = inner.slice(shares_up ? 0 : head * num_rows, num_rows);
        if (shares_up && head > 0) continue;
        const FeedForward& one = heads[size_t(head)][block];
        products_.push_back({&one.up, inputs.slice(is_alike ? 0 : head * num_rows, num_rows), up_sink(one, next, nullptr)});
    }
    run_products("guess_up");
    products_.clear();
    for (int head = 0; head < num_heads; head++) {
        Sink sink{Finish::add, states + size_t(head) * size_t(num_rows) * stride_, stride_};
        products_.push_back({&heads[size_t(head)][block].down, nexts_[size_t(head)], sink});
    }
    run_products("guess_down");
}

}  // namespace cloister
