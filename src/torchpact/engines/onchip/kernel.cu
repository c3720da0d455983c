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
// within one. Weights come packed as fragments, straight into registers, asked for before the barrier ahead of their
// use. A unit has four barriers.
//
// Compiled by NVRTC for each block of a network; the macros in capitals that are not defined here are given.
// With EMULATED it is plain C++, and the warp's collective instructions are functions of the tests.

#include "device.cuh"
#include "layout.cuh"
#include "convolve.cuh"
#include "decide.cuh"
#include "ends.cuh"

// What the phases to come need, into shared memory.
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
