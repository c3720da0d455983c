// A block of residual units, computed at its active pixels only; native.py compiles and calls this.
//
// Maps lie in memory pixel by pixel, channels last, within a border of zeros, so that a pixel is one number:
// its place in the bordered map. A convolution takes a list of places and computes PIXELS of them at a time for
// 16 or 32 output channels, all in registers; wherever the pixels lie they cost the same, and nothing is
// gathered. Images go one by one to the threads; those left over, when the batch is no multiple of the threads,
// are shared by all, stage by stage, unless others keep the cores busy: an image that is computed in parts by
// one thread has the same bits.

#include "native_image.hpp"

namespace {

template <typename T>
int64_t workspace_of(const Block& block, int32_t height, int32_t width, int32_t threads) {
    return threads * size_of_seat<T>(block, Shape(block, height, width, threads));
}

template <typename T>
void prepare(const Block& block, const Call& call) {
    const Shape shape(block, call.height, call.width, call.threads);
    char* at = static_cast<char*>(call.workspace);
    for (int t = 0; t < call.threads; ++t)
        fill_tables(block, shape, make_seat<T>(block, shape, at), call.threads);
}

template <typename T>
void run(const Block& block, const Call& call) {
    const Shape shape(block, call.height, call.width, call.threads);
    char* workspace = static_cast<char*>(call.workspace);
    in_team(call.threads, [&](Team& team) {
        const long whole = call.batch / team.members * team.members;
        team.each(team.is_together ? whole : call.batch, [&](long i, int member) {
            const int parts = i < whole ? 1 : team.members;
            Image<T>(block, call, shape, workspace, member, parts, nullptr).run(i);
        });
        if (!team.is_together || whole == call.batch) return;
        Image<T> image(block, call, shape, workspace, 0, team.members, &team);
        for (long i = whole; i < call.batch; ++i) image.run(i);
    });
}

#if defined(__AVX512BF16__)
#define IN_PRECISION_OF(block, call) (block)->half ? call<BFloat> : call<float>
#else
#define IN_PRECISION_OF(block, call) call<float>
#endif

}  // namespace

extern "C" {

// Whether this processor multiplies bfloat16.
int32_t torchpact_has_half() {
#if defined(__AVX512BF16__)
    return 1;
#else
    return 0;
#endif
}

// The bytes that threads work in.
int64_t torchpact_workspace(const Block* block, int32_t height, int32_t width, int32_t threads) {
    return (IN_PRECISION_OF(block, workspace_of))(*block, height, width, threads);
}

// Fill the tables of a zeroed workspace, before its first use.
void torchpact_prepare(const Block* block, const Call* call) { (IN_PRECISION_OF(block, prepare))(*block, *call); }

void torchpact_run(const Block* block, const Call* call) { (IN_PRECISION_OF(block, run))(*block, *call); }
}
