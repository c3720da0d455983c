// How a block begins and ends.
#pragma once

// Pixels of what a CTA makes, with so many rows more above and below.
DEVICE int first_pixel(int more) { return CLUSTER == 1 ? 0 : band_from(more) * WIDTH; }
DEVICE int end_pixel(int more, int images) { return CLUSTER == 1 ? images * PLANE : band_to(more) * WIDTH; }

#if ENTRY_STRIDE == 1
// u = stem(images). Four numbers a pixel in x, the fourth 0; k = 4 · tap + colour, in three steps of 16.
DEVICE void enter(const Args& a, int first, int images) {
    const int lane = threadIdx.x % 32;
    clear(X, up(SLOTS * 8));
    __syncthreads();
#pragma unroll 4
    for (int pixel = first_pixel(2) + threadIdx.x; pixel < end_pixel(2, images); pixel += THREADS) {
        const int row = pixel / WIDTH % HEIGHT, column = pixel % WIDTH;
        const half_t* from = a.input + (first + image_of(pixel)) * a.image_stride + row * a.row_stride + column * a.column_stride;
        const unsigned red = from[0], green = from[a.channel_stride], blue = from[2 * a.channel_stride];
        at<uint2>(X + 8 * slot_of(pixel)) = make_uint2(red | green << 16, blue);
    }
    __syncthreads();
    for (int tile = first_pixel(1) / 16 + threadIdx.x / 32; tile * 16 < end_pixel(1, images); tile += WARPS) {
        float c[CHUNKS][4];
#pragma unroll
        for (int n = 0; n < CHUNKS; ++n) c[n][0] = c[n][1] = c[n][2] = c[n][3] = 0;
        int pixel[2];
        for (int half = 0; half < 2; ++half) pixel[half] = tile * 16 + lane / 4 + 8 * half;
#pragma unroll
        for (int step = 0; step < 3; ++step) {
            unsigned rows[4];
#pragma unroll
            for (int r = 0; r < 4; ++r) {
                const int tap = 4 * step + 2 * (r / 2) + lane % 4 / 2;
                const int shift = tap < 9 ? (tap / 3 - 1) * PITCH + tap % 3 - 1 : 0;  // weights beyond are 0
                const int at_pixel = pixel[r % 2] < PIXELS ? pixel[r % 2] : PIXELS - 1;
                rows[r] = at<unsigned>(X + 8 * (slot_of(at_pixel) + shift) + 4 * (lane % 2));
            }
#pragma unroll
            for (int n = 0; n < CHUNKS / 2; ++n) {
                const uint4 w = a.stem[(step * (CHUNKS / 2) + n) * 32 + lane];
                multiply(c[2 * n], rows, w.x, w.y);
                multiply(c[2 * n + 1], rows, w.z, w.w);
            }
        }
#pragma unroll
        for (int half = 0; half < 2; ++half)
            if (pixel[half] < PIXELS)
#pragma unroll
                for (int n = 0; n < CHUNKS; ++n)
                    at<unsigned>(home_at(pixel[half], n) + 4 * (lane % 4)) = pack(c[n][2 * half], c[n][2 * half + 1]);
    }
    __syncthreads();
    clear(X, X_BYTES);
    __syncthreads();
}
#elif ENTRY_STRIDE == 0
// u is given.
DEVICE void enter(const Args& a, int first, int images) {
    clear(X, X_BYTES);
    __syncthreads();
#pragma unroll 4
    for (int i = first_pixel(1) * CHUNKS + threadIdx.x; i < end_pixel(1, images) * CHUNKS; i += THREADS)
        at<uint4>(home_at(i / CHUNKS, i % CHUNKS)) = reinterpret_cast<const uint4*>(a.input)[(long long)first * PLANE * CHUNKS + i];
    __syncthreads();
}
#else
// The first convolution of a unit of stride 2, into y, and its shortcut, into u: means of 2×2, zeros beside.
DEVICE void enter(const Args& a, int first, int images) {
    constexpr int LANES = THREADS / (IN / 8);  // pixels at a time
    HeadOf<true> none;
    const int chunk = threadIdx.x % (IN / 8);
    const Norm norm(a.norms, IN, chunk);
    for (int start = 0; start < images; start += AT_ONCE) {
        const int pixels = (images - start < AT_ONCE ? images - start : AT_ONCE) * PLANE;
        clear(X, X_BYTES);
        __syncthreads();
        for (int i = first_pixel(1) + threadIdx.x / (IN / 8); i < (CLUSTER == 1 ? pixels : end_pixel(1, 1)) && threadIdx.x < LANES * (IN / 8); i += LANES) {
            const int pixel = start * PLANE + i, row = pixel / WIDTH % HEIGHT, column = pixel % WIDTH;
            const half_t* from = a.input + (((long long)(first + image_of(pixel)) * 2 * HEIGHT + 2 * row) * 2 * WIDTH + 2 * column) * IN + 8 * chunk;
            float mean[8] = {0, 0, 0, 0, 0, 0, 0, 0};
#pragma unroll
            for (int corner = 0; corner < 4; ++corner) {
                const uint4 u = *reinterpret_cast<const uint4*>(from + (corner / 2 * 2 * WIDTH + corner % 2) * IN);
                at<uint4>(X + 16 * (in_slot(i) + corner / 2 * IN_PITCH + corner % 2) + IN_PLANE * chunk) = norm(u);
                const unsigned parts[4] = {u.x, u.y, u.z, u.w};
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const float2 v = unpack(parts[j]);
                    mean[2 * j] += v.x / 4;
                    mean[2 * j + 1] += v.y / 4;
                }
            }
            at<uint4>(home_at(pixel, CHUNKS / 4 + chunk)) =
                make_uint4(pack(mean[0], mean[1]), pack(mean[2], mean[3]), pack(mean[4], mean[5]), pack(mean[6], mean[7]));
        }
        const Weights<Source<true, true>> weights(a.weights);
        meet();
        convolve<true, true>(weights, Rows{false, start * PLANE + first_pixel(0), CLUSTER == 1 ? pixels : BAND * WIDTH}, none);
        __syncthreads();
    }
    clear(X, X_BYTES);
    __syncthreads();
}
#endif

