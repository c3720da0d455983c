// A block of an adaptive CIFAR ResNet, from its input to its output, without leaving the chip.
//
// A CTA holds IMAGES images in shared memory, channels last: u, the residual stream; x, what the first
// convolution of a unit reads, relu(norm(u)); y, what the second one reads. Pixels of x and y lie in "slots" with
// a border of zeros, a row being PITCH = WIDTH + 1 slots (the right border of a row is the left one of the next).
// A pixel is a row of 16-byte chunks, XORed by its slot, so that ldmatrix of eight pixels meets no bank twice if their
// slots differ modulo 8: lists take pixels of the eight classes in turn, however they lie.
//
// A convolution is nine taps of m16n8k16 over a list of pixels, or of pixels with the one below (TALL = 2: a row that
// is read serves both). First come those with `active` pixels, which run the unit, then others with pixels `near` them,
// within one. Weights come packed as fragments, straight into registers, and are asked for
// before the barrier ahead of their use: what bounds sparse units is latency, so a unit has four barriers and no more.
//
// Compiled by NVRTC for each block of a network; the macros in capitals that are not defined here are given.
// With EMULATED it is plain C++, and the warp's collective instructions are functions of the tests.

#ifdef EMULATED
#include "onchip_emulator.hpp"
#else
#define DEVICE __device__ __forceinline__
extern __shared__ __align__(128) unsigned char memory[];

DEVICE void load_rows(unsigned (&a)[4], int at) {
    unsigned address = (unsigned)__cvta_generic_to_shared(memory) + at;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(address) : "memory");
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

typedef unsigned short half_t;  // bits

struct Args {
    const half_t* input;       // images, or the map of the block before as (batch, 2 HEIGHT, 2 WIDTH, CHANNELS / 2)
    half_t* output;            // the map as (batch, HEIGHT, WIDTH, CHANNELS); of the LAST block, logits of classes
    const uint4* weights;      // of all convolutions, as fragments
    const float* norms;        // of every unit: scale and shift before its convolutions, CHANNELS each
    const uint4* heads;        // taps of the halting heads, as fragments
    const float* pools;        // of every head: weights of the mean, divided by the number of pixels
    const float* biases;       // of every head
    const uint4* stem;         // as fragments
    const float* last;         // scale and shift of the last norm, weights of the classes, biases
    const float* bounds;       // what logits must exceed to halt: (units - 1, batch, pixels), or null
    float* probs;              // (units, batch, pixels): halting probabilities, or with keep_logits their logits
    float* expected;           // (batch, pixels)
    float* cost;
    long long* steps;
    long long image_stride, channel_stride, row_stride, column_stride;  // of images
    float bound;               // for all, if there are no bounds
    int batch, units, adaptive, keep_logits;
};

constexpr int THREADS = 32 * WARPS;
constexpr int PLANE = HEIGHT * WIDTH;
constexpr int PIXELS = IMAGES * PLANE;
constexpr int ROWS = IMAGES * HEIGHT;
constexpr int PITCH = WIDTH + 1;
constexpr int SLOTS = (IMAGES * (HEIGHT + 1) + 1) * PITCH + 1;
constexpr int CHUNKS = CHANNELS / 8;
constexpr int GROUPS = CHUNKS / N_TILES;   // of outputs; a warp computes those of one
constexpr int WIDE_N = 8 * N_TILES;        // outputs that a group has
constexpr int FRAGMENTS = CHANNELS / 16 * 32;  // uint4 that a k16 step of a convolution has

// The map before, in x while the first convolution reads it.
constexpr int IN = ENTRY_STRIDE == 2 ? CHANNELS / 2 : CHANNELS;
constexpr int IN_PITCH = 2 * WIDTH + 1;
DEVICE constexpr int in_bytes(int images) { return ((images * (2 * HEIGHT + 1) + 1) * IN_PITCH + 1) * IN * 2; }
DEVICE constexpr int up(int bytes) { return (bytes + 127) / 128 * 128; }
DEVICE constexpr int larger(int a, int b) { return a > b ? a : b; }
// The border below x is also the one above y.
constexpr int X_BYTES = up(larger((SLOTS - PITCH) * CHANNELS * 2, ENTRY_STRIDE == 2 ? in_bytes(1) : 0));
DEVICE constexpr int at_once(int images) { return images == 1 || in_bytes(images) <= X_BYTES ? images : at_once(images - 1); }

// Offsets into shared memory.
constexpr int X = 0;
constexpr int Y = X + X_BYTES;
constexpr int U = Y + up(SLOTS * CHANNELS * 2);
constexpr int LIST = U + up(PIXELS * CHANNELS * 2);       // pixels, the uppermost bits being whether they are active
constexpr int STEPS = LIST + up(PIXELS / TALL * 2);
constexpr int CENTRES = STEPS + up(PIXELS);               // of the heads' products, where x has no room for them
constexpr int PARTS = CENTRES + up(N_TILES == 2 ? GROUPS * PIXELS * 4 : 0);  // each warp's sums of u, for each image
constexpr int NORMS = PARTS + up(IMAGES * WARPS * WIDE_N * 4);  // scale and shift before both convolutions of a unit
constexpr int TAPS = NORMS + up(4 * CHANNELS * 4);        // of its head, unless registers hold them
constexpr int POOLS = TAPS + up(N_TILES == 2 ? 0 : CHANNELS / 16 * 512);
constexpr int MASKS = POOLS + up(CHANNELS * 4);           // a bit for every active pixel, a word for a row
constexpr int TOTAL = MASKS + up(ROWS * 4);
static_assert(TOTAL == SHARED_BYTES, "the host plans with another layout");
static_assert(CHANNELS % 16 == 0 && CHUNKS % N_TILES == 0 && N_TILES % 2 == 0, "tiles must fit the channels");
static_assert(PIXELS / TALL <= 1024, "classes must fit a byte");
static_assert(HEIGHT % TALL == 0 && PIXELS <= 1 << (16 - TALL), "pixels must fit the list");
static_assert(WARPS % GROUPS == 0 && WIDTH <= 32 && 32 % CHUNKS == 0, "warps must fit the groups");

