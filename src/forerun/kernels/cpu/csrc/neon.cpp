// The kernels for NEON of ARM64.
#include "instructions.h"
#if defined(__aarch64__)
namespace neon {
#include "isa/neon.h"
#include "kernels/all.h"
}  // namespace neon
OFFER(neon, 6)
#endif
