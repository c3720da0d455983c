// Shared memory that is watched: two threads that touch the same place, one of them writing, must have a barrier between
// them, or if they are of one warp, a __syncwarp; as racecheck of NVIDIA's compute-sanitizer demands.
#pragma once

namespace emulator {
struct Touched { int epoch = -1, meeting = -1, sync = 0, thread = 0; };  // by whom, after which barriers and which __syncwarp
struct Place { Touched read, write; unsigned long long warps = 0; bool many = false, atomic = false; };  // all that read since the barrier
static Place places[CLUSTER][SHARED_BYTES];
static_assert(WARPS * CLUSTER <= 64, "every warp must have a bit");

// Whether no barrier has been since that the two share: of their CTA, or of all.
inline bool recent(const Touched& other) {
    if (other.meeting != emulator::meeting.generation) return false;
    return other.thread / OF_CTA != cta || other.epoch == barriers[cta].generation;
}
inline bool clash(const Touched& other) {
    const int me = fiber();
    if (!recent(other) || other.thread == me) return false;
    return other.thread / 32 != me / 32 || other.sync == warps[me / 32].syncs;
}
inline void race(const char* what, int byte) {
    static char text[100];
    std::snprintf(text, sizeof text, "a race: %s at byte %d", what, byte);
    fail(text);
}
inline void touch_place(Place& place, int byte, bool writes, bool atomic) {
    const int me = fiber(), warp = me / 32;
    const Touched now{barriers[cta].generation, emulator::meeting.generation, warps[warp].syncs, me};
    if (clash(place.write) && !(atomic && place.atomic)) race(writes ? "two writes" : "a read after a write", byte);
    const bool read_now = recent(place.read);
    if (writes) {
        const bool others = read_now && (place.warps & ~(1ull << warp));
        const bool lanes = read_now && place.many && place.read.sync == now.sync && place.read.thread / 32 == warp;
        if (others || lanes || clash(place.read)) race("a write after a read", byte);
        place.write = now, place.atomic = atomic;
    } else {
        place.warps = (read_now ? place.warps : 0) | 1ull << warp;
        const bool same = read_now && place.read.thread / 32 == warp && place.read.sync == now.sync;
        place.many = same && (place.many || place.read.thread != me);
        place.read = now;
    }
}
// Words, or what is smaller.
inline void touch(int byte, int bytes, bool writes) {
    for (int i = 0; i < bytes; i += 4) touch_place(places[cta][byte + i], byte + i, writes, false);
}
inline void touch_in(int rank, int byte, int bytes, bool atomic) {
    for (int i = 0; i < bytes; i += 4) touch_place(places[rank][byte + i], byte + i, true, atomic);
}

template <class T> struct Watched {
    int byte;
    operator T() const {
        touch(byte, sizeof(T), false);
        T v;
        std::memcpy(&v, memory + byte, sizeof v);
        return v;
    }
    void operator=(T v) const {
        touch(byte, sizeof(T), true);
        std::memcpy(memory + byte, &v, sizeof v);
    }
};
template <class T> struct WatchedArray {
    int byte;
    Watched<T> operator[](int i) const { return {byte + i * (int)sizeof(T)}; }
    WatchedArray operator+(int i) const { return {byte + i * (int)sizeof(T)}; }
    operator T*() const { return reinterpret_cast<T*>(memory + byte); }  // not watched
};
}  // namespace emulator

template <class T> emulator::Watched<T> at(int byte) { return {byte}; }
template <class T> emulator::WatchedArray<T> array(int byte) { return {byte}; }