template <class T> DEVICE T& at(int byte) { return *reinterpret_cast<T*>(memory + byte); }
template <class T> DEVICE T* array(int byte) { return reinterpret_cast<T*>(memory + byte); }

// How the chunks of a pixel are permuted: pixels whose rows start at the same bank differ in these bits.
template <int C> struct Swizzle {
    static constexpr int power = (C & -C) > 64 ? 64 : (C & -C);
    static constexpr int shift = power == 16 ? 2 : power == 32 ? 1 : 0;
    static constexpr int mask = power / 8 - 1;
    static DEVICE int of(int slot) { return (slot >> shift) & mask; }
};

template <int C> DEVICE int chunk_at(int slot, int chunk) {
    return slot * (2 * C) + ((chunk ^ Swizzle<C>::of(slot)) << 4);
}

// A float of a slot of x, n < 8, for each group; lanes that read one n of consecutive slots meet no bank twice.
DEVICE int product_at(int slot, int group, int n) {
    using S = Swizzle<CHANNELS>;
    constexpr int EIGHTS = S::power / 16;
    const int eight = ((slot >> (S::shift + 3)) ^ group) & (EIGHTS - 1);
    return slot * (2 * CHANNELS) + 32 * (eight + group / EIGHTS * EIGHTS) + 4 * (n ^ ((slot >> S::shift) & 7));
}

DEVICE int centre_at(int pixel, int slot, int group) {
    return N_TILES == 2 ? CENTRES + 4 * (group * PIXELS + pixel) : X + product_at(slot, GROUPS + group, 0);
}

DEVICE int image_of(int pixel) { return IMAGES == 1 ? 0 : pixel / PLANE; }
// Where u has a pixel: rows are turned, so that classes are those of slots.
DEVICE int home_of(int pixel) {
    const int row = pixel / WIDTH;
    return row * WIDTH + (pixel + row + image_of(pixel)) % WIDTH;
}
DEVICE int slot_of(int pixel) { return pixel + pixel / WIDTH + (image_of(pixel) + 1) * PITCH + 1; }

DEVICE int in_slot(int pixel) {  // of the centre in the map before
    int row = pixel / WIDTH, column = pixel % WIDTH;
    return (2 * row + image_of(pixel) + 1) * IN_PITCH + 1 + 2 * column;
}

DEVICE void clear(int from, int bytes) {
    for (int i = threadIdx.x; i < bytes / 16; i += THREADS) array<uint4>(from)[i] = make_uint4(0, 0, 0, 0);
}

// Eight channels of relu(scale · u + shift).
struct Norm {
    float4 scale[2], shift[2];
    DEVICE Norm(const float* of, int channels, int chunk) {
        const float4* from = reinterpret_cast<const float4*>(of) + 2 * chunk;
        scale[0] = from[0], scale[1] = from[1];
        shift[0] = from[channels / 4], shift[1] = from[channels / 4 + 1];
    }
    static DEVICE unsigned two(unsigned u, float s0, float s1, float t0, float t1) {
        const float2 v = unpack(u);
        return pack_relu(v.x * s0 + t0, v.y * s1 + t1);
    }
    DEVICE uint4 operator()(uint4 u) const {
        return make_uint4(two(u.x, scale[0].x, scale[0].y, shift[0].x, shift[0].y),
                          two(u.y, scale[0].z, scale[0].w, shift[0].z, shift[0].w),
                          two(u.z, scale[1].x, scale[1].y, shift[1].x, shift[1].y),
                          two(u.w, scale[1].z, scale[1].w, shift[1].z, shift[1].w));
    }
};

// Convolve --------------------------------------------------------------------------------------------------------

// A pixel of a list, or as many as TALL says; which of them are active.
struct Entry {
    int bits;
    DEVICE int pixel(int t = 0) const { return (bits & ((1 << (16 - TALL)) - 1)) + t * WIDTH; }
    DEVICE bool active(int t) const { return bits >> (16 - TALL + t) & 1; }
};

// What a convolution reads or writes: entries of the list from a place on, or consecutive pixels.
struct Rows {
    bool listed;
    int first, count;
    DEVICE Entry operator[](int i) const {
        const int in = first + (i < count ? i : count - 1);  // the last tile is filled up
        return Entry{listed ? array<unsigned short>(LIST)[in] : in};
    }
};

// What a warp adds to its sums of an image, in registers for as long as pixels are of the same image. No atomics: the
// order is fixed, and so are the results.
struct Sums {
    float added[N_TILES][2];
    int image;
    DEVICE Sums() : image(-1) { reset(); }
    DEVICE void reset() {
#pragma unroll
        for (int n = 0; n < N_TILES; ++n) added[n][0] = added[n][1] = 0;
    }
    DEVICE void flush(int warp, int lane) {
        float* to = array<float>(PARTS) + (image * WARPS + warp) * WIDE_N;
#pragma unroll
        for (int n = 0; n < N_TILES; ++n)
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                float v = added[n][j];
                v += __shfl_xor_sync(~0u, v, 4);
                v += __shfl_xor_sync(~0u, v, 8);
                v += __shfl_xor_sync(~0u, v, 16);
                if (lane < 4) to[8 * n + 2 * lane + j] += v;
            }
        reset();
    }
    DEVICE void finish(int warp, int lane) {
        if (image >= 0) flush(warp, lane);
        image = -1;
    }
    DEVICE void of(int next, int warp, int lane) {
        if (next != image && image >= 0) flush(warp, lane);
        image = next;
    }
};

