// Attention of single rows to ranges of keys, without gradients; native.py compiles and calls this.
//
// Examples have as many queries as have not halted, so there is no rectangle to compute. A vector holds one
// query (of one head) in each lane: scores of a key are broadcasts of its features times transposed queries, the
// softmax runs down the keys, lane by lane, and keys and values are read where they lie, packed or in a cache.
// A lane attends to the keys first[lane] to last[lane] - 1, which stands for padding, causality and windows.
// Keys come in blocks, and what has been summed up is scaled when a larger score is found.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "attend_products.hpp"
#include "attend_vectors.hpp"
#include "team.hpp"

namespace {

constexpr int WIDE = 3;          // vectors of lanes at a time
constexpr int BLOCK = 128;       // keys at a time
constexpr int MOST = 256;        // features of a head
constexpr int ROW = WIDE * LANES;

// out[i][lane] = (ADD ? out : 0) + Σ_t left[i · step + t · stride] · right[t][lane], i < M
template <int M, int W, bool ADD>
inline void product(const float* left, int64_t step, int64_t stride, const float* right, int count, float* out) {
    Vector sums[M][W];
    for (int i = 0; i < M; ++i)
        for (int w = 0; w < W; ++w) sums[i][w] = ADD ? load(out + i * ROW + w * LANES) : Vector{};
    for (int t = 0; t < count; ++t) {
        Vector row[W];
        for (int w = 0; w < W; ++w) row[w] = load(right + t * ROW + w * LANES);
#pragma GCC unroll 8
        for (int i = 0; i < M; ++i) {
            const Vector each = all(left[i * step + t * stride]);
            for (int w = 0; w < W; ++w) sums[i][w] += each * row[w];
        }
    }
    for (int i = 0; i < M; ++i)
        for (int w = 0; w < W; ++w) store(out + i * ROW + w * LANES, sums[i][w]);
}

template <int M, int W, bool ADD>
inline void rest(int rows, const float* left, int64_t step, int64_t stride, const float* right, int count, float* out) {
    if (rows == M) return product<M, W, ADD>(left, step, stride, right, count, out);
    if constexpr (M > 1) rest<M - 1, W, ADD>(rows, left, step, stride, right, count, out);
}

template <int W, bool ADD>
void products(int rows, const float* left, int64_t step, int64_t stride, const float* right, int count, float* out) {
    for (; rows >= TILE; rows -= TILE, left += TILE * step, out += TILE * ROW)
        product<TILE, W, ADD>(left, step, stride, right, count, out);
    if (rows) rest<TILE - 1, W, ADD>(rows, left, step, stride, right, count, out);
}

struct Call {
    const void* queries;       // [rows][heads][size], of an example one after the other
    const void* keys;          // a key of a head at offset + head · head_step + key · key_step
    const void* values;        // likewise
    void* output;              // [rows][heads][size]
    const int64_t* starts;     // [groups + 1], the first row of each example that has any
    const int64_t* offsets;    // [groups], of the keys of each example, in keys
    const int32_t* first;      // [rows]
    const int32_t* last;       // [rows]
    int64_t query_step;        // between rows
    int64_t key_steps[3], value_steps[3];  // of offsets, heads, keys
    float scale;
    int32_t groups, heads, kv_heads, size, bfloat16, threads;
};

struct Scratch {
    alignas(64) float queries[MOST * ROW], sums[MOST * ROW], scores[BLOCK * ROW];
    alignas(64) float keys[BLOCK * MOST], values[BLOCK * MOST];  // in bfloat16 only
};

inline const float* widened(const float* x, int64_t& step, int, int, float*) { return x; }

inline const float* widened(const uint16_t* x, int64_t& step, int count, int size, float* space) {
    const int wide = (size + LANES - 1) / LANES * LANES;
    for (int j = 0; j < count; ++j)
        for (int t = 0; t < size; t += LANES) store(space + j * wide + t, load_some(x + j * step + t, size - t));
    step = wide;
    return space;
}

// The scores become their exponentials; what was summed up so far is scaled to the same maximum.
template <int W>
void softmax(Scratch& s, int count, int key, bool masks, const Integers* first, const Integers* last, Vector* most,
             Vector* total, bool begun, int size) {
    for (int w = 0; w < W; ++w) {
        float* scores = s.scores + w * LANES;
        const Vector before = most[w];
        Vector now = before;
        if (masks)
            for (int j = 0; j < count; ++j) {
                const Integers at = (key + j) - Integers{};
                const Vector x = (at >= first[w]) & (at < last[w]) ? load(scores + j * ROW) : all(-1e30f);
                store(scores + j * ROW, x);
                now = x > now ? x : now;
            }
        else
            for (int j = 0; j < count; ++j) {
                const Vector x = load(scores + j * ROW);
                now = x > now ? x : now;
            }
        Vector sum{};
        for (int j = 0; j < count; ++j) {
            const Vector x = load(scores + j * ROW);
            Vector e = exponential(x - now);
            if (masks) e = x > -1e29f ? e : Vector{};
            sum += e;
            store(scores + j * ROW, e);
        }
        if (begun) {
            const Vector less = exponential(before - now);
            total[w] = total[w] * less + sum;
            for (int t = 0; t < size; ++t)
                store(s.sums + t * ROW + w * LANES, load(s.sums + t * ROW + w * LANES) * less);
        } else {
            total[w] = sum;
        }
        most[w] = now;
    }
}

template <int W, typename T>
void attend(const Call& c, Scratch& s, int group, int kv_head, int from, int lanes) {
    const int size = c.size, shared = c.heads / c.kv_heads, heads = c.heads;
    const T* queries = static_cast<const T*>(c.queries);
    const int64_t row = c.starts[group];
    const auto place = [&](int lane) {
        lane = std::min(lane, lanes - 1) + from;  // lanes that are left over repeat the last one
        return std::pair<int64_t, int>(row + lane / shared, kv_head * shared + lane % shared);
    };
    Integers first[W], last[W];
    int begin = INT32_MAX, end = 0, all_begin = 0, all_end = INT32_MAX;
    for (int lane = 0; lane < W * LANES; ++lane) {
        const int64_t r = place(lane).first;
        first[lane / LANES][lane % LANES] = c.first[r], last[lane / LANES][lane % LANES] = c.last[r];
        begin = std::min(begin, c.first[r]), end = std::max(end, c.last[r]);
        all_begin = std::max(all_begin, c.first[r]), all_end = std::min(all_end, c.last[r]);
    }
    for (int w = 0; w < W; ++w)
        for (int t = 0; t < size; t += LANES) {
            Vector x[LANES];
            for (int i = 0; i < LANES; ++i) {
                const auto [r, head] = place(w * LANES + i);
                x[i] = load_some(queries + r * c.query_step + head * size + t, size - t) * c.scale;
            }
            transpose<LANES / 2>(x);
            for (int i = 0; i < std::min(LANES, size - t); ++i) store(s.queries + (t + i) * ROW + w * LANES, x[i]);
        }
    Vector most[W], total[W];
    for (int w = 0; w < W; ++w) most[w] = all(-1e30f), total[w] = Vector{};
    const int64_t offset = c.offsets[group];
    const T* keys = static_cast<const T*>(c.keys) + offset * c.key_steps[0] + kv_head * c.key_steps[1];
    const T* values = static_cast<const T*>(c.values) + offset * c.value_steps[0] + kv_head * c.value_steps[1];
    bool begun = false;
    for (int key = begin; key < end; key += BLOCK) {
        const int count = std::min(BLOCK, end - key);
        int64_t key_step = c.key_steps[2], value_step = c.value_steps[2];
        const float* k = widened(keys + key * key_step, key_step, count, size, s.keys);
        products<W, false>(count, k, key_step, 1, s.queries, size, s.scores);
        const bool masks = key < all_begin || key + count > all_end;
        softmax<W>(s, count, key, masks, first, last, most, total, begun, size);
        const float* v = widened(values + key * value_step, value_step, count, size, s.values);
        if (begun)
            products<W, true>(size, v, 1, value_step, s.scores, count, s.sums);
        else
            products<W, false>(size, v, 1, value_step, s.scores, count, s.sums);
        begun = true;
    }
    T* output = static_cast<T*>(c.output);
    for (int w = 0; w < W; ++w) {
        const Vector share = total[w] > 0.0f ? 1.0f / total[w] : Vector{};
        for (int t = 0; t < size; t += LANES) {
            Vector x[LANES];
            for (int i = 0; i < LANES; ++i)
                x[i] = begun && t + i < size ? load(s.sums + (t + i) * ROW + w * LANES) * share : Vector{};
            transpose<LANES / 2>(x);
            for (int i = 0; i < LANES && w * LANES + i < lanes; ++i) {
                const auto [r, head] = place(w * LANES + i);
                store_some(output + (r * heads + head) * size + t, x[i], size - t);
            }
        }
    }
}

template <typename T>
void run(const Call& c, Scratch& s, int group, int kv_head, int from, int lanes) {
    const int wide = (lanes + LANES - 1) / LANES;
    if (wide == 1) return attend<1, T>(c, s, group, kv_head, from, lanes);
    if (wide == 2) return attend<2, T>(c, s, group, kv_head, from, lanes);
    attend<3, T>(c, s, group, kv_head, from, lanes);
}

// That of the thread.
inline Scratch& scratch() {
    static thread_local std::vector<char> space;
    if (space.empty()) space.resize(sizeof(Scratch) + 64);
    const auto address = (reinterpret_cast<uintptr_t>(space.data()) + 63) / 64 * 64;
    return *reinterpret_cast<Scratch*>(address);
}

}  // namespace

