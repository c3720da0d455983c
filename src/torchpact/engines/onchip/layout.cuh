// The kernel's argument, and what lies where in shared memory.
#pragma once

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