// What a convolution reads: x, y, or the map before, which lies in x.
template <bool FIRST, bool ENTRY> struct Source {
    static constexpr int C = ENTRY ? IN : CHANNELS, K = C / 16, ROW = ENTRY ? IN_PITCH : PITCH, T = ENTRY ? 1 : TALL;
    static DEVICE int slot(int pixel, int first) { return ENTRY ? in_slot(pixel - first) : slot_of(pixel); }
    static DEVICE void load(unsigned (&a)[4], int slot, int k) {
        load_rows(a, (FIRST ? X : Y) + chunk_at<C>(slot, 2 * k + threadIdx.x % 32 / 16));
    }
};

template <int N> DEVICE void multiply_all(float (&c)[N][4], const unsigned (&a)[4], const uint4 (&w)[N / 2]) {
#pragma unroll
    for (int n = 0; n < N / 2; ++n) {
        multiply(c[2 * n], a, w[n].x, w[n].y);
        multiply(c[2 * n + 1], a, w[n].z, w[n].w);
    }
}

// All weights of a group of outputs, in registers for a whole list.
template <class From> struct Held {
    uint4 all[9 * From::K][N_TILES / 2];
    DEVICE Held(const uint4* weights) {
        weights += threadIdx.x / 32 % GROUPS * (N_TILES / 2) * 32 + threadIdx.x % 32;
#pragma unroll
        for (int s = 0; s < 9 * From::K; ++s)
#pragma unroll
            for (int n = 0; n < N_TILES / 2; ++n) all[s][n] = fetch(weights + s * FRAGMENTS + n * 32);
    }
    template <int M> DEVICE void convolve(float (&c)[M][From::T][N_TILES][4], const int (&slot)[M], bool) const {
#pragma unroll
        for (int row = 0; row < 2 + From::T; ++row)
#pragma unroll
            for (int s = 0; s < 3 * From::K; ++s)
#pragma unroll
                for (int m = 0; m < M; ++m) {
                    unsigned a[4];
                    From::load(a, slot[m] + (row - 1) * From::ROW + s / From::K - 1, s % From::K);
#pragma unroll
                    for (int t = 0; t < From::T; ++t)
                        if (row - t >= 0 && row - t < 3) multiply_all(c[m][t], a, all[(row - t) * 3 * From::K + s]);
                }
    }
};

// Or read again for every tile: the warps of a CTA do so at about the same time, so that L1 serves them. AHEAD steps
// before their use, and hence that many beyond the end.
template <class From> struct Streamed {
    static constexpr int STEPS_OF_ROW = 3 * From::K, D = STEPS_OF_ROW % AHEAD ? 3 : AHEAD;
    const uint4* weights;
    mutable uint4 next[D][N_TILES / 2];
    DEVICE Streamed(const uint4* from) : weights(from + threadIdx.x / 32 % GROUPS * (N_TILES / 2) * 32 + threadIdx.x % 32) {
        start();
    }
    DEVICE void start() const {
#pragma unroll
        for (int d = 0; d < D; ++d)
#pragma unroll
            for (int n = 0; n < N_TILES / 2; ++n) next[d][n] = fetch(weights + d * FRAGMENTS + n * 32);
    }
    template <int M> DEVICE void convolve(float (&c)[M][From::T][N_TILES][4], const int (&slot)[M], bool again) const {
        if (again) start();
        const uint4* from = weights + D * FRAGMENTS;
#pragma unroll 1
        for (int row = -From::ROW; row <= From::ROW; row += From::ROW)
#pragma unroll
            for (int s = 0; s < STEPS_OF_ROW; ++s) {
                uint4 now[N_TILES / 2];
#pragma unroll
                for (int n = 0; n < N_TILES / 2; ++n) now[n] = next[s % D][n], next[s % D][n] = fetch(from + n * 32);
                from += FRAGMENTS;
#pragma unroll
                for (int m = 0; m < M; ++m)
#pragma unroll
                    for (int t = 0; t < From::T; ++t) {
                        unsigned a[4];
                        From::load(a, slot[m] + row + t * From::ROW + s / From::K - 1, s % From::K);
                        multiply_all(c[m][t], a, now);
                    }
            }
    }
};

#if HOLD
template <class From> using Weights = Held<From>;
#else
template <class From> using Weights = Streamed<From>;
#endif

// Scale and shift of a lane's outputs.
struct Affine {
    float2 scale[N_TILES], shift[N_TILES];
    DEVICE void load(int channel) {
#pragma unroll
        for (int n = 0; n < N_TILES; ++n) {
            scale[n] = at<float2>(NORMS + 4 * (2 * CHANNELS + channel + 8 * n));
            shift[n] = at<float2>(NORMS + 4 * (3 * CHANNELS + channel + 8 * n));
        }
    }
};

