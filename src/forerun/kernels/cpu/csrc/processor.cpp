// Which instruction sets the processor has. Compiled before all else, and loaded alone, to say which kernels are compiled.
#include "forerun.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <initializer_list>

// Whether the processor multiplies tiles of bfloat16, and the system lets this process do so.
static bool has_tiles() {
#if defined(__linux__)
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d >> 22 & 0b101) != 0b101) return false;  // AMX-BF16, -TILE
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
    __builtin_cpu_init();
    const bool half = __builtin_cpu_supports("f16c"), fma = __builtin_cpu_supports("fma");
    if (!__builtin_cpu_supports("avx2") || !fma || !half) return found;
    unsigned a = 0, b, c, d;
    if (!__get_cpuid_count(7, 1, &a, &b, &c, &d)) a = 0;
    found |= 1 << 1;
    if (a & 1 << 4) found |= 1 << 2;  // AVX_VNNI
    for (bool has : {__builtin_cpu_supports("avx512f") != 0, __builtin_cpu_supports("avx512bw") != 0,
                     __builtin_cpu_supports("avx512vl") != 0, __builtin_cpu_supports("avx512dq") != 0,
                     __builtin_cpu_supports("avx512vnni") != 0})
        if (!has) return found;
    found |= 1 << 3;
    if (!(a & 1 << 5)) return found;  // AVX512_BF16
    found |= 1 << 4;
    if (has_tiles()) found |= 1 << 5;
#elif defined(__aarch64__)
    found |= 1 << 6;
    if (!has_dot_products()) return found;
    found |= 1 << 7;
    if (has_matrix_products()) found |= 1 << 8;
#endif
    return found;
}
