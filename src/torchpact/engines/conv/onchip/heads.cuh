// The halting heads: 3×3 convolutions of u, the means that they see, and what they decide.
#pragma once

// Logits are sums of whole numbers, which do not depend on the order in which warps add them: of 2^-16, so that nine terms of
// a group of outputs are wrong by 7e-5 at most, far less than u in half precision makes. Terms beyond LIMIT count as LIMIT, so
// that none of the sums leaves an int. Those of trained networks were below 90; of 3600, bfloat16 keeps whole logits only.
// What is not finite in u makes the mean, and so all logits of the image, NaN; what is not finite among the taps (or, in
// bfloat16, beyond 2^112) the bias.
constexpr float UNIT = 1 << 16, LIMIT = 3600.0f / GROUPS;
// Taps in bfloat16 come as multiples of it already, see pack_heads.
DEVICE int fixed(float v) { return __float2int_rn(limited(HALF ? v * UNIT : v, LIMIT * UNIT)); }

// To the logits of three neighbours in a row of the image, of which the middle one lies at a byte.
DEVICE void add_three(int row, int byte, float left, float middle, float right) {
    if (CLUSTER == 1 || own_row(row)) {
        add(byte - 4, fixed(left)), add(byte, fixed(middle)), add(byte + 4, fixed(right));
    } else {
#if CLUSTER > 1
        const int to = row / BAND;
        put_sum(to, byte - 4, fixed(left)), put_sum(to, byte, fixed(middle)), put_sum(to, byte + 4, fixed(right));
#endif
    }
}

// What a warp does for a head. A pixel adds its products with the nine taps to the logits around it. For 16 lines they are a
// product of matrices, and lanes that have made u have it as the left one. A line has TALL pixels and adds to TALL + 2 rows:
// lane q of four to three logits of row q. It also has the product of the line's pixel q with the weights of the mean.
struct Head {
    static constexpr int K = N_TILES / 2;
    bool asked;  // else there is nothing to decide
    uint4 taps[TALL][K];
    float dots[IMAGES];  // of the lane: sums of products with the weights of the mean; no atomics, so the order is fixed

    DEVICE Head(const uint4* heads, int unit, bool asked) : asked(asked) {
        const unsigned thread = anew(threadIdx.x);
        const uint4* from = heads + (unit * 2 * (CHANNELS / 16) + thread / 32 % GROUPS * K) * 32 + thread % 32;
#pragma unroll
        for (int image = 0; image < IMAGES; ++image) dots[image] = 0;
#pragma unroll
        for (int t = 0; t < TALL; ++t)
#pragma unroll
            for (int k = 0; k < K; ++k)
                if (asked) taps[t][k] = fetch(from + (t * (CHANNELS / 16) + k) * 32);
    }