// A 3×3 convolution to a single number leaves the matrix units idle. So the second convolution multiplies each pixel
// that it made with the weights of the nine taps, out of its registers, and puts the products into x, which is free by
// then; `decide` adds them up. A group has those of its channels.
struct Heads {
    static constexpr int K = N_TILES / 2;
    bool asked, fresh;  // fresh: sums have yet to be started
    uint4 held;         // taps, if there are no more for a lane
    DEVICE Heads() : asked(false), fresh(false) {}
    DEVICE Heads(const uint4* taps, bool asked, bool fresh) : asked(asked), fresh(fresh) {
        if (asked && K == 1) held = fetch(taps + threadIdx.x % (32 * GROUPS) / 32 * 32 + threadIdx.x % 32);
    }
    DEVICE void put(const unsigned (&u)[K][4], const Rows& rows, int row, int t) const {
        const int lane = threadIdx.x % 32, group = threadIdx.x / 32 % GROUPS;
        float around[4] = {0, 0, 0, 0}, centre[4] = {0, 0, 0, 0};
#pragma unroll
        for (int k = 0; k < K; ++k) {
            const uint4 taps = K == 1 ? held : array<uint4>(TAPS)[(group * K + k) * 32 + lane];
            multiply(around, u[k], taps.x, taps.y);
            multiply(centre, u[k], taps.z, taps.w);
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int i = row + lane / 4 + 8 * half;
            if (i < rows.count) {
                const int pixel = rows[i].pixel(t), slot = slot_of(pixel);
                at<float>(X + product_at(slot, group, 2 * (lane % 4))) = around[2 * half];
                at<float>(X + product_at(slot, group, 2 * (lane % 4) + 1)) = around[2 * half + 1];
                if (lane % 4 == 0) at<float>(centre_at(pixel, slot, group)) = centre[2 * half];
            }
        }
    }
    // Of pixels near active ones, which no convolution made; by those warps first that have least to convolve.
    DEVICE void put_others(const Rows& rows) const {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = warp % GROUPS;
        for (int row = (WARPS - 1 - warp) / GROUPS * 16; row < rows.count; row += WARPS / GROUPS * 16) {
#pragma unroll
            for (int t = 0; t < TALL; ++t) {
                const int pixel = rows[row + lane % 16].pixel(t);
                unsigned u[K][4];
#pragma unroll
                for (int k = 0; k < K; ++k) load_rows(u[k], U + chunk_at<CHANNELS>(home_of(pixel), 2 * (group * K + k) + lane / 16));
                put(u, rows, row, t);
            }
        }
    }
};

template <bool FIRST, bool ENTRY, int M>
DEVICE void convolve_by(const Weights<Source<FIRST, ENTRY>>& weights, const Rows& rows, const Heads& heads) {
    using From = Source<FIRST, ENTRY>;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = warp % GROUPS;
    const int tiles = (rows.count + 15) / 16;
    const int channel = group * WIDE_N + 2 * (lane % 4);
    Affine norm;
    if (FIRST && HOLD) norm.load(channel);
    Sums sums;
    bool again = false;
    for (int tile = warp / GROUPS * M; tile < tiles; tile += WARPS / GROUPS * M) {
        float c[M][From::T][N_TILES][4];
        int slot[M];
#pragma unroll
        for (int m = 0; m < M; ++m) {
            const int pixel = rows[(tile + m) * 16 + lane % 16].pixel();
            slot[m] = ENTRY ? in_slot(pixel - rows.first) : slot_of(pixel);
#pragma unroll
            for (int t = 0; t < From::T; ++t)
#pragma unroll
                for (int n = 0; n < N_TILES; ++n) c[m][t][n][0] = c[m][t][n][1] = c[m][t][n][2] = c[m][t][n][3] = 0;
        }
        weights.template convolve<M>(c, slot, again);
        again = true;
        if (FIRST && !HOLD) norm.load(channel);
#pragma unroll
        for (int m = 0; m < M; ++m) {
            const int row = (tile + m) * 16;
            const Entry entries[2] = {rows[row + lane / 4], rows[row + lane / 4 + 8]};
#pragma unroll
            for (int t = 0; t < From::T; ++t) {
                unsigned made[N_TILES / 2][4];
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const bool there = row + lane / 4 + 8 * half < rows.count && (FIRST || entries[half].active(t));
                    const int pixel = entries[half].pixel(t), place = FIRST ? slot_of(pixel) : home_of(pixel);
#pragma unroll
                    for (int n = 0; n < N_TILES; ++n) {
                        float* v = &c[m][t][n][2 * half];
                        unsigned& to = at<unsigned>((FIRST ? Y : U) + chunk_at<CHANNELS>(place, group * N_TILES + n) + 4 * (lane % 4));
                        if (FIRST) {
                            if (there) to = pack_relu(v[0] * norm.scale[n].x + norm.shift[n].x, v[1] * norm.scale[n].y + norm.shift[n].y);
                        } else {
                            if (!there) v[0] = v[1] = 0;
                            const float2 old = unpack(to);
                            const unsigned sum = pack(old.x + v[0], old.y + v[1]);
                            if (there) to = sum;
                            made[n / 2][n % 2 * 2 + half] = sum;  // the layout of outputs is that of inputs
                            if (heads.fresh && there) v[0] += old.x, v[1] += old.y;
                        }
                    }
                }
                if (!FIRST && heads.asked && row < rows.count) heads.put(made, rows, row, t);
            }
        }
        if (!FIRST && heads.asked) {
#pragma unroll 1
            for (int image = 0; image < IMAGES; ++image) {
                bool of[M][2], any = IMAGES == 1;
#pragma unroll
                for (int m = 0; m < M; ++m)
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        of[m][half] = image_of(rows[(tile + m) * 16 + lane / 4 + 8 * half].pixel()) == image;
                        any |= of[m][half];
                    }
                if (IMAGES > 1 && !__any_sync(~0u, any)) continue;
                sums.of(image, warp, lane);
#pragma unroll
                for (int m = 0; m < M; ++m)
#pragma unroll
                    for (int t = 0; t < From::T; ++t)
#pragma unroll
                        for (int n = 0; n < N_TILES; ++n)
#pragma unroll
                            for (int j = 0; j < 4; ++j) sums.added[n][j % 2] += of[m][j / 2] ? c[m][t][n][j] : 0;
            }
        }
        if (!FIRST && !HOLD) sums.finish(warp, lane);  // else registers would be short
    }
    if (!FIRST && HOLD) sums.finish(warp, lane);
}

