// Products of few rows with weights in panels, and what follows them: what costs least where overheads count.
//
// A panel holds PANEL outputs, [inputs][PANEL], of bfloat16 [inputs / 2][PANEL][2]; weights beyond the last output
// are zeros. A tile of rows stays in registers while it goes down a panel, which the next tile finds in the cache.

#pragma once

#include <cmath>
#include <type_traits>
#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

#include "attend_norms.hpp"
#include "attend_vectors.hpp"

namespace {

constexpr int PANEL = 3 * LANES;
constexpr int ROWS = 4 * TILE;  // of a task
constexpr int CHUNK = 384;      // inputs that are summed up by themselves: long sums round more

enum Function { NONE, GELU, GELU_TANH, SILU, RELU };

struct Product {
    const void* panels;
    const float* bias;  // or null
    int32_t inputs, outputs, function;
};

inline Vector sigmoid(Vector x) {
    const Vector e = exponential(x < 0.0f ? x : -x);
    return (x < 0.0f ? e : all(1.0f)) / (e + 1.0f);
}

// the normal distribution at x by formula 7.1.26 of Abramowitz and Stegun, to 1e-7
inline Vector normal(Vector x) {
    const Vector z = (x < 0.0f ? -x : x) * 0.70710678f, t = 1.0f / (z * 0.3275911f + 1.0f);
    Vector p = all(1.061405429f);
    for (float c : {-1.453152027f, 1.421413741f, -0.284496736f, 0.254829592f}) p = p * t + c;
    const Vector tail = p * t * exponential(-(z * z)) * 0.5f;
    return x < 0.0f ? tail : 1.0f - tail;
}

inline Vector applied(Vector x, int function) {
    switch (function) {
        case GELU: return x * normal(x);
        case GELU_TANH: return x * sigmoid((x * x * x * 0.044715f + x) * 1.59576912f);
        case SILU: return x * sigmoid(x);
        case RELU: return x < 0.0f ? Vector{} : x;  // not a number stays so
        default: return x;
    }
}

template <int M>
inline void multiply(const float* x, int64_t step, const float* panel, int inputs, Vector (&sums)[M][3]) {
    for (int t = 0; t < inputs; ++t) {
        Vector w[3];
        for (int j = 0; j < 3; ++j) w[j] = load(panel + t * PANEL + j * LANES);
#pragma GCC unroll 8
        for (int i = 0; i < M; ++i) {
            const Vector each = all(x[i * step + t]);
            for (int j = 0; j < 3; ++j) sums[i][j] += each * w[j];
        }
    }
}

#if defined(__AVX512BF16__)
constexpr bool PAIRS = true;

template <int M>
inline void multiply(const uint16_t* x, int64_t step, const uint16_t* panel, int inputs, Vector (&sums)[M][3]) {
    for (int t = 0; t < inputs; t += 2) {
        __m512i w[3];
        for (int j = 0; j < 3; ++j) w[j] = _mm512_loadu_si512(panel + t * PANEL + 2 * j * LANES);
#pragma GCC unroll 8
        for (int i = 0; i < M; ++i) {
            int32_t pair;
            std::memcpy(&pair, x + i * step + t, sizeof(pair));
            const __m512i each = _mm512_set1_epi32(pair);
            for (int j = 0; j < 3; ++j)
                sums[i][j] = (Vector)_mm512_dpbf16_ps((__m512)sums[i][j], (__m512bh)each, (__m512bh)w[j]);
        }
    }
}
#else
constexpr bool PAIRS = false;

template <int M>
inline void multiply(const uint16_t*, int64_t, const uint16_t*, int, Vector (&)[M][3]) {}
#endif

template <int M, typename T>
void tile(const Product& p, const T* x, int index, T* out, const T* factor) {
    Vector sums[M][3];
    const int begin = index * PANEL, left = p.outputs - begin;
    for (int j = 0; j < 3; ++j) {
        const Vector bias = p.bias && left > j * LANES ? load_some(p.bias + begin + j * LANES, left - j * LANES) : Vector{};
        for (int i = 0; i < M; ++i) sums[i][j] = bias;
    }
    const T* panel = static_cast<const T*>(p.panels) + static_cast<int64_t>(begin) * p.inputs;
    for (int t = 0; t < p.inputs; t += CHUNK) {
        Vector part[M][3] = {};
        multiply<M>(x + t, p.inputs, panel + static_cast<int64_t>(t) * PANEL, std::min(CHUNK, p.inputs - t), part);
        for (int i = 0; i < M; ++i)
            for (int j = 0; j < 3; ++j) sums[i][j] += part[i][j];
    }
    for (int i = 0; i < M; ++i)
        for (int j = 0; j < 3 && left > j * LANES; ++j) {
            const int64_t at = static_cast<int64_t>(i) * p.outputs + begin + j * LANES;
            Vector v = applied(sums[i][j], p.function);
            if (factor) v *= load_some(factor + at, left - j * LANES);
            store_some(out + at, v, left - j * LANES);
        }
}

template <int M, typename T>
void last_tile(int rows, const Product& p, const T* x, int panel, T* out, const T* factor) {
    if (rows == M) return tile<M, T>(p, x, panel, out, factor);
    if constexpr (M > 1) last_tile<M - 1, T>(rows, p, x, panel, out, factor);
}

// out = function(x · weights + bias), times the factor if there is one; called by all threads of a team
template <typename T>
void product(const Product& p, const void* rows_of_x, void* output, int64_t rows, const void* factors = nullptr) {
    const T *x = static_cast<const T*>(rows_of_x), *factor = static_cast<const T*>(factors);
    T* out = static_cast<T*>(output);
    const int panels = (p.outputs + PANEL - 1) / PANEL;
    const int64_t parts = (rows + ROWS - 1) / ROWS;
#pragma omp for schedule(static)
    for (int64_t task = 0; task < panels * parts; ++task) {
        const int panel = static_cast<int>(task / parts);
        const int64_t begin = task % parts * ROWS, end = std::min<int64_t>(begin + ROWS, rows);
        for (int64_t row = begin; row < end; row += TILE) {
            const int count = static_cast<int>(std::min<int64_t>(TILE, end - row));
            const int64_t at = row * p.outputs;
            last_tile<TILE, T>(count, p, x + row * p.inputs, panel, out + at, factor ? factor + at : nullptr);
        }
    }
}

}  // namespace

