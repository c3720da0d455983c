// The list of pixels that go on, and what is due to those that have halted.
#pragma once

// A pixel of a list, or as many as TALL says; which of them are active.
struct Entry {
    int bits;
    DEVICE int pixel(int t = 0) const { return (bits & ((1 << (16 - TALL)) - 1)) + t * WIDTH; }
    DEVICE bool active(int t) const { return bits >> (16 - TALL + t) & 1; }
};

// What a phase goes through: entries of the list from a place on, or consecutive pixels.
struct Rows {
    bool listed;
    int first, count;
    DEVICE Entry operator[](int i) const {
        const int in = first + (i < count - 1 ? i : count - 1);  // the last tile is filled up
        return Entry{listed ? array<unsigned short>(LIST)[in] : in};
    }
};

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

    DEVICE Turns(int first, int count, int pixels) : first(first), count(count) {  // in all, and of the lane
        const int lane = threadIdx.x % 32;
        const int near = __shfl_xor_sync(~0u, pixels, 8), pair = pixels + near, far = __shfl_xor_sync(~0u, pair, 16);
        before = (lane & 8 ? near : 0) + (lane & 16 ? far : 0);
        const int total = pair + far;
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
    const int within = row % HEIGHT + d;
    const unsigned bit = (row + d) * WIDTH;
    if (row >= ROWS || within < 0 || within >= HEIGHT) return 0;
    unsigned word = array<unsigned>(MASKS)[bit / 32] >> bit % 32;
    if (32 % WIDTH && bit % 32) word |= array<unsigned>(MASKS)[bit / 32 + 1] << (32 - bit % 32);
    return word & ALL_COLUMNS;
}

// Bits of lines, each of TALL rows, at the uppermost of them, where bits are rows.
DEVICE unsigned of_lines(unsigned word) { return (TALL == 1 ? word : word | word >> 1) & ~0u / ((1 << TALL) - 1); }
// What has to be turned so that all pixels of a class are together.
DEVICE int turn_of(int line) { return slot_of(line * TALL * WIDTH) & 7; }

// The list that the masks make has three parts: lines with active pixels; others with pixels within one of such, whose y
// the second convolution reads; others with pixels within two, whose x the first one reads. Every warp counts all, and
// writes some lines of a part. A lane looks at a row, then at what of all rows is in its class.
struct Lists {
    static constexpr int PARTS = 3;
    static_assert(WARPS >= PARTS, "every part must have a warp");
    int counts[PARTS] = {0, 0, 0};  // lines of each; shared memory has them too
    bool none = true;  // are active, in all CTAs
    unsigned mine[BLOCKS];  // of the warp's part, bits for rows

    const int warp = anew(threadIdx.x) / 32, part = warp % PARTS;
    // A row and those around, of lines; pixels that are active stay in rows.
    static DEVICE void look(unsigned (&words)[PARTS], int row) {
        const unsigned here = mask(row, 0), one = widened(mask(row, -1) | here | mask(row, 1));
        const unsigned two = widened(one | widened(mask(row, -2) | mask(row, 2)));
        words[0] = here, words[1] = one & ALL_COLUMNS, words[2] = two & ALL_COLUMNS;
        unsigned lines = here;
        if (TALL == 2) {
            lines |= __shfl_xor_sync(~0u, lines, 1);
            words[1] |= __shfl_xor_sync(~0u, words[1], 1), words[2] |= __shfl_xor_sync(~0u, words[2], 1);
        }
        words[2] &= ~words[1], words[1] &= ~lines;
    }
    DEVICE Lists() {
#pragma unroll
        for (int b = 0; b < BLOCKS; ++b) {
            const int row = 32 * b + anew(threadIdx.x) % 32;
            unsigned words[PARTS];
            look(words, row);
            if (CLUSTER > 1) {
                none &= !__any_sync(~0u, words[0]);
                if (!own_row(row)) words[0] = words[1] = words[2] = 0;
            }
            const unsigned lines = TALL == 2 ? words[0] | __shfl_xor_sync(~0u, words[0], 1) : words[0];
#pragma unroll
            for (int p = 0; p < PARTS; ++p)
                counts[p] += __reduce_add_sync(~0u, row % TALL ? 0u : __popc(p ? words[p] : lines));
            mine[b] = turned(part == 0 ? words[0] : part == 1 ? words[1] : words[2], turn_of(row / TALL));
        }
        if (CLUSTER == 1) none = counts[0] == 0;
    }
    // Every n-th line, of n warps of the part.
    static constexpr DEVICE unsigned every(int n) {
        unsigned bits = 0;
        for (int bit = 0; bit < 32; bit += n * TALL) bits |= 1u << bit;
        return bits;
    }
    DEVICE unsigned own_lines() const {
        constexpr int LEAST = WARPS / PARTS;
        return (part < WARPS % PARTS ? every(LEAST + 1) : every(LEAST)) << warp / PARTS * TALL;
    }
    DEVICE void write() {
        const int lane = threadIdx.x % 32;
        const int count = part == 0 ? counts[0] : part == 1 ? counts[1] : counts[2];
        if (threadIdx.x < PARTS)
            at<int>(COUNTS + 4 * threadIdx.x) = threadIdx.x == 0 ? counts[0] : threadIdx.x == 1 ? counts[1] : counts[2];
        if (count == 0) return;
        int pixels = 0;
        transpose(mine);
#pragma unroll
        for (int b = 0; b < BLOCKS; ++b) pixels += __popc(of_lines(mine[b]));
        const Turns turns(part == 0 ? 0 : part == 1 ? counts[0] : counts[0] + counts[1], count, pixels);
        int ahead = turns.before;
#pragma unroll
        for (int b = 0; b < BLOCKS; ++b) {
            const unsigned lines = of_lines(mine[b]);
            // those of the warp, as many rounds as the lane with most has
            for (unsigned left = lines & own_lines(); __any_sync(~0u, left != 0); left &= left - 1) {
                const bool there = left != 0;
                const int bit = there ? __ffs(left) - 1 : 0, line = (32 * b + bit) / TALL;
                const int to = turns.place(ahead + __popc(lines & ((1u << bit) - 1)), there);
                const int pixel = line * TALL * WIDTH + ((lane - turn_of(line)) & 31);
                const unsigned rows = part == 0 ? mine[b] >> bit & ((1 << TALL) - 1) : 0;
                if (there) array<unsigned short>(LIST)[to] = pixel | rows << (16 - TALL);
            }
            ahead += __popc(lines);
        }
    }
};

