// An adaptive recurrent layer in thresholded mode, without gradients; cluster.py compiles and calls this.
//
// A cluster of CTAs reads some sequences, each at its own pace, from the first time step to the last, without
// waiting for others. A CTA has 32 units: all weights to their gates stay in its registers (and in shared memory, where
// they are too many), and every iteration it gives the new outputs of its units to the others of the cluster. A
// thread has the gates of one unit, and every eighth four of the outputs that they are summed over.
//
// Macros: KIND (0 LSTM, 1 GRU, 2 RNN), GATES, UNITS of the layer, CTAS of a cluster, SLOTS for sequences at a time,
// NUMBERS (0 single precision, 1 fp16, 2 bf16): in half precision states are rounded, and sums are not.

#ifdef EMULATED
#include "recurrent_emulator.hpp"
#else
#define DEVICE __device__ __forceinline__
extern __shared__ __align__(128) unsigned char memory[];

DEVICE int rank_in_cluster() {
    unsigned rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
// To the same place in the shared memory of another CTA; there after `cluster_barrier`.
DEVICE void give(float* place, int rank, float4 v) {
    unsigned address = (unsigned)__cvta_generic_to_shared(place);
    asm volatile("{.reg .u32 to; mapa.shared::cluster.u32 to, %0, %1; st.shared::cluster.v4.f32 [to], {%2,%3,%4,%5};}"
                 :: "r"(address), "r"(rank), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w) : "memory");
}
DEVICE void cluster_barrier() {
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}
#if NUMBERS == 1
#define FORMAT "f16"
DEVICE float number(unsigned short bits) {
    float v;
    asm("cvt.f32.f16 %0, %1;" : "=f"(v) : "h"(bits));
    return v;
}
#elif NUMBERS
#define FORMAT "bf16"
DEVICE float number(unsigned short bits) { return __uint_as_float((unsigned)bits << 16); }
#endif
#if NUMBERS
DEVICE unsigned short written(float v) {
    unsigned short bits;
    asm("cvt.rn." FORMAT ".f32 %0, %1;" : "=h"(bits) : "f"(v));
    return bits;
}
#endif
#endif

#if NUMBERS
typedef unsigned short Number;
#else
typedef float Number;
DEVICE float number(float v) { return v; }
DEVICE float written(float v) { return v; }
#endif

constexpr int WARPS = 8, THREADS = 32 * WARPS;
constexpr int PADDED = 32 * CTAS;          // units, those added have weights of 0
constexpr int KEPT = CTAS < 8 ? CTAS : 8;  // groups of 32 outputs whose weights are in registers

struct Args {
    const Number *inputs, *weight, *flag;
    const Number *input_bias, *hidden_bias, *head, *head_bias;  // may be missing; the first is then part of `inputs`
    // Missing, zeros; may be the same memory as the next two: a row is read before it is written.
    const Number *first_h, *first_c;
    Number *h, *c;                    // in the end
    Number* output;
    float *probs, *cost, *expected;
    long long* steps;
    const int* offsets;  // where each time step begins, and the end twice
    // Of rows that are under way, as the Triton kernels leave them, and how many; missing where all sequences begin.
    const int *notes, *count;
    const float* odds;
    float bound;
    int batch, rows, max_steps, flag_stride, slots;
};

struct Shared {
    float h[2][SLOTS][PADDED + 4], c[SLOTS][32 + 4];  // so that four units of eight slots are in different banks
    float4 weights[CTAS > KEPT ? CTAS - KEPT : 1][GATES][CTAS > KEPT ? THREADS : 1];  // no array is empty
    float head[PADDED];
    int row[SLOTS], sequence[SLOTS], time[SLOTS], place[SLOTS], done[SLOTS];
    float survival[SLOTS], expected[SLOTS];
    unsigned live;
};

// What a thread keeps all the time.
struct Unit {
    float4 weights[KEPT][GATES];
    float flag[GATES], bias[GATES], outer, head_bias;  // outer: a GRU's bias outside of the reset gate
    int in_cta, in_layer, part;
};

DEVICE float logistic(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }
DEVICE float tangent(float x) { return 2.0f * logistic(2.0f * x) - 1.0f; }

