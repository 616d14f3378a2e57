// How the tokens of a step go through the state of one head (backends/base.py, `ForwardBatch.state_spans`).
#pragma once
#include <cstring>

#include "program.hpp"

namespace cloister {

// Advances a state of `size` numbers by the tokens of a sequence: `advance(first, count, state)`, with `state_in(block)` before and behind
// them. Known tokens change states in place; drafts change `copies`, which are forgotten: one of a chain, one for each node of a tree.
template <class StateIn, class Advance>
void Program::scan(const Batch& batch, int sequence, size_t size, float* copies, StateIn&& state_in, Advance&& advance) const {
    int first_draft = -1;
    for (int i = span_starts_[size_t(sequence)]; i < span_starts_[size_t(sequence) + 1]; i++) {
        const StateSpan& span = batch.state_spans[i];
        const float* before = state_in(span.read);
        if (span.written >= 0) {
            float* state = state_in(span.written);
            if (span.written != span.read) std::memcpy(state, before, size * 4);
            advance(span.first, span.end - span.first, state);
            continue;
        }
        int count = batch.parents ? 1 : span.end - span.first;
        for (int token = span.first; token < span.end; token += count) {
            if (first_draft < 0) first_draft = draft_of_[size_t(token)];
            int parent = before_[size_t(token)], parent_draft = parent < 0 ? -1 : draft_of_[size_t(parent)];
            float* state = batch.parents ? copies + size_t(draft_of_[size_t(token)] - first_draft) * size : copies;
            if (parent_draft < 0) std::memcpy(state, before, size * 4);
            else if (batch.parents) std::memcpy(state, copies + size_t(parent_draft - first_draft) * size, size * 4);
            advance(token, count, state);
        }
    }
}

}  // namespace cloister