template <bool FIRST, bool ENTRY>
DEVICE void convolve(const Weights<Source<FIRST, ENTRY>>& weights, const Rows& rows, const Heads& heads) {
    // tiles for each warp: as many at once as it has, for then the weights are read once; else in equal parts
    const int each = ((rows.count + 15) / 16 * GROUPS + WARPS - 1) / WARPS, rounds = (each + M_TILES - 1) / M_TILES;
    [[maybe_unused]] const int tiles = (each + rounds - 1) / (rounds > 1 ? rounds : 1);
#if M_TILES >= 4
    if (tiles == 4) return convolve_by<FIRST, ENTRY, 4>(weights, rows, heads);
#endif
#if M_TILES >= 3
    if (tiles == 3) return convolve_by<FIRST, ENTRY, 3>(weights, rows, heads);
#endif
#if M_TILES >= 2
    if (tiles == 2) return convolve_by<FIRST, ENTRY, 2>(weights, rows, heads);
#endif
    convolve_by<FIRST, ENTRY, 1>(weights, rows, heads);
}

// Decide ----------------------------------------------------------------------------------------------------------

// What all logits of an image share; every warp adds up the parts for itself.
DEVICE float pool(int image) {
    constexpr int ALL = WARPS * WIDE_N;
    float dot = 0;
#pragma unroll
    for (int part = 4 * (threadIdx.x % 32); part < ALL; part += 128) {
        const float4 v = at<float4>(PARTS + 4 * (image * ALL + part));
        const float4 w = at<float4>(POOLS + 4 * (part / WIDE_N % GROUPS * WIDE_N + part % WIDE_N));
        dot += w.x * v.x + w.y * v.y + w.z * v.z + w.w * v.w;
    }
#pragma unroll
    for (int other = 16; other; other /= 2) dot += __shfl_xor_sync(~0u, dot, other);
    return dot;
}

DEVICE void decide(const Args& a, int first, int unit, int count, float bias) {
    float pooled[IMAGES];
#pragma unroll
    for (int image = 0; image < IMAGES; ++image) pooled[image] = pool(image) + bias;
    for (int i = threadIdx.x; i < (count + 15) / 16 * 16 * TALL; i += THREADS) {
        const int entry = TALL == 1 ? i : i / 32 * 16 + i % 16, t = TALL == 1 ? 0 : i / 16 % 2;  // rows for half a warp
        if (entry >= count) continue;
        const Entry of{array<unsigned short>(LIST)[entry]};
        if (!of.active(t)) continue;
        const int pixel = of.pixel(t), slot = slot_of(pixel);
        float logit = 0;
#pragma unroll
        for (int group = 0; group < GROUPS; ++group) {
            logit += at<float>(centre_at(pixel, slot, group));
#pragma unroll
            for (int n = 0; n < 8; ++n) {
                const int tap = n < 4 ? n : n + 1;
                logit += at<float>(X + product_at(slot + (tap / 3 - 1) * PITCH + tap % 3 - 1, group, n));
            }
        }
#pragma unroll
        for (int image = 0; image < IMAGES; ++image) logit += image_of(pixel) == image ? pooled[image] : 0;
        const long long place = ((long long)unit * a.batch + first) * PLANE + pixel;
        if (logit > (a.bounds ? a.bounds[place] : a.bound)) {
            at<unsigned char>(STEPS + pixel) = unit + 1;
            atomicAnd(&array<unsigned>(MASKS)[pixel / WIDTH], ~(1u << pixel % WIDTH));
        }
        a.probs[place] = a.keep_logits ? logit : 1 / (1 + __expf(-logit));
    }
}

DEVICE unsigned widened(unsigned word) { return word | word << 1 | word >> 1; }

// Numbers for the eight classes of slots, a byte each.
struct Classes {
    unsigned low, high;
    DEVICE int operator[](int c) const { return (c < 4 ? low : high) >> 8 * (c % 4) & 255; }
    // Bits of a word, the first of them being of the class `turn`.
    static DEVICE Classes of(unsigned word, int turn) {
        unsigned long long counts = 0;
#pragma unroll
        for (int bit = 0; bit < 8; ++bit) counts |= (unsigned long long)__popc(word & 0x01010101u << bit) << 8 * bit;
        counts = counts << 8 * turn | counts >> (64 - 8 * turn) % 64;
        return {(unsigned)counts, (unsigned)(counts >> 32)};
    }
    // Before those of the lane; the sum of all lanes goes to total, and what it was is added.
    DEVICE Classes before(Classes& total) const {
        return {before(low, total.low), before(high, total.high)};
    }
    static DEVICE unsigned before(unsigned here, unsigned& total) {
        unsigned end = here;
#pragma unroll
        for (int d = 1; d < 32; d *= 2) {
            const unsigned other = __shfl_up_sync(~0u, end, d);
            if (threadIdx.x % 32 >= d) end += other;
        }
        const unsigned start = total + end - here;
        total += __shfl_sync(~0u, end, 31);
        return start;
    }
    DEVICE Classes from(int lane) const { return {__shfl_sync(~0u, low, lane), __shfl_sync(~0u, high, lane)}; }
    DEVICE int sum() const {
        const unsigned pairs = (low & 0xff00ff) + (low >> 8 & 0xff00ff) + (high & 0xff00ff) + (high >> 8 & 0xff00ff);
        return (pairs & 0xffff) + (pairs >> 16);
    }
};

