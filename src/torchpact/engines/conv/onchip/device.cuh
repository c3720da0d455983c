// Instructions of a warp; with EMULATED they are functions of the tests.
#pragma once

#ifdef EMULATED
#include "emulator.hpp"
#else
#define DEVICE __device__ __forceinline__
extern __shared__ __align__(128) unsigned char memory[];

DEVICE void load_rows(unsigned (&a)[4], int at) {
    unsigned address = (unsigned)__cvta_generic_to_shared(memory) + at;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(address) : "memory");
}

// The same, but what is made of it is made anew each time: registers that would keep it are needed elsewhere.
DEVICE unsigned anew(unsigned v) {
    asm volatile("" : "+r"(v));
    return v;
}
// And the other way: made but once, for it is not known what of.
DEVICE int kept(int v) {
    asm volatile("" : "+r"(v));
    return v;
}

// From memory that no one writes, now: the compiler must not put it off until behind a barrier.
DEVICE uint4 fetch(const uint4* from) {
    uint4 v;
    asm volatile("ld.global.nc.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from));
    return v;
}

// 16 bytes into shared memory, not through registers; there after `copied` and a barrier.
DEVICE void copy(int to, const void* from) {
    unsigned address = (unsigned)__cvta_generic_to_shared(memory) + to;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(address), "l"(from) : "memory");
}
DEVICE void copied() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// The next kernel of the stream may begin, and waits where it reads what this one writes. Not before Hopper.
DEVICE void let_next_begin() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}
// Until the kernel before has ended, if this one was allowed to begin earlier.
DEVICE void await_last() {
#if OVERLAP && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// CTAs that share an image are a cluster. What one puts into the memory of another is there once they have met.
#if CLUSTER > 1
DEVICE int rank() {
    int of;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(of));
    return of;
}
DEVICE unsigned place_in(int rank, int byte) {
    unsigned place;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(place) : "r"((unsigned)__cvta_generic_to_shared(memory) + byte), "r"(rank));
    return place;
}
DEVICE void put(int rank, int byte, unsigned v) {
    asm volatile("st.shared::cluster.u32 [%0], %1;" :: "r"(place_in(rank, byte)), "r"(v) : "memory");
}
DEVICE void put(int rank, int byte, float v) { put(rank, byte, __float_as_uint(v)); }
DEVICE void put(int rank, int byte, uint4 v) {
    asm volatile("st.shared::cluster.v4.u32 [%0], {%1,%2,%3,%4};"
                 :: "r"(place_in(rank, byte)), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
DEVICE void put_and(int rank, int byte, unsigned v) {
    asm volatile("red.relaxed.cluster.shared::cluster.and.b32 [%0], %1;" :: "r"(place_in(rank, byte)), "r"(v) : "memory");
}
DEVICE void put_sum(int rank, int byte, int v) {
    asm volatile("red.relaxed.cluster.shared::cluster.add.u32 [%0], %1;" :: "r"(place_in(rank, byte)), "r"(v) : "memory");
}
DEVICE void put_larger(int rank, int byte, unsigned v) {
    asm volatile("red.relaxed.cluster.shared::cluster.max.u32 [%0], %1;" :: "r"(place_in(rank, byte)), "r"(v) : "memory");
}
DEVICE void meet() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
#else
DEVICE int rank() { return 0; }
template <class T> DEVICE void put(int, int byte, T v) { *reinterpret_cast<T*>(memory + byte) = v; }
DEVICE void put_and(int, int byte, unsigned v) { atomicAnd(reinterpret_cast<unsigned*>(memory + byte), v); }
DEVICE void meet() { __syncthreads(); }
#endif
// A word of which others may change bits that do not matter here.
DEVICE unsigned glance(int byte) { return *reinterpret_cast<volatile unsigned*>(memory + byte); }
DEVICE void add(int byte, int v) { atomicAdd(reinterpret_cast<int*>(memory + byte), v); }

// Or where it is beyond a limit, that with its sign.
DEVICE float limited(float v, float limit) {
#if __CUDA_ARCH__ >= 860
    float within;
    asm("min.xorsign.abs.f32 %0, %1, %2;" : "=f"(within) : "f"(v), "f"(limit));
    return within;
#else
    return fminf(fmaxf(v, -limit), limit);
#endif
}

#if HALF
#define FORMAT "f16"
#else
#define FORMAT "bf16"
#endif

DEVICE void multiply(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." FORMAT "." FORMAT ".f32 "
                 "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// As a first product.
DEVICE void multiply_new(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." FORMAT "." FORMAT ".f32 "
                 "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
                 : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.0f));
}

DEVICE unsigned pack(float low, float high) {
    unsigned both;
    asm("cvt.rn." FORMAT "x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

DEVICE unsigned pack_relu(float low, float high) {
    unsigned both;
    asm("cvt.rn.relu." FORMAT "x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

DEVICE float2 unpack(unsigned both) {
#if HALF
    float2 out;
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h;}"
        : "=f"(out.x), "=f"(out.y) : "r"(both));
    return out;
#else
    return make_float2(__uint_as_float(both << 16), __uint_as_float(both & 0xffff0000u));
#endif
}
#endif