// The list of all pixels, of whom all are active, as Lists would have it: eight divide the width.
DEVICE void list_all() {
    for (int place = threadIdx.x; place < PIXELS / TALL; place += THREADS) {
        const int line = place / WIDTH, column = place % WIDTH / 8 * 8 + ((place - turn_of(line)) & 7);
        array<unsigned short>(LIST)[place] = (line * TALL * WIDTH + column) | ((1 << TALL) - 1) << (16 - TALL);
    }
    if (threadIdx.x < Lists::PARTS) at<int>(COUNTS + 4 * threadIdx.x) = threadIdx.x == 0 ? PIXELS / TALL : 0;
    __syncthreads();
}

// Add u of pixels whose lines have halted since the last time to the warp's sums. A warp has rows of one image, a lane eight
// channels of some columns.
DEVICE void add_halted() {
    constexpr int AT_ONCE_COLUMNS = 32 / CHUNKS;
    const int thread = anew(threadIdx.x), lane = thread % 32, chunk = lane % CHUNKS;
    const int warp = thread / 32, image = warp % IMAGES, team = (WARPS - 1 - image) / IMAGES + 1;
    float sums[8] = {0, 0, 0, 0, 0, 0, 0, 0};
    bool some = false;
    for (int row = image * HEIGHT + rank() * BAND + warp / IMAGES; row < (image + 1) * HEIGHT && own_row(row); row += team) {
        const unsigned now = mask(row, 0) | (TALL == 2 ? mask(row ^ 1, 0) : 0), gone = array<unsigned>(PAST)[row] & ~now;
        if (gone == 0) continue;
        some = true;
#pragma unroll
        for (int first = 0; first < WIDTH; first += AT_ONCE_COLUMNS) {
            const int column = first + lane / CHUNKS;
            const bool there = gone >> column & 1;
            const uint4 u = at<uint4>(home_at(row * WIDTH + (column < WIDTH ? column : 0), chunk));
            const unsigned parts[4] = {u.x, u.y, u.z, u.w};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float2 v = unpack(parts[i]);
                sums[2 * i] += there ? v.x : 0, sums[2 * i + 1] += there ? v.y : 0;
            }
        }
        __syncwarp();
        if (lane == 0) array<unsigned>(PAST)[row] = now;
    }
    if (!some) return;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
#pragma unroll
        for (int other = CHUNKS; other < 32; other *= 2) sums[i] += __shfl_xor_sync(~0u, sums[i], other);
        const int to = SUMS + 4 * (warp * CHANNELS + 8 * chunk + i);
        if (lane < CHUNKS) at<float>(to) = at<float>(to) + sums[i];
    }
}

// x = relu(norm(u)) at pixels of the list, or at consecutive ones, when there is no list yet; GIVEN to other CTAs, too. A thread
// reads some before it writes any, which the compiler would not dare.
template <int T, bool GIVEN> DEVICE void refresh(const Rows& rows) {
    constexpr int STEP = THREADS / CHUNKS, SIDE = 4 / T;
    const unsigned thread = anew(threadIdx.x);
    const int chunk = thread % CHUNKS;
    const int start = (THREADS - 1 - thread) / CHUNKS;  // the last ones have least to do else
    if (start >= rows.count) return;
    const Norm norm(array<float>(NORMS), CHANNELS, chunk);
#pragma unroll 1
    for (int i = start; i < rows.count; i += SIDE * STEP) {
        int pixels[SIDE];
        uint4 u[SIDE][T];
#pragma unroll
        for (int s = 0; s < SIDE; ++s) {
            pixels[s] = rows[i + s * STEP].pixel();
#pragma unroll
            for (int t = 0; t < T; ++t) u[s][t] = at<uint4>(home_at(pixels[s] + t * WIDTH, chunk));
        }
#pragma unroll
        for (int s = 0; s < SIDE; ++s)
#pragma unroll
            for (int t = 0; t < T; ++t) {
                const int pixel = pixels[s] + t * WIDTH, to = X + slot_at(slot_of(pixel), chunk);
                if (s && i + s * STEP >= rows.count) break;
                if (GIVEN) put_pixel(pixel, to, norm(u[s][t]));
                else at<uint4>(to) = norm(u[s][t]);
            }
    }
}
