// A block of residual units, computed at its active pixels only; native.py compiles and calls this.
//
// Maps lie in memory pixel by pixel, channels last, within a border of zeros, so that a pixel is one number:
// its place in the bordered map. A convolution takes a list of places and computes PIXELS of them at a time for
// 16 or 32 output channels, all in registers; wherever the pixels lie they cost the same, and nothing is
// gathered. Images go one by one to the threads; those left over, when the batch is no multiple of the threads,
// are shared by all.

#include "native_image.hpp"

extern "C" {

// The bytes that one thread works in.
int64_t torchpact_workspace(const Block* block, int32_t height, int32_t width) {
    char* at = nullptr;
    make_seat(*block, Shape(*block, height, width), at);
    return at - static_cast<char*>(nullptr);
}

// Fill the tables of a zeroed workspace, before its first use.
void torchpact_prepare(const Block* block, const Call* call) {
    const Shape shape(*block, call->height, call->width);
    char* at = static_cast<char*>(call->workspace);
    for (int t = 0; t < call->threads; ++t) fill_tables(*block, shape, make_seat(*block, shape, at), call->threads);
}

void torchpact_run(const Block* block, const Call* call) {
    const Shape shape(*block, call->height, call->width);
    const int64_t seat = torchpact_workspace(block, call->height, call->width);
    char* workspace = static_cast<char*>(call->workspace);
#pragma omp parallel num_threads(call->threads)
    {
        const int team = omp_get_num_threads(), member = omp_get_thread_num();
        const long alone = call->batch / team * team;
        if (alone) {
            Image image(*block, *call, shape, workspace + member * seat, 0, 1);
#pragma omp for schedule(dynamic, 1)
            for (long i = 0; i < alone; ++i) image.run(i);
        }
        if (alone < call->batch) {
            Image image(*block, *call, shape, workspace, member, team);
#pragma omp barrier
            for (long i = alone; i < call->batch; ++i) image.run(i);
        }
    }
}
}