struct alignas(4 * sizeof(Number)) Four { Number x, y, z, w; };

DEVICE float4 four(const Args& a, int gate, int unit, int k) {
    const Number* row = a.weight + (size_t)(gate * UNITS + unit) * UNITS;
    if constexpr (UNITS == PADDED) {
        const Four v = *reinterpret_cast<const Four*>(row + k);
        return make_float4(number(v.x), number(v.y), number(v.z), number(v.w));
    } else {
        float v[4];
        for (int i = 0; i < 4; ++i) v[i] = unit < UNITS && k + i < UNITS ? number(row[k + i]) : 0.0f;
        return make_float4(v[0], v[1], v[2], v[3]);
    }
}

DEVICE void learn(const Args& a, Shared& s, Unit& u, int rank) {
    const int thread = threadIdx.x, lane = thread % 32;
    // neighbours read the same outputs, which shared memory can hand to all of them at once
    u.in_cta = thread / 32 * 4 + lane % 4, u.in_layer = 32 * rank + u.in_cta, u.part = lane / 4;
#pragma unroll
    for (int j = 0; j < CTAS; ++j)
#pragma unroll
        for (int g = 0; g < GATES; ++g) {
            const float4 w = four(a, g, u.in_layer, 32 * j + 4 * u.part);
            if (j < KEPT) u.weights[j % KEPT][g] = w;
            else s.weights[j - KEPT][g][thread] = w;
        }
#pragma unroll
    for (int g = 0; g < GATES; ++g) {
        const int row = g * UNITS + u.in_layer, there = u.in_layer < UNITS;
        u.flag[g] = there ? number(a.flag[(size_t)row * a.flag_stride]) : 0.0f;
        u.bias[g] = there && a.hidden_bias ? number(a.hidden_bias[row]) : 0.0f;
        const float of_input = there && a.input_bias ? number(a.input_bias[row]) : 0.0f;
        if (KIND == 1 && g == 2) u.outer = of_input;
        else u.bias[g] += of_input;
    }
    for (int k = thread; k < PADDED; k += THREADS) s.head[k] = a.head && k < UNITS ? number(a.head[k]) : 0.0f;
    u.head_bias = a.head && a.head_bias ? number(*a.head_bias) : 0.0f;
}

DEVICE int rows_of(const Args& a) { return a.count ? __ldg(a.count) : a.batch; }

// A warp puts a sequence into a slot; all CTAs do.
DEVICE void begin(const Args& a, Shared& s, int now, int slot, int row, int rank) {
    const int lane = threadIdx.x % 32, unit = 32 * rank + lane;
    const size_t at = (size_t)row * UNITS;
    for (int k = lane; k < PADDED; k += 32)
        s.h[now][slot][k] = a.first_h && k < UNITS ? number(a.first_h[at + k]) : 0.0f;
    if (KIND == 0) s.c[slot][lane] = a.first_c && unit < UNITS ? number(a.first_c[at + unit]) : 0.0f;
    if (lane) return;
    s.row[slot] = row;
    if (a.notes) {
        const int* note = a.notes + 4 * row;
        s.sequence[slot] = note[0], s.time[slot] = note[1], s.place[slot] = note[2], s.done[slot] = note[3];
        s.survival[slot] = a.odds[2 * row], s.expected[slot] = a.odds[2 * row + 1];
    } else {
        s.sequence[slot] = row, s.time[slot] = 0, s.place[slot] = row, s.done[slot] = 0;
        s.survival[slot] = s.expected[slot] = 1.0f;
    }
}

