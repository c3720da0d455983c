// Who goes on: the heads' decisions, and the list that they make.
#pragma once

// What all logits of an image share; every warp adds up the parts for itself.
DEVICE float pool(int image) {
    constexpr int ALL = WARPS * CHANNELS;
    const int lane = threadIdx.x % 32;
    float dot = lane < WARPS ? at<float>(DOTS + 4 * (image * WARPS + lane)) * (1.0f / PLANE) : 0;
#pragma unroll
    for (int part = 4 * lane; part < ALL; part += 128) {
        const float4 v = at<float4>(PARTS + 4 * (image * ALL + part));
        const float4 w = at<float4>(POOLS + 4 * (part % CHANNELS));
        dot += w.x * v.x + w.y * v.y + w.z * v.z + w.w * v.w;
    }
#pragma unroll
    for (int other = 16; other; other /= 2) dot += __shfl_xor_sync(~0u, dot, other);
    return dot;
}

// A warp does 32 pixels at a time, as many as a word of the masks has bits.
DEVICE void decide(const Args& a, int first, int unit, float bias) {
    const int lane = threadIdx.x % 32;
    float pooled[IMAGES];
#pragma unroll
    for (int image = 0; image < IMAGES; ++image) pooled[image] = pool(image) + bias;
    for (int start = threadIdx.x - lane; start < PIXELS; start += THREADS) {
        const unsigned word = array<unsigned>(MASKS)[start / 32];
        if (word == 0) continue;
        const int pixel = start + lane, row = pixel / WIDTH % HEIGHT, column = pixel % WIDTH;
        const bool active = word >> lane & 1;
        const bool within[2][3] = {{active && row > 0, active, active && row + 1 < HEIGHT},
                                   {column > 0, true, column + 1 < WIDTH}};
        const int centre = product_at(slot_of(pixel), 0);
        float logit = 0;
#pragma unroll
        for (int image = 0; image < IMAGES; ++image)
            if (image_of(pixel) == image) logit = pooled[image];
        if (active) logit += at<float>(centre + CENTRE);
#pragma unroll
        for (int n = 0; n < 8; ++n) {
            const int y = (n < 4 ? n : n + 1) / 3, x = (n < 4 ? n : n + 1) % 3;
            if (within[0][y] && within[1][x]) logit += at<float>(centre + 4 * (n * STRIDE + (y - 1) * PITCH + x - 1));
        }
        const long long place = ((long long)unit * a.batch + first) * PLANE + pixel;
        const bool halts = active && logit > (a.bounds ? a.bounds[place] : a.bound);
        const unsigned left = word & ~__ballot_sync(~0u, halts);
        if (halts) at<unsigned char>(STEPS + pixel) = unit + 1;
        if (lane == 0 && left != word) array<unsigned>(MASKS)[start / 32] = left;
        if (active) a.probs[place] = a.keep_logits ? logit : 1 / (1 + __expf(-logit));
    }
}

DEVICE unsigned widened(unsigned word) { return word | word << 1 | word >> 1; }
DEVICE unsigned turned(unsigned word, int by) { return word << by | word >> (32 - by) % 32; }

// Bit i of lane j becomes bit j of lane i.
template <int N> DEVICE void transpose(unsigned (&words)[N]) {
    const int lane = threadIdx.x % 32;
    unsigned mask = 0xffff;
#pragma unroll
    for (int side = 16; side; side /= 2, mask ^= mask << side) {
        const unsigned taken = lane & side ? mask : ~mask;
        const int by = lane & side ? 32 - side : side;
#pragma unroll
        for (int n = 0; n < N; ++n) {
            const unsigned other = turned(__shfl_xor_sync(~0u, words[n], side), by);
            words[n] = (words[n] & ~taken) | (other & taken);
        }
    }
}

// A part of the list, whose places belong to the eight classes of slots in turn. A class has four lanes, which put their
// pixels there one after the other; what a class has too many goes to places that others leave.
struct Turns {
    int first, count;
    int before;      // pixels of lanes before, of the class
    int room, over;  // places of the class; pixels without, of classes before
    int left, hole;  // places left by classes before; where the next one would be, less eight times `left`

