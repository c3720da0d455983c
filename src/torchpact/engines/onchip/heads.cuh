// The halting heads' 3×3 convolutions, and the means that they see.
#pragma once

// What a warp adds up for each image. No atomics: the order is fixed, and so are the results.
struct Dots {
    float of[IMAGES];
    DEVICE Dots() {
#pragma unroll
        for (int image = 0; image < IMAGES; ++image) of[image] = 0;
    }
    DEVICE void add(float v, int pixel) {
#pragma unroll
        for (int image = 0; image < IMAGES; ++image) of[image] += IMAGES == 1 || image_of(pixel) == image ? v : 0;
    }
    DEVICE void store() {  // of lanes that have the first column of outputs; that of others is 0
#pragma unroll
        for (int image = 0; image < IMAGES; ++image) {
#pragma unroll
            for (int other = 4; other < 32; other *= 2) of[image] += __shfl_xor_sync(~0u, of[image], other);
            if (threadIdx.x % 32 == 0) at<float>(DOTS + 4 * (image * WARPS + threadIdx.x / 32)) = of[image];
        }
    }
};

// A 3×3 convolution to a single number would leave the matrix units idle. So each pixel is multiplied with the weights of
// all nine taps; the products go to y, which is free by then, and `decide` adds them up. A tenth column has the weights of
// the mean.
struct Heads {
    static constexpr int K = CHANNELS / 16;
    uint4 taps[K];
    DEVICE Heads(const uint4* from, bool asked) {
        if (asked)
#pragma unroll
            for (int k = 0; k < K; ++k) taps[k] = fetch(from + 32 * k + threadIdx.x % 32);
    }
    DEVICE void multiply_row(float (&around)[4], float (&centre)[4], int pixel) const {
        unsigned u[4];
#pragma unroll
        for (int k = 0; k < K; ++k) {
            load_rows(u, home_at(pixel, 2 * k + threadIdx.x % 32 / 16));
            if (k == 0) {
                multiply_new(around, u, taps[k].x, taps[k].y);
                multiply_new(centre, u, taps[k].z, taps[k].w);
            } else {
                multiply(around, u, taps[k].x, taps[k].y);
                multiply(centre, u, taps[k].z, taps[k].w);
            }
        }
    }
    DEVICE void operator()(const Rows& rows) const {
        const int lane = threadIdx.x % 32;
        Dots dots;
        for (int job = threadIdx.x / 32; job < (rows.count + 15) / 16 * TALL; job += WARPS) {
            const int tile = job / TALL * 16, t = job % TALL;
            float around[4], centre[4];
            multiply_row(around, centre, rows[tile + lane % 16].pixel(t));
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int row = tile + lane / 4 + 8 * half;
                const Entry entry = rows[row];
                if (row < rows.count) {
                    const int slot = slot_of(entry.pixel(t)), to = product_at(slot, 2 * (lane % 4));
                    at<float>(to) = around[2 * half];
                    at<float>(to + 4 * STRIDE) = around[2 * half + 1];
                    if (lane % 4 == 0) at<float>(product_at(slot, 0) + CENTRE) = centre[2 * half];
                }
                dots.add(row < rows.count && entry.active(t) ? centre[2 * half + 1] : 0, entry.pixel());
            }
        }
        dots.store();
    }
};
