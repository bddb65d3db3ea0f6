// Which instruction sets the processor has. Compiled before all else, and loaded alone, to say which kernels are compiled.
#include "forerun.h"

#if defined(__x86_64__)
#include <cpuid.h>

#include <initializer_list>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

struct Registers {
    unsigned a = 0, b = 0, c = 0, d = 0;
};

// What the processor tells of itself; zeros of what it does not know.
static Registers cpuid(unsigned leaf, unsigned part) {
    Registers found;
    if (!__get_cpuid_count(leaf, part, &found.a, &found.b, &found.c, &found.d)) return {};
    return found;
}

// The registers that the system keeps for each thread, a bit for each kind. Only where OSXSAVE is.
static unsigned saved_registers() {
    unsigned low, high;
    asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return low;
}

// Whether the processor multiplies tiles of bfloat16, and the system lets this process do so.
static bool has_tiles(const Registers& more) {
#if defined(__linux__)
    if ((more.d >> 22 & 0b101) != 0b101) return false;  // AMX-BF16, -TILE
    constexpr long REQUEST = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
#else
    return false;
#endif
}
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>

static bool has(const char* feature) {
    int32_t value = 0;
    size_t size = sizeof(value);
    return sysctlbyname(feature, &value, &size, nullptr, 0) == 0 && value;
}
static bool has_dot_products() { return has("hw.optional.arm.FEAT_DotProd"); }
static bool has_matrix_products() { return has("hw.optional.arm.FEAT_I8MM"); }
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>

// As asm/hwcap.h has them, of any version.
static bool has_dot_products() { return getauxval(AT_HWCAP) >> 20 & 1; }     // HWCAP_ASIMDDP
static bool has_matrix_products() { return getauxval(AT_HWCAP2) >> 13 & 1; }  // HWCAP2_I8MM
#elif defined(__aarch64__)
static bool has_dot_products() { return false; }
static bool has_matrix_products() { return false; }
#endif

extern "C" int32_t forerun_processor_instructions(void) {
    int32_t found = 1;
#if defined(__x86_64__)
    // Not by __builtin_cpu_supports: in the runtime library of some compilers it answers no to everything.
    const Registers basic = cpuid(1, 0), more = cpuid(7, 0), newer = cpuid(7, 1);
    const auto has = [](unsigned bits, std::initializer_list<int> wanted) {
        for (int bit : wanted)
            if (!(bits >> bit & 1)) return false;
        return true;
    };
    if (!has(basic.c, {12, 27, 28, 29}) || !has(more.b, {5})) return found;  // FMA, OSXSAVE, AVX, F16C; AVX2
    const unsigned saved = saved_registers();
    if (!has(saved, {1, 2})) return found;  // of SSE and AVX
    found |= 1 << 1;
    if (has(newer.a, {4})) found |= 1 << 2;  // AVX_VNNI
    if (!has(saved, {5, 6, 7}) || !has(more.b, {16, 17, 30, 31}) || !has(more.c, {11}))  // AVX512F, DQ, BW, VL; VNNI
        return found;
    found |= 1 << 3;
    if (!has(newer.a, {5})) return found;  // AVX512_BF16
    found |= 1 << 4;
    if (has_tiles(more)) found |= 1 << 5;
#elif defined(__aarch64__)
    found |= 1 << 6;
    if (!has_dot_products()) return found;
    found |= 1 << 7;
    if (has_matrix_products()) found |= 1 << 8;
#endif
    return found;
}
