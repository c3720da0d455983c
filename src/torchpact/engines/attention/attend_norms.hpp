// Norms of rows, and the sums before them: what torch does by an addition and a norm, in one pass over each row.

#pragma once

#include <algorithm>
#include <cmath>

#include "attend_vectors.hpp"

namespace {

constexpr int64_t MOST_ALONE = 1 << 16;  // numbers that take one thread less time than two

inline float total(Vector v) {
    float sum = 0.0f;
    for (int i = 0; i < LANES; ++i) sum += v[i];
    return sum;
}

// x += added (if any); output = (x - mean) / √(variance + eps) · weight + bias, or without the mean (rms).
// output may be x; sums are rounded to T before their norm is taken, as if they had been stored.
template <typename T>
void norm_of_row(T* x, const T* added, const float* weight, const float* bias, T* output, int size, float eps, bool rms) {
    Vector sum{}, squares{};
    for (int t = 0; t < size; t += LANES) {
        const int count = size - t;
        Vector v = load_some(x + t, count);
        if (added) {
            store_some(x + t, v + load_some(added + t, count), count);
            v = load_some(x + t, count);
        }
        sum += v, squares += v * v;
    }
    const float mean = rms ? 0.0f : total(sum) / size;
    if (!rms) {
        squares = Vector{};
        for (int t = 0; t < size; t += LANES) {
            const Vector v = load_some(x + t, size - t);
            Vector apart = v - mean;
            if (size - t < LANES)
                for (int i = size - t; i < LANES; ++i) apart[i] = 0.0f;
            squares += apart * apart;
        }
    }
    const float scale = 1.0f / std::sqrt(total(squares) / size + eps);
    for (int t = 0; t < size; t += LANES) {
        const int count = size - t;
        Vector v = (load_some(x + t, count) - mean) * scale;
        if (weight) v *= load_some(weight + t, count);
        if (bias) v += load_some(bias + t, count);
        store_some(output + t, v, count);
    }
}

template <typename T>
void norms(void* x, const void* added, const float* weight, const float* bias, void* output, int64_t rows, int size,
           float eps, bool rms, int threads) {
    T* given = static_cast<T*>(x);
    const T* other = static_cast<const T*>(added);
    T* made = static_cast<T*>(output);
#pragma omp parallel for num_threads(threads) if (rows * size > MOST_ALONE)
    for (int64_t row = 0; row < rows; ++row) {
        const int64_t at = row * size;
        norm_of_row<T>(given + at, other ? other + at : nullptr, weight, bias, made + at, size, eps, rms);
    }
}

}  // namespace

extern "C" void torchpact_norm(void* x, const void* added, const float* weight, const float* bias, void* output,
                               int64_t rows, int32_t size, float eps, int32_t rms, int32_t bfloat16, int32_t threads) {
    (bfloat16 ? norms<uint16_t> : norms<float>)(x, added, weight, bias, output, rows, size, eps, rms, threads);
}