// A part of the list, whose places belong to the classes in turn.
struct Turns {
    int first, count;
    Classes total;
    DEVICE int offset(int c) const { return (c - first) & 7; }
    DEVICE int room(int c) const { return (count + 7 - offset(c)) / 8; }
    DEVICE int place(int c, int rank) const {
        int over = rank - room(c);
        if (over < 0) return first + offset(c) + 8 * rank;
#pragma unroll 1
        for (int d = 0; d < c; ++d) over += total[d] > room(d) ? total[d] - room(d) : 0;
#pragma unroll 1
        for (int d = 0;; ++d) {  // places that other classes leave
            const int left = room(d) - total[d];
            if (over < left) return first + offset(d) + 8 * (total[d] + over);
            over -= left > 0 ? left : 0;
        }
    }
};

// What the masks say, for TALL rows at a time; every warp finds out for itself, a lane for such a line.
struct Field {
    static constexpr int LINES = ROWS / TALL, PARTS_OF_LINES = (LINES + 31) / 32;
    unsigned own[PARTS_OF_LINES][TALL], near[PARTS_OF_LINES], wide[PARTS_OF_LINES][TALL];  // of the lane's lines
    Classes before[PARTS_OF_LINES], before_near[PARTS_OF_LINES];  // those lines in the list
    Turns active, others;

    static DEVICE unsigned mask(int row, int d) {
        const int within = row % HEIGHT + d;
        return row < ROWS && within >= 0 && within < HEIGHT ? array<unsigned>(MASKS)[row + d] : 0;
    }
    static DEVICE unsigned any(const unsigned (&words)[TALL]) { return TALL == 1 ? words[0] : words[0] | words[TALL - 1]; }

    DEVICE void look() {
        const int lane = threadIdx.x % 32;
        const unsigned all = ~0u >> (32 - WIDTH);
        active.total = others.total = {0, 0};
#pragma unroll
        for (int p = 0; p < PARTS_OF_LINES; ++p) {
            near[p] = 0;
#pragma unroll
            for (int t = 0; t < TALL; ++t) {
                const int row = (32 * p + lane) * TALL + t;
                own[p][t] = mask(row, 0);
                const unsigned within = mask(row, -1) | own[p][t] | mask(row, 1);
                near[p] |= widened(within) & all;
                wide[p][t] = widened(widened(mask(row, -2) | within | mask(row, 2))) & all;
            }
            near[p] &= ~any(own[p]);
            const int turn = turn_of(32 * p + lane);
            before[p] = Classes::of(any(own[p]), turn).before(active.total);
            before_near[p] = Classes::of(near[p], turn).before(others.total);
        }
        active.first = 0, others.first = active.count = active.total.sum(), others.count = others.total.sum();
    }
    static DEVICE int turn_of(int line) { return slot_of(line * TALL * WIDTH) & 7; }
    DEVICE void enlist(int p, int line) const {
        const int lane = threadIdx.x % 32;
        unsigned words[TALL];
#pragma unroll
        for (int t = 0; t < TALL; ++t) words[t] = __shfl_sync(~0u, own[p][t], line % 32);
        const unsigned one = any(words), other = __shfl_sync(~0u, near[p], line % 32);
        const Classes start = before[p].from(line % 32), start_near = before_near[p].from(line % 32);
        const unsigned ahead = (0x01010101u << lane % 8) & ((1u << lane) - 1);  // of the lane's class
        const int c = (turn_of(line) + lane) & 7;
        unsigned short* out = array<unsigned short>(LIST);
        int entry = line * TALL * WIDTH + lane;
        if (other >> lane & 1) out[others.place(c, start_near[c] + __popc(other & ahead))] = entry;
#pragma unroll
        for (int t = 0; t < TALL; ++t) entry |= (words[t] >> lane & 1) << (16 - TALL + t);
        if (one >> lane & 1) out[active.place(c, start[c] + __popc(one & ahead))] = entry;
    }
    // x = relu(norm(u)) at all pixels that are within two of active ones.
    static DEVICE void refresh(unsigned around, int row, const Norm& norm) {
        const int lane = threadIdx.x % 32, chunk = lane % CHUNKS;
#pragma unroll
        for (int column = lane / CHUNKS; column < WIDTH; column += 32 / CHUNKS) {
            const int pixel = row * WIDTH + column;
            if (around >> column & 1)
                at<uint4>(X + chunk_at<CHANNELS>(slot_of(pixel), chunk)) = norm(at<uint4>(U + chunk_at<CHANNELS>(home_of(pixel), chunk)));
        }
    }
    DEVICE void make(bool list, bool fresh) const {
        const int warp = threadIdx.x / 32;
        const Norm norm(array<float>(NORMS), CHANNELS, threadIdx.x % CHUNKS);
#pragma unroll
        for (int p = 0; p < PARTS_OF_LINES; ++p)
            for (int line = 32 * p + warp; line < 32 * p + 32 && line < LINES; line += WARPS) {
                if (list) enlist(p, line);
#pragma unroll
                for (int t = 0; t < TALL; ++t) {
                    const unsigned around = __shfl_sync(~0u, wide[p][t], line % 32);
                    if (fresh && around) refresh(around, line * TALL + t, norm);
                }
            }
    }
};

// Begin and end ---------------------------------------------------------------------------------------------------

