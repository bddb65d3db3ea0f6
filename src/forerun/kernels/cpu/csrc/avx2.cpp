// The kernels for AVX2.
#include "instructions.h"
#if defined(__x86_64__)
namespace avx2 {
#include "isa/avx2.h"
#include "kernels/all.h"
}  // namespace avx2
OFFER(avx2, 1)
#endif