// A thread reports as many pixels as a store takes.
constexpr int AT_A_TIME = BAND * WIDTH % 4 ? 1 : 4;
template <class T> struct alignas(AT_A_TIME == 4 ? 16 : sizeof(T)) Pixels { T of[AT_A_TIME]; };
template <class T> DEVICE Pixels<T>& pixels_at(T* from, long long place) {
    return *reinterpret_cast<Pixels<T>*>(from + place);
}

DEVICE Pixels<long long> report_steps(const Args& a, long long place, int pixel) {
    Pixels<long long> steps;
    Pixels<float> cost;
#pragma unroll
    for (int v = 0; v < AT_A_TIME; ++v) cost.of[v] = steps.of[v] = at<unsigned char>(STEPS + pixel + v);
    pixels_at(a.steps, place) = steps;
    pixels_at(a.cost, place) = cost;
    return steps;
}

// Halting probabilities of steps that were not asked are 1.
DEVICE void report(const Args& a, int first, int images) {
    constexpr int V = AT_A_TIME, BATCH = 6;
    if (a.nan && first == 0 && rank() == 0 && threadIdx.x == 0) *a.nan = 0x7fc00000;
    for (int pixel = first_pixel(0) + threadIdx.x * V; pixel < end_pixel(0, images); pixel += THREADS * V) {
        const long long place = (long long)first * PLANE + pixel, stride = (long long)a.batch * PLANE;
        const Pixels<long long> steps = report_steps(a, place, pixel);
        if (!a.probs) continue;
        int asked[V], most = 0, least = a.units;
        float left[V];
        Pixels<float> expected;
#pragma unroll
        for (int v = 0; v < V; ++v) {
            const int ran = (int)steps.of[v];
            asked[v] = ran < a.units ? ran : a.units - 1;
            most = asked[v] > most ? asked[v] : most, least = asked[v] < least ? asked[v] : least;
            left[v] = expected.of[v] = 1;
        }
        for (int unit = 0; unit < a.units; unit += BATCH) {
            Pixels<float> probs[BATCH];
#pragma unroll
            for (int b = 0; b < BATCH; ++b)
                if (unit + b < most) probs[b] = pixels_at(a.probs, (unit + b) * stride + place);
#pragma unroll
            for (int b = 0; b < BATCH; ++b) {
#pragma unroll
                for (int v = 0; v < V; ++v)
                    if (unit + b < asked[v]) {
                        left[v] *= a.keep_logits ? 1 / (1 + __expf(probs[b].of[v])) : 1 - probs[b].of[v];
                        expected.of[v] += left[v];
                    } else {
                        probs[b].of[v] = a.keep_logits ? 1 / 0.0f : 1;
                    }
                if (unit + b >= least && unit + b < a.units) pixels_at(a.probs, (unit + b) * stride + place) = probs[b];
            }
        }
        pixels_at(a.expected, place) = expected;
    }
}

#if LAST
DEVICE void leave(const Args& a, int first, int images) {
    for (int i = threadIdx.x; i < images * CHANNELS; i += THREADS) {
        const int c = i % CHANNELS;
        const float scale = a.last[c], shift = a.last[CHANNELS + c];
        float sum = 0;
        for (int p = first_pixel(0); p < end_pixel(0, 1); ++p) {
            const float2 u = unpack(at<unsigned>(home_at(i / CHANNELS * PLANE + p, c / 8) + 4 * (c % 8 / 2)));
            const float v = (c % 2 ? u.y : u.x) * scale + shift;
            sum += v < 0 ? 0 : v;
        }
        put(0, SUMS + 4 * (rank() * CHANNELS + i), sum / PLANE);
    }
    meet();
    if (rank() > 0) return;
    for (int i = threadIdx.x; CLUSTER > 1 && i < CHANNELS; i += THREADS)
        for (int r = 1; r < CLUSTER; ++r)
            at<float>(SUMS + 4 * i) = at<float>(SUMS + 4 * i) + at<float>(SUMS + 4 * (r * CHANNELS + i));
    if (CLUSTER > 1) __syncthreads();
    for (int i = threadIdx.x; i < images * CLASSES; i += THREADS) {
        const int image = i / CLASSES, k = i % CLASSES;
        const float* weights = a.last + 2 * CHANNELS;
        float logit = weights[CLASSES * CHANNELS + k];
        for (int c = 0; c < CHANNELS; ++c) logit += weights[k * CHANNELS + c] * at<float>(SUMS + 4 * (image * CHANNELS + c));
        a.output[(long long)first * CLASSES + i] = pack(logit, 0) & 0xffff;
    }
}
#else
DEVICE void leave(const Args& a, int first, int images) {
    for (int i = first_pixel(0) * CHUNKS + threadIdx.x; i < end_pixel(0, images) * CHUNKS; i += THREADS)
        reinterpret_cast<uint4*>(a.output)[(long long)first * PLANE * CHUNKS + i] =
            at<uint4>(home_at(i / CHUNKS, i % CHUNKS));
}
#endif
