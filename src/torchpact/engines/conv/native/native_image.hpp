// One image of a block.

#pragma once

#include <omp.h>

#include <cmath>

#include "native_seat.hpp"

namespace {

// One image, by one thread or by a team of them, which then wait for each other after each stage.
template <typename T>
class Image {
   public:
    static constexpr int MAX_TEAM = 64;

    Image(const Block& block, const Call& call, const Shape& shape, char* workspace, int member, int team)
        : b(block), call(call), s(shape), member(member), team(team) {
        char* at = workspace;
        for (int t = 0; t < team; ++t) {
            const Seat<T> seat = make_seat<T>(b, s, at);
            if (t == 0) maps = seat;
            if (t == member) own = seat;
            totals[t] = seat.total;
        }
        order = team > 1 ? own.together : own.alone;
    }

    void run(long image) {
        index = image;
        first_unit();
        for (int unit = 1; unit < b.units; ++unit) {
            if (b.heads) ask(unit - 1);
            if (!active) break;
            next_unit(unit);
        }
        T* output = static_cast<T*>(call.output) + index * s.pixels * b.outputs;
        const long size = s.width * b.outputs;
        for (long y = begin(s.height); y < end(s.height); ++y)
            for (long i = 0; i < size; i += LANES)
                store(output + y * size + i, load(maps.state + ((y + 1) * s.row + 1) * b.outputs + i));
        wait();
    }

   private:
    const Block& b;
    const Call& call;
    const Shape& s;
    const int member, team;
    Seat<T> maps, own;
    Order order;
    float* totals[MAX_TEAM];
    long index = 0, active = 0, near = 0;

    long begin(long count) const { return count * member / team; }
    long end(long count) const { return count * (member + 1) / team; }
    void wait() const {
        if (team > 1) {
#pragma omp barrier
        }
    }

    // What a 3×3 convolution reads. The table of taps is for maps of the output's size.
    Source<T> around(const T* map, const int32_t* places, long channels) const {
        const bool entering = map == maps.input;
        const bool known = !(entering && b.stride > 1) && channels > FEW_CHANNELS;
        return {map, places, entering ? s.in_row : s.row, known ? own.inside : nullptr};
    }

    // Where the last convolution of a unit adds to the state.
    Target<T> sums(const int32_t* places) const { return {places, nullptr, nullptr, maps.state, own.total}; }

    void first_unit() {
        const UnitWeights w = unit_weights(b, 0);
        const T* input = static_cast<const T*>(call.input) + index * s.in_pixels * b.inputs;
        std::fill(own.total, own.total + b.outputs, 0.0f);
        shortcut(input);
        std::copy(order.all, order.all + s.pixels, own.active);
        std::copy(order.all, order.all + s.pixels, own.near);
        active = near = s.pixels;
        if (b.heads && b.local)
            for (long i = begin(s.pixels); i < end(s.pixels); ++i) maps.live[order.all[i]] = 1;
        for (long i = begin(s.positions); i < end(s.positions); ++i) maps.survival[i] = 1;
        if (b.middle) {
            narrow(w, input, b.inputs, own.in_order, maps.input, own.entering, s.in_pixels);
            widen(w, maps.input, order.strided);
            return;
        }
        const long width = call.width, ci = b.inputs;
        for (long y = begin(call.height); y < end(call.height); ++y)
            for (long x = 0; x < width; ++x)
                normalize(maps.input + ((y + 1) * s.in_row + x + 1) * ci, input + (y * width + x) * ci, w.scale,
                          w.shift, ci);
        wait();
        convolutions(w, maps.input, order.strided, ci);
    }

