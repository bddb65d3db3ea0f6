// The kernels for AVX2 with AVX-VNNI.
#include "instructions.h"
#if defined(__x86_64__)
#define AVX_VNNI
namespace avxvnni {
#include "isa/avx2.h"
#include "kernels/all.h"
}  // namespace avxvnni
OFFER(avxvnni, 2)
#endif
