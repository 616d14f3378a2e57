// Which experts a token takes, and with what weights.
#pragma once
#include "kernels.hpp"
#include "rows.hpp"
#include "simd.hpp"

namespace cloister::CLOISTER_ISA {

constexpr float hidden_expert = -INFINITY;

// What experts are compared by.
INLINE float rank_of(const float* scores, const Routing& routing, int expert) {
    return routing.correction ? scores[expert] + routing.correction[expert] : scores[expert];
}

// The sum of a group's `num_group_scores` highest ranks, the highest first.
static float score_group(const float* scores, const Routing& routing, int begin, int end) {
    float sum = 0.0f, last = INFINITY;
    for (int left = routing.num_group_scores; left > 0;) {
        float next = -INFINITY;
        int count = 0;  // of equal ones
        for (int i = begin; i < end; i++) {
            float rank = rank_of(scores, routing, i);
            if (rank >= last || rank < next) continue;
            count = rank == next ? count + 1 : 1;
            next = rank;
        }
        for (; count > 0 && left > 0; count--, left--) sum += next;
        last = next;
    }
    return sum;
}

// Hides the experts of all but the best groups; of equal groups the first ones are kept.
static void hide_groups(float* scores, float* group_scores, const Routing& routing) {
    int size = routing.num_experts / routing.num_groups;
    for (int g = 0; g < routing.num_groups; g++) group_scores[g] = score_group(scores, routing, g * size, (g + 1) * size);
    for (int left = routing.num_groups; left > routing.num_chosen_groups; left--) {
        int worst = 0;
        for (int g = 1; g < routing.num_groups; g++)
            if (group_scores[g] <= group_scores[worst]) worst = g;
        group_scores[worst] = INFINITY;
        for (int i = worst * size; i < (worst + 1) * size; i++) scores[i] = hidden_expert;
    }
}

// Turns outputs of a router into scores; returns what they are to be divided by.
static float score_experts(float* outputs, const Routing& routing, float highest_output) {
    float total = 0.0f;
    for (int i = 0; i < routing.num_experts; i += 16) {
        int some = routing.num_experts - i < 16 ? routing.num_experts - i : 16;
        f32x16 v = load_some(outputs + i, some);
        v = routing.sigmoid ? 1.0f / (1.0f + exp(-v)) : exp(v - highest_output);
        memcpy(outputs + i, &v, size_t(some) * 4);
        for (int j = i; j < i + some; j++) total += outputs[j];
    }
    return routing.sigmoid ? 1.0f : total;
}

// Outputs that are no numbers choose the first experts with weights that are none either, so that nobody takes the answer for one.
static void choose(float* scores, float* group_scores, const Routing& routing, int32_t* experts, float* weights) {
    int count = routing.num_chosen;
    float highest_output = scores[0], bad = 0.0f;
    for (int i = 0; i < routing.num_experts; i++) {
        highest_output = scores[i] > highest_output ? scores[i] : highest_output;
        bad += rank_of(scores, routing, i) * 0.0f;
    }
    if (bad != 0.0f) {
        for (int j = 0; j < count; j++) {
            experts[j] = j;
            weights[j] = NAN;
        }
        return;
    }
    float total = score_experts(scores, routing, highest_output);
    if (routing.correction || routing.num_groups > 1) {  // otherwise the order does not depend on the divisor
        for (int i = 0; i < routing.num_experts; i++) scores[i] /= total;
        total = 1.0f;
    }
    if (routing.num_groups > 1) hide_groups(scores, group_scores, routing);
    int found = 0;
    for (int i = 0; i < routing.num_experts; i++) {
        float rank = rank_of(scores, routing, i);
        if (rank == hidden_expert || (found == count && !(rank > weights[count - 1]))) continue;
        int at = found < count ? found++ : count - 1;
        for (; at > 0 && rank > weights[at - 1]; at--) {
            weights[at] = weights[at - 1];
            experts[at] = experts[at - 1];
        }
        weights[at] = rank;
        experts[at] = i;
    }
    for (int j = 0; j < count; j++) weights[j] = scores[experts[j]];
    float divisor = total;
    if (routing.renormalize) {
        divisor = 0.0f;
        for (int j = 0; j < count; j++) divisor += weights[j];
        divisor += 1e-20f;  // as DeepSeek-V3 has it: sigmoids may all be 0; it changes no bit of a sum of softmax scores
    }
    for (int j = 0; j < count; j++) weights[j] /= divisor;
    for (int j = 0; routing.scale != 1 && j < count; j++) weights[j] *= routing.scale;
}

}  // namespace cloister::CLOISTER_ISA