// A warp looks at what an iteration made of a slot: whether it halts, and what comes next. All CTAs see the same.
DEVICE void decide(const Args& a, Shared& s, const Unit& u, int now, int slot, int rank, int stride) {
    const int lane = threadIdx.x % 32, row = s.row[slot];
    const int sequence = s.sequence[slot], time = s.time[slot], place = s.place[slot], done = s.done[slot] + 1;
    float survival = s.survival[slot], expected = s.expected[slot], logit = 0.0f;
    const int begins = __ldg(a.offsets + time + 1), ends = __ldg(a.offsets + time + 2);
    if (a.head) {
#pragma unroll
        for (int j = 0; j < CTAS; ++j) logit += s.head[32 * j + lane] * s.h[now][slot][32 * j + lane];
#pragma unroll
        for (int d = 16; d; d /= 2) logit += __shfl_xor_sync(~0u, logit, d);
        logit += u.head_bias;
    } else {
        logit = __int_as_float(0xff800000);  // −∞
    }
    __syncwarp();  // all lanes have read what is known of the slot
    if (done < a.max_steps) {
        if (rank == 0 && lane == 0) a.probs[(size_t)(done - 1) * a.rows + place] = logistic(logit);
        survival *= logistic(-logit);
        expected += survival;
    }
    const bool always = a.bound < -3.402823466e38f;  // −∞, which all logits exceed
    const bool halts = done >= a.max_steps || logit > a.bound || always, more = sequence < ends - begins;
    if (lane == 0) {
        s.done[slot] = halts ? 0 : done;
        s.survival[slot] = halts ? 1.0f : survival, s.expected[slot] = halts ? 1.0f : expected;
        if (halts && more) s.time[slot] = time + 1, s.place[slot] = begins + sequence;
    }
    if (!halts) return;
    const int unit = 32 * rank + lane;
    const float mine = s.h[now][slot][unit];
    if (unit < UNITS) a.output[(size_t)place * UNITS + unit] = written(mine);
    if (rank == 0) {
        if (lane == 0) a.steps[place] = done, a.cost[place] = done, a.expected[place] = expected;
        for (int l = (done < a.max_steps ? done : a.max_steps - 1) + lane; l < a.max_steps; l += 32)
            a.probs[(size_t)l * a.rows + place] = 1.0f;  // of those that were not asked any more
    }
    if (more) return;
    if (unit < UNITS) {
        a.h[(size_t)sequence * UNITS + unit] = written(mine);
        if (KIND == 0) a.c[(size_t)sequence * UNITS + unit] = written(s.c[slot][lane]);
    }
    __syncwarp();
    if (row + stride < rows_of(a)) begin(a, s, now, slot, row + stride, rank);
    else if (lane == 0) atomicAnd(&s.live, ~(1u << slot));
}

DEVICE void add(float& sum, float4 w, float4 h) {  // four instructions: each is fused
    sum += w.x * h.x;
    sum += w.y * h.y;
    sum += w.z * h.z;
    sum += w.w * h.w;
}

// One iteration of the first ROWS slots of `live`, or of all if they are fewer.
template <int ROWS> DEVICE unsigned advance(const Args& a, Shared& s, const Unit& u, int now, unsigned live) {
    const int own = u.part % ROWS;
    int slots[ROWS], slot = 0, there = 0;
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        slots[r] = live ? __ffs(live) - 1 : 0;
        if (r == own) slot = slots[r], there = live != 0;
        live &= live - 1;
    }
    const bool inside = u.in_layer < UNITS, first = s.done[slot] == 0;
    const Number* given = a.inputs + (size_t)s.place[slot] * (GATES * UNITS) + u.in_layer;
    float x[GATES], sums[ROWS][GATES];
#pragma unroll
    for (int g = 0; g < GATES; ++g) x[g] = inside ? number(__ldg(given + g * UNITS)) : 0.0f;
    const float old = s.h[now][slot][u.in_layer], c = KIND == 0 ? s.c[slot][u.in_cta] : 0.0f;
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
        for (int g = 0; g < GATES; ++g) sums[r][g] = 0.0f;
#pragma unroll
    for (int j = 0; j < KEPT; ++j)
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            const float4 h = *reinterpret_cast<const float4*>(&s.h[now][slots[r]][32 * j + 4 * u.part]);
#pragma unroll
            for (int g = 0; g < GATES; ++g) add(sums[r][g], u.weights[j][g], h);
        }
