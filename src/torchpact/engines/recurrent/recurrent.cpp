// An adaptive recurrent layer in thresholded mode, without gradients; native.py compiles and calls this.
//
// Sequences know nothing of each other, so they need not keep step: one that halts goes on to its next input
// at once, while others still ponder. All that are under way move by one iteration together, which is one
// matrix product with as many rows; a row leaves when its sequence ends, and nothing is gathered or scattered.
// For 16 (8, 4) units at a time all gates are summed up in registers, and the new state comes straight out of
// them. Threads share the sequences.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "team.hpp"

namespace {

#if defined(__AVX512F__)
constexpr int LANES = 16, REGISTERS = 24;  // of 32, for sums
#elif defined(__AVX__)
constexpr int LANES = 8, REGISTERS = 12;  // of 16
#else
constexpr int LANES = 4, REGISTERS = 20;  // of 32
#endif

constexpr float ALWAYS = -std::numeric_limits<float>::infinity();  // a bound that all logits exceed

typedef float Vector __attribute__((vector_size(LANES * sizeof(float)), aligned(sizeof(float)), may_alias));
typedef int32_t Integers __attribute__((vector_size(LANES * sizeof(int32_t))));

inline Vector load(const float* x) { return *reinterpret_cast<const Vector*>(x); }
inline void store(float* x, Vector v) { *reinterpret_cast<Vector*>(x) = v; }
inline Vector all(float x) { return x - Vector{}; }

inline float sum(Vector v) {
    float total = 0;
    for (int i = 0; i < LANES; ++i) total += v[i];
    return total;
}

// e^x = (1 + less) · power, power a power of two and |less| < 1/2, to 2 units in the last place of `less`; what
// would overflow stays within bounds, NaN stays NaN.
struct Exponential {
    Vector less, power;
};

inline Exponential exponential(Vector x) {
    x = x < -87.0f ? all(-87.0f) : x;
    x = x > 88.0f ? all(88.0f) : x;
    const Vector shift = all(12582912.0f);  // 1.5 · 2²³: adding it rounds to whole numbers
    const Vector n = (x * 1.44269504f + shift) - shift;
    const Vector r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    Vector p = all(1.9875691500e-4f);
    for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
        p = p * r + c;
    const Integers bits = (__builtin_convertvector(n, Integers) + 127) << 23;
    Vector power;
    std::memcpy(&power, &bits, sizeof(power));
    return {p * r * r + r, power};
}

inline Vector sigmoid(Vector x) {
    const Exponential e = exponential(-x);
    return 1.0f / (1.0f + (e.less * e.power + e.power));
}

// By e^2x - 1, in which power - 1 is exact, and 0 near 0: small numbers keep all their digits.
inline Vector tanh(Vector x) {
    const Exponential e = exponential(2.0f * x);
    const Vector above = e.less * e.power + (e.power - 1.0f);
    return above / (above + 2.0f);
}

struct Layer {
    const float* weights;      // [units / LANES][units][gates][LANES], from states to gates
    const float* flag;         // [units / LANES][gates][LANES], what the first iteration adds
    const float* hidden_bias;  // [units], of the GRU's new state, inside the reset gate
    const float* head;         // [units]
    float head_bias, bound;
    int32_t kind, units, max_steps;
};

struct Call {
    const int64_t* lengths;  // [batch]
    const int64_t* offsets;  // [time], the place of the first row of a time step among all rows
    const float* inputs;     // [rows from `begin` on][units / LANES][gates][LANES], what inputs and biases add
    float *h, *c;            // [batch][units], states before, then after
    float* spare;            // [batch][units]
    float* output;           // [rows][units]
    float* logits;           // [max_steps - 1][rows], +inf
    int64_t* steps;          // [rows]
    int64_t rows;
    int32_t batch, begin, end, threads;  // time steps from `begin` to `end`
};

struct Row {
    int64_t sequence, time, end;
    int32_t done;  // iterations of this time step
    float *h, *next, *c;
    const float* inputs;
};

// --- cells: gates that are sums of inputs and states, to the new state ---

struct LSTM {
    static constexpr int GATES = 4;
    static Vector start(const Layer&, const Vector in, int, long) { return in; }
    static void finish(const Vector* gate, const Row& row, const Vector*, long at) {
        const Vector c = sigmoid(gate[1]) * load(row.c + at) + sigmoid(gate[0]) * tanh(gate[2]);
        store(row.c + at, c);
        store(row.next + at, sigmoid(gate[3]) * tanh(c));
    }
};

struct GRU {
    static constexpr int GATES = 3;
    static Vector start(const Layer& layer, const Vector in, int gate, long at) {
        return gate == 2 ? load(layer.hidden_bias + at) : in;
    }
    static void finish(const Vector* gate, const Row& row, const Vector* in, long at) {
        const Vector update = sigmoid(gate[1]), fresh = tanh(in[2] + sigmoid(gate[0]) * gate[2]);
        store(row.next + at, fresh + update * (load(row.h + at) - fresh));
    }
};

struct Tanh {
    static constexpr int GATES = 1;
    static Vector start(const Layer&, const Vector in, int, long) { return in; }
    static void finish(const Vector* gate, const Row& row, const Vector*, long at) {
        store(row.next + at, tanh(gate[0]));
    }
};

template <class Cell>
constexpr int most_rows = std::min(REGISTERS / Cell::GATES, 12);

template <class Cell, int COUNT>
void tile(const Layer& layer, const Row* rows, long at) {
    constexpr int GATES = Cell::GATES, WIDTH = GATES * LANES;
    const float* h[COUNT];
    Vector gate[COUNT][GATES];
    auto input = [&](int r, int g) {
        const Vector in = load(rows[r].inputs + at * GATES + g * LANES);
        return rows[r].done ? in : in + load(layer.flag + at * GATES + g * LANES);
    };
#pragma GCC unroll 12
    for (int r = 0; r < COUNT; ++r) {
        h[r] = rows[r].h;
#pragma GCC unroll 4
        for (int g = 0; g < GATES; ++g) gate[r][g] = Cell::start(layer, input(r, g), g, at);
    }
    const float* weight = layer.weights + at * GATES * layer.units;
    for (long k = 0; k < layer.units; ++k, weight += WIDTH) {
        Vector w[GATES];
#pragma GCC unroll 4
        for (int g = 0; g < GATES; ++g) w[g] = load(weight + g * LANES);
#pragma GCC unroll 12
        for (int r = 0; r < COUNT; ++r)
#pragma GCC unroll 4
            for (int g = 0; g < GATES; ++g) gate[r][g] += h[r][k] * w[g];
    }
    for (int r = 0; r < COUNT; ++r) {
        Vector in[GATES];
        for (int g = 0; g < GATES; ++g) in[g] = input(r, g);
        Cell::finish(gate[r], rows[r], in, at);
    }
}

template <class Cell, int COUNT = most_rows<Cell>>
void tile_of(long count, const Layer& layer, const Row* rows, long at) {
    if constexpr (COUNT > 0) {
        if (count == COUNT)
            tile<Cell, COUNT>(layer, rows, at);
        else
            tile_of<Cell, COUNT - 1>(count, layer, rows, at);
    }
}

// One iteration of all rows. Where the weights stay in a core's cache, so should the states: a few rows at a
// time. Where they do not, they are to be read once for all rows.
template <class Cell>
void iterate(const Layer& layer, const std::vector<Row>& rows) {
    constexpr long CACHED = 128 * 1024;  // weights
    const long count = rows.size(), weights = long(layer.units) * layer.units * Cell::GATES;
    const long parts = weights <= CACHED ? (count + 95) / 96 : 1;
    for (long part = 0; part < parts; ++part) {
        const long begin = count * part / parts, size = count * (part + 1) / parts - begin;
        const long tiles = (size + most_rows<Cell> - 1) / most_rows<Cell>;
        for (long at = 0; at < layer.units; at += LANES)
            for (long i = 0; i < tiles; ++i) {  // of nearly equal size: those of few rows are slow
                const long first = size * i / tiles;
                tile_of<Cell>(size * (i + 1) / tiles - first, layer, rows.data() + begin + first, at);
            }
    }
}

float ask(const Layer& layer, const float* h) {
    Vector total{};
    for (long at = 0; at < layer.units; at += LANES) total += load(layer.head + at) * load(h + at);
    return sum(total) + layer.head_bias;
}

int64_t place(const Call& call, const Row& row) { return call.offsets[row.time] + row.sequence; }

template <class Cell>
void read(const Layer& layer, const Call& call, int first, int step) {
    const int64_t units = layer.units, width = units * Cell::GATES;
    auto turn_to_input = [&](Row& row) {
        row.inputs = call.inputs + (place(call, row) - call.offsets[call.begin]) * width;
        row.done = 0;
    };
    std::vector<Row> rows;
    for (int64_t s = first; s < call.batch; s += step) {
        Row row{s, call.begin, std::min<int64_t>(call.lengths[s], call.end), 0,
                call.h + s * units, call.spare + s * units, call.c + s * units, nullptr};
        if (row.time >= row.end) continue;
        turn_to_input(row);
        rows.push_back(row);
    }
    while (!rows.empty()) {
        iterate<Cell>(layer, rows);
        std::size_t kept = 0;
        for (Row row : rows) {
            std::swap(row.h, row.next);
            const int64_t here = place(call, row);
            bool halts = ++row.done == layer.max_steps;
            if (!halts) {
                const float logit = ask(layer, row.h);
                call.logits[(row.done - 1) * call.rows + here] = logit;
                halts = logit > layer.bound || layer.bound == ALWAYS;
            }
            if (halts) {
                std::memcpy(call.output + here * units, row.h, units * sizeof(float));
                call.steps[here] = row.done;
                if (++row.time == row.end) {
                    float* last = call.h + row.sequence * units;
                    if (row.h != last) std::memcpy(last, row.h, units * sizeof(float));
                    continue;
                }
                turn_to_input(row);
            }
            rows[kept++] = row;
        }
        rows.resize(kept);
    }
}

}  // namespace

extern "C" {

int32_t torchpact_lanes() { return LANES; }

void torchpact_read(const Layer* layer, const Call* call) {
    in_team(call->threads, [&](Team& team) {
        // the sequences of a part go through the weights together
        const int parts = team.is_together ? team.members : std::min(call->batch, 4 * team.members);
        team.each(parts, [&](long part, int) {
            switch (layer->kind) {
                case 0: read<LSTM>(*layer, *call, part, parts); break;
                case 1: read<GRU>(*layer, *call, part, parts); break;
                default: read<Tanh>(*layer, *call, part, parts);
            }
        });
    });
}
}
