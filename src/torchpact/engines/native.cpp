// A block of residual units, computed at its active pixels only; native.py compiles and calls this.
//
// Maps lie in memory pixel by pixel, channels last, within a border of zeros, so that a pixel is one number:
// its place in the bordered map. A convolution takes a list of places and computes PIXELS of them at a time for
// 16 or 32 output channels, all in registers; wherever the pixels lie they cost the same, and nothing is
// gathered. The maps of one image stay in the cache from the first unit of the block to the last. Images go one
// by one to the threads; those left over, when the batch is no multiple of the threads, are shared by all.

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
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

// --- convolution at listed places ---

struct Convolution {
    const float* weight;  // [outputs / 16][9][inputs][16]
    long inputs, outputs;
    const float* source;
    const int32_t* from;  // places in the source, one for each in `to`
    long row;             // places in a row of the source
    float* target;
    const int32_t* to;
    const float* bias;  // given: target = relu(result + bias); else target += result and total += result
    float* total;
};

template <int COUNT, int BLOCKS>
void tile(const Convolution& conv, long first, long output) {
    // Without a few channels in a row for each pixel, its address would be fetched for every product:
    // 86 instead of 111 GFLOP/s a core with 16 channels.
    constexpr int N = BLOCKS * VECTORS, DEPTH = 4 / BLOCKS;
    const float* source[COUNT];
    for (int p = 0; p < COUNT; ++p) source[p] = conv.source + conv.from[first + p] * conv.inputs;
    const long next_block = 9 * conv.inputs * BLOCK;
    const float* weight = conv.weight + output / BLOCK * next_block;
    Vector result[COUNT][N] = {};
    for (int tap = 0; tap < 9; ++tap) {
        const long start = ((tap / 3 - 1) * conv.row + tap % 3 - 1) * conv.inputs;
        for (long c = start; c < start + conv.inputs; c += DEPTH, weight += DEPTH * BLOCK) {
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
            float* target = conv.target + conv.to[first + p] * conv.outputs + at;
            if (conv.bias) {
                store(target, relu(result[p][j] + load(conv.bias + at)));
            } else {
                store(target, load(target) + result[p][j]);
                total += result[p][j];
            }
        }
        if (!conv.bias) store(conv.total + at, load(conv.total + at) + total);
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

void convolve(const Convolution& conv, long begin, long end) {
    const long tiles = (end - begin + PIXELS - 1) / PIXELS;  // nearly equal ones: those of few pixels are slow
    for (long output = 0; output < conv.outputs;) {
        const int blocks = output + WIDE * BLOCK <= conv.outputs ? WIDE : 1;
        for (long i = 0; i < tiles; ++i) {
            const long first = begin + (end - begin) * i / tiles;
            const long count = begin + (end - begin) * (i + 1) / tiles - first;
            if (blocks == WIDE)
                tile_of<WIDE>(count, conv, first, output);
            else
                tile_of<1>(count, conv, first, output);
        }
        output += blocks * BLOCK;
    }
}

// --- the block ---

}  // namespace

extern "C" {

// As Block and Call in native.py.
struct Block {
    int32_t inputs, outputs, stride, units;
    int32_t heads;  // 0: a plain block
    int32_t local;  // heads have a convolution: a decision for every patch of group × group pixels
    int32_t norm;   // heads have batch norm and ReLU
    int32_t group;
    const float* weights;
};

struct Call {
    int32_t batch, height, width;  // of the input
    int32_t threads;
    const float* input;
    float* output;
    float bound;          // halts where the logit is above it,
    const float* bounds;  // or above these, if given: [heads][batch][positions]
    float* logits;        // [heads][batch][positions], filled with infinity; may be null
    float* probs;         // [units][batch][positions], filled with 1
    int64_t* steps;       // [batch][positions], filled with 1
    float* expected;      // [batch][positions], filled with 1
    void* workspace;      // threads × torchpact_workspace bytes, prepared
};
}

namespace {

struct UnitWeights {
    const float *scale, *shift, *conv1, *bias, *conv2;
};

struct HeadWeights {
    const float *scale, *shift, *conv, *pooled_scale, *pooled_shift, *linear, *bias;
};

// What a thread works in; maps are those of the first seat where threads share an image.
struct Seat {
    float *input, *state, *active_input, *middle;  // bordered maps: pre-activation, u, relu(BN(u)), conv1
    float *logits, *survival;                      // of places, of positions
    float* total;                                  // the sum of u over pixels, or this thread's part of it
    int32_t *all, *strided, *active, *near;        // lists of places; the first two stay
    int32_t *position, *corner;                    // of places: the position, its first place; these stay too
    uint8_t *live, *spread, *mark;                 // of places: active, dilated by row, dilated
};

struct Shape {
    long height, width, row, places, positions, pixels;
    long in_row, in_places;
    Shape(const Block& b, long in_height, long in_width) {
        height = (in_height + b.stride - 1) / b.stride, width = (in_width + b.stride - 1) / b.stride;
        row = width + 2, places = row * (height + 2), pixels = height * width;
        in_row = in_width + 2, in_places = in_row * (in_height + 2);
        positions = b.local ? pixels / (b.group * b.group) : 1;
    }
};

template <typename T>
T* take(char*& at, long count) {
    T* start = reinterpret_cast<T*>(at);
    at += (count * sizeof(T) + 63) / 64 * 64;  // own cache lines
    return start;
}

Seat make_seat(const Block& b, const Shape& s, char*& at) {
    Seat seat;
    seat.input = take<float>(at, s.in_places * b.inputs);
    for (float** map : {&seat.state, &seat.active_input, &seat.middle})
        *map = take<float>(at, s.places * b.outputs);
    seat.logits = take<float>(at, s.places), seat.survival = take<float>(at, s.pixels);
    seat.total = take<float>(at, b.outputs);
    for (int32_t** list : {&seat.all, &seat.strided, &seat.active, &seat.near})
        *list = take<int32_t>(at, s.pixels);
    for (int32_t** map : {&seat.position, &seat.corner}) *map = take<int32_t>(at, s.places);
    for (uint8_t** map : {&seat.live, &seat.spread, &seat.mark}) *map = take<uint8_t>(at, s.places);
    return seat;
}

void fill_tables(const Block& b, const Shape& s, const Seat& seat) {
    const long group = b.local ? b.group : std::max(s.height, s.width);
    long i = 0;
    for (long y = 0; y < s.height; ++y)
        for (long x = 0; x < s.width; ++x, ++i) {
            const long place = seat.all[i] = (y + 1) * s.row + x + 1;
            seat.strided[i] = (y * b.stride + 1) * s.in_row + x * b.stride + 1;
            seat.position[place] = y / group * (s.width / group) + x / group;
            seat.corner[place] = place - y % group * s.row - x % group;
        }
}

long filter(int32_t* list, long count, const uint8_t* keep) {
    long kept = 0;
    for (long i = 0; i < count; ++i) {
        list[kept] = list[i];
        kept += keep[list[i]];
    }
    return kept;
}

void normalize(float* target, const float* source, const float* scale, const float* shift, long channels) {
    for (long c = 0; c < channels; c += LANES)
        store(target + c, relu(load(source + c) * load(scale + c) + load(shift + c)));
}

// One image, by one thread or by a team of them, which then wait for each other after each stage.
class Image {
   public:
    static constexpr int MAX_TEAM = 64;

    Image(const Block& block, const Call& call, const Shape& shape, char* workspace, int member, int team)
        : b(block), call(call), s(shape), member(member), team(team) {
        char* at = workspace;
        for (int t = 0; t < team; ++t) {
            const Seat seat = make_seat(b, s, at);
            if (t == 0) maps = seat;
            if (t == member) own = seat;
            totals[t] = seat.total;
        }
    }

    void run(long image) {
        index = image;
        first_unit();
        for (int unit = 1; unit < b.units; ++unit) {
            if (b.heads) ask(unit - 1);
            if (!active) break;
            next_unit(unit);
        }
        float* output = call.output + index * s.pixels * b.outputs;
        const long size = s.width * b.outputs;
        for (long y = begin(s.height); y < end(s.height); ++y)
            std::memcpy(output + y * size, maps.state + ((y + 1) * s.row + 1) * b.outputs, size * sizeof(float));
        wait();
    }

   private:
    const Block& b;
    const Call& call;
    const Shape& s;
    const int member, team;
    Seat maps, own;
    float* totals[MAX_TEAM];
    long index = 0, active = 0, near = 0;

    long begin(long count) const { return count * member / team; }
    long end(long count) const { return count * (member + 1) / team; }
    void wait() const {
        if (team > 1) {
#pragma omp barrier
        }
    }

    UnitWeights unit_weights(int unit) const {
        const long ci = b.inputs, co = b.outputs, first = 2 * ci + 9 * ci * co + co + 9 * co * co;
        const long in = unit ? co : ci;
        const float* at = b.weights + (unit ? first + (unit - 1) * (3 * co + 18 * co * co) : 0);
        return {at, at + in, at + 2 * in, at + 2 * in + 9 * in * co, at + 2 * in + 9 * in * co + co};
    }

    HeadWeights head_weights(int head) const {
        const long co = b.outputs;
        const float* at = unit_weights(b.units).scale + head * (14 * co + BLOCK);
        return {at, at + co, at + 2 * co, at + 11 * co, at + 12 * co, at + 13 * co, at + 14 * co};
    }

    void first_unit() {
        const UnitWeights w = unit_weights(0);
        const long in_height = call.height, in_width = call.width, ci = b.inputs, co = b.outputs;
        const float* input = call.input + index * in_height * in_width * ci;
        for (long y = begin(in_height); y < end(in_height); ++y)
            for (long x = 0; x < in_width; ++x)
                normalize(maps.input + ((y + 1) * s.in_row + x + 1) * ci, input + (y * in_width + x) * ci,
                          w.scale, w.shift, ci);
        std::fill(own.total, own.total + co, 0.0f);
        shortcut(input);
        std::copy(own.all, own.all + s.pixels, own.active);
        std::copy(own.all, own.all + s.pixels, own.near);
        active = near = s.pixels;
        if (b.heads && b.local)
            for (long i = begin(s.pixels); i < end(s.pixels); ++i) maps.live[own.all[i]] = 1;
        for (long i = begin(s.positions); i < end(s.positions); ++i) maps.survival[i] = 1;
        wait();
        convolve({w.conv1, ci, co, maps.input, own.strided, s.in_row, maps.middle, own.all, w.bias, nullptr},
                 begin(near), end(near));
        wait();
        second_convolution(w);
    }

    // The mean over stride × stride pixels, of those there are, with channels of zeros before and after.
    void shortcut(const float* input) {
        const long before = (b.outputs - b.inputs) / 2;
        for (long i = begin(s.pixels); i < end(s.pixels); ++i) {
            const long y = i / s.width * b.stride, x = i % s.width * b.stride;
            const long y_end = std::min<long>(y + b.stride, call.height);
            const long x_end = std::min<long>(x + b.stride, call.width);
            float* target = maps.state + own.all[i] * b.outputs;
            std::fill(target, target + b.outputs, 0.0f);
            const float share = 1.0f / ((y_end - y) * (x_end - x));
            for (long yy = y; yy < y_end; ++yy)
                for (long xx = x; xx < x_end; ++xx)
                    for (long c = 0; c < b.inputs; ++c)
                        target[before + c] += input[(yy * call.width + xx) * b.inputs + c] * share;
            for (long c = 0; c < b.inputs; ++c) own.total[before + c] += target[before + c];
        }
    }

    void next_unit(int unit) {
        const UnitWeights w = unit_weights(unit);
        activate(w.scale, w.shift, own.near, near);
        wait();
        const long co = b.outputs;
        convolve({w.conv1, co, co, maps.active_input, own.near, s.row, maps.middle, own.near, w.bias, nullptr},
                 begin(near), end(near));
        wait();
        second_convolution(w);
    }

    void second_convolution(const UnitWeights& w) {
        const long co = b.outputs;
        convolve({w.conv2, co, co, maps.middle, own.active, s.row, maps.state, own.active, nullptr, own.total},
                 begin(active), end(active));
        wait();
    }

    // Batch norm and ReLU in all rows that the listed places can see.
    void activate(const float* scale, const float* shift, const int32_t* list, long count) {
        const long top = std::max<long>(list[0] / s.row - 1, 1);
        const long rows = std::min<long>(list[count - 1] / s.row + 1, s.height) - top + 1;
        for (long y = top + begin(rows); y < top + end(rows); ++y)
            for (long place = y * s.row + 1; place < y * s.row + 1 + s.width; ++place)
                normalize(maps.active_input + place * b.outputs, maps.state + place * b.outputs, scale, shift,
                          b.outputs);
    }

    void ask(int head) {
        const HeadWeights w = head_weights(head);
        float common = w.bias[0];
        for (long c = 0; c < b.outputs; ++c) {
            float pooled = 0;
            for (int t = 0; t < team; ++t) pooled += totals[t][c];
            pooled /= s.pixels;
            if (b.norm) {
                pooled = pooled * w.pooled_scale[c] + w.pooled_shift[c];
                pooled = pooled < 0 ? 0 : pooled;
            }
            common += w.linear[c] * pooled;
        }
        if (!b.local) {
            const bool halts = common > bound(head, 0);
            if (member == 0) note(head, 0, common, halts);
            if (halts) active = near = 0;
            wait();  // nobody may add to a total that others still read
            return;
        }
        const float* map = maps.state;
        if (b.norm) {
            activate(w.scale, w.shift, own.active, active);
            map = maps.active_input;
            wait();
        }
        long i = begin(active);
        for (; i + 4 <= end(active); i += 4) products<4>(map, own.active + i, w.conv, common);
        for (; i < end(active); ++i) products<1>(map, own.active + i, w.conv, common);
        if (b.group > 1) wait();
        for (i = begin(active); i < end(active); ++i) decide(head, own.active[i]);
        wait();
        const long before = active;
        active = filter(own.active, active, maps.live);
        if (active < before && active) {
            dilate();
            near = filter(own.near, near, own.mark);
        }
    }

    // The convolution of a head at COUNT active pixels; the three inputs in a row of the map lie together.
    template <int COUNT>
    void products(const float* map, const int32_t* places, const float* weight, float common) {
        const long size = 3 * b.outputs;
        const float* source[COUNT];
        for (int p = 0; p < COUNT; ++p) source[p] = map + (places[p] - s.row - 1) * b.outputs;
        Vector total[COUNT] = {};
        for (int row = 0; row < 3; ++row, weight += size)
            for (long c = 0; c < size; c += LANES)
#pragma GCC unroll 4
                for (int p = 0; p < COUNT; ++p)
                    total[p] += load(source[p] + row * s.row * b.outputs + c) * load(weight + c);
        for (int p = 0; p < COUNT; ++p) maps.logits[places[p]] = common + sum(total[p]);
    }

    // Pixels of a patch decide alike, as they take the same mean in the same order; the first takes the notes.
    void decide(int head, long place) {
        const long position = own.position[place], corner = own.corner[place], group = b.group;
        float logit = maps.logits[place];
        if (group > 1) {
            logit = 0;
            for (long i = 0; i < group * group; ++i) logit += maps.logits[corner + i / group * s.row + i % group];
            logit /= group * group;
        }
        const bool halts = logit > bound(head, position);
        if (halts) maps.live[place] = 0;
        if (place == corner) note(head, position, logit, halts);
    }

    long at(int head, long position) const { return (head * long(call.batch) + index) * s.positions + position; }

    float bound(int head, long position) const {
        return call.bounds ? call.bounds[at(head, position)] : call.bound;
    }

    void note(int head, long position, float logit, bool halts) {
        const float small = std::exp(-std::fabs(logit)), less = small / (1 + small), more = 1 / (1 + small);
        call.probs[at(head, position)] = logit < 0 ? less : more;
        if (call.logits) call.logits[at(head, position)] = logit;
        call.steps[at(0, position)] += !halts;
        call.expected[at(0, position)] += maps.survival[position] *= logit < 0 ? more : less;
    }

    void dilate() {
        const uint8_t* live = maps.live;
        for (long i = 1; i < s.places - 1; ++i) own.spread[i] = live[i - 1] | live[i] | live[i + 1];
        for (long i = s.row; i < s.places - s.row; ++i)
            own.mark[i] = own.spread[i - s.row] | own.spread[i] | own.spread[i + s.row];
    }
};

}  // namespace

extern "C" {

// The bytes that one thread works in.
int64_t torchpact_workspace(const Block* block, int32_t height, int32_t width) {
    char* at = nullptr;
    make_seat(*block, Shape(*block, height, width), at);
    return at - static_cast<char*>(nullptr);
}

// Fill the tables of a zeroed workspace, before its first use.
void torchpact_prepare(const Block* block, const Call* call) {
    const Shape shape(*block, call->height, call->width);
    char* at = static_cast<char*>(call->workspace);
    for (int t = 0; t < call->threads; ++t) fill_tables(*block, shape, make_seat(*block, shape, at));
}

void torchpact_run(const Block* block, const Call* call) {
    const Shape shape(*block, call->height, call->width);
    const int64_t seat = torchpact_workspace(block, call->height, call->width);
    char* workspace = static_cast<char*>(call->workspace);
#pragma omp parallel num_threads(call->threads)
    {
        const int team = omp_get_num_threads(), member = omp_get_thread_num();
        const long alone = call->batch / team * team;
        if (alone) {
            Image image(*block, *call, shape, workspace + member * seat, 0, 1);
#pragma omp for schedule(dynamic, 1)
            for (long i = 0; i < alone; ++i) image.run(i);
        }
        if (alone < call->batch) {
            Image image(*block, *call, shape, workspace, member, team);
#pragma omp barrier
            for (long i = alone; i < call->batch; ++i) image.run(i);
        }
    }
}
}
