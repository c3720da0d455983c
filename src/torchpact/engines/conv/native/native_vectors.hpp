// Vectors of floats, and how maps in single precision or bfloat16 are read, written and multiplied.

#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int LANES = 16, PIXELS = 12, WIDE = 2;  // 24 of 32 registers accumulate; 14 pixels are no faster
#elif defined(__AVX__)
constexpr int LANES = 8, PIXELS = 6, WIDE = 1;  // 12 of 16
#else
constexpr int LANES = 4, PIXELS = 5, WIDE = 1;  // 20 of 32
#endif
constexpr int BLOCK = 16;  // output channels whose weights lie together
constexpr int VECTORS = BLOCK / LANES;

typedef float Vector __attribute__((vector_size(LANES * sizeof(float)), aligned(sizeof(float)), may_alias));

inline Vector load(const float* x) { return *reinterpret_cast<const Vector*>(x); }
inline void store(float* x, Vector v) { *reinterpret_cast<Vector*>(x) = v; }
inline Vector relu(Vector v) { return v < Vector{} ? Vector{} : v; }  // keeps NaN, as torch does

template <int STEP, int... I>
inline Vector rotate(Vector v, std::integer_sequence<int, I...>) {
#if defined(__clang__)
    return __builtin_shufflevector(v, v, ((I + STEP) % LANES)...);
#else
    typedef int32_t Order __attribute__((vector_size(LANES * sizeof(int32_t))));
    return __builtin_shuffle(v, Order{((I + STEP) % LANES)...});
#endif
}

template <int STEP = LANES / 2>
inline float sum(Vector v) {
    if constexpr (STEP == 0)
        return v[0];
    else
        return sum<STEP / 2>(v + rotate<STEP>(v, std::make_integer_sequence<int, LANES>{}));
}

// How many channels of a pixel a product takes, and what it makes of them. Weights of as many channels are 16
// floats, or as much memory.
template <typename T>
struct Product;

template <>
struct Product<float> {
    static constexpr int CHANNELS = 1;
    static float of(const float* x) { return *x; }
    static Vector add(Vector result, float x, Vector weight) { return result + x * weight; }
};

#if defined(__AVX512BF16__)
struct BFloat {
    uint16_t bits;
};

inline Vector load(const BFloat* x) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)));
    return reinterpret_cast<Vector>(_mm512_slli_epi32(wide, 16));
}

inline void store(BFloat* x, Vector v) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(x), (__m256i)_mm512_cvtneps_pbh((__m512)v));
}

template <>
struct Product<BFloat> {
    static constexpr int CHANNELS = 2;
    static __m512i of(const BFloat* x) {
        int32_t pair;
        std::memcpy(&pair, x, sizeof pair);
        return _mm512_set1_epi32(pair);
    }
    static Vector add(Vector result, __m512i x, Vector weight) {
        return (Vector)_mm512_dpbf16_ps((__m512)result, (__m512bh)x, (__m512bh)weight);
    }
};
#endif

}  // namespace
