// Runs the kernel of kernel.cu on a CPU: the threads of a CTA are fibers, which take turns where the warp or the
// CTA waits for one another. Exact in what the instructions move where; sums of products are in single precision.
//
// Faults that a GPU would hide end a run with a message: lanes of a warp at different instructions, threads that
// wait for ever, rows read outside of the memory. Memory starts as NaN. `reverse` lets the last warp go first:
// results that depend on it show a missing barrier. With WATCHED every access is checked for races, see watch.hpp.
#pragma once
#include <setjmp.h>
#include <ucontext.h>

#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>

#define DEVICE inline
#define __global__
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __expf(x) std::exp(x)
#define __fdividef(x, y) ((x) / (y))
inline int __float2int_rn(float v) {
    return v != v ? 0 : v >= 2147483648.0f ? 2147483647 : v <= -2147483648.0f ? -2147483647 - 1 : (int)std::nearbyint(v);
}
inline float limited(float v, float limit) { return std::fmin(std::fmax(v, -limit), limit); }

struct uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline uint4 fetch(const uint4* from) { return *from; }
inline unsigned anew(unsigned v) { return v; }
inline int kept(int v) { return v; }

namespace emulator {
constexpr int THREADS = 32 * WARPS * CLUSTER, OF_CTA = 32 * WARPS, STACK = 128 * 1024;  // of a cluster, and of a CTA
struct Index { int x; };
struct Fiber { ucontext_t context; jmp_buf place; const int* waits_for; int while_it_is; bool begun, done; };
struct Warp { int arrived = 0, generation = 0, what = 0, syncs = 0; void* lanes[32]; };
static Fiber fibers[THREADS];
static Warp warps[WARPS * CLUSTER];
struct Barrier { int arrived = 0, generation = 0; };
static Barrier barriers[CLUSTER], meeting;  // of a CTA; of all
static int cta;  // of the cluster, whose turn it is
static jmp_buf scheduler;
static char fault[200];
static void (*body)();
static long long loads, waves, products;  // of ldmatrix: times eight rows, and cycles of shared memory that took; of mma
}  // namespace emulator

static emulator::Index threadIdx, blockIdx;
alignas(128) static unsigned char memories[CLUSTER][SHARED_BYTES];
#define memory memories[emulator::cta]

inline void copied() {}
inline void let_next_begin() {}
inline void await_last() {}
inline long long clock64() { static long long now; return ++now; }

namespace emulator {
inline int fiber() { return cta * OF_CTA + threadIdx.x; }
inline Warp& warp() { return warps[fiber() / 32]; }
inline void fail(const char* what) {
    if (!fault[0]) std::snprintf(fault, sizeof fault, "%s (thread %d of CTA %d)", what, threadIdx.x, blockIdx.x);
    _longjmp(scheduler, 1);
}
inline void wait(const int& generation) {
    Fiber& me = fibers[fiber()];
    me.waits_for = &generation, me.while_it_is = generation;
    if (!_setjmp(me.place)) _longjmp(scheduler, 1);
}
// A thread begins by its context, on its stack, and goes on by a jump: swapcontext would ask the kernel for signals every time.
inline void go_on(Fiber& fiber) {
    if (_setjmp(scheduler)) return;
    if (fiber.begun) _longjmp(fiber.place, 1);
    fiber.begun = true;
    setcontext(&fiber.context);
}
template <class Run> void together(int what, void* mine, Run run) {
    Warp& warp = emulator::warp();
    if (warp.arrived && warp.what != what) fail("lanes of a warp are at different instructions");
    warp.what = what, warp.lanes[threadIdx.x % 32] = mine;
    if (++warp.arrived < 32) return wait(warp.generation);
    warp.arrived = 0, ++warp.generation;
    run(warp.lanes);
}
inline void start() {
    body();
    fibers[fiber()].done = true;
    _longjmp(scheduler, 1);
}
inline void run_cluster(int cluster, char* stacks, bool reverse) {
    std::memset(memories, 0xff, sizeof memories);
    for (Barrier& barrier : barriers) barrier.arrived = 0, ++barrier.generation;
    meeting.arrived = 0, ++meeting.generation;
    for (Warp& warp : warps) warp.arrived = 0;
    for (int i = 0; i < THREADS; ++i) {
        Fiber& fiber = fibers[i];
        fiber.begun = fiber.done = false, fiber.waits_for = nullptr;
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = stacks + (size_t)i * STACK;
        fiber.context.uc_stack.ss_size = STACK;
        fiber.context.uc_link = nullptr;
        makecontext(&fiber.context, start, 0);
    }
    for (int left = THREADS; left && !fault[0];) {
        bool moved = false;
        for (int k = 0; k < THREADS && !fault[0]; ++k) {
            const int i = reverse ? THREADS - 1 - k : k;
            Fiber& fiber = fibers[i];
            if (fiber.done || (fiber.waits_for && *fiber.waits_for == fiber.while_it_is)) continue;
            moved = true, fiber.waits_for = nullptr;
            threadIdx.x = i % OF_CTA, cta = i / OF_CTA, blockIdx.x = cluster * CLUSTER + cta;
            go_on(fiber);
            left -= fiber.done;
        }
        if (!moved) std::snprintf(fault, sizeof fault, "threads of CTA %d wait for ever", blockIdx.x);
    }
}
}  // namespace emulator