    static DEVICE void multiply_by(float (&c)[2][4], const unsigned (&a)[4], uint4 w, bool anew) {
        if (anew) multiply_new(c[0], a, w.x, w.y), multiply_new(c[1], a, w.z, w.w);
        else multiply(c[0], a, w.x, w.y), multiply(c[1], a, w.z, w.w);
    }
    // The lane's part of u, in T rows from `top` on, of a line and of that eight further; zeros where the list has ended.
    // Halted pixels of lines count for the mean as active ones do.
    template <int T> DEVICE void add(const unsigned (&u)[T][2][N_TILES], const Entry (&lines)[2], int top) {
        if (!asked) return;
        float c[2][4];
#pragma unroll
        for (int t = 0; t < T; ++t)
#pragma unroll
            for (int k = 0; k < K; ++k) {
                const unsigned a[4] = {u[t][0][2 * k], u[t][1][2 * k], u[t][0][2 * k + 1], u[t][1][2 * k + 1]};
                const uint4 w = T == TALL || top == 0 ? taps[t][k] : taps[TALL - 1][k];
                multiply_by(c, a, w, t == 0 && k == 0);
            }
        scatter(c, lines);
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int image = 0; image < IMAGES; ++image)
                // which are zeros for lanes beyond the TALL first of four, if u is finite
                dots[image] += IMAGES == 1 || image_of(lines[half].pixel()) == image ? c[1][2 * half + 1] : 0;
    }
    // What falls above or below an image is dropped if CTAs share the image, else it goes to the border.
    static DEVICE void scatter(const float (&c)[2][4], const Entry (&lines)[2]) {
        const int q = threadIdx.x % 4;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int pixel = lines[half].pixel(), row = CLUSTER == 1 ? 0 : pixel / WIDTH + q - 1;
            if (q < TALL + 2 && row >= 0 && row < HEIGHT)
                add_three(row, logit_at(pixel) + 4 * LOGIT_PITCH * (q - 1), c[0][2 * half], c[0][2 * half + 1], c[1][2 * half]);
        }
    }
    // Lines without active pixels, which some have beside them; the last warps have least to do else.
    DEVICE void add_beside(const Rows& rows) const {
        constexpr int TEAM = WARPS / GROUPS;
        const unsigned thread = anew(threadIdx.x), lane = thread % 32, group = thread / 32 % GROUPS;
        if (!asked) return;
        for (int tile = TEAM - 1 - thread / 32 / GROUPS; tile * 16 < rows.count; tile += TEAM) {
            const int own = tile * 16 + (int)lane % 16, pixel = rows[own].pixel();
            float c[2][4];
#pragma unroll
            for (int t = 0; t < TALL; ++t)
#pragma unroll
                for (int k = 0; k < K; ++k) {
                    unsigned a[4];
                    const int chunk = group * N_TILES + lane / 16 + 2 * k;
                    load_rows(a, own < rows.count ? home_at(pixel + t * WIDTH, chunk) : zeros_at(chunk));
                    multiply_by(c, a, taps[t][k], t == 0 && k == 0);
                }
            const int line = tile * 16 + lane / 4;
            scatter(c, {rows[line], rows[line + 8]});
        }
    }
    // The mean's part of the warp: of active pixels, and of those of its image whose sums it keeps.
    DEVICE void store() {
        if (!asked) return;
        const unsigned thread = anew(threadIdx.x);
        const int warp = thread / 32, lane = thread % 32;
        float kept = 0;
#pragma unroll
        for (int pair = lane; pair < CHANNELS / 2; pair += 32) {
            const float2 sum = at<float2>(SUMS + 8 * (warp * (CHANNELS / 2) + pair)), weight = at<float2>(POOLS + 8 * pair);
            kept += sum.x * weight.x + sum.y * weight.y;
        }
#pragma unroll
        for (int image = 0; image < IMAGES; ++image) {
            dots[image] += warp % IMAGES == image ? kept : 0;
#pragma unroll
            for (int other = 1; other < 32; other *= 2) dots[image] += __shfl_xor_sync(~0u, dots[image], other);
            if (lane < CLUSTER) put(lane, DOTS + 4 * (image * ALL_WARPS + rank() * WARPS + warp), dots[image]);
        }
    }
};

// Of the first convolution, and of plain networks.
struct NoHead {
    DEVICE NoHead() {}
    DEVICE NoHead(const uint4*, int, bool) {}
    template <int T> DEVICE void add(const unsigned (&)[T][2][N_TILES], const Entry (&)[2], int) const {}
    DEVICE void add_beside(const Rows&) const {}
    DEVICE void store() const {}
};
template <bool NONE> struct Choice { using Of = NoHead; };
template <> struct Choice<false> { using Of = Head; };
template <bool FIRST> using HeadOf = typename Choice<FIRST || !ADAPTIVE>::Of;