    DEVICE void share(int from, int pixels) {
        const int lane = threadIdx.x % 32;
        first = from;
        const int near = __shfl_xor_sync(~0u, pixels, 8), pair = pixels + near, far = __shfl_xor_sync(~0u, pair, 16);
        before = (lane & 8 ? near : 0) + (lane & 16 ? far : 0);
        const int total = pair + far;
        count = total;
#pragma unroll
        for (int other = 1; other < 8; other *= 2) count += __shfl_xor_sync(~0u, count, other);
        const int offset = (lane - first) & 7;
        room = (count + 7 - offset) / 8;
        const int both = total > room ? total - room : (room - total) << 16;
        int sum = both;
#pragma unroll
        for (int d = 1; d < 8; d *= 2) {
            const int other = __shfl_up_sync(~0u, sum, d);
            if (lane % 8 >= d) sum += other;
        }
        over = (sum - both) & 0xffff, left = (sum - both) >> 16;
        hole = first + offset + 8 * (total - left);
    }
    // Of the lane's pixel of this rank, if it is `there`; all lanes ask at once.
    DEVICE int place(int rank, bool there) const {
        int to = first + ((int)(threadIdx.x - first) & 7) + 8 * rank;
        const bool beyond = there && rank >= room;
        if (__any_sync(~0u, beyond)) {
            const int number = over + rank - room;
#pragma unroll
            for (int c = 0; c < 8; ++c) {
                const int from = __shfl_sync(~0u, left, c), next = __shfl_sync(~0u, hole, c);
                if (beyond && number >= from) to = next + 8 * number;
            }
        }
        return to;
    }
};

// Active pixels of a row, or of one next to it in the same image.
DEVICE unsigned mask(int row, int d) {
    const int within = row % HEIGHT + d, bit = (row + d) * WIDTH;
    if (row >= ROWS || within < 0 || within >= HEIGHT) return 0;
    unsigned word = array<unsigned>(MASKS)[bit / 32] >> bit % 32;
    if (32 % WIDTH && bit % 32) word |= array<unsigned>(MASKS)[bit / 32 + 1] << (32 - bit % 32);
    return word & ALL_COLUMNS;
}

// The list that the masks make: every warp finds out for itself, and writes some lines of it. A lane looks at a row, then
// at what of all rows is in its class.
struct Lists {
    static constexpr unsigned TOPS = ~0u / ((1 << TALL) - 1);  // bits of the uppermost rows of lines, each of TALL
    unsigned own[BLOCKS], others[BLOCKS];  // bits for rows: active pixels and those near, of the lane's
    Turns active, near;

    static DEVICE unsigned of_lines(unsigned word) { return (TALL == 1 ? word : word | word >> 1) & TOPS; }
    static DEVICE int turn_of(int line) { return slot_of(line * TALL * WIDTH) & 7; }

    DEVICE Lists() {
        int pixels = 0, pixels_near = 0;
#pragma unroll
        for (int b = 0; b < BLOCKS; ++b) {
            const int row = 32 * b + threadIdx.x % 32, turn = turn_of(row / TALL);
            const unsigned here = mask(row, 0), around = widened(mask(row, -1) | here | mask(row, 1)) & ALL_COLUMNS;
            unsigned words[2] = {turned(here, turn), turned(around, turn)};
            transpose(words);
            own[b] = words[0], others[b] = of_lines(words[1]) & ~of_lines(own[b]);
            pixels += __popc(of_lines(own[b])), pixels_near += __popc(others[b]);
        }
        active.share(0, pixels);
        near.share(active.count, pixels_near);
    }
    DEVICE void write_line(int b, int line, int ahead, int ahead_near) const {
        const int lane = threadIdx.x % 32, bit = line * TALL - 32 * b;
        const unsigned below = (1u << bit) - 1;
        const bool here = of_lines(own[b]) >> bit & 1, beside = others[b] >> bit & 1;
        const int to = active.place(ahead + __popc(of_lines(own[b]) & below), here);
        const int to_near = near.place(ahead_near + __popc(others[b] & below), beside);
        const int pixel = line * TALL * WIDTH + ((lane - turn_of(line)) & 31);
        const unsigned rows = own[b] >> bit & ((1 << TALL) - 1);
        if (here || beside) array<unsigned short>(LIST)[here ? to : to_near] = pixel | rows << (16 - TALL);
    }
    DEVICE void write() const {
        int ahead = active.before, ahead_near = near.before;
#pragma unroll
        for (int b = 0; b < BLOCKS; ++b) {
            const int from = 32 / TALL * b, to = from + 32 / TALL < ROWS / TALL ? from + 32 / TALL : ROWS / TALL;
            for (int line = from + threadIdx.x / 32; line < to; line += WARPS) write_line(b, line, ahead, ahead_near);
            ahead += __popc(of_lines(own[b])), ahead_near += __popc(others[b]);
        }
    }
};

