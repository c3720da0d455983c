// The halting heads: the means that they see, their 3×3 convolutions, and what they decide.
#pragma once

// What all logits of an image share: what the warps added up, as a mean, and the bias. The image's first lane has it.
DEVICE float share() {
    const int lane = threadIdx.x % 32;
    float sum = 0;
#pragma unroll
    for (int i = lane; i < IMAGES * ALL_WARPS; i += 32) sum += at<float>(DOTS + 4 * i);
#pragma unroll
    for (int other = 1; other < ALL_WARPS && other < 32; other *= 2) sum += __shfl_xor_sync(~0u, sum, other);
    return sum * (1.0f / PLANE) + at<float>(POOLS + 4 * CHANNELS);
}

// Where the rows of u are that logits of a pixel read, or of as many as TALL says.
#if BORDERED
struct Around {
    int start;
    DEVICE Around(int pixel) : start(home_at(pixel, threadIdx.x % 32 / 16)) {}
    DEVICE int at(int y, int x) const { return start + 16 * ((y - 1) * PITCH + x - 1); }
};
#else
// What is beyond the edges is a pixel of zeros.
struct Around {
    int line, zero, turn;
    bool rows[TALL + 2], columns[3];
    DEVICE Around(int pixel) {
        const int half = HOME_PLANE * (threadIdx.x % 32 / 16), row = pixel / WIDTH % HEIGHT, column = pixel % WIDTH;
        line = U + 16 * (pixel - column) + half, zero = U + 16 * ZERO + half;
        turn = pixel + pixel / WIDTH + image_of(pixel) + WIDTH;
        columns[0] = column > 0, columns[1] = true, columns[2] = column + 1 < WIDTH;
#pragma unroll
        for (int y = 0; y < TALL + 2; ++y) rows[y] = y == 0 ? row > 0 : y <= TALL || row + TALL < HEIGHT;
    }
    DEVICE int at(int y, int x) const {
        const int there = line + 16 * (y - 1) * WIDTH + 16 * ((turn + y - 1 + x - 1) % WIDTH);
        return rows[y] && columns[x] ? there : zero;
    }
};
#endif

// The taps of a head, which registers hold if they can. All columns of B are alike, or every second one: those for the upper
// pixels of lines and those for the lower ones, for which the same rows of u meet the taps of another row.
struct Head {
    static constexpr int K = CHANNELS / 16, HELD = K <= 2 ? K : 0;
    int from;
    uint2 taps[(TALL + 2) * 3][HELD + 1];
    DEVICE Head() {
        const int lane = threadIdx.x % 32;
        from = HEADS + 8 * K * (lane % 4) + 3 * HEAD_TAP * (TALL == 2 ? 1 - lane / 4 % 2 : 1);
#pragma unroll
        for (int tap = 0; tap < (TALL + 2) * 3; ++tap)
#pragma unroll
            for (int k = 0; k < HELD; k += 2)
                if (k + 1 < HELD) {
                    const uint4 two = at<uint4>(from + tap * HEAD_TAP + 8 * k);
                    taps[tap][k] = make_uint2(two.x, two.y), taps[tap][k + 1] = make_uint2(two.z, two.w);
                } else {
                    taps[tap][k] = read(tap, k);
                }
    }
    DEVICE uint2 read(int tap, int k) const { return at<uint2>(from + tap * HEAD_TAP + 8 * k); }
    // Logits of 16 lines of which a lane has a pixel: less what is the same for an image.
    DEVICE void operator()(float (&logits)[4], int pixel) const {
        const Around around(pixel);
        constexpr int CHAINS = K == 1 ? 3 : 6;  // one after the other would take long
        float c[CHAINS][4];
#pragma unroll
        for (int y = 0; y < TALL + 2; ++y)
#pragma unroll
            for (int x = 0; x < 3; ++x)
#pragma unroll
                for (int k = 0; k < K; ++k) {
                    const uint2 w = k < HELD ? taps[3 * y + x][k] : read(3 * y + x, k);
                    unsigned u[4];
                    load_rows(u, around.at(y, x) + 2 * HOME_PLANE * k);
                    if (y == 0 && k < 2) multiply_new(c[x + 3 * (k % 2)], u, w.x, w.y);
                    else multiply(c[x + 3 * (k % 2)], u, w.x, w.y);
                }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            logits[i] = c[0][i] + c[1][i] + c[2][i];
            if (CHAINS == 6) logits[i] += c[CHAINS - 3][i] + c[CHAINS - 2][i] + c[CHAINS - 1][i];
        }
    }
};

// A lane decides for a pixel of the list. Returns whether some have halted.
DEVICE bool decide(const Args& a, int unit, const Head& head, const Rows& rows) {
    const int lane = anew(threadIdx.x) % 32, t = TALL == 2 ? lane % 2 : 0;
    const int first = anew(blockIdx.x) / CLUSTER * IMAGES;
    bool halted = false;
    if (threadIdx.x / 32 * 16 >= rows.count) return halted;
    const float shared = share();
#pragma unroll 1
    for (int tile = threadIdx.x / 32 * 16; tile < rows.count; tile += 16 * WARPS) {
        float logits[4];
        head(logits, rows[tile + lane % 16].pixel());
        const int own = tile + lane / 4 + lane % 4 / 2 * 8;
        const Entry entry = rows[own];
        const int pixel = entry.pixel(t);
        const float low = lane & 1 ? logits[1] : logits[0], high = lane & 1 ? logits[3] : logits[2];
        const float logit = (lane & 2 ? high : low) + __shfl_sync(~0u, shared, image_of(pixel) * ALL_WARPS);
        if (own >= rows.count || (TALL == 2 ? !entry.active(t) : lane % 2)) continue;
        const long long place = ((long long)unit * a.batch + first) * PLANE + pixel;
        if (logit > (a.bounds ? a.bounds[place] : a.bound)) {
            halted = true;
            at<unsigned char>(STEPS + pixel) = unit + 1;
#pragma unroll
            for (int r = 0; r < CLUSTER; ++r) put_and(r, MASKS + pixel / 32 * 4, ~(1u << pixel % 32));
        }
        if (a.probs) a.probs[place] = a.keep_logits ? logit : __fdividef(1, 1 + __expf(-logit));
    }
    return halted;
}

// Wait for all, and return whether someone has halted after this unit.
DEVICE bool meet_or(bool halted, int unit) {
#if CLUSTER == 1
    return __syncthreads_or(halted);
#else
    if (__any_sync(~0u, halted) && threadIdx.x % 32 < CLUSTER) put_larger(threadIdx.x % 32, COUNTS + 12, unit + 1);
    meet();
    return at<int>(COUNTS + 12) == unit + 1;
#endif
}