extern "C" int torchpact_most_features() { return MOST; }

extern "C" void torchpact_attend(const Call* call) {
    const Call& c = *call;
    const int shared = c.heads / c.kv_heads;
    struct Task {
        int group, kv_head, from, lanes;
    };
    std::vector<Task> tasks;
    for (int group = 0; group < c.groups; ++group) {
        const int lanes = static_cast<int>(c.starts[group + 1] - c.starts[group]) * shared;
        const int parts = (lanes + ROW - 1) / ROW, vectors = (lanes + LANES - 1) / LANES;
        for (int head = 0; head < c.kv_heads; ++head)
            for (int part = 0; part < parts; ++part) {
                const int from = vectors * part / parts * LANES;
                const int to = std::min(vectors * (part + 1) / parts * LANES, lanes);
                tasks.push_back({group, head, from, to - from});
            }
    }
    const int count = static_cast<int>(tasks.size());
    in_team(std::max(std::min(c.threads, count), 1), [&](Team& team) {
        team.each(count, [&](long i, int) {
            const Task& t = tasks[i];
            Scratch& s = scratch();
            if (c.bfloat16)
                run<uint16_t>(c, s, t.group, t.kv_head, t.from, t.lanes);
            else
                run<float>(c, s, t.group, t.kv_head, t.from, t.lanes);
        });
    });
}