    // The mean over stride × stride pixels, of those there are, with channels of zeros before and after.
    void shortcut(const T* input) {
        const long before = (b.outputs - b.inputs) / 2;
        for (long i = begin(s.pixels); i < end(s.pixels); ++i) {
            const long place = (i / s.width + 1) * s.row + i % s.width + 1;
            const long y = i / s.width * b.stride, x = i % s.width * b.stride;
            const long y_end = std::min<long>(y + b.stride, call.height);
            const long x_end = std::min<long>(x + b.stride, call.width);
            float* target = maps.state + place * b.outputs;
            std::fill(target, target + b.outputs, 0.0f);
            const float share = 1.0f / ((y_end - y) * (x_end - x));
            for (long yy = y; yy < y_end; ++yy)
                for (long xx = x; xx < x_end; ++xx)
                    add(target + before, input + (yy * call.width + xx) * b.inputs, share);
            add(own.total + before, target + before, 1.0f);
        }
    }

    template <typename S>
    void add(float* target, const S* source, float share) const {
        for (long c = 0; c < b.inputs; c += LANES) store(target + c, load(target + c) + load(source + c) * share);
    }

    void next_unit(int unit) {
        const UnitWeights w = unit_weights(b, unit);
        if (b.middle) {
            narrow(w, maps.state, b.outputs, own.near, maps.middle, own.near, near);
            widen(w, maps.middle, own.active);
            return;
        }
        activate(w.scale, w.shift, own.near, near);
        wait();
        convolutions(w, maps.active_input, own.near, b.outputs);
    }

    // Both of a unit that has no others: at near pixels, then at active ones.
    void convolutions(const UnitWeights& w, const T* source, const int32_t* from, long inputs) {
        const long co = b.outputs;
        convolve<T>({{w.conv1, 9, inputs, co}, around(source, from, inputs), {own.near, maps.middle, w.bias1}},
                    begin(near), end(near));
        wait();
        convolve<T>({{w.conv2, 9, co, co}, around(maps.middle, own.active, co), sums(own.active)}, begin(active),
                    end(active));
        wait();
    }

    // The first convolution of a bottleneck, from listed rows to listed places, with the batch norm before it.
    template <typename S>
    void narrow(const UnitWeights& w, const S* source, long inputs, const int32_t* from, T* target,
                const int32_t* to, long count) {
        by_chunks(count, [&](long first, long some) {
            for (long i = 0; i < some; ++i)
                normalize(own.rows + i * inputs, source + from[first + i] * inputs, w.scale, w.shift, inputs);
            convolve<T>({{w.conv1, 1, inputs, b.middle}, {own.rows, own.in_order}, {to + first, target, w.bias1}},
                        0, some);
        });
        wait();
    }

    // The other two, at active pixels, which have these places in what the first one has left.
    void widen(const UnitWeights& w, const T* source, const int32_t* from) {
        const long m = b.middle;
        by_chunks(active, [&](long first, long some) {
            convolve<T>({{w.conv2, 9, m, m}, around(source, from + first, m), {own.in_order, own.rows, w.bias2}},
                        0, some);
            convolve<T>({{w.conv3, 1, m, b.outputs}, {own.rows, own.in_order}, sums(own.active + first)}, 0,
                        some);
        });
        wait();
    }

    // This thread's part of a list, in chunks that are nearly equal.
    template <typename Work>
    void by_chunks(long count, const Work& work) {
        const long start = begin(count), size = end(count) - start, chunks = (size + CHUNK - 1) / CHUNK;
        for (long i = 0; i < chunks; ++i) {
            const long first = size * i / chunks;
            work(start + first, size * (i + 1) / chunks - first);
        }
    }

    // Batch norm and ReLU in all rows that the listed places can see.
    void activate(const float* scale, const float* shift, const int32_t* list, long count) {
        int32_t least = list[0], most = list[0];
        for (long i = 1; i < count; ++i) least = std::min(least, list[i]), most = std::max(most, list[i]);
        const long top = std::max<long>(least / s.row - 1, 1);
        const long rows = std::min<long>(most / s.row + 1, s.height) - top + 1;
        for (long y = top + begin(rows); y < top + end(rows); ++y)
            for (long place = y * s.row + 1; place < y * s.row + 1 + s.width; ++place)
                normalize(maps.active_input + place * b.outputs, maps.state + place * b.outputs, scale, shift,
                          b.outputs);
    }

