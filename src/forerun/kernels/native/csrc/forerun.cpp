// The native kernels, behind a plain C interface.
#include <cstdint>

static int32_t best() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512vnni"))
        return 2;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return 1;
#endif
    return 0;
}

static int32_t used = best();

extern "C" {
int32_t forerun_abi(void) { return 1; }
// 2: AVX-512 VNNI, 1: AVX2, 0: portable.
int32_t forerun_instructions(void) { return used; }
int32_t forerun_best_instructions(void) { return best(); }
int32_t forerun_use_instructions(int32_t which) {
    if (which < 0 || which > best()) return -1;
    used = which;
    return 0;
}
}
