// The kernels for NEON with products of four bytes, and of eight of two rows.
#include "instructions.h"
#if defined(__aarch64__)
#define NEON_DOTPROD
#define NEON_I8MM
namespace neoni8mm {
#include "isa/neon.h"
#include "kernels/all.h"
}  // namespace neoni8mm
OFFER(neoni8mm, 8)
#endif
