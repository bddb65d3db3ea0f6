// Call what recorder.py has written to a file, with each instruction set of this processor, and compare all memory with what
// it became there. Memory and numbers differ by nothing, but for the bits of NaN. Exits with 1 if any differs.
#include <sys/mman.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "forerun.h"

namespace {

constexpr uint64_t BASE = 0x2000000000, LINE = 64;
const char* const NAMES[] = {"portable", "avx2", "avxvnni", "avx512", "avx512bf16", "amx", "neon", "neondotprod", "neoni8mm"};
const char* const FUNCTIONS[] = {"linear", "forward_layers", "head", "attention", "eagle", "fuse", "context", "greedy_chains",
                                 "argmax", "topk", "pack", "pack_blocks", "unpack", "unpack_words"};

struct Call {
    std::string title;
    uint32_t function;
    std::vector<int64_t> arguments;
    int64_t result;
    std::vector<uint8_t> before, after;
};

template <class T> T read(FILE* file) {
    T x;
    if (fread(&x, sizeof(T), 1, file) != 1) exit(3);
    return x;
}

bool read_call(FILE* file, Call& c) {
    uint32_t length;
    if (fread(&length, 4, 1, file) != 1) return false;
    c.arguments.resize(read<uint32_t>(file));
    c.title.resize(length);
    for (char& each : c.title) each = read<char>(file);
    c.function = read<uint32_t>(file);
    for (int64_t& each : c.arguments) each = read<int64_t>(file);
    c.result = read<int64_t>(file);
    c.before.resize(read<uint64_t>(file));
    uint64_t lines = read<uint64_t>(file);
    if (fread(c.before.data(), 1, c.before.size(), file) != c.before.size()) exit(3);
    c.after = c.before;
    for (; lines; lines--) {
        const uint64_t at = read<uint64_t>(file);
        uint8_t line[LINE];
        const uint64_t size = c.after.size() - at < LINE ? c.after.size() - at : LINE;
        if (fread(line, 1, size, file) != size) exit(3);
        memcpy(c.after.data() + at, line, size);
    }
    return true;
}

float float_of(int64_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

// threads: instead of those that were recorded.
int64_t made(const Call& c, int32_t threads) {
    const std::vector<int64_t>& a = c.arguments;
    const auto n = [&](int i) { return (int32_t)a[i]; };
#define P(type, i) ((type*)a[i])
    switch (c.function) {
    case 0: return forerun_linear(P(ForerunLinear, 0), P(float, 1), a[2], P(float, 3), P(float, 4), threads);
    case 1: return forerun_forward_layers(P(ForerunModel, 0), P(ForerunRows, 1), n(2), n(3), P(float, 4), P(int32_t, 5), n(6),
                                          P(float, 7), threads);
    case 2: return forerun_head(P(ForerunModel, 0), a[1], P(float, 2), P(float, 3), threads);
    case 3: return forerun_attention(P(ForerunAttention, 0), P(ForerunRows, 1), P(float, 2), P(float, 3), P(float, 4),
                                     P(float, 5), threads);
    case 4: return forerun_eagle(P(ForerunEagle, 0), P(ForerunRows, 1), P(float, 2), P(float, 3), P(int64_t, 4), a[5],
                                 P(float, 6), P(float, 7), threads);
    case 5: return forerun_fuse(P(ForerunLinear, 0), P(float, 1), n(2), float_of(a[3]), P(float, 4), a[5], P(float, 6), threads);
    case 6: return forerun_context(P(ForerunModel, 0), P(float, 1), P(ForerunRows, 2), P(float, 3), threads);
    case 7: return forerun_greedy_chains(P(ForerunLinear, 0), P(float, 1), P(int64_t, 2), P(float, 3), P(int64_t, 4),
                                         P(int64_t, 5), a[6], P(int64_t, 7), threads);
    case 8: return forerun_argmax(P(float, 0), a[1], a[2], a[3], P(int64_t, 4), P(float, 5)), 0;
    case 9: return forerun_topk(P(float, 0), a[1], a[2], a[3], P(int64_t, 4)), 0;
    case 10: return forerun_pack(n(0), a[1], a[2], a[3], P(void, 4), P(uint16_t, 5), P(void, 6), P(void, 7), threads), 0;
    case 11: return forerun_pack_blocks(n(0), a[1], a[2], P(uint8_t, 3), a[4], P(int64_t, 5), P(void, 6), threads);
    case 12: return forerun_unpack(P(ForerunLinear, 0), P(int64_t, 1), a[2], P(float, 3)), 0;
    case 13: return forerun_unpack_words(P(uint32_t, 0), a[1], a[2], a[3], a[4], n(5), P(uint8_t, 6), threads), 0;
    default: exit(3);
    }
}

bool is_nan(uint32_t bits) { return (bits & 0x7fffffff) > 0x7f800000; }
bool is_bfloat16_nan(uint32_t bits) { return (bits & 0x7fff) > 0x7f80; }

// Whether words of memory are the same, but for the bits of NaN.
bool are_same(uint32_t a, uint32_t b) {
    if (a == b || (is_nan(a) && is_nan(b))) return true;
    for (int shift : {0, 16})
        if ((a >> shift & 0xffff) != (b >> shift & 0xffff) && !(is_bfloat16_nan(a >> shift) && is_bfloat16_nan(b >> shift)))
            return false;
    return true;
}

uint64_t num_wrong(const uint8_t* ours, const std::vector<uint8_t>& theirs, uint64_t& first) {
    uint64_t wrong = 0;
    if (!memcmp(ours, theirs.data(), theirs.size())) return 0;
    for (uint64_t i = 0; i + 4 <= theirs.size(); i += 4) {
        uint32_t a, b;
        memcpy(&a, ours + i, 4);
        memcpy(&b, theirs.data() + i, 4);
        if (are_same(a, b)) continue;
        if (!wrong) first = i;
        wrong++;
    }
    return wrong;
}

struct Tally {
    uint64_t calls = 0, wrong = 0;
};

const char* kind_name(int32_t kind) {
    switch (kind) {
    case FORERUN_FLOAT32: return "FLOAT32";
    case FORERUN_BFLOAT16: return "BFLOAT16";
#define FORMAT(name, ...) \
    case FORERUN_##name: return #name;
#include "weight_formats.h"
    default: exit(3);
    }
}

// What a call computes: its function, of a product also the kind of weight.
std::string form_of(const Call& c) {
    std::string form = FUNCTIONS[c.function];
    if (c.function) return form;
    const ForerunLinear& w = *(const ForerunLinear*)(c.before.data() + c.arguments[0] - BASE);
    return form + " " + kind_name(w.kind) + (w.activation_bits == 8 ? " by bytes" : "");
}

struct Form {
    uint64_t vectors = 0;
    std::set<int64_t> rows;
    bool has_tail = false;  // outputs that are no whole block, or inputs that are no whole group

    void add(const Call& c) {
        vectors++;
        if (c.function) return;
        const ForerunLinear& w = *(const ForerunLinear*)(c.before.data() + c.arguments[0] - BASE);
        rows.insert(c.arguments[2]);
        has_tail |= w.out_features % 16 || w.in_features % 32;
    }
    void print(const std::string& name) const {
        printf("%-32s %5llu vectors", name.c_str(), (unsigned long long)vectors);
        if (!rows.empty()) printf(", rows:");
        for (const int64_t each : rows) printf(" %lld", (long long)each);
        printf("%s\n", has_tail ? "; with tails" : "");
    }
};

}  // namespace

int main(int count, char** arguments) {
    if (count != 2) return 3;
    FILE* file = fopen(arguments[1], "rb");
    constexpr size_t ROOM = 1 << 28;
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED;
    if (!file || mmap((void*)BASE, ROOM, PROT_READ | PROT_WRITE, flags, -1, 0) != (void*)BASE) return 3;
    const int32_t present = forerun_processor_instructions();
    std::map<std::string, Tally> tallies;
    int sets = 0;
    for (int32_t set = 6; set < 9; set++) sets += present >> set & 1 && !forerun_use_instructions(set);
    uint64_t wrong = 0, shown = 0;
    std::map<std::string, Form> forms;
    for (Call c; read_call(file, c);) {
        forms[form_of(c)].add(c);
        for (int32_t set = 0; set < 9; set++) {
            if (!(present >> set & 1) || forerun_use_instructions(set)) continue;
            for (const int32_t threads : {1, 3}) {
                memcpy((void*)BASE, c.before.data(), c.before.size());
                const int64_t result = made(c, threads);
                uint64_t first = 0;
                const uint64_t words = num_wrong((const uint8_t*)BASE, c.after, first);
                Tally& tally = tallies[std::string(NAMES[set]) + " " + FUNCTIONS[c.function]];
                tally.calls++;
                if (!words && result == c.result) continue;
                tally.wrong++;
                wrong++;
                if (shown++ < 20)
                    printf("WRONG %s, %s, %d threads: %llu words, the first at %llu of %zu; result %lld, not %lld\n",
                           c.title.c_str(), NAMES[set], threads, (unsigned long long)words, (unsigned long long)first,
                           c.after.size(), (long long)result, (long long)c.result);
            }
        }
    }
    for (const auto& [name, form] : forms) form.print(name);
    for (const auto& [name, tally] : tallies)
        printf("%-28s %6llu calls, %llu wrong\n", name.c_str(), (unsigned long long)tally.calls, (unsigned long long)tally.wrong);
    if (sets < 3) printf("not all sets of ARM64 were there: %d\n", sets);
    return wrong || sets < 3;
}
