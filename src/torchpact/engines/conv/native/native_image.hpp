// One image of a block.

#pragma once

#include <cmath>

#include "native_seat.hpp"
#include "team.hpp"

namespace {

// One image, by one thread or by a team of them that do their parts of each stage.
template <typename T>
class Image {
   public:
    // `member` is the thread that runs it, in so many parts; a team of null: all of them.
    Image(const Block& block, const Call& call, const Shape& shape, char* workspace, int member, int parts,
          Team* team)
        : b(block), call(call), s(shape), team(team), parts(parts) {
        char* at = workspace + member * size_of_seat<T>(b, s);
        for (int t = 0; t < (team ? parts : 1); ++t) seats[t] = make_seat<T>(b, s, at);
        maps = seats[0];
        order = parts > 1 ? maps.together : maps.alone;
    }

    void run(long image) {
        index = image;
        decided = false;
        first_unit();
        for (int unit = 1; unit < b.units && active; ++unit) {
            if (b.heads) ask(unit - 1);
            if (active) next_unit(unit);
        }
        T* output = static_cast<T*>(call.output) + index * s.pixels * b.outputs;
        const long size = s.width * b.outputs;
        share([&](int part, int) {
            for (long y = begin(s.height, part); y < end(s.height, part); ++y)
                for (long i = 0; i < size; i += LANES)
                    store(output + y * size + i, load(maps.state + ((y + 1) * s.row + 1) * b.outputs + i));
        });
    }

   private:
    const Block& b;
    const Call& call;
    const Shape& s;
    Team* const team;
    const int parts;
    Seat<T> seats[MOST_MEMBERS], maps;  // of all threads of a team; the first, which has the maps and lists
    Order order;
    long index = 0, active = 0, near = 0;
    bool decided = false;  // and those that have halted are still on the lists

    struct Counts {
        long active, near;
    };

    // What each of the parts of a stage has of a list.
    long begin(long count, int part) const { return count * part / parts; }
    long end(long count, int part) const { return count * (part + 1) / parts; }

    // A stage: `work(part, member)`, where a member has rows of its maps. All that it reads was written before.
    template <typename Work>
    void share(const Work& work) {
        if (team) return team->share(work);
        for (int part = 0; part < parts; ++part) work(part, 0);
    }

    // What a 3×3 convolution reads. The table of taps is for maps of the output's size.
    Source<T> around(const T* map, const int32_t* places, long channels) const {
        const bool entering = map == maps.input;
        const bool known = !(entering && b.stride > 1) && channels > FEW_CHANNELS;
        return {map, places, entering ? s.in_row : s.row, known ? maps.inside : nullptr};
    }

    // The lists that a part goes by: of a team each has its own, as caches of other cores are far.
    const Seat<T>& lists(int part) const { return seats[team ? part : 0]; }

    float* total(int part) const { return maps.total + part * b.outputs; }

    // Where the last convolution of a unit adds to the state, and to the part's total of it.
    Target<T> sums(const int32_t* places, int part) const {
        return {places, nullptr, nullptr, maps.state, total(part)};
    }

    void first_unit() {
        const UnitWeights w = unit_weights(b, 0);
        const T* input = static_cast<const T*>(call.input) + index * s.in_pixels * b.inputs;
        active = near = s.pixels;
        share([&](int part, int) {
            if (part == 0 || team)
                for (int32_t* list : {lists(part).active, lists(part).near})
                    std::copy(order.all, order.all + s.pixels, list);
            shortcut(input, part);
            if (b.heads && b.local)
                for (long i = begin(s.pixels, part); i < end(s.pixels, part); ++i) maps.live[order.all[i]] = 1;
            for (long i = begin(s.positions, part); i < end(s.positions, part); ++i) maps.survival[i] = 1;
            if (!b.middle) normalize_input(w, input, part);
        });
        if (b.middle) {
            share([&](int part, int member) {
                narrow(w, input, b.inputs, maps.in_order, maps.input, maps.entering, s.in_pixels, part, member);
            });
            widen(w, maps.input, order.strided);
        } else {
            convolutions(w, maps.input, order.strided, b.inputs);
        }
    }

