// recurrent_cluster.cu as plain C++, with a function that launches it.
#define EMULATED
#include "recurrent_cluster.cu"

static const Args* arguments;

extern "C" int shared_bytes() { return sizeof(Shared); }

extern "C" const char* emulate(const Args* args, int clusters, int reverse) {
    static std::vector<char> stacks((size_t)emulator::FIBERS * emulator::STACK);
    arguments = args, gridDim.x = clusters * CTAS, emulator::fault[0] = 0;
    emulator::body = [] { read_sequences(*arguments); };
    for (int i = 0; i < clusters && !emulator::fault[0]; ++i)
        emulator::run_cluster(stacks, (reverse ? clusters - 1 - i : i) * CTAS, reverse);
    return emulator::fault[0] ? emulator::fault : nullptr;
}
