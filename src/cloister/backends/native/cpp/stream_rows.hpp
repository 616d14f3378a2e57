// What several residual streams of a token need beside products (backends/spec.py, StreamsSpec): one token at a time, each number in one
// order, as the torch back end computes it.
#pragma once
#include <cmath>

#include "kernels.hpp"
#include "rows.hpp"
#include "simd.hpp"

namespace cloister::CLOISTER_ISA {

static void dot_rows(const float* rows, const float* x, int num_rows, int length, float scale, float* out) {
    for (int row = 0; row < num_rows; row += 4) {
        int count = num_rows - row < 4 ? num_rows - row : 4;
        f32x16 sums[4] = {};
        for (int at = 0; at < length; at += 16) {
            f32x16 v = load_some(x + at, length - at);
            for (int i = 0; i < count; i++) sums[i] = fma(load_some(rows + size_t(row + i) * size_t(length) + at, length - at), v, sums[i]);
        }
        for (int i = 0; i < count; i++) out[row + i] = sum(sums[i]) * scale;
    }
}

static void predict_streams(float* streams, const float* weights, int num_streams, int length) {
    f32x16 x[most_streams];
    size_t step = size_t(length);
    for (int at = 0; at < length; at += 16) {
        int left = length - at;
        for (int i = 0; i < num_streams; i++) x[i] = load_some(streams + size_t(i) * step + at, left);
        for (int j = 0; j < num_streams; j++) {
            const float* its = weights + j * num_streams;
            f32x16 total = x[0] * its[0];
            for (int i = 1; i < num_streams; i++) total += x[i] * its[i];
            store_some(streams + size_t(j) * step + at, x[j] + total, left);
        }
    }
}

static void correct_streams(float* streams, const float* row, const float* weights, int active, int num_streams, int length) {
    size_t step = size_t(length);
    for (int at = 0; at < length; at += 16) {
        int left = length - at;
        f32x16 moved = load_some(row + at, left) - load_some(streams + size_t(active) * step + at, left);
        for (int j = 0; j < num_streams; j++) {
            float* to = streams + size_t(j) * step + at;
            store_some(to, load_some(to, left) + moved * weights[j], left);
        }
    }
}

static float mean_square(const float* row, int length) {
    f32x16 squares = {};
    for (int at = 0; at < length; at += 16) {
        f32x16 v = load_some(row + at, length - at);
        squares = fma(v, v, squares);
    }
    return sum(squares) / float(length);
}

static void multiply_by(float* values, const float* others, int length) {
    for (int at = 0; at < length; at += 16) {
        int left = length - at;
        store_some(values + at, load_some(values + at, left) * load_some(others + at, left), left);
    }
}

static void activate_row(float* values, Activation activation, int length) {
    for (int at = 0; at < length; at += 16) store_some(values + at, activate(load_some(values + at, length - at), int(activation)), length - at);
}

// Gates stand 16 by 16 in turn with what they multiply. What is no number makes the whole row none.
static void keep_largest(float* outputs, int length, float deviations) {
    f32x16 total = {}, squares = {};
    for (int at = 0; at < length; at += 16) total += load_some(outputs + 2 * at, length - at);
    float mean = sum(total) / float(length);
    for (int at = 0; at < length; at += 16) {
        f32x16 v = load<f32x16>(outputs + 2 * at) - mean;
        if (length - at < 16) v = select(lane_numbers() < length - at, v, set(0.0f));
        squares = fma(v, v, squares);
    }
    float deviation = std::sqrt(sum(squares)) / std::sqrt(float(length));
    float least = mean + deviation * deviations;
    for (int at = 0; at < length; at += 16) {
        f32x16 v = load<f32x16>(outputs + 2 * at) - least;
        store(outputs + 2 * at, select(v < 0.0f, set(0.0f), v));
    }
}

static void read_numbers(const uint8_t* from, NumberType type, int length, float* out) {
    for (int at = 0; at < length; at += 16) {
        int left = length - at;
        f32x16 v;
        if (type == NumberType::f32) {
            v = load_some((const float*)from + at, left);
        } else {
            u16x16 codes = {};
            memcpy(&codes, from + 2 * at, size_t(left < 16 ? left : 16) * 2);
            v = type == NumberType::bf16 ? from_bf16(codes) : from_f16(codes);
        }
        store_some(out + at, v, left);
    }
}

}  // namespace cloister::CLOISTER_ISA
