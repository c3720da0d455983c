// Vectors of lanes: loads and stores in single precision and bfloat16, the exponential, and a transposition.

#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

namespace {

#if defined(__AVX512F__)
constexpr int LANES = 16, TILE = 8;  // TILE · WIDE sums are held in registers
#elif defined(__AVX__)
constexpr int LANES = 8, TILE = 4;
#else
constexpr int LANES = 4, TILE = 8;
#endif

typedef float Vector __attribute__((vector_size(LANES * sizeof(float)), aligned(sizeof(float)), may_alias));
typedef int32_t Integers __attribute__((vector_size(LANES * sizeof(int32_t)), aligned(sizeof(int32_t)), may_alias));
typedef uint16_t Halves __attribute__((vector_size(LANES * sizeof(uint16_t)), aligned(sizeof(uint16_t)), may_alias));

inline Vector load(const float* x) { return *reinterpret_cast<const Vector*>(x); }
inline void store(float* x, Vector v) { *reinterpret_cast<Vector*>(x) = v; }
inline Vector all(float x) { return x - Vector{}; }

// bfloat16 is the upper half of a float; to nearest, ties to even
inline Vector load(const uint16_t* x) {
    const Integers bits = __builtin_convertvector(*reinterpret_cast<const Halves*>(x), Integers) << 16;
    Vector v;
    std::memcpy(&v, &bits, sizeof(v));
    return v;
}

inline void store(uint16_t* x, Vector v) {
    Integers bits;
    std::memcpy(&bits, &v, sizeof(v));
    bits = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    *reinterpret_cast<Halves*>(x) = __builtin_convertvector(bits, Halves);
}

template <typename T>
inline Vector load_some(const T* x, int count) {
    if (count >= LANES) return load(x);
    T whole[LANES] = {};
    for (int i = 0; i < count; ++i) whole[i] = x[i];
    return load(whole);
}

template <typename T>
inline void store_some(T* x, Vector v, int count) {
    if (count >= LANES) return store(x, v);
    T whole[LANES];
    store(whole, v);
    for (int i = 0; i < count; ++i) x[i] = whole[i];
}

// e^x for x <= 0, to some units in the last place
inline Vector exponential(Vector x) {
    x = x < -87.0f ? all(-87.0f) : x;
    const Vector shift = all(12582912.0f);  // 1.5 · 2²³: adding it rounds to whole numbers
    const Vector n = (x * 1.44269504f + shift) - shift;
    const Vector r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    Vector p = all(1.9875691500e-4f);
    for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
        p = p * r + c;
    const Integers bits = (__builtin_convertvector(n, Integers) + 127) << 23;
    Vector power;
    std::memcpy(&power, &bits, sizeof(power));
    return (p * r * r + r) * power + power;
}

template <int S, size_t... I>
inline Vector lower(Vector a, Vector b, std::index_sequence<I...>) {
    return __builtin_shufflevector(a, b, static_cast<int>((I & S) ? LANES + I - S : I)...);
}

template <int S, size_t... I>
inline Vector upper(Vector a, Vector b, std::index_sequence<I...>) {
    return __builtin_shufflevector(a, b, static_cast<int>((I & S) ? LANES + I : I + S)...);
}

template <int S>
inline void transpose(Vector* x) {
    constexpr auto lanes = std::make_index_sequence<LANES>{};
#pragma GCC unroll 16
    for (int i = 0; i < LANES; ++i)
        if (!(i & S)) {
            const Vector a = x[i], b = x[i + S];
            x[i] = lower<S>(a, b, lanes), x[i + S] = upper<S>(a, b, lanes);
        }
    if constexpr (S > 1) transpose<S / 2>(x);
}

}  // namespace
