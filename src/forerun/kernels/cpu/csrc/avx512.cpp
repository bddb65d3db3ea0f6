// The kernels for AVX-512 with VNNI.
#include "instructions.h"
#if defined(__x86_64__)
namespace avx512 {
#include "isa/avx512.h"
#include "kernels/all.h"
}  // namespace avx512
OFFER(avx512, 3)
#endif