    void normalize_input(const UnitWeights& w, const T* input, int part) {
        const long width = call.width, ci = b.inputs;
        for (long y = begin(call.height, part); y < end(call.height, part); ++y)
            for (long x = 0; x < width; ++x)
                normalize(maps.input + ((y + 1) * s.in_row + x + 1) * ci, input + (y * width + x) * ci, w.scale,
                          w.shift, ci);
    }

    // The mean over stride × stride pixels, of those there are, with channels of zeros before and after.
    void shortcut(const T* input, int part) {
        const long before = (b.outputs - b.inputs) / 2;
        float* sum = total(part);
        std::fill(sum, sum + b.outputs, 0.0f);
        for (long i = begin(s.pixels, part); i < end(s.pixels, part); ++i) {
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
            add(sum + before, target + before, 1.0f);
        }
    }

    template <typename S>
    void add(float* target, const S* source, float share) const {
        for (long c = 0; c < b.inputs; c += LANES) store(target + c, load(target + c) + load(source + c) * share);
    }

    void next_unit(int unit) {
        const UnitWeights w = unit_weights(b, unit);
        const Counts before{active, near};
        share([&](int part, int member) {
            const Counts left = decided ? leave(part, before) : before;
            if (part == 0) active = left.active, near = left.near;
            if (!left.active) return;
            const int32_t* list = lists(part).near;
            if (b.middle)
                narrow(w, maps.state, b.outputs, list, maps.middle, list, left.near, part, member);
            else
                activate(w.scale, w.shift, list, left.near, part);
        });
        decided = false;
        if (!active) return;
        if (b.middle)
            widen(w, maps.middle, nullptr);
        else
            convolutions(w, maps.active_input, nullptr, b.outputs);
    }

    // Both of a unit that has no others: at near pixels, then at active ones. They lie at the places `from` in
    // the source; null: at the same.
    void convolutions(const UnitWeights& w, const T* source, const int32_t* from, long inputs) {
        const long co = b.outputs;
        share([&](int part, int) {
            const int32_t* places = lists(part).near;
            convolve<T>({{w.conv1, 9, inputs, co},
                         around(source, from ? from : places, inputs),
                         {places, maps.middle, w.bias1}},
                        begin(near, part), end(near, part));
        });
        share([&](int part, int) {
            const int32_t* places = lists(part).active;
            convolve<T>({{w.conv2, 9, co, co}, around(maps.middle, places, co), sums(places, part)},
                        begin(active, part), end(active, part));
        });
    }

    // A part of the first convolution of a bottleneck, from listed rows to listed places, with the batch norm
    // before it.
    template <typename S>
    void narrow(const UnitWeights& w, const S* source, long inputs, const int32_t* from, T* target,
                const int32_t* to, long count, int part, int member) {
        T* rows = seats[member].rows;
        by_chunks(count, part, [&](long first, long some) {
            for (long i = 0; i < some; ++i)
                normalize(rows + i * inputs, source + from[first + i] * inputs, w.scale, w.shift, inputs);
            convolve<T>({{w.conv1, 1, inputs, b.middle}, {rows, maps.in_order}, {to + first, target, w.bias1}}, 0,
                        some);
        });
    }

    // The other two, at active pixels, which have these places in what the first one has left; null: the same.
    void widen(const UnitWeights& w, const T* source, const int32_t* given_from) {
        const long m = b.middle;
        share([&](int part, int member) {
            const int32_t* places = lists(part).active;
            const int32_t* from = given_from ? given_from : places;
            T* rows = seats[member].rows;
            by_chunks(active, part, [&](long first, long some) {
                convolve<T>({{w.conv2, 9, m, m}, around(source, from + first, m), {maps.in_order, rows, w.bias2}},
                            0, some);
                convolve<T>({{w.conv3, 1, m, b.outputs}, {rows, maps.in_order}, sums(places + first, part)},
                            0, some);
            });
        });
    }