#if ENTRY_STRIDE == 1
// u = stem(images). Four numbers a pixel in x, the fourth 0; k = 4 · tap + colour, in three steps of 16.
DEVICE void enter(const Args& a, int first, int images) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    clear(X, up(SLOTS * 8));
    __syncthreads();
    for (int pixel = threadIdx.x; pixel < images * PLANE; pixel += THREADS) {
        const int row = pixel / WIDTH % HEIGHT, column = pixel % WIDTH;
        const half_t* from = a.input + (first + image_of(pixel)) * a.image_stride + row * a.row_stride + column * a.column_stride;
        const unsigned red = from[0], green = from[a.channel_stride], blue = from[2 * a.channel_stride];
        at<uint2>(X + 8 * slot_of(pixel)) = make_uint2(red | green << 16, blue);
    }
    __syncthreads();
    for (int tile = warp; tile * 16 < images * PLANE; tile += WARPS) {
        float c[CHUNKS][4];
#pragma unroll
        for (int n = 0; n < CHUNKS; ++n) c[n][0] = c[n][1] = c[n][2] = c[n][3] = 0;
        int pixel[2];
        for (int half = 0; half < 2; ++half) pixel[half] = tile * 16 + lane / 4 + 8 * half;
#pragma unroll
        for (int step = 0; step < 3; ++step) {
            unsigned rows[4];
#pragma unroll
            for (int r = 0; r < 4; ++r) {
                const int tap = 4 * step + 2 * (r / 2) + lane % 4 / 2;
                const int shift = tap < 9 ? (tap / 3 - 1) * PITCH + tap % 3 - 1 : 0;  // weights beyond are 0
                const int at_pixel = pixel[r % 2] < PIXELS ? pixel[r % 2] : PIXELS - 1;
                rows[r] = at<unsigned>(X + 8 * (slot_of(at_pixel) + shift) + 4 * (lane % 2));
            }
#pragma unroll
            for (int n = 0; n < CHUNKS / 2; ++n) {
                const uint4 w = a.stem[(step * (CHUNKS / 2) + n) * 32 + lane];
                multiply(c[2 * n], rows, w.x, w.y);
                multiply(c[2 * n + 1], rows, w.z, w.w);
            }
        }
#pragma unroll
        for (int half = 0; half < 2; ++half)
            if (pixel[half] < PIXELS)
#pragma unroll
                for (int n = 0; n < CHUNKS; ++n)
                    at<unsigned>(U + chunk_at<CHANNELS>(home_of(pixel[half]), n) + 4 * (lane % 4)) = pack(c[n][2 * half], c[n][2 * half + 1]);
    }
    __syncthreads();
    clear(X, X_BYTES);
    __syncthreads();
}
#else
// The first convolution of a unit of stride 2, into y, and its shortcut, into u: means of 2×2, zeros beside.
DEVICE void enter(const Args& a, int first, int images) {
    constexpr int N = at_once(IMAGES), AT_ONCE = THREADS / (IN / 8);
    const int chunk = threadIdx.x % (IN / 8);
    const Norm norm(a.norms, IN, chunk);
    clear(U, PIXELS * CHANNELS * 2);
    for (int start = 0; start < images; start += N) {
        const int pixels = (images - start < N ? images - start : N) * PLANE;
        clear(X, X_BYTES);
        __syncthreads();
        for (int i = threadIdx.x / (IN / 8); i < pixels && threadIdx.x < AT_ONCE * (IN / 8); i += AT_ONCE) {
            const int pixel = start * PLANE + i, row = pixel / WIDTH % HEIGHT, column = pixel % WIDTH;
            const half_t* from = a.input + (((long long)(first + image_of(pixel)) * 2 * HEIGHT + 2 * row) * 2 * WIDTH + 2 * column) * IN + 8 * chunk;
            float mean[8] = {0, 0, 0, 0, 0, 0, 0, 0};
#pragma unroll
            for (int corner = 0; corner < 4; ++corner) {
                const uint4 u = *reinterpret_cast<const uint4*>(from + (corner / 2 * 2 * WIDTH + corner % 2) * IN);
                at<uint4>(X + chunk_at<IN>(in_slot(i) + corner / 2 * IN_PITCH + corner % 2, chunk)) = norm(u);
                const unsigned parts[4] = {u.x, u.y, u.z, u.w};
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const float2 v = unpack(parts[j]);
                    mean[2 * j] += v.x / 4;
                    mean[2 * j + 1] += v.y / 4;
                }
            }
            at<uint4>(U + chunk_at<CHANNELS>(home_of(pixel), CHUNKS / 4 + chunk)) =
                make_uint4(pack(mean[0], mean[1]), pack(mean[2], mean[3]), pack(mean[4], mean[5]), pack(mean[6], mean[7]));
        }
        const Weights<Source<true, true>> weights(a.weights);
        __syncthreads();
        convolve<true, true>(weights, Rows{false, start * PLANE, pixels}, Heads());
        __syncthreads();
    }
    clear(X, X_BYTES);
    __syncthreads();
}
#endif

