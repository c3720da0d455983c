// The kernel's argument, and what lies where in shared memory.
#pragma once

typedef unsigned short half_t;  // bits

struct Args {
    const half_t* input;       // images, or the map of the block before: (batch, 2 HEIGHT, 2 WIDTH, CHANNELS / 2), or as output
    half_t* output;            // the map as (batch, HEIGHT, WIDTH, CHANNELS); of the LAST block, logits of classes
    const uint4* weights;      // of all convolutions, as fragments
    const float* norms;        // of every unit: scale and shift before its convolutions, CHANNELS each
    const uint4* heads;        // of the halting heads: taps and weights of the mean as fragments, see Head
    const float* pools;        // of every head: weights of the mean; the bias, thrice 0
    const uint4* stem;         // as fragments
    const float* last;         // scale and shift of the last norm, weights of the classes, biases
    const float* bounds;       // what logits must exceed to halt: (units - 1, batch, pixels), or null
    float* probs;              // (units, batch, pixels): halting probabilities, or with keep_logits their logits; or null
    float* expected;           // (batch, pixels), with probs
    float* cost;
    long long* steps;
    unsigned* nan;             // where one is wanted, in the place of all that is not kept; or null
    long long image_stride, channel_stride, row_stride, column_stride;  // of images
    float bound;               // for all, if there are no bounds
    int batch, units, keep_logits;
#ifdef TORCHPACT_STAMPS
    long long* stamps;
#endif
};

constexpr int THREADS = 32 * WARPS, ALL_WARPS = WARPS * CLUSTER;
constexpr int PLANE = HEIGHT * WIDTH;
constexpr int BAND = HEIGHT / CLUSTER;  // rows that a CTA of a cluster makes of an image
constexpr int PIXELS = IMAGES * PLANE;
constexpr int ROWS = IMAGES * HEIGHT;
constexpr int BLOCKS = (ROWS + 31) / 32;  // of rows
constexpr unsigned ALL_COLUMNS = ~0u >> (32 - WIDTH);
constexpr int PITCH = WIDTH + 1;
constexpr int SLOTS = (IMAGES * (HEIGHT + 1) + 1) * PITCH + 1;
constexpr int CHUNKS = CHANNELS / 8;
constexpr int GROUPS = CHUNKS / N_TILES;   // of outputs; a warp computes those of one
constexpr int FRAGMENTS = CHANNELS / 16 * 32;  // uint4 that a k16 step of a convolution has

DEVICE constexpr int up(int bytes) { return (bytes + 15) / 16 * 16; }
DEVICE constexpr int larger(int a, int b) { return a > b ? a : b; }
// Bytes from a chunk of a pixel to the next one: the lanes that read all chunks of neighbours meet no bank twice.
DEVICE constexpr int plane_of(int pixels, int chunks) {
    const int turn = chunks < 8 ? 8 / chunks : 1;
    return 16 * ((pixels - turn + 7) / 8 * 8 + turn);
}
// All chunks of them; the last one needs no more than its pixels.
DEVICE constexpr int map_of(int pixels, int chunks) { return plane_of(pixels, chunks) * (chunks - 1) + 16 * pixels; }
constexpr int SLOT_PLANE = plane_of(SLOTS, CHUNKS), SLOT_MAP = map_of(SLOTS, CHUNKS);
// u has a border too if it is BORDERED, which takes room and saves addresses; else it ends with a pixel of zeros. Only the
// first column of the border is read, as zeros: the list lies between the last row of a chunk and the first of the next.
constexpr int HOMES = BORDERED ? SLOTS : PIXELS + 1, HOME_PLANE = plane_of(HOMES, CHUNKS), ZERO = BORDERED ? PITCH : PIXELS;
constexpr int LAST_END = IMAGES * (HEIGHT + 1) * PITCH;  // of the slots of pixels
constexpr bool LIST_WITHIN = BORDERED && HOME_PLANE + 16 * (PITCH - LAST_END) >= PIXELS / TALL * 2;

// The map before, in x while the first convolution reads it.
constexpr int IN = ENTRY_STRIDE == 2 ? CHANNELS / 2 : CHANNELS;
constexpr int IN_PITCH = 2 * WIDTH + 1;
DEVICE constexpr int in_slots(int images) { return (images * (2 * HEIGHT + 1) + 1) * IN_PITCH + 1; }
DEVICE constexpr int in_map(int images) { return map_of(in_slots(images), IN / 8); }
constexpr int X_BYTES = larger(SLOT_MAP, ENTRY_STRIDE == 2 ? in_map(1) : 0);
DEVICE constexpr int at_once(int images) { return images == 1 || in_map(images) <= X_BYTES ? images : at_once(images - 1); }
constexpr int AT_ONCE = at_once(IMAGES), IN_PLANE = plane_of(in_slots(AT_ONCE), IN / 8);

// Logits have a border as slots have: what falls there is never read. Between rows there are as many columns as GAP says: a
// warp adds to four rows at once, which should not meet the same banks.
constexpr int LOGIT_PITCH = WIDTH + GAP;
constexpr int LOGIT_COUNT = IMAGES * (HEIGHT + 1) * LOGIT_PITCH + WIDTH + 2;