// What all logits of an image share: what the warps added up, as a mean, and the bias.
DEVICE float share(int image) {
    float4 sums = at<float4>(DOTS + 4 * image * ALL_WARPS);
#pragma unroll
    for (int i = 4; i < ALL_WARPS; i += 4) {
        const float4 more = at<float4>(DOTS + 4 * (image * ALL_WARPS + i));
        sums.x += more.x, sums.y += more.y, sums.z += more.z, sums.w += more.w;
    }
    return ((sums.x + sums.y) + (sums.z + sums.w)) * (1.0f / PLANE) + at<float>(POOLS + 4 * CHANNELS);
}

// A warp decides for 32 pixels at a time, of which the masks have a word; it reads some words at once. Returns whether some
// have halted. DETAILED: by bounds of their own, or keeping probabilities.
template <bool DETAILED> DEVICE bool decide_by(const Args& a, int unit) {
    constexpr int OWN = IMAGES * BAND * WIDTH;  // pixels of the CTA, which may begin within a word
    constexpr int ROUNDS = (OWN + (OWN % 32 ? 31 : 0) + THREADS - 1) / THREADS, SIDE = ROUNDS < 4 ? ROUNDS : 4;
    constexpr bool FULL = OWN % (THREADS * SIDE) == 0;  // no round goes beyond
    constexpr bool STEADY = FULL && THREADS % WIDTH == 0 && PLANE % THREADS == 0;  // from round to round
    const int thread = anew(threadIdx.x), lane = thread % 32, from = rank() * OWN, start = from / 32 * 32 + thread;
    const float only = IMAGES == 1 ? share(0) : 0;
    bool halted = false;
#pragma unroll 1
    for (int round = 0; round < ROUNDS; round += SIDE) {
        int places[SIDE];
        float logits[SIDE];
        unsigned words[SIDE];
#pragma unroll
        for (int i = 0; i < SIDE; ++i) {
            const int further = (round + i) * THREADS, pixel = start + further;
            const bool own = FULL || (pixel >= from && pixel < from + OWN);
            places[i] = STEADY ? logit_at(start) + 4 * LOGIT_PITCH * (further / WIDTH + further / PLANE) : logit_at(pixel);
            words[i] = own ? glance(MASKS + start / 32 * 4 + further / 8) : 0;
            logits[i] = own ? at<int>(places[i]) * (1 / UNIT) + (IMAGES == 1 ? only : share(image_of(pixel))) : 0;
        }
#pragma unroll
        for (int i = 0; i < SIDE; ++i) {
            const int further = (round + i) * THREADS, pixel = start + further;
            const bool active = words[i] >> lane & 1;
            float bound = a.bound;
            if (active) at<int>(places[i]) = 0;  // for the next head
            if (DETAILED && active) {
                const int first = anew(blockIdx.x) / CLUSTER * IMAGES;
                const long long place = ((long long)unit * a.batch + first) * PLANE + pixel;
                if (a.bounds) bound = a.bounds[place];
                if (a.probs) a.probs[place] = a.keep_logits ? logits[i] : __fdividef(1, 1 + __expf(-logits[i]));
            }
            // minus infinity, which is below all other numbers, is exceeded by whatever the logit is
            const bool always = bound < -3.402823466e38f;
            const unsigned gone = __ballot_sync(~0u, active && (logits[i] > bound || always));
            if (gone == 0) continue;
            halted = true;
            if (gone >> lane & 1) at<unsigned char>(STEPS + pixel) = unit + 1;
            // no other warp of the CTA has this word; other CTAs may change bits that are not the CTA's
            const int word = MASKS + start / 32 * 4 + further / 8;
            __syncwarp();
            if (CLUSTER == 1 && lane == 0) at<unsigned>(word) = words[i] & ~gone;
            if (CLUSTER > 1 && lane < CLUSTER) put_and(lane, word, ~gone);
        }
    }
    return halted;
}
DEVICE bool decide(const Args& a, int unit) {
    return a.bounds || a.probs ? decide_by<true>(a, unit) : decide_by<false>(a, unit);
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
