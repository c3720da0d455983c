// A block of an adaptive CIFAR ResNet, from its input to its output, without leaving the chip.
//
// A CTA holds IMAGES images in shared memory, channels last: u, the residual stream; x, what the first convolution of a
// unit reads, relu(norm(u)), made together with u, of what u was before it was rounded; y, what the second one reads.
// Pixels of x and y lie in "slots" with a border of zeros, a row being PITCH = WIDTH + 1 slots (the right border of a row is
// the left one of the next).
// Eight channels are a chunk, and a chunk of all slots lies together, so that ldmatrix of eight pixels meets no bank twice
// if their slots differ modulo 8: lists take pixels of the eight classes in turn, however they lie.
//
// A convolution is nine taps of m16n8k16 over a list of pixels, or of pixels with the one below (TALL = 2: a row that
// is read serves both). First come those with active pixels, which run the unit, then others with pixels near them, see
// Lists. Weights come packed as fragments, straight into registers, asked for before the barrier ahead of their
// use. Halting heads get u out of the registers in which the second one makes it, see Head. A unit has two barriers, one more
// if there are decisions, and one more if someone has halted.
//
// With few images, CLUSTER CTAs share one: each makes some rows of every map, and is given those beside them by the CTAs that
// make them. Where it says `meet`, all of them wait for one another.
//
// Compiled by NVRTC for each block of a network; the macros in capitals that are not defined here are given.
// With EMULATED it is plain C++, and the warp's collective instructions are functions of the tests.

#include "device.cuh"
#include "layout.cuh"
#include "stamps.cuh"
#include "lists.cuh"
#include "heads.cuh"
#include "convolve.cuh"
#include "ends.cuh"

// What the phases to come need, into shared memory.
DEVICE void ask_for(int to, const void* from, int bytes) {
    for (int i = 16 * threadIdx.x; i < bytes; i += 16 * THREADS) copy(to + i, static_cast<const char*>(from) + i);
}

// Of a convolution; the first one may have fewer inputs.
DEVICE const uint4* weights_of(const Args& a, int convolution) {
    return a.weights + (convolution * CHANNELS - (convolution ? CHANNELS - IN : 0)) / 16 * 9 * FRAGMENTS;
}

// Of the parts of the list.
DEVICE int lines(int part) { return at<int>(COUNTS + 4 * part); }

#if CLUSTER > 1
#define SHARED_IMAGES __cluster_dims__(CLUSTER, 1, 1)
#else
#define SHARED_IMAGES
#endif

extern "C" __global__ void SHARED_IMAGES __launch_bounds__(THREADS, CTAS) onchip_block(const Args a) {
    const int first = blockIdx.x / CLUSTER * IMAGES;
    const int images = a.batch - first < IMAGES ? a.batch - first : IMAGES;
    if (!LAST) let_next_begin();
    ask_for(NORMS, a.norms, 16 * CHANNELS);
    clear(Y, STEPS - Y);
    clear(LOGITS, NORMS - LOGITS);
    for (int word = threadIdx.x; word < (PAST - MASKS) / 4; word += THREADS) {
        const int left = images * PLANE - 32 * word;
        array<unsigned>(MASKS)[word] = left >= 32 ? ~0u : left > 0 ? (1u << left) - 1 : 0;
    }
    for (int row = threadIdx.x; row < ROWS; row += THREADS)
        array<unsigned>(PAST)[row] = row < images * HEIGHT ? ~0u >> (32 - WIDTH) : 0;
    for (int pixel = threadIdx.x; pixel < PIXELS; pixel += THREADS) at<unsigned char>(STEPS + pixel) = a.units;
    copied();
    if (CLUSTER > 1 && ENTRY_STRIDE < 2) meet();  // before anyone is given anything
    await_last();
    enter(a, first, images);

    if (ENTRY_STRIDE < 2) refresh<1, false>(Rows{false, first_pixel(1), end_pixel(1, images) - first_pixel(1)});
    Weights<Source<true, false>> ones(weights_of(a, 0));
    HeadOf<true> none;
    bool fewer = CLUSTER > 1 || WIDTH % 8 || images < IMAGES;  // than the list has
    if (!fewer) list_all();
    for (int unit = 0; unit < a.units; ++unit) {
        STAMP(0);
        const bool entered = ENTRY_STRIDE == 2 && unit == 0;  // the first convolution is done
        const bool last = unit + 1 == a.units, ask = ADAPTIVE && !last;
        if (fewer) {
            Lists lists;
            if (lists.none) break;
            lists.write();
            STAMP(1);
            __syncthreads();
        }
        STAMP(2);
        const float* norms = a.norms + (unit + 1) * 4 * CHANNELS;
        if (!last) ask_for(NORMS, norms, 8 * CHANNELS);
        if (ask) ask_for(POOLS, a.pools + unit * (CHANNELS + 4), 4 * CHANNELS + 16);
        if (ADAPTIVE && fewer && unit > 0) add_halted();
        fewer = false;
        if (!entered) convolve<true, false>(ones, Rows{true, 0, lines(0) + lines(1)}, none);
        STAMP(3);
        const Weights<Source<false, false>> twos(weights_of(a, 2 * unit + 1));
        HeadOf<false> head(a.heads, unit, ask);
        copied();
        meet();
        STAMP(4);
        if (!last) ask_for(SECOND_NORM, norms + 2 * CHANNELS, 8 * CHANNELS);
        convolve<false, false>(twos, Rows{true, 0, lines(0)}, head);
        head.add_beside(Rows{true, lines(0), lines(1)});
        head.store();
        STAMP(5);
        ones = Weights<Source<true, false>>(weights_of(a, last ? 0 : 2 * unit + 2));  // for the next unit
        copied();
        meet();
        STAMP(6);
        if (ask) {
            const bool halted = decide(a, unit);
            STAMP(7);
            refresh<TALL, true>(Rows{true, lines(0), lines(1) + lines(2)});
            STAMP(8);
            fewer = meet_or(halted, unit);
            STAMP(9);
        }
    }
    if (ADAPTIVE) report(a, first, images);
    leave(a, first, images);
}