#ifdef WATCHED
#include "watch.hpp"
#else
namespace emulator {
inline void touch(int, int, bool) {}
inline void touch_in(int, int, int, bool) {}
}
#endif

namespace emulator {
inline void arrive(Barrier& barrier, int threads) {
    if (warp().arrived) fail("a barrier while the warp is at an instruction");
    if (++barrier.arrived < threads) return wait(barrier.generation);
    barrier.arrived = 0, ++barrier.generation;
}
}  // namespace emulator

inline void copy(int to, const void* from) {
    emulator::touch(to, 16, true);
    std::memcpy(memory + to, from, 16);
}

inline void __syncthreads() {
    emulator::arrive(emulator::barriers[emulator::cta], emulator::OF_CTA);
}
inline void meet() {
    if (CLUSTER == 1) return __syncthreads();
    emulator::arrive(emulator::meeting, emulator::THREADS);
}
inline int rank() { return emulator::cta; }
template <class Do> void put_by(int rank, int byte, int bytes, bool atomic, Do change) {
    emulator::touch_in(rank, byte, bytes, atomic);
    bool there = false;
    for (int i = 0; i < emulator::OF_CTA; ++i) there |= !emulator::fibers[rank * emulator::OF_CTA + i].done;
    if (!there) emulator::fail("a CTA that has ended is given something");
    change(memories[rank] + byte);
}
template <class T> void put(int rank, int byte, T v) {
    put_by(rank, byte, sizeof(T), false, [v](unsigned char* to) { std::memcpy(to, &v, sizeof v); });
}
template <class Do> void put_changed(int rank, int byte, Do change) {
    put_by(rank, byte, 4, true, [change](unsigned char* to) {
        unsigned v;
        std::memcpy(&v, to, 4);
        v = change(v);
        std::memcpy(to, &v, 4);
    });
}
inline void put_and(int rank, int byte, unsigned v) { put_changed(rank, byte, [v](unsigned old) { return old & v; }); }
inline void put_sum(int rank, int byte, int v) { put_changed(rank, byte, [v](unsigned old) { return old + v; }); }
inline void add(int byte, int v) { put_sum(emulator::cta, byte, v); }
inline unsigned glance(int byte) {
    unsigned v;
    if (CLUSTER == 1) emulator::touch(byte, 4, false);  // else others may change it, see decide
    std::memcpy(&v, memory + byte, 4);
    return v;
}
inline void put_larger(int rank, int byte, unsigned v) {
    put_changed(rank, byte, [v](unsigned old) { return old > v ? old : v; });
}

// Whether it holds for any thread; a thread that goes on before others have read the last answer changes the other one.
// Not within the function: the libraries of several plans would share it.
static bool any[2];
static int turn;
inline bool __syncthreads_or(bool v) {
    const int now = turn;
    any[now] |= v;
    __syncthreads();
    if (turn == now) turn = 1 - now, any[turn] = false;
    return any[now];
}

template <class T> T exchange(int what, T value, int from) {
    struct { T value, result; int from; } mine{value, value, from};
    emulator::together(what, &mine, [](void** lanes) {
        using Lane = decltype(mine);
        for (int i = 0; i < 32; ++i) {
            Lane& lane = *static_cast<Lane*>(lanes[i]);
            if (lane.from >= 0) lane.result = static_cast<Lane*>(lanes[lane.from])->value;
        }
    });
    return mine.result;
}
template <class T> T __shfl_xor_sync(unsigned, T v, int mask) { return exchange(1, v, (threadIdx.x % 32) ^ mask); }
template <class T> T __shfl_up_sync(unsigned, T v, int by) { return exchange(2, v, threadIdx.x % 32 - by); }
template <class T> T __shfl_sync(unsigned, T v, int lane) { return exchange(3, v, lane); }
inline void __syncwarp() {
    emulator::together(6, nullptr, [](void**) { ++emulator::warp().syncs; });
}
inline bool __any_sync(unsigned, bool v) {
    unsigned any = v;
    for (int d = 1; d < 32; d *= 2) any |= __shfl_xor_sync(~0u, any, d);
    return any;
}
inline unsigned __reduce_add_sync(unsigned, unsigned v) {
    for (int d = 1; d < 32; d *= 2) v += __shfl_xor_sync(~0u, v, d);
    return v;
}
inline unsigned __ballot_sync(unsigned, bool v) {
    unsigned all = (unsigned)v << threadIdx.x % 32;
    for (int d = 1; d < 32; d *= 2) all |= __shfl_xor_sync(~0u, all, d);
    return all;
}
inline int __ffs(unsigned v) { return __builtin_ffs(v); }
inline int __popc(unsigned v) { return __builtin_popcount(v); }

