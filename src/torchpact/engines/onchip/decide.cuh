// Who goes on: the heads' decisions, and the list that they make.
#pragma once

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
        for (int image = 0; image < IMAGES; ++image)
            if (pixel >= image * PLANE && pixel < (image + 1) * PLANE) logit += pooled[image];
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
        for (int d = 0; d < 8; ++d) {  // places that other classes leave
            const int left = room(d) - total[d];
            if (over < left) return first + offset(d) + 8 * (total[d] + over);
            over -= left > 0 ? left : 0;
        }
        return first;  // not reached: there are as many places as pixels
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