extern "C" int torchpact_panel() { return PANEL; }

extern "C" int torchpact_multiplies_pairs() { return PAIRS; }

extern "C" void torchpact_product(const Product* p, const void* x, void* output, int64_t rows, int32_t bfloat16,
                                  int32_t threads) {
#pragma omp parallel num_threads(threads)
    if (bfloat16)
        product<uint16_t>(*p, x, output, rows);
    else
        product<float>(*p, x, output, rows);
}

struct Norm {
    const float *weight, *bias;
    float eps;
    int32_t rms;
};

// What follows attention in a layer; gate.panels is null where there is none.
struct Layer {
    Product out, gate, up, down;
    Norm norm1, norm2;
    int32_t post;  // whether norms stand after the sums, else norm2 stands before the MLP
};

namespace {

template <typename T>
void norms_of_rows(const Norm& n, T* x, const T* added, T* output, int64_t rows, int size) {
#pragma omp for schedule(static)
    for (int64_t row = 0; row < rows; ++row) {
        const int64_t at = row * size;
        norm_of_row<T>(x + at, added + at, n.weight, n.bias, output + at, size, n.eps, n.rms);
    }
}

template <typename T>
void finish(const Layer& l, const T* attended, const T* u, T* moved, T* normed, T* gated, T* hidden, T* output,
            int64_t rows) {
    const int size = l.out.outputs;
    product<T>(l.out, attended, moved, rows);
    norms_of_rows<T>(l.post ? l.norm1 : l.norm2, moved, u, normed, rows, size);
    if (l.gate.panels) product<T>(l.gate, normed, gated, rows);
    product<T>(l.up, normed, hidden, rows, l.gate.panels ? gated : nullptr);
    product<T>(l.down, hidden, output, rows);
    if (l.post) return norms_of_rows<T>(l.norm2, output, normed, output, rows, size);
#pragma omp for schedule(static)
    for (int64_t row = 0; row < rows; ++row)
        for (int64_t t = row * size; t < (row + 1) * size; t += LANES) {
            const int count = static_cast<int>((row + 1) * size - t);
            store_some(output + t, load_some(output + t, count) + load_some(moved + t, count), count);
        }
}

}  // namespace

// space holds moved, normed (both rows x outputs of out), gated and hidden (rows x outputs of up)
extern "C" void torchpact_finish(const Layer* l, const void* attended, const void* u, void* space, void* output,
                                 int64_t rows, int32_t bfloat16, int32_t threads) {
    const int64_t size = rows * l->out.outputs, wide = rows * l->up.outputs;
    const auto run = [&](auto* s) {
        using T = std::remove_reference_t<decltype(*s)>;
#pragma omp parallel num_threads(threads)
        finish<T>(*l, static_cast<const T*>(attended), static_cast<const T*>(u), s, l->post ? s : s + size, s + 2 * size,
                  s + 2 * size + wide, static_cast<T*>(output), rows);
    };
    if (bfloat16)
        run(static_cast<uint16_t*>(space));
    else
        run(static_cast<float*>(space));
}
