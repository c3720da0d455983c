// What a block is, what it is asked to do, and what a thread works in.

#pragma once

#include <algorithm>
#include <initializer_list>

#include "native_convolve.hpp"

extern "C" {

// As Block and Call in native.py.
struct Block {
    int32_t inputs, outputs, stride, units;
    int32_t middle;  // channels between the convolutions of a bottleneck; 0: units of two 3×3 convolutions
    int32_t heads;   // 0: a plain block
    int32_t local;   // heads have a convolution: a decision for every patch of group × group pixels
    int32_t norm;    // heads have batch norm and ReLU
    int32_t group;
    int32_t half;  // maps and weights of convolutions are in bfloat16, and so are input and output
    const float* weights;
};

struct Call {
    int32_t batch, height, width;  // of the input
    int32_t threads;
    const void* input;
    void* output;
    const float* limits;  // [heads]: halts where the logit exceeds it, see exceeds
    const float* bounds;  // or where it exceeds these, if given: [heads][batch][positions]
    float* logits;        // [heads][batch][positions], filled with infinity; may be null
    float* probs;         // [units][batch][positions], filled with 1
    int64_t* steps;       // [batch][positions], filled with 1
    float* expected;      // [batch][positions], filled with 1
    void* workspace;      // torchpact_workspace bytes, prepared
};
}

