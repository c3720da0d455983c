// The kernel as plain C++, with a function that launches it.
#define EMULATED
#include "kernel.cu"

static const Args* arguments;

// What was done since the last time.
extern "C" void count(long long* loads, long long* waves, long long* products) {
    *loads = emulator::loads, *waves = emulator::waves, *products = emulator::products;
    emulator::loads = emulator::waves = emulator::products = 0;
}

extern "C" const char* emulate(const Args* args, int ctas, int reverse) {
    const std::unique_ptr<char[]> stacks(new char[(size_t)emulator::THREADS * emulator::STACK]);  // of which little is touched
    arguments = args;
    emulator::fault[0] = 0;
    emulator::body = [] { onchip_block(*arguments); };
    if (ctas % CLUSTER) return "CTAs that are no whole clusters";
    const int clusters = ctas / CLUSTER;
    for (int i = 0; i < clusters && !emulator::fault[0]; ++i)
        emulator::run_cluster(reverse ? clusters - 1 - i : i, stacks.get(), reverse);
    return emulator::fault[0] ? emulator::fault : nullptr;
}
