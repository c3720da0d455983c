// Convolutions at listed places of bordered maps.

#pragma once

#include "native_vectors.hpp"

namespace {

constexpr unsigned ALL_TAPS = 0x1ff;

struct Weights {
    const float* values;  // [outputs / 16][taps][inputs][16], or [inputs / 2][16][2] of bfloat16 in their place
    long taps;            // 9, or 1 for products of each pixel by itself
    long inputs, outputs;
};

template <typename T>
struct Source {
    const T* map;
    const int32_t* places;             // one for each of the target
    long row = 0;                      // places in a row, for neighbours
    const uint16_t* inside = nullptr;  // of places: the taps that meet no border; null: all are taken
};

template <typename T>
struct Target {
    const int32_t* places;
    T* map;  // if there is a bias: map = relu(result + bias)
    const float* bias;
    float* sum = nullptr;  // else: sum += result and total += result
    float* total = nullptr;
};

template <typename T>
struct Convolution {
    Weights weights;
    Source<T> source;
    Target<T> target;
};

template <typename T, int COUNT, int BLOCKS>
void tile(const Convolution<T>& conv, long first, long output) {
    // Without a few channels in a row for each pixel, its address would be fetched for every product:
    // 86 instead of 111 GFLOP/s a core with 16 channels.
    constexpr int N = BLOCKS * VECTORS, DEPTH = 4 / BLOCKS, STEP = Product<T>::CHANNELS;
    const auto [values, taps, inputs, outputs] = conv.weights;
    const auto [map, places, row, inside] = conv.source;
    const T* source[COUNT];
    unsigned wanted = inside ? 0 : ALL_TAPS;
    for (int p = 0; p < COUNT; ++p) {
        const int32_t place = places[first + p];
        source[p] = map + place * inputs;
        if (inside) wanted |= inside[place];
    }
    const long next_block = taps * inputs / STEP * BLOCK;
    const float* weight = values + output / BLOCK * next_block;
    Vector result[COUNT][N] = {};
    for (long tap = 0; tap < taps; ++tap) {
        if (!(wanted >> tap & 1)) {
            weight += inputs / STEP * BLOCK;
            continue;
        }
        const long start = taps == 1 ? 0 : ((tap / 3 - 1) * row + tap % 3 - 1) * inputs;
        for (long c = start; c < start + inputs; c += DEPTH * STEP, weight += DEPTH * BLOCK) {
            Vector w[DEPTH][N];
#pragma GCC unroll 4
            for (int d = 0; d < DEPTH; ++d)
#pragma GCC unroll 8
                for (int j = 0; j < N; ++j)
                    w[d][j] = load(weight + j / VECTORS * next_block + d * BLOCK + j % VECTORS * LANES);
#pragma GCC unroll 16
            for (int p = 0; p < COUNT; ++p)
#pragma GCC unroll 4
                for (int d = 0; d < DEPTH; ++d) {
                    const auto x = Product<T>::of(source[p] + c + d * STEP);
#pragma GCC unroll 8
                    for (int j = 0; j < N; ++j) result[p][j] = Product<T>::add(result[p][j], x, w[d][j]);
                }
        }
    }
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j) {
        const long at = output + j * LANES;
        Vector total{};
#pragma GCC unroll 16
        for (int p = 0; p < COUNT; ++p) {
            const long place = conv.target.places[first + p] * outputs + at;
            if (conv.target.bias) {
                store(conv.target.map + place, relu(result[p][j] + load(conv.target.bias + at)));
            } else {
                store(conv.target.sum + place, load(conv.target.sum + place) + result[p][j]);
                total += result[p][j];
            }
        }
        if (!conv.target.bias) store(conv.target.total + at, load(conv.target.total + at) + total);
    }
}

template <typename T, int BLOCKS, int COUNT = PIXELS>
void tile_of(long count, const Convolution<T>& conv, long first, long output) {
    if constexpr (COUNT > 0) {
        if (count == COUNT)
            tile<T, COUNT, BLOCKS>(conv, first, output);
        else
            tile_of<T, BLOCKS, COUNT - 1>(count, conv, first, output);
    }
}

// A few tiles, of which the outputs are made one after the other: maps and weights stay in the cache meanwhile.
constexpr int MOST_TILES = 8;

template <typename T>
class Tiles {
   public:
    explicit Tiles(const Convolution<T>& conv) : conv(conv) {}

    // Pixels of a list, in nearly equal tiles: those of few pixels are slow.
    void add(long begin, long end) {
        const long tiles = (end - begin + PIXELS - 1) / PIXELS;
        for (long i = 0; i < tiles; ++i) {
            first[held] = begin + (end - begin) * i / tiles;
            count[held] = begin + (end - begin) * (i + 1) / tiles - first[held];
            if (++held == MOST_TILES) run();
        }
    }

    void run() {
        for (long output = 0; output < conv.weights.outputs;) {
            const int blocks = output + WIDE * BLOCK <= conv.weights.outputs ? WIDE : 1;
            for (int i = 0; i < held; ++i)
                if (blocks == WIDE)
                    tile_of<T, WIDE>(count[i], conv, first[i], output);
                else
                    tile_of<T, 1>(count[i], conv, first[i], output);
            output += blocks * BLOCK;
        }
        held = 0;
    }

   private:
    const Convolution<T>& conv;
    long first[MOST_TILES], count[MOST_TILES];
    int held = 0;
};

// Pixels of a list that lie at the same edge come one after the other: taps that meet the border are left out
// for them, which takes 13 % less time on 64 maps of 64×8×8, and 5 % on those of 32×16×16. Few of them are not
// worth tiles of their own, nor are few channels: 16×32×32 took 1 to 4 % more.
constexpr long FEW = 4, FEW_CHANNELS = 16;

template <typename T>
void convolve(const Convolution<T>& conv, long begin, long end) {
    const auto [map, places, row, inside] = conv.source;
    Tiles<T> tiles(conv);
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