    void ask(int head) {
        const HeadWeights w = head_weights(b, head);
        float common = w.bias[0];
        for (long c = 0; c < b.outputs; ++c) {
            float pooled = 0;
            for (int t = 0; t < team; ++t) pooled += totals[t][c];
            pooled /= s.pixels;
            if (b.norm) {
                pooled = pooled * w.pooled_scale[c] + w.pooled_shift[c];
                pooled = pooled < 0 ? 0 : pooled;
            }
            common += w.linear[c] * pooled;
        }
        if (!b.local) {
            const bool halts = exceeds(common, bound(head, 0));
            if (member == 0) note(head, 0, common, halts);
            if (halts) active = near = 0;
            return;  // totals change only after the next barrier, once all have read them
        }
        if (b.norm) {
            activate(w.scale, w.shift, own.active, active);
            wait();
            local_logits(maps.active_input, w.conv, common);
        } else {
            local_logits(maps.state, w.conv, common);
        }
        if (b.group > 1) wait();
        for (long i = begin(active); i < end(active); ++i) decide(head, own.active[i]);
        wait();
        const long before = active;
        active = filter(own.active, active, maps.live);
        if (active < before && active) {
            dilate();
            near = filter(own.near, near, own.mark);
        }
    }

    template <typename S>
    void local_logits(const S* map, const float* weight, float common) {
        long i = begin(active);
        for (; i + 4 <= end(active); i += 4) products<4>(map, own.active + i, weight, common);
        for (; i < end(active); ++i) products<1>(map, own.active + i, weight, common);
    }

    // The convolution of a head at COUNT active pixels; the three inputs in a row of the map lie together.
    template <int COUNT, typename S>
    void products(const S* map, const int32_t* places, const float* weight, float common) {
        const long size = 3 * b.outputs;
        const S* source[COUNT];
        for (int p = 0; p < COUNT; ++p) source[p] = map + (places[p] - s.row - 1) * b.outputs;
        Vector total[COUNT] = {};
        for (int row = 0; row < 3; ++row, weight += size)
            for (long c = 0; c < size; c += LANES)
#pragma GCC unroll 4
                for (int p = 0; p < COUNT; ++p)
                    total[p] += load(source[p] + row * s.row * b.outputs + c) * load(weight + c);
        for (int p = 0; p < COUNT; ++p) maps.logits[places[p]] = common + sum(total[p]);
    }

    // Pixels of a patch decide alike, as they take the same mean in the same order; the first takes the notes.
    void decide(int head, long place) {
        const long position = own.position[place], corner = own.corner[place], group = b.group;
        float logit = maps.logits[place];
        if (group > 1) {
            logit = 0;
            for (long i = 0; i < group * group; ++i) logit += maps.logits[corner + i / group * s.row + i % group];
            logit /= group * group;
        }
        const bool halts = exceeds(logit, bound(head, position));
        if (halts) maps.live[place] = 0;
        if (place == corner) note(head, position, logit, halts);
    }

    long at(int head, long position) const { return (head * long(call.batch) + index) * s.positions + position; }

    float bound(int head, long position) const {
        return call.bounds ? call.bounds[at(head, position)] : call.limits[head];
    }

    // Minus infinity is exceeded by all logits.
    static bool exceeds(float logit, float bound) { return logit > bound || bound == -INFINITY; }

    void note(int head, long position, float logit, bool halts) {
        const float small = std::exp(-std::fabs(logit)), less = small / (1 + small), more = 1 / (1 + small);
        call.probs[at(head, position)] = logit < 0 ? less : more;
        if (call.logits) call.logits[at(head, position)] = logit;
        call.steps[at(0, position)] += !halts;
        call.expected[at(0, position)] += maps.survival[position] *= logit < 0 ? more : less;
    }

    void dilate() {
        const uint8_t* live = maps.live;
        for (long i = 1; i < s.places - 1; ++i) own.spread[i] = live[i - 1] | live[i] | live[i + 1];
        for (long i = s.row; i < s.places - s.row; ++i)
            own.mark[i] = own.spread[i - s.row] | own.spread[i] | own.spread[i + s.row];
    }
};

}  // namespace
