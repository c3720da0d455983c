// Convolutions over lists of pixels.
#pragma once

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
    static DEVICE void load(unsigned (&a)[4], int slot, int k) {
        load_rows(a, (FIRST ? X : Y) + (chunk_at<C>(slot, threadIdx.x % 32 / 16) ^ k << 5));
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
                const int pixel = rows[i].pixel(), slot = slot_of(pixel) + t * PITCH;
                const int even = product_at(slot, group, 2 * (lane % 4));
                at<float>(X + even) = around[2 * half];
                at<float>(X + (even ^ 4)) = around[2 * half + 1];
                if (lane % 4 == 0) at<float>(centre_at(pixel + t * WIDTH, slot, group)) = centre[2 * half];
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
                    const bool listed = row + lane / 4 + 8 * half < rows.count;
                    const bool there = listed && (FIRST || entries[half].active(t));
                    const int place = FIRST ? slot_of(entries[half].pixel()) + t * PITCH : home_of(entries[half].pixel(t));
                    const int chunk = chunk_at<CHANNELS>(place, group * N_TILES);
#pragma unroll
                    for (int n = 0; n < N_TILES; ++n) {
                        float* v = &c[m][t][n][2 * half];
                        unsigned& to = at<unsigned>((FIRST ? Y : U) + (chunk ^ n << 4) + 4 * (lane % 4));
                        if (FIRST) {
                            if (there) to = pack_relu(v[0] * norm.scale[n].x + norm.shift[n].x, v[1] * norm.scale[n].y + norm.shift[n].y);
                        } else {
                            if (!there) v[0] = v[1] = 0;
                            const float2 old = unpack(listed ? to : 0);
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
