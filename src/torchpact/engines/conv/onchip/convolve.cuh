// Convolutions over lists of pixels.
#pragma once

// What a convolution reads: x, y, or the map before, which lies in x.
template <bool FIRST, bool ENTRY> struct Source {
    static constexpr int C = ENTRY ? IN : CHANNELS, K = C / 16, ROW = ENTRY ? IN_PITCH : PITCH;
    static constexpr int NEXT = ENTRY ? IN_PLANE : SLOT_PLANE;
    static DEVICE int side() { return NEXT * (threadIdx.x % 32 / 16); }  // of the lane
    static DEVICE int start(int slot, int side) { return (FIRST ? X : Y) + 16 * slot + side; }
    // By constants from the start: no address has to be computed.
    static DEVICE void load(unsigned (&a)[4], int start, int row, int column, int k) {
        load_rows(a, start + 16 * (row * ROW + column) + 2 * NEXT * k);
    }
};

template <bool NEW, int N> DEVICE void multiply_all(float (&c)[N][4], const unsigned (&a)[4], const uint4 (&w)[N / 2]) {
#pragma unroll
    for (int n = 0; n < N / 2; ++n)
        if (NEW) {
            multiply_new(c[2 * n], a, w[n].x, w[n].y);
            multiply_new(c[2 * n + 1], a, w[n].z, w[n].w);
        } else {
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
    template <int M, int T> DEVICE void convolve(float (&c)[M][T][N_TILES][4], const int (&start)[M], bool) const {
        if constexpr (CLUSTER > 1 && M * T == 1) in_chains(c[0][0], start[0]);
        else in_rows<M, T>(c, start);
    }
    template <int M, int T> DEVICE void in_rows(float (&c)[M][T][N_TILES][4], const int (&start)[M]) const {
#pragma unroll
        for (int row = 0; row < 2 + T; ++row)
#pragma unroll
            for (int s = 0; s < 3 * From::K; ++s)
#pragma unroll
                for (int m = 0; m < M; ++m) {
                    unsigned a[4];
                    From::load(a, start[m], row - 1, s / From::K - 1, s % From::K);
#pragma unroll
                    for (int t = 0; t < T; ++t)
                        if (row == t && s == 0)
                            multiply_all<true>(c[m][t], a, all[s]);
                        else if (row - t >= 0 && row - t < 3)
                            multiply_all<false>(c[m][t], a, all[(row - t) * 3 * From::K + s]);
                }
    }
    // Each product waits for the last one that it is added to: three sums at a time.
    DEVICE void in_chains(float (&c)[N_TILES][4], int start) const {
        float sums[3][N_TILES][4];
#pragma unroll
        for (int s = 0; s < 3 * From::K; ++s)
#pragma unroll
            for (int row = 0; row < 3; ++row) {
                unsigned a[4];
                From::load(a, start, row - 1, s / From::K - 1, s % From::K);
                if (s == 0) multiply_all<true>(sums[row], a, all[row * 3 * From::K]);
                else multiply_all<false>(sums[row], a, all[row * 3 * From::K + s]);
            }
#pragma unroll
        for (int n = 0; n < N_TILES; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) c[n][i] = sums[0][n][i] + sums[1][n][i] + sums[2][n][i];
    }
};

// Or read again for every tile: the warps of a CTA do so at about the same time, so that L1 serves them. AHEAD steps
// before their use, and hence that many beyond the end.
template <class From> struct Streamed {
    static constexpr int STEPS_OF_ROW = 3 * From::K, D = STEPS_OF_ROW % AHEAD ? 3 : AHEAD;
    const uint4* weights;
    mutable uint4 next[D][N_TILES / 2];
    DEVICE Streamed(const uint4* from) {
        const unsigned thread = anew(threadIdx.x);
        weights = from + thread / 32 % GROUPS * (N_TILES / 2) * 32 + thread % 32;
        start();
    }
    DEVICE void start() const {
#pragma unroll
        for (int d = 0; d < D; ++d)
#pragma unroll
            for (int n = 0; n < N_TILES / 2; ++n) next[d][n] = fetch(weights + d * FRAGMENTS + n * 32);
    }
    template <int M, int T> DEVICE void convolve(float (&c)[M][T][N_TILES][4], int (&place)[M], bool again) const {
        if (again) start();
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
            for (int t = 0; t < T; ++t)
#pragma unroll
                for (int n = 0; n < N_TILES; ++n) c[m][t][n][0] = c[m][t][n][1] = c[m][t][n][2] = c[m][t][n][3] = 0;
        const uint4* from = weights + D * FRAGMENTS;
#pragma unroll 1
        for (int row = 0; row < 3; ++row) {
#pragma unroll
            for (int s = 0; s < STEPS_OF_ROW; ++s) {
                uint4 now[N_TILES / 2];
#pragma unroll
                for (int n = 0; n < N_TILES / 2; ++n) now[n] = next[s % D][n], next[s % D][n] = fetch(from + n * 32);
                from += FRAGMENTS;
#pragma unroll
                for (int m = 0; m < M; ++m)
#pragma unroll
                    for (int t = 0; t < T; ++t) {
                        unsigned a[4];
                        From::load(a, place[m], t - 1, s / From::K - 1, s % From::K);
                        multiply_all<false>(c[m][t], a, now);
                    }
            }
#pragma unroll
            for (int m = 0; m < M; ++m) place[m] += 16 * From::ROW;
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
    DEVICE void load(int from) {
#pragma unroll
        for (int n = 0; n < N_TILES; ++n) {
            scale[n] = at<float2>(from + 32 * n);
            shift[n] = at<float2>(from + 4 * CHANNELS + 32 * n);
        }
    }
    DEVICE unsigned operator()(float low, float high, int n) const {
        return pack_relu(low * scale[n].x + shift[n].x, high * scale[n].y + shift[n].y);
    }
};

// A warp's part of a convolution. The second one also makes x of the next unit, and gives u to the head.
template <bool FIRST, bool ENTRY> struct Convolution {
    using From = Source<FIRST, ENTRY>;
    const Weights<From>& weights;
    const Rows& rows;
    HeadOf<FIRST>& head;
    Affine norm;  // of what comes after
    bool again = false;
    // Where registers are not needed elsewhere.
    const int side_kept = HOLD ? kept(From::side()) : 0, column_kept = HOLD ? kept(column_of()) : 0;

    DEVICE Convolution(const Weights<From>& weights, const Rows& rows, HeadOf<FIRST>& head) : weights(weights), rows(rows), head(head) {
        if (HOLD) load_norm();
    }
    static DEVICE int column_of() { return SLOT_PLANE * N_TILES * group() + 4 * (threadIdx.x % 4); }
    DEVICE int side() const { return HOLD ? side_kept : From::side(); }
    DEVICE int column() const { return HOLD ? column_kept : column_of(); }
    static DEVICE int group() { return threadIdx.x / 32 % GROUPS; }
    DEVICE void load_norm() { norm.load((FIRST ? SECOND_NORM : NORMS) + 4 * (group() * 8 * N_TILES + 2 * (threadIdx.x % 4))); }

    // M tiles, and of their lines T rows, from `top` on.
    template <int M, int T> DEVICE void make(int tile, int top) {
        const int lane = (HOLD ? threadIdx.x : anew(threadIdx.x)) % 32;
        float c[M][T][N_TILES][4];
        int start[M];
#pragma unroll
        for (int m = 0; m < M; ++m) {
            const int pixel = rows[(tile + m) * 16 + lane % 16].pixel();
            start[m] = From::start((ENTRY ? in_slot(CLUSTER == 1 ? pixel - rows.first : pixel) : slot_of(pixel)) + top * From::ROW, side());
        }
        weights.template convolve<M, T>(c, start, again);
        again = true;
        if (!HOLD) load_norm();
        constexpr int ROOM = 65536 / (THREADS * CTAS) - 6 * M * T * N_TILES - 4 * N_TILES;  // registers, less sums, u and norm
        constexpr int AHEAD_OF_WRITES = ROOM >= 100 ? M : 1;
#pragma unroll
        for (int m = 0; m < M; m += AHEAD_OF_WRITES) finish<AHEAD_OF_WRITES, T>(&c[m], tile + m, top, lane);
    }
    // Tiles whose u is read before that of any is written, which the compiler would not dare.
    template <int M, int T> DEVICE void finish(float (*c)[T][N_TILES][4], int tile, int top, int lane) {
        Entry entries[M][2];
        Place places[M][2];
        unsigned u[M][T][2][N_TILES];
#pragma unroll
        for (int i = 0; i < 2 * M; ++i) {
            const int m = i / 2, half = i % 2, row = (tile + m) * 16 + lane / 4 + 8 * half;
            entries[m][half] = rows[row];
            places[m][half] = Place(entries[m][half].pixel(), top, row < rows.count, column());
            if (!FIRST) read<T>(u[m], half, places[m][half]);
        }
#pragma unroll
        for (int m = 0; m < M; ++m) {
#pragma unroll
            for (int half = 0; half < 2; ++half)
                if ((tile + m) * 16 + lane / 4 + 8 * half < rows.count)
#pragma unroll
                    for (int t = 0; t < T; ++t) {
                        const bool active = T == 1 && TALL == 1 ? true : entries[m][half].active(top + t);
                        write(c[m][t], half, u[m][t][half], places[m][half], t, active);
                    }
            head.add(u[m], entries[m], top);
        }
    }
    // Of a lane's line, from `top` on: bytes from the start of x or y, and where u has it. What fills up the last tile is a pixel
    // that other lanes write, and is not used: zeros are read instead.
    struct Place {
        int pixel, slot, home[TALL];
        DEVICE Place() {}
        DEVICE Place(int first, int top, bool there, int column) : pixel(first + top * WIDTH) {
            const int number = slot_of(first) + top * PITCH;
            slot = 16 * (FIRST || !BORDERED || there ? number : ZERO) + column;  // with a border, u is alike
#pragma unroll
            for (int t = 0; t < TALL; ++t)
                home[t] = BORDERED ? U + slot + 16 * PITCH * t : there ? home_of_lane(pixel + t * WIDTH) : zeros_at(0);
        }
        static DEVICE int home_of_lane(int pixel) { return home_at(pixel, group() * N_TILES) + 4 * (threadIdx.x % 4); }
        DEVICE int to(int t) const { return (FIRST ? Y : X) + slot + 16 * PITCH * t; }
    };
    template <int T> static DEVICE void read(unsigned (&u)[T][2][N_TILES], int half, const Place& place) {
#pragma unroll
        for (int t = 0; t < T; ++t)
#pragma unroll
            for (int n = 0; n < N_TILES; ++n) u[t][half][n] = at<unsigned>(place.home[t] + HOME_PLANE * n);
    }
    // Half of a tile: to y; or added to u, if the pixel is active, and then to x.
    DEVICE void write(const float (&c)[N_TILES][4], int half, unsigned (&u)[N_TILES], const Place& place, int t, bool active) {
#pragma unroll
        for (int n = 0; n < N_TILES; ++n) {
            float2 v = make_float2(c[n][2 * half], c[n][2 * half + 1]);
            if (!FIRST) {
                const float2 old = unpack(u[n]);
                v = active ? make_float2(old.x + v.x, old.y + v.y) : old;
                u[n] = pack(v.x, v.y);
                if (active) at<unsigned>(place.home[t] + HOME_PLANE * n) = u[n];
            }
            put_pixel(place.pixel + t * WIDTH, place.to(t) + SLOT_PLANE * n, norm(v.x, v.y, n));
        }
    }
};

template <bool FIRST, bool ENTRY, int M>
DEVICE void convolve_by(const Weights<Source<FIRST, ENTRY>>& weights, const Rows& rows, HeadOf<FIRST>& head) {
    constexpr int TEAM = WARPS / GROUPS, T = ENTRY ? 1 : TALL;
    const int own = anew(threadIdx.x) / 32 / GROUPS, tiles = (rows.count + 15) / 16, left = tiles % TEAM;
    Convolution<FIRST, ENTRY> part(weights, rows, head);
    const bool split = T == 2 && M == 1 && 2 * left <= TEAM;  // of tiles left over, a warp makes but a row
    for (int tile = own * M; tile < (split ? tiles - left : tiles); tile += TEAM * M) part.template make<M, T>(tile, 0);
    if (split && own < 2 * left) part.template make<1, 1>(tiles - left + own / 2, own % 2);
}

template <bool FIRST, bool ENTRY>
DEVICE void convolve(const Weights<Source<FIRST, ENTRY>>& weights, const Rows& rows, HeadOf<FIRST>& head) {
    // tiles for each warp: as many at once as it has, for then the weights are read once; else in equal parts
    const int each = ((rows.count + 15) / 16 * GROUPS + WARPS - 1) / WARPS, rounds = (each + M_TILES - 1) / M_TILES;
    [[maybe_unused]] const int tiles = (each + rounds - 1) / (rounds > 1 ? rounds : 1);
#if M_TILES >= 4
    if (tiles == 4) return convolve_by<FIRST, ENTRY, 4>(weights, rows, head);
#endif
#if M_TILES >= 3
    if (tiles == 3) return convolve_by<FIRST, ENTRY, 3>(weights, rows, head);
#endif
#if M_TILES >= 2
    if (tiles == 2) return convolve_by<FIRST, ENTRY, 2>(weights, rows, head);
#endif
    convolve_by<FIRST, ENTRY, 1>(weights, rows, head);
}
