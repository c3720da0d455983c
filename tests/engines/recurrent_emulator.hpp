// Runs recurrent_cluster.cu on a CPU: the threads of a cluster are fibers, which take turns where a warp, a CTA or
// the cluster waits. Faults that a GPU would hide end a run with a message. Memory starts as NaN. `reverse` lets the
// last thread go first: results that depend on it show a missing barrier.
#pragma once
#include <ucontext.h>

#include <cmath>
#include <cstdio>
#include <cstring>
#include <vector>

#define DEVICE inline
#define __global__
#define __grid_constant__
#define __cluster_dims__(...)
#define __launch_bounds__(...)
#define __expf(x) std::exp(x)
#define __fdividef(x, y) ((x) / (y))

struct alignas(16) float4 { float x, y, z, w; };
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

namespace emulator {
constexpr int IN_CTA = 256, FIBERS = IN_CTA * CTAS, STACK = 32 * 1024, SHARED = 232448;
struct Index { int x; };
struct Place { int arrived = 0, generation = 0, what = 0; float lanes[32]; };
struct Fiber { ucontext_t context; const int* waits_for; int while_it_is; bool done; };
static Fiber fibers[FIBERS];
static Place warps[FIBERS / 32], ctas[CTAS], cluster;
static ucontext_t scheduler;
static char fault[200];
static void (*body)();
static int current;
alignas(128) static unsigned char memories[CTAS][SHARED];
}  // namespace emulator

static emulator::Index threadIdx, blockIdx, gridDim;
#define memory emulator::memories[emulator::current / emulator::IN_CTA]

namespace emulator {
inline void fail(const char* what) {
    if (!fault[0]) std::snprintf(fault, sizeof fault, "%s (thread %d)", what, current);
    ucontext_t unused;
    swapcontext(&unused, &scheduler);
}
inline void meet(Place& place, int size, int what) {
    if (place.arrived && place.what != what) fail("lanes of a warp are at different instructions");
    place.what = what;
    if (++place.arrived == size) {
        place.arrived = 0, ++place.generation;
        return;
    }
    Fiber& me = fibers[current];
    me.waits_for = &place.generation, me.while_it_is = place.generation;
    swapcontext(&me.context, &scheduler);
}
inline void start() {
    body();
    fibers[current].done = true;
    swapcontext(&fibers[current].context, &scheduler);
}
inline void run_cluster(std::vector<char>& stacks, int first_cta, bool reverse) {
    std::memset(memories, 0xff, sizeof memories);
    for (Place& warp : warps) warp.arrived = 0;
    for (Place& cta : ctas) cta.arrived = 0;
    cluster.arrived = 0;
    for (int i = 0; i < FIBERS; ++i) {
        fibers[i].done = false, fibers[i].waits_for = nullptr;
        getcontext(&fibers[i].context);
        fibers[i].context.uc_stack.ss_sp = stacks.data() + (size_t)i * STACK;
        fibers[i].context.uc_stack.ss_size = STACK;
        fibers[i].context.uc_link = nullptr;
        makecontext(&fibers[i].context, start, 0);
    }
    for (int left = FIBERS; left && !fault[0];) {
        bool moved = false;
        for (int k = 0; k < FIBERS && !fault[0]; ++k) {
            const int i = reverse ? FIBERS - 1 - k : k;
            Fiber& fiber = fibers[i];
            if (fiber.done || (fiber.waits_for && *fiber.waits_for == fiber.while_it_is)) continue;
            moved = true, current = i, fiber.waits_for = nullptr;
            threadIdx.x = i % IN_CTA, blockIdx.x = first_cta + i / IN_CTA;
            swapcontext(&scheduler, &fiber.context);
            left -= fiber.done;
        }
        if (!moved) std::snprintf(fault, sizeof fault, "threads of a cluster wait for ever");
    }
}
inline Place& warp() { return warps[current / 32]; }
}  // namespace emulator

inline int rank_in_cluster() { return emulator::current / emulator::IN_CTA; }
inline void give(float* place, int rank, float4 values) {
    const size_t at = reinterpret_cast<unsigned char*>(place) - memory;
    if (rank >= CTAS || at % 16 || at + 16 > emulator::SHARED) emulator::fail("a place outside, or not aligned");
    std::memcpy(emulator::memories[rank] + at, &values, 16);
}
inline void __syncthreads() {
    if (emulator::warp().arrived) emulator::fail("a barrier while the warp is at an instruction");
    emulator::meet(emulator::ctas[rank_in_cluster()], emulator::IN_CTA, 0);
}
inline void cluster_barrier() {
    if (emulator::warp().arrived) emulator::fail("a barrier while the warp is at an instruction");
    emulator::meet(emulator::cluster, emulator::FIBERS, 0);
}
inline void __syncwarp() { emulator::meet(emulator::warp(), 32, 1); }
inline float __shfl_sync(unsigned, float value, int lane) {
    emulator::Place& warp = emulator::warp();
    warp.lanes[threadIdx.x % 32] = value;
    emulator::meet(warp, 32, 2);
    const float found = warp.lanes[lane];
    emulator::meet(warp, 32, 3);  // all have read before the next is written
    return found;
}
inline float __shfl_xor_sync(unsigned all, float value, int mask) {
    return __shfl_sync(all, value, threadIdx.x % 32 ^ mask);
}
template <class T> T __ldg(const T* from) { return *from; }
inline int __ffs(unsigned v) { return __builtin_ffs(v); }
inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline float __int_as_float(unsigned bits) {
    float v;
    std::memcpy(&v, &bits, 4);
    return v;
}
inline void atomicAnd(unsigned* word, unsigned mask) { *word &= mask; }

#if NUMBERS == 1
inline float number(unsigned short bits) {
    _Float16 v;
    std::memcpy(&v, &bits, 2);
    return (float)v;
}
inline unsigned short written(float v) {
    const _Float16 h = (_Float16)v;
    unsigned short bits;
    std::memcpy(&bits, &h, 2);
    return bits;
}
#elif NUMBERS == 2
inline float number(unsigned short bits) { return __int_as_float((unsigned)bits << 16); }
inline unsigned short written(float v) {
    unsigned word;
    std::memcpy(&word, &v, 4);
    return v != v ? 0x7fff : (word + 0x7fff + (word >> 16 & 1)) >> 16;
}
#endif
