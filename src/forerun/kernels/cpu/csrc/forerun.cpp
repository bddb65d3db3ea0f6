// The library: one set of kernels for each instruction set, the choice among them, and the C interface.
#include "forerun.h"

#include "block_packing.h"
#include "instructions.h"
#include "packing.h"

const Entries* forerun::offered[forerun::NUM_INSTRUCTIONS];

namespace {

// The instruction sets that the processor has and this library was compiled for, a bit for each by its number.
int32_t available() {
    int32_t found = 0;
    for (int32_t which = 0; which < forerun::NUM_INSTRUCTIONS; which++)
        if (forerun::offered[which]) found |= 1 << which;
    return found & forerun_processor_instructions();
}

std::atomic<int32_t>& chosen() {
    static std::atomic<int32_t> which{31 - __builtin_clz(available() | 1)};
    return which;
}

const Entries& entries() { return *forerun::offered[chosen().load(std::memory_order_relaxed)]; }

// No exception leaves the library. They are of memory that the system does not give.
template <class Call> int32_t tried(const Call& call) {
    int32_t result = 0;
    try {
        call();
    } catch (const std::exception&) {
        result = -1;
    }
    forerun::kept_workspace().trim();
    return result;
}

}  // namespace

extern "C" {

int32_t forerun_abi(void) { return FORERUN_ABI; }
int32_t forerun_instructions(void) { return chosen().load(); }
int32_t forerun_use_instructions(int32_t which) {
    if (which < 0 || which >= forerun::NUM_INSTRUCTIONS || !(available() >> which & 1)) return -1;
    chosen().store(which);
    return 0;
}
void forerun_use_openmp(void* parallel) { forerun::shared_openmp().store((forerun::GompParallel)parallel); }
int32_t forerun_threads(int32_t most) { return forerun::pace().threads(most); }
int64_t forerun_workspace_bytes(void) { return forerun::kept_workspace().bytes(); }

int32_t forerun_prefetch_distance(int32_t kind, int64_t rows) { return forerun::prefetch_distance(kind, rows); }
void forerun_set_prefetch_distance(int32_t kind, int64_t rows, int32_t distance) {
    forerun::prefetch_distance(kind, rows) = distance;
}
void forerun_read(const uint64_t* addresses, const int64_t* bytes, int64_t n, int64_t distance, int32_t threads) {
    entries().read(addresses, bytes, n, distance, threads);
}

int64_t forerun_packed_bytes(int32_t kind, int64_t out, int64_t in, int64_t span) {
    return forerun::packed_bytes(kind, out, in, span);
}
void forerun_pack(int32_t kind, int64_t out, int64_t in, int64_t span, const void* numbers, const uint16_t* scales,
                  const void* behind, void* packed, int32_t threads) {
    forerun::Team team(threads);
    forerun::Packing call{kind, out, in, span, numbers, scales, behind, (uint8_t*)packed, &team};
    forerun::run_in_parallel(forerun::pack_body, &call, team);
}
int64_t forerun_pack_blocks(int32_t kind, int64_t out, int64_t in, const uint8_t* blocks, int64_t row_bytes,
                            const int64_t* order, void* packed, int32_t threads) {
    return forerun::pack_blocks(kind, out, in, blocks, row_bytes, order, packed, threads);
}
void forerun_unpack_words(const uint32_t* words, int64_t rows, int64_t columns, int64_t row_stride, int64_t column_stride,
                          int32_t of_outputs, uint8_t* values, int32_t threads) {
    forerun::Team team(threads);
    forerun::WordUnpacking call{words, rows, columns, row_stride, column_stride, of_outputs != 0, values, &team};
    forerun::run_in_parallel(forerun::unpack_words_body, &call, team);
}
void forerun_unpack(const ForerunLinear* linear, const int64_t* rows, int64_t n, float* numbers) {
    forerun::unpack(*linear, rows, n, numbers);
}
int32_t forerun_linear(const ForerunLinear* linear, const float* x, int64_t n, const float* residual, float* out,
                       int32_t threads) {
    return n > 0 ? tried([&] { entries().linear(linear, x, n, residual, out, threads); }) : 0;
}
int32_t forerun_forward_layers(const ForerunModel* model, const ForerunRows* rows, int32_t first, int32_t last, float* x,
                               const int32_t* output_layers, int32_t num_output_layers, float* states, int32_t threads) {
    const bool any = rows->num_rows > 0 && first < last;
    return any ? tried([&] {
        entries().forward_layers(model, rows, first, last, x, output_layers, num_output_layers, states, threads);
    }) : 0;
}
int32_t forerun_head(const ForerunModel* model, int64_t n, float* x, float* logits, int32_t threads) {
    return n > 0 ? tried([&] { entries().head(model, n, x, logits, threads); }) : 0;
}
void forerun_move_slots(const uint64_t* pages, const int32_t* shapes, const int64_t* starts, int32_t layers,
                        int32_t page, int32_t number_bytes, const int64_t* slots, int64_t n, int64_t start) {
    forerun::move_slots(pages, shapes, starts, layers, page, number_bytes, slots, n, start);
}
int32_t forerun_attention(const ForerunAttention* attention, const ForerunRows* rows, const float* query,
                          const float* key, const float* value, float* out, int32_t threads) {
    const bool any = rows->num_rows > 0;
    return any ? tried([&] { entries().attention(attention, rows, query, key, value, out, threads); }) : 0;
}
int32_t forerun_eagle(const ForerunEagle* head, const ForerunRows* rows, const float* embeddings, const float* states,
                      const int64_t* wanted, int64_t num_wanted, float* x, float* logits, int32_t threads) {
    const bool any = rows->num_rows > 0;
    return any ? tried([&] {
        entries().eagle(head, rows, embeddings, states, wanted, num_wanted, x, logits, threads);
    }) : 0;
}
int32_t forerun_fuse(const ForerunLinear* linear, const float* norms, int32_t parts, float eps, const float* x,
                     int64_t n, float* out, int32_t threads) {
    return n > 0 ? tried([&] { entries().fuse(linear, norms, parts, eps, x, n, out, threads); }) : 0;
}
int32_t forerun_context(const ForerunModel* model, const float* norm, const ForerunRows* rows, const float* states,
                        int32_t threads) {
    return rows->num_rows > 0 ? tried([&] { entries().context(model, norm, rows, states, threads); }) : 0;
}
int32_t forerun_greedy_chains(const ForerunLinear* after, const float* before, const int64_t* token_ids,
                              const float* logits, const int64_t* last, const int64_t* lengths, int64_t chains,
                              int64_t* picked, int32_t threads) {
    return chains > 0 ? tried([&] {
        entries().greedy_chains(after, before, token_ids, logits, last, lengths, chains, picked, threads);
    }) : 0;
}
void forerun_argmax(const float* logits, int64_t n, int64_t width, int64_t stride, int64_t* picked, float* probabilities) {
    entries().argmax(logits, n, width, stride, picked, probabilities);
}
void forerun_topk(const float* logits, int64_t n, int64_t width, int64_t count, int64_t* found) {
    entries().topk(logits, n, width, count, found);
}
}