// Offsets into shared memory.
constexpr int X = 0;
constexpr int Y = X + X_BYTES;
constexpr int U = Y + SLOT_MAP;
constexpr int U_END = U + map_of(HOMES, CHUNKS);
constexpr int LIST = LIST_WITHIN ? U + 16 * LAST_END : U_END;       // pixels, the uppermost bits being whether they are active
constexpr int STEPS = LIST_WITHIN ? U_END : LIST + up(PIXELS / TALL * 2);
constexpr int LOGITS = STEPS + up(PIXELS);                // what heads have added up, see Head
constexpr int SUMS = LOGITS + (ADAPTIVE ? up(4 * LOGIT_COUNT) : 0);  // a warp's sums of u where pixels of its image have halted
constexpr int DOTS = SUMS + up(WARPS * CHANNELS * 4);    // each warp's sums of products with the weights of the mean
constexpr int COUNTS = DOTS + up(IMAGES * ALL_WARPS * 4); // lines of the parts of the list; then after which unit someone has halted
constexpr int NORMS = COUNTS + 16;                        // scale and shift before a unit, whose input is made with them
constexpr int SECOND_NORM = NORMS + 8 * CHANNELS;         // those before its second convolution
constexpr int POOLS = SECOND_NORM + 8 * CHANNELS;
constexpr int MASKS = POOLS + 4 * CHANNELS + 16;            // a bit for every active pixel
constexpr int PAST = MASKS + up(PIXELS / 8 + 8);          // those of a row's line when sums were last made, a word for a row
constexpr int TOTAL = PAST + up(ROWS * 4);
static_assert(TOTAL == SHARED_BYTES, "the host plans with another layout");
static_assert(CHANNELS % 16 == 0 && CHUNKS % N_TILES == 0 && N_TILES % 2 == 0, "tiles must fit the channels");
static_assert(HEIGHT % TALL == 0 && TALL <= 2 && PIXELS <= 1 << (16 - TALL), "pixels must fit the list");
static_assert(WARPS % GROUPS == 0 && 32 % WARPS == 0 && IMAGES * WARPS <= 32 && IMAGES <= WARPS && WIDTH <= 32 && 32 % CHUNKS == 0, "warps must fit the groups");
static_assert(CLUSTER == 1 || (IMAGES == 1 && HEIGHT <= 32 && HEIGHT % (CLUSTER * TALL) == 0 && CLUSTER <= WARPS && CLUSTER <= 8), "CTAs must fit the rows");

#ifndef WATCHED  // by the tests, which then see who reads and writes
template <class T> DEVICE T& at(int byte) { return *reinterpret_cast<T*>(memory + byte); }
template <class T> DEVICE T* array(int byte) { return reinterpret_cast<T*>(memory + byte); }
#endif

DEVICE int image_of(int pixel) { return IMAGES == 1 ? 0 : pixel / PLANE; }
DEVICE int slot_of(int pixel) { return pixel + pixel / WIDTH + (image_of(pixel) + 1) * PITCH + 1; }
// Where u has a pixel: without a border rows are turned, so that classes are those of slots.
DEVICE int home_of(int pixel) {
    const int row = pixel / WIDTH;
    return BORDERED ? slot_of(pixel) : row * WIDTH + (pixel + row + image_of(pixel)) % WIDTH;
}

DEVICE int logit_at(int pixel) { return LOGITS + 4 * (slot_of(pixel) + (pixel / WIDTH + image_of(pixel) + 1) * (GAP - 1)); }

DEVICE int in_slot(int pixel) {  // of the centre in the map before
    int row = pixel / WIDTH, column = pixel % WIDTH;
    return (2 * row + image_of(pixel) + 1) * IN_PITCH + 1 + 2 * column;
}

DEVICE int slot_at(int slot, int chunk) { return 16 * slot + SLOT_PLANE * chunk; }
DEVICE int home_at(int pixel, int chunk) { return U + 16 * home_of(pixel) + HOME_PLANE * chunk; }
DEVICE int zeros_at(int chunk) { return U + 16 * ZERO + HOME_PLANE * chunk; }

// Whether the CTA makes this row; and those that it needs besides.
DEVICE bool own_row(int row) { return CLUSTER == 1 || row / BAND == rank(); }
DEVICE int band_from(int more) { return rank() * BAND - more < 0 ? 0 : rank() * BAND - more; }
DEVICE int band_to(int more) { return (rank() + 1) * BAND + more < HEIGHT ? (rank() + 1) * BAND + more : HEIGHT; }
// A pixel's part of a map: to the CTA that makes it, and to the one beside that reads it.
template <class T> DEVICE void put_pixel(int pixel, int byte, T v) {
    at<T>(byte) = v;
    if (CLUSTER > 1) {
        const int row = pixel / WIDTH % BAND;
        if (row == 0 && rank() > 0) put(rank() - 1, byte, v);
        if (row == BAND - 1 && rank() + 1 < CLUSTER) put(rank() + 1, byte, v);
    }
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