namespace {

struct UnitWeights {
    const float *scale, *shift, *conv1, *bias1, *conv2, *bias2, *conv3;  // the last two of bottlenecks
    const float* end;
};

struct HeadWeights {
    const float *scale, *shift, *conv, *pooled_scale, *pooled_shift, *linear, *bias;
};

inline UnitWeights weights_from(const float* at, const Block& b, long inputs) {
    const auto next = [&at](long count) { return std::exchange(at, at + count); };
    const auto conv = [&](long count) { return next(b.half ? count / 2 : count); };
    const long m = b.middle ? b.middle : b.outputs;
    UnitWeights w{};
    w.scale = next(inputs), w.shift = next(inputs);
    w.conv1 = conv((b.middle ? 1 : 9) * inputs * m), w.bias1 = next(m);
    w.conv2 = conv(9 * m * m);
    if (b.middle) w.bias2 = next(m), w.conv3 = conv(m * b.outputs);
    w.end = at;
    return w;
}

inline UnitWeights unit_weights(const Block& b, int unit) {
    const UnitWeights first = weights_from(b.weights, b, b.inputs);
    if (!unit) return first;
    const long size = weights_from(first.end, b, b.outputs).end - first.end;
    return weights_from(first.end + (unit - 1) * size, b, b.outputs);
}

inline HeadWeights head_weights(const Block& b, int head) {
    const long co = b.outputs;
    const float* at = unit_weights(b, b.units - 1).end + head * (14 * co + BLOCK);
    return {at, at + co, at + 2 * co, at + 11 * co, at + 12 * co, at + 13 * co, at + 14 * co};
}

// Pixels that go through the convolutions of a bottleneck together.
constexpr long CHUNK = MOST_TILES * PIXELS;

struct Shape {
    long height, width, row, places, positions, pixels;
    long in_row, in_places, in_pixels;
    int parts;  // of an image that threads share
    Shape(const Block& b, long in_height, long in_width, int threads) : parts(threads) {
        height = (in_height + b.stride - 1) / b.stride, width = (in_width + b.stride - 1) / b.stride;
        row = width + 2, places = row * (height + 2), pixels = height * width;
        in_row = in_width + 2, in_places = in_row * (in_height + 2), in_pixels = in_height * in_width;
        positions = b.local ? pixels / (b.group * b.group) : 1;
    }
};

// All pixels, cut into bands of rows, and there by the edge of the map at which they lie, unless that does not
// matter: their places, and those of the pixels of the input from which the first convolution makes them.
struct Order {
    int32_t *all, *strided;
};

// Maps and lists are those of the first seat where threads share an image. Of bottlenecks, which have a map only where
// neighbours are looked at, there are the output of the first convolution, and rows for a chunk of pixels.
template <typename T>
struct Seat {
    float* state;                      // bordered map: u
    T *input, *active_input, *middle;  // likewise: pre-activation, relu(BN(u)), conv1
    T* rows;                           // of a chunk: what a convolution reads, or leaves for the next
    float *logits, *survival;          // of places, of positions
    float* total;                      // the sum of u over pixels, of each part of them
    int32_t *active, *near;            // lists of places
    uint8_t *live, *spread, *mark;     // of places: active, dilated by row, dilated
    // what stays:
    Order alone, together;         // for one thread, in one band; for all threads, a band each
    int32_t *entering, *in_order;  // of pixels of the input: places, numbers
    int32_t *position, *corner;    // of places: the position, its first place
    uint16_t* inside;              // of places: the taps that meet no border
};

template <typename T>
T* take(char*& at, long count) {
    T* start = reinterpret_cast<T*>(at);
    at += (count * sizeof(T) + 63) / 64 * 64;  // own cache lines
    return start;
}

template <typename T>
Seat<T> make_seat(const Block& b, const Shape& s, char*& at) {
    Seat<T> seat;
    seat.input = take<T>(at, s.in_places * (b.middle ? b.middle : b.inputs));
    seat.state = take<float>(at, s.places * b.outputs);
    seat.active_input = take<T>(at, b.middle && !b.norm ? 0 : s.places * b.outputs);
    seat.middle = take<T>(at, s.places * (b.middle ? b.middle : b.outputs));
    seat.rows = take<T>(at, b.middle ? CHUNK * std::max({b.inputs, b.middle, b.outputs}) : 0);
    seat.logits = take<float>(at, s.places), seat.survival = take<float>(at, s.pixels);
    seat.total = take<float>(at, s.parts * b.outputs);
    for (int32_t** list : {&seat.active, &seat.near, &seat.alone.all, &seat.alone.strided, &seat.together.all,
                           &seat.together.strided})
        *list = take<int32_t>(at, s.pixels);
    for (int32_t** list : {&seat.entering, &seat.in_order}) *list = take<int32_t>(at, b.middle ? s.in_pixels : 0);
    for (int32_t** map : {&seat.position, &seat.corner}) *map = take<int32_t>(at, s.places);
    seat.inside = take<uint16_t>(at, s.places);
    for (uint8_t** map : {&seat.live, &seat.spread, &seat.mark}) *map = take<uint8_t>(at, s.places);
    return seat;
}

template <typename T>
int64_t size_of_seat(const Block& b, const Shape& s) {
    char* at = nullptr;
    make_seat<T>(b, s, at);
    return at - static_cast<char*>(nullptr);
}

inline void fill_order(const Block& b, const Shape& s, const Order& order, long bands) {
    const bool matters = (b.middle ? b.middle : b.outputs) > FEW_CHANNELS;
    const auto edge = [&s, matters](long y, long x) {  // corners belong to rows
        return !matters ? 4 : y == 0 ? 0 : y == s.height - 1 ? 1 : x == 0 ? 2 : x == s.width - 1 ? 3 : 4;
    };
    long i = 0;
    for (long band = 0; band < bands; ++band)
        for (int wanted = 0; wanted < 5; ++wanted)
            for (long y = s.height * band / bands; y < s.height * (band + 1) / bands; ++y)
                for (long x = 0; x < s.width; ++x)
                    if (edge(y, x) == wanted) {
                        order.all[i] = (y + 1) * s.row + x + 1;
                        order.strided[i++] = (y * b.stride + 1) * s.in_row + x * b.stride + 1;
                    }
}

template <typename T>
void fill_tables(const Block& b, const Shape& s, const Seat<T>& seat, int threads) {
    fill_order(b, s, seat.alone, 1);
    fill_order(b, s, seat.together, threads);
    const long group = b.local ? b.group : std::max(s.height, s.width);
    for (long y = 0; y < s.height; ++y)
        for (long x = 0; x < s.width; ++x) {
            const long place = (y + 1) * s.row + x + 1;
            seat.position[place] = y / group * (s.width / group) + x / group;
            seat.corner[place] = place - y % group * s.row - x % group;
            for (int tap = 0; tap < 9; ++tap) {
                const long above = y + tap / 3 - 1, beside = x + tap % 3 - 1;
                if (above >= 0 && above < s.height && beside >= 0 && beside < s.width)
                    seat.inside[place] |= 1 << tap;
            }
        }
    if (b.middle)
        for (long pixel = 0, width = s.in_row - 2; pixel < s.in_pixels; ++pixel) {
            seat.entering[pixel] = (pixel / width + 1) * s.in_row + pixel % width + 1;
            seat.in_order[pixel] = pixel;
        }
}

inline long filter(int32_t* list, long count, const uint8_t* keep) {
    long kept = 0;
    for (long i = 0; i < count; ++i) {
        list[kept] = list[i];
        kept += keep[list[i]];
    }
    return kept;
}

template <typename T, typename S>
void normalize(T* target, const S* source, const float* scale, const float* shift, long channels) {
    for (long c = 0; c < channels; c += LANES)
        store(target + c, relu(load(source + c) * load(scale + c) + load(shift + c)));
}

}  // namespace