    // A part of a list, in chunks that are nearly equal.
    template <typename Work>
    void by_chunks(long count, int part, const Work& work) {
        const long start = begin(count, part), size = end(count, part) - start, chunks = (size + CHUNK - 1) / CHUNK;
        for (long i = 0; i < chunks; ++i) {
            const long first = size * i / chunks;
            work(start + first, size * (i + 1) / chunks - first);
        }
    }

    // A part of batch norm and ReLU in all rows that the listed places can see.
    void activate(const float* scale, const float* shift, const int32_t* list, long count, int part) {
        int32_t least = list[0], most = list[0];
        for (long i = 1; i < count; ++i) least = std::min(least, list[i]), most = std::max(most, list[i]);
        const long top = std::max<long>(least / s.row - 1, 1);
        const long rows = std::min<long>(most / s.row + 1, s.height) - top + 1;
        for (long y = top + begin(rows, part); y < top + end(rows, part); ++y)
            for (long place = y * s.row + 1; place < y * s.row + 1 + s.width; ++place)
                normalize(maps.active_input + place * b.outputs, maps.state + place * b.outputs, scale, shift,
                          b.outputs);
    }

    void ask(int head) {
        const HeadWeights w = head_weights(b, head);
        float common = w.bias[0];
        for (long c = 0; c < b.outputs; ++c) {
            float pooled = 0;
            for (int part = 0; part < parts; ++part) pooled += total(part)[c];
            pooled /= s.pixels;
            if (b.norm) {
                pooled = pooled * w.pooled_scale[c] + w.pooled_shift[c];
                pooled = pooled < 0 ? 0 : pooled;
            }
            common += w.linear[c] * pooled;
        }
        if (!b.local) {
            const bool halts = exceeds(common, bound(head, 0));
            note(head, 0, common, halts);
            if (halts) active = near = 0;
            return;
        }
        if (b.norm) {
            share([&](int part, int) { activate(w.scale, w.shift, lists(part).active, active, part); });
            decisions(head, maps.active_input, w.conv, common);
        } else {
            decisions(head, maps.state, w.conv, common);
        }
        decided = true;
    }

    // Take what has halted off a part's lists, as the next stage begins; return how many are left.
    Counts leave(int part, const Counts& before) {
        if (part && !team) return {active, near};  // the first part has the same lists
        const Seat<T>& own = lists(part);
        Counts left = before;
        left.active = filter(own.active, before.active, maps.live);
        if (left.active < before.active && left.active) {
            dilate(own);
            left.near = filter(own.near, before.near, own.mark);
        }
        return left;
    }

    // Those of a patch need the logits of all of its pixels.
    template <typename S>
    void decisions(int head, const S* map, const float* weight, float common) {
        share([&](int part, int) {
            local_logits(map, weight, common, part);
            if (b.group == 1) decide_all(head, part);
        });
        if (b.group > 1) share([&](int part, int) { decide_all(head, part); });
    }

    void decide_all(int head, int part) {
        const int32_t* list = lists(part).active;
        for (long i = begin(active, part); i < end(active, part); ++i) decide(head, list[i]);
    }

    template <typename S>
    void local_logits(const S* map, const float* weight, float common, int part) {
        long i = begin(active, part);
        const long last = end(active, part);
        const int32_t* list = lists(part).active;
        for (; i + 4 <= last; i += 4) products<4>(map, list + i, weight, common);
        for (; i < last; ++i) products<1>(map, list + i, weight, common);
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
        const long position = maps.position[place], corner = maps.corner[place], group = b.group;
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

    void dilate(const Seat<T>& own) {
        const uint8_t* live = maps.live;
        for (long i = 1; i < s.places - 1; ++i) own.spread[i] = live[i - 1] | live[i] | live[i + 1];
        for (long i = s.row; i < s.places - s.row; ++i)
            own.mark[i] = own.spread[i - s.row] | own.spread[i] | own.spread[i + s.row];
    }
};

}  // namespace