#pragma unroll 1
    for (int j = KEPT; j < CTAS; ++j) {
        float4 w[GATES];
#pragma unroll
        for (int g = 0; g < GATES; ++g) w[g] = s.weights[j - KEPT][g][threadIdx.x];
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            const float4 h = *reinterpret_cast<const float4*>(&s.h[now][slots[r]][32 * j + 4 * u.part]);
#pragma unroll
            for (int g = 0; g < GATES; ++g) add(sums[r][g], w[g], h);
        }
    }
    // the eight threads of a unit share out the rows, as they add up their sums
#pragma unroll
    for (int d = ROWS / 2; d; d /= 2)
#pragma unroll
        for (int r = 0; r < d; ++r)
#pragma unroll
            for (int g = 0; g < GATES; ++g) {
                const bool upper = u.part & d;
                const float low = sums[r][g], high = sums[r + d][g];
                sums[r][g] = (upper ? high : low) + __shfl_xor_sync(~0u, upper ? low : high, 4 * d);
            }
#pragma unroll
    for (int d = ROWS; d < 8; d *= 2)
#pragma unroll
        for (int g = 0; g < GATES; ++g) sums[0][g] += __shfl_xor_sync(~0u, sums[0][g], 4 * d);
    float v[GATES], made, kept = c;
#pragma unroll
    for (int g = 0; g < GATES; ++g) {
        v[g] = sums[0][g] + u.bias[g];
        x[g] += first ? u.flag[g] : 0.0f;
    }
    if constexpr (KIND == 1) x[2] += u.outer;
    if constexpr (KIND == 0) {
        kept = logistic(v[1] + x[1]) * c + logistic(v[0] + x[0]) * tangent(v[2] + x[2]);
        made = logistic(v[3] + x[3]) * tangent(kept);
    } else if constexpr (KIND == 1) {
        const float fresh = tangent(x[2] + logistic(v[0] + x[0]) * v[2]);
        made = fresh + logistic(v[1] + x[1]) * (old - fresh);
    } else {
        made = tangent(v[0] + x[0]);
    }
    made = inside ? number(written(made)) : 0.0f;  // the next iteration reads what is written
    if (KIND == 0 && there && u.part < ROWS) s.c[slot][u.in_cta] = number(written(kept));
    const int lane = threadIdx.x % 32, begin = lane / 4 * 4;  // of the four units of a warp
    const float4 four = make_float4(__shfl_sync(~0u, made, begin), __shfl_sync(~0u, made, begin + 1),
                                    __shfl_sync(~0u, made, begin + 2), __shfl_sync(~0u, made, begin + 3));
    // those that know the same share out the CTAs
    for (int rank = u.part / ROWS * 4 + lane % 4; there && rank < CTAS; rank += 32 / ROWS)
        give(&s.h[1 - now][slot][u.in_layer - lane % 4], rank, four);
    return live;
}

extern "C" __global__ void __cluster_dims__(CTAS, 1, 1) __launch_bounds__(THREADS, 1) read_sequences(
    const __grid_constant__ Args a) {
    Shared& s = *reinterpret_cast<Shared*>(memory);
    const int rank = rank_in_cluster(), warp = threadIdx.x / 32;
    const int clusters = gridDim.x / CTAS, stride = clusters * a.slots, rows = rows_of(a);
    Unit u;
    learn(a, s, u, rank);
    unsigned live = 0;
    for (int slot = 0; slot < a.slots; ++slot) {
        const int row = blockIdx.x / CTAS + slot * clusters;
        if (row >= rows) break;
        live |= 1u << slot;
        if (slot % WARPS == warp) begin(a, s, 0, slot, row, rank);
    }
    if (threadIdx.x == 0) s.live = live;
    cluster_barrier();
    for (int now = 0; live; now = 1 - now) {
        unsigned rest = live;
        while (__popc(rest) > 4) rest = advance<8>(a, s, u, now, rest);
        if (__popc(rest) > 2) rest = advance<4>(a, s, u, now, rest);
        if (__popc(rest) > 1) rest = advance<2>(a, s, u, now, rest);
        if (rest) advance<1>(a, s, u, now, rest);
        cluster_barrier();
        for (int turn = 0; live; live &= live - 1, ++turn)
            if (turn % WARPS == warp) decide(a, s, u, 1 - now, __ffs(live) - 1, rank, stride);
        __syncthreads();
        live = s.live;
    }
}