// Whether pixels have halted since the list was made; every warp finds out for itself.
DEVICE bool changed() {
    bool any = false;
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b) {
        const int row = 32 * b + threadIdx.x % 32;
        any |= row < ROWS && array<unsigned>(PAST)[row] != mask(row, 0);
    }
    return __any_sync(~0u, any);
}

// Add u of pixels of a row that have halted since the last time to the warp's sums. Each part of the lanes takes as many
// columns as it has lanes.
DEVICE void add_halted(int row) {
    constexpr int LANES = CHANNELS < 64 ? CHANNELS / 2 : 32;
    const int lane = threadIdx.x % 32;
    const unsigned now = mask(row, 0), gone = array<unsigned>(PAST)[row] & ~now;
    if (gone == 0) return;
#pragma unroll
    for (int pair = lane % LANES; pair < CHANNELS / 2; pair += LANES) {
        unsigned columns = gone >> lane / LANES * LANES & ~0u >> (32 - LANES);
        float2 sum = make_float2(0, 0);
        for (; columns; columns &= columns - 1) {
            const int pixel = row * WIDTH + lane / LANES * LANES + __ffs(columns) - 1;
            const float2 u = unpack(at<unsigned>(home_at(pixel, pair / 4) + 4 * (pair % 4)));
            sum.x += u.x, sum.y += u.y;
        }
#pragma unroll
        for (int other = LANES; other < 32; other *= 2) {
            sum.x += __shfl_xor_sync(~0u, sum.x, other);
            sum.y += __shfl_xor_sync(~0u, sum.y, other);
        }
        float2& to = at<float2>(PARTS + 8 * ((row / HEIGHT * WARPS + threadIdx.x / 32) * (CHANNELS / 2) + pair));
        if (lane < LANES) to.x += sum.x, to.y += sum.y;
    }
    __syncwarp();
    if (lane == 0) array<unsigned>(PAST)[row] = now;
}
DEVICE void add_halted() {
    for (int row = threadIdx.x / 32; row < ROWS; row += WARPS) add_halted(row);
}

// x = relu(norm(u)) at pixels that are within two of active ones: at all of them, or at those alone that are not active
// themselves. A lane looks at the masks for a row.
DEVICE void refresh(bool all) {
    const int lane = threadIdx.x % 32, chunk = lane % CHUNKS, start = lane / CHUNKS;
    const Norm norm(array<float>(NORMS), CHANNELS, chunk);
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b) {
        const int own = 32 * b + lane;
        const unsigned here = mask(own, 0), within = mask(own, -2) | mask(own, -1) | here | mask(own, 1) | mask(own, 2);
        const unsigned around = widened(widened(within)) & ALL_COLUMNS & (all ? ~0u : ~here);
        for (int row = 32 * b + threadIdx.x / 32; row < 32 * (b + 1) && row < ROWS; row += WARPS) {
            const unsigned columns = __shfl_sync(~0u, around, row % 32);
            if (columns == 0) continue;
            const int from = U + 16 * row * WIDTH + HOME_PLANE * chunk, turn = start + row + row / HEIGHT;
            const int to = X + slot_at(slot_of(row * WIDTH) + start, chunk);
#pragma unroll
            for (int column = 0; column < WIDTH; column += 32 / CHUNKS)
                if (start + column < WIDTH && columns >> (start + column) & 1)
                    at<uint4>(to + 16 * column) = norm(at<uint4>(from + 16 * ((turn + column) % WIDTH)));
        }
    }
}

// The border of y, where products were.
DEVICE void clear_border() {
    constexpr int COUNT = HEIGHT + PITCH;  // slots of an image: a row, and one in front of every row
    for (int i = threadIdx.x; i < (IMAGES * COUNT + PITCH + 1) * CHUNKS; i += THREADS) {
        const int image = i / CHUNKS / COUNT, k = i / CHUNKS % COUNT;
        const int slot = image * (HEIGHT + 1) * PITCH + (k < PITCH ? k : (k - PITCH + 1) * PITCH);
        at<uint4>(Y + slot_at(slot, i % CHUNKS)) = make_uint4(0, 0, 0, 0);
    }
}