inline float to_float(unsigned short bits) {
#if HALF
    _Float16 v;
    std::memcpy(&v, &bits, 2);
    return (float)v;
#else
    const unsigned word = (unsigned)bits << 16;
    float v;
    std::memcpy(&v, &word, 4);
    return v;
#endif
}
inline unsigned short to_half(float v) {
#if HALF
    const _Float16 h = (_Float16)v;
    unsigned short bits;
    std::memcpy(&bits, &h, 2);
    return bits;
#else
    unsigned word;
    std::memcpy(&word, &v, 4);
    if (v != v) return 0x7fff;
    return (word + 0x7fff + (word >> 16 & 1)) >> 16;
#endif
}
inline unsigned pack(float low, float high) { return to_half(low) | (unsigned)to_half(high) << 16; }
inline unsigned pack_relu(float low, float high) { return pack(low < 0 ? 0 : low, high < 0 ? 0 : high); }
inline float2 unpack(unsigned both) { return {to_float(both & 0xffff), to_float(both >> 16)}; }

// ldmatrix.x4: lane 8 m + r gives the address of row r of matrix m; a lane gets two numbers of each matrix.
inline void load_rows(unsigned (&a)[4], int at) {
    if (at < 0 || at % 16 || at + 16 > SHARED_BYTES) emulator::fail("rows outside of the memory, or not aligned");
    emulator::touch(at, 16, false);
    struct { unsigned (*a)[4]; int at; } mine{&a, at};
    emulator::together(4, &mine, [](void** lanes) {
        using Lane = decltype(mine);
        for (int m = 0; m < 4; ++m) {
            int rows[8][8], most = 1;  // different ones that share a group of four banks
            int count[8] = {};
            for (int r = 0; r < 8; ++r) {
                const int at = static_cast<Lane*>(lanes[8 * m + r])->at, banks = at / 16 % 8;
                bool known = false;
                for (int k = 0; k < count[banks]; ++k) known |= rows[banks][k] == at;
                if (!known) rows[banks][count[banks]++] = at;
                if (count[banks] > most) most = count[banks];
            }
            ++emulator::loads, emulator::waves += most;
        }
        for (int i = 0; i < 32; ++i)
            for (int m = 0; m < 4; ++m)
                std::memcpy(&(*static_cast<Lane*>(lanes[i])->a)[m],
                            memory + static_cast<Lane*>(lanes[8 * m + i / 4])->at + i % 4 * 4, 4);
    });
}

// mma.m16n8k16: fragments as in the PTX manual.
inline void multiply(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    struct { float* c; const unsigned* a; unsigned b[2]; } mine{c, a, {b0, b1}};
    emulator::together(5, &mine, [](void** lanes) {
        using Lane = decltype(mine);
        ++emulator::products;
        float left[16][16], right[16][8];
        for (int i = 0; i < 32; ++i) {
            const Lane& lane = *static_cast<Lane*>(lanes[i]);
            const int group = i / 4, pair = i % 4 * 2;
            for (int r = 0; r < 4; ++r) {
                const float2 v = unpack(lane.a[r]);
                left[group + r % 2 * 8][pair + r / 2 * 8] = v.x;
                left[group + r % 2 * 8][pair + r / 2 * 8 + 1] = v.y;
            }
            for (int r = 0; r < 2; ++r) {
                const float2 v = unpack(lane.b[r]);
                right[pair + 8 * r][group] = v.x;
                right[pair + 8 * r + 1][group] = v.y;
            }
        }
        for (int i = 0; i < 32; ++i)
            for (int j = 0; j < 4; ++j) {
                float& sum = static_cast<Lane*>(lanes[i])->c[j];
                for (int k = 0; k < 16; ++k) sum += left[i / 4 + j / 2 * 8][k] * right[k][i % 4 * 2 + j % 2];
            }
    });
}
inline void multiply_new(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    c[0] = c[1] = c[2] = c[3] = 0;
    multiply(c, a, b0, b1);
}
