// The kernels for AVX-512 with products of bfloat16 by tiles.
#include "instructions.h"
#if defined(__x86_64__)
#define AVX512_BF16
#define AMX
namespace amx {
#include "isa/avx512.h"
#include "kernels/all.h"
}  // namespace amx
OFFER(amx, 5)
#endif
