// Where the time of a unit goes: compiled with TORCHPACT_STAMPS, every warp notes the clock where phases meet; else
// nothing is left of it.
#pragma once

#ifdef TORCHPACT_STAMPS
constexpr int STAMPS = 12, STAMPED = 528;  // in a unit; CTAs that do so
DEVICE void stamp(long long* stamps, int units, int unit, int phase) {
    if (threadIdx.x % 32 == 0 && blockIdx.x < STAMPED)
        stamps[((blockIdx.x * units + unit) * STAMPS + phase) * WARPS + threadIdx.x / 32] = clock64();
}
#define STAMP(phase) stamp(a.stamps, a.units, unit, phase)
#else
#define STAMP(phase)
#endif
