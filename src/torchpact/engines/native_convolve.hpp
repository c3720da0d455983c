// Convolutions at listed places of bordered maps.

#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>

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

constexpr unsigned ALL_TAPS = 0x1ff;

struct Weights {
    const float* values;  // [outputs / 16][taps][inputs][16]
    long taps;            // 9, or 1 for products of each pixel by itself
    long inputs, outputs;
};

struct Source {
    const float* map;
    const int32_t* places;  // one for each of the target
    long row = 0;           // places in a row, for neighbours
    const uint16_t* inside = nullptr;  // of places: the taps that meet no border; null: all are taken
};

struct Target {
    float* map;
    const int32_t* places;
    const float* bias;       // given: map = relu(result + bias); else map += result and total += result
    float* total = nullptr;
};

struct Convolution {
    Weights weights;
    Source source;
    Target target;
};

template <int COUNT, int BLOCKS>
void tile(const Convolution& conv, long first, long output) {
    // Without a few channels in a row for each pixel, its address would be fetched for every product:
    // 86 instead of 111 GFLOP/s a core with 16 channels.
    constexpr int N = BLOCKS * VECTORS, DEPTH = 4 / BLOCKS;
    const auto [values, taps, inputs, outputs] = conv.weights;
    const auto [map, places, row, inside] = conv.source;
    const float* source[COUNT];
    unsigned wanted = inside ? 0 : ALL_TAPS;
    for (int p = 0; p < COUNT; ++p) {
        const int32_t place = places[first + p];
        source[p] = map + place * inputs;
        if (inside) wanted |= inside[place];
    }
    const long next_block = taps * inputs * BLOCK;
    const float* weight = values + output / BLOCK * next_block;
    Vector result[COUNT][N] = {};
    for (long tap = 0; tap < taps; ++tap) {
        if (!(wanted >> tap & 1)) {
            weight += inputs * BLOCK;
            continue;
        }
        const long start = taps == 1 ? 0 : ((tap / 3 - 1) * row + tap % 3 - 1) * inputs;
        for (long c = start; c < start + inputs; c += DEPTH, weight += DEPTH * BLOCK) {
            Vector w[DEPTH][N];
#pragma GCC unroll 4
            for (int d = 0; d < DEPTH; ++d)
#pragma GCC unroll 8
                for (int j = 0; j < N; ++j)
                    w[d][j] = load(weight + j / VECTORS * next_block + d * BLOCK + j % VECTORS * LANES);
#pragma GCC unroll 16
            for (int p = 0; p < COUNT; ++p)
#pragma GCC unroll 4
                for (int d = 0; d < DEPTH; ++d)
#pragma GCC unroll 8
                    for (int j = 0; j < N; ++j) result[p][j] += source[p][c + d] * w[d][j];
        }
    }
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j) {
        const long at = output + j * LANES;
        Vector total{};
#pragma GCC unroll 16
        for (int p = 0; p < COUNT; ++p) {
            float* target = conv.target.map + conv.target.places[first + p] * outputs + at;
            if (conv.target.bias) {
                store(target, relu(result[p][j] + load(conv.target.bias + at)));
            } else {
                store(target, load(target) + result[p][j]);
                total += result[p][j];
            }
        }
        if (!conv.target.bias) store(conv.target.total + at, load(conv.target.total + at) + total);
    }
}

template <int BLOCKS, int COUNT = PIXELS>
void tile_of(long count, const Convolution& conv, long first, long output) {
    if constexpr (COUNT > 0) {
        if (count == COUNT)
            tile<COUNT, BLOCKS>(conv, first, output);
        else
            tile_of<BLOCKS, COUNT - 1>(count, conv, first, output);
    }
}

// A few tiles, of which the outputs are made one after the other: maps and weights stay in the cache meanwhile.
class Tiles {
   public:
    static constexpr int MOST = 8;

    explicit Tiles(const Convolution& conv) : conv(conv) {}

    // Pixels of a list, in nearly equal tiles: those of few pixels are slow.
    void add(long begin, long end) {
        const long tiles = (end - begin + PIXELS - 1) / PIXELS;
        for (long i = 0; i < tiles; ++i) {
            first[held] = begin + (end - begin) * i / tiles;
            count[held] = begin + (end - begin) * (i + 1) / tiles - first[held];
            if (++held == MOST) run();
        }
    }

    void run() {
        for (long output = 0; output < conv.weights.outputs;) {
            const int blocks = output + WIDE * BLOCK <= conv.weights.outputs ? WIDE : 1;
            for (int i = 0; i < held; ++i)
                if (blocks == WIDE)
                    tile_of<WIDE>(count[i], conv, first[i], output);
                else
                    tile_of<1>(count[i], conv, first[i], output);
            output += blocks * BLOCK;
        }
        held = 0;
    }

   private:
    const Convolution& conv;
    long first[MOST], count[MOST];
    int held = 0;
};

// Pixels of a list that lie at the same edge come one after the other: taps that meet the border are left out
// for them, which takes 13 % less time on 64 maps of 64×8×8, and 5 % on those of 32×16×16. Few of them are not
// worth tiles of their own, nor are few channels: 16×32×32 took 1 to 4 % more.
constexpr long FEW = 4, FEW_CHANNELS = 16;

void convolve(const Convolution& conv, long begin, long end) {
    const auto [map, places, row, inside] = conv.source;
    Tiles tiles(conv);
    while (begin < end) {
        long next = inside ? begin : end;
        for (unsigned wanted = 0; next < end; ++next) {
            const unsigned taps = inside[places[next]];
            const bool alike = wanted == ALL_TAPS ? taps == ALL_TAPS : !(taps & ~wanted);
            if (!alike && next >= begin + FEW) break;
            wanted |= taps;
        }
        tiles.add(begin, next);
        begin = next;
    }
    tiles.run();
}

}  // namespace