// Halting probabilities of steps that were not asked are 1; a thread does as many pixels as a store takes.
DEVICE void report(const Args& a, int first, int images) {
    constexpr int V = PLANE % 4 ? 1 : 4, BATCH = 6;
    struct alignas(4 * V) Pixels { float of[V]; };
    for (int pixel = threadIdx.x * V; pixel < images * PLANE; pixel += THREADS * V) {
        const long long place = (long long)first * PLANE + pixel, stride = (long long)a.batch * PLANE;
        int ran[V], asked[V], most = 0, least = a.units;
        float left[V], expected[V];
#pragma unroll
        for (int v = 0; v < V; ++v) {
            ran[v] = at<unsigned char>(STEPS + pixel + v), asked[v] = ran[v] < a.units ? ran[v] : a.units - 1;
            most = asked[v] > most ? asked[v] : most, least = asked[v] < least ? asked[v] : least;
            left[v] = expected[v] = 1;
        }
        for (int unit = 0; unit < a.units; unit += BATCH) {
            Pixels probs[BATCH];
#pragma unroll
            for (int b = 0; b < BATCH; ++b)
                if (unit + b < most) probs[b] = *reinterpret_cast<const Pixels*>(a.probs + (unit + b) * stride + place);
#pragma unroll
            for (int b = 0; b < BATCH; ++b) {
#pragma unroll
                for (int v = 0; v < V; ++v)
                    if (unit + b < asked[v]) {
                        left[v] *= a.keep_logits ? 1 / (1 + __expf(probs[b].of[v])) : 1 - probs[b].of[v];
                        expected[v] += left[v];
                    } else {
                        probs[b].of[v] = a.keep_logits ? 1 / 0.0f : 1;
                    }
                if (unit + b >= least && unit + b < a.units)
                    *reinterpret_cast<Pixels*>(a.probs + (unit + b) * stride + place) = probs[b];
            }
        }
#pragma unroll
        for (int v = 0; v < V; ++v) {
            a.steps[place + v] = ran[v];
            a.cost[place + v] = ran[v];
            a.expected[place + v] = expected[v];
        }
    }
}

#if LAST
DEVICE void leave(const Args& a, int first, int images) {
    float* means = array<float>(PARTS);
    for (int i = threadIdx.x; i < images * CHANNELS; i += THREADS) {
        const int c = i % CHANNELS;
        const float scale = a.last[c], shift = a.last[CHANNELS + c];
        float sum = 0;
        for (int p = 0; p < PLANE; ++p) {
            const float2 u = unpack(at<unsigned>(U + chunk_at<CHANNELS>(i / CHANNELS * PLANE + p, c / 8) + 4 * (c % 8 / 2)));
            const float v = (c % 2 ? u.y : u.x) * scale + shift;
            sum += v < 0 ? 0 : v;
        }
        means[i] = sum / PLANE;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < images * CLASSES; i += THREADS) {
        const int image = i / CLASSES, k = i % CLASSES;
        const float* weights = a.last + 2 * CHANNELS;
        float logit = weights[CLASSES * CHANNELS + k];
        for (int c = 0; c < CHANNELS; ++c) logit += weights[k * CHANNELS + c] * means[image * CHANNELS + c];
        a.output[(long long)first * CLASSES + i] = pack(logit, 0) & 0xffff;
    }
}
#else
DEVICE void leave(const Args& a, int first, int images) {
    for (int i = threadIdx.x; i < images * PLANE * CHUNKS; i += THREADS)
        reinterpret_cast<uint4*>(a.output)[(long long)first * PLANE * CHUNKS + i] =
            at<uint4>(U + chunk_at<CHANNELS>(home_of(i / CHUNKS), i % CHUNKS));
}
#endif

// Floats that the phases to come need, into shared memory.
DEVICE void ask_for(int to, const void* from, int bytes) {
    for (int i = 16 * threadIdx.x; i < bytes; i += 16 * THREADS) copy(to + i, static_cast<const char*>(from) + i);
}

extern "C" __global__ void __launch_bounds__(THREADS, CTAS) onchip_block(const Args a) {
    const int first = blockIdx.x * IMAGES;
    const int images = a.batch - first < IMAGES ? a.batch - first : IMAGES;
    ask_for(NORMS, a.norms, 16 * CHANNELS);
    clear(Y, U - Y);
    clear(PARTS, NORMS - PARTS);
    for (int row = threadIdx.x; row < ROWS; row += THREADS)
        array<unsigned>(MASKS)[row] = row < images * HEIGHT ? ~0u >> (32 - WIDTH) : 0;
    for (int pixel = threadIdx.x; pixel < PIXELS; pixel += THREADS) at<unsigned char>(STEPS + pixel) = a.units;
    copied();
    enter(a, first, images);

    Field field;
    const uint4* weights = a.weights;
    for (int unit = 0; unit < a.units; ++unit) {
        const bool entered = ENTRY_STRIDE == 2 && unit == 0;  // the first convolution is done
        const bool last = unit + 1 == a.units, list = unit == 0 || a.adaptive, ask = a.adaptive && !last;
        if (list) field.look();
        if (field.active.count == 0) break;
        const uint4* taps = a.heads + unit * (CHANNELS / 16) * 32;
        if (ask && TAPS < POOLS) ask_for(TAPS, taps, CHANNELS / 16 * 512);
        if (ask) ask_for(POOLS, a.pools + unit * CHANNELS, CHANNELS * 4);
        if (entered) {
            field.make(list, false);
        } else {
            const Weights<Source<true, false>> ones(weights);
            field.make(list, true);
            __syncthreads();
            convolve<true, false>(ones, Rows{true, 0, field.active.count + field.others.count}, Heads());
        }
        weights += 9 * (entered ? IN : CHANNELS) / 16 * FRAGMENTS;
        const Weights<Source<false, false>> twos(weights);
        weights += 9 * CHANNELS / 16 * FRAGMENTS;
        const Heads heads(taps, ask, unit == 0);
        copied();
        __syncthreads();
        if (!last) ask_for(NORMS, a.norms + (unit + 1) * 4 * CHANNELS, 16 * CHANNELS);
        if (ask) heads.put_others(Rows{true, field.others.first, field.others.count});
        convolve<false, false>(twos, Rows{true, 0, field.active.count}, heads);
        copied();
        __syncthreads();
        if (ask) {
            decide(a, first, unit, field.active.count, a.biases[unit]);
            __syncthreads();
        }
    }
    if (a.adaptive) report(a, first, images);
    leave(a, first, images);
}
