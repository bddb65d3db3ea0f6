// The kernels for AVX-512 with products of bfloat16.
#include "instructions.h"
#if defined(__x86_64__)
#define AVX512_BF16
namespace avx512bf16 {
#include "isa/avx512.h"
#include "kernels/all.h"
}  // namespace avx512bf16
OFFER(avx512bf16, 4)
#endif
