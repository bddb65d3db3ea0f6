// The kernels for NEON with products of four bytes.
#include "instructions.h"
#if defined(__aarch64__)
#define NEON_DOTPROD
namespace neondotprod {
#include "isa/neon.h"
#include "kernels/all.h"
}  // namespace neondotprod
OFFER(neondotprod, 7)
#endif
