// The kernels for AVX2.
#include "instructions.h"
#if defined(__x86_64__)
using forerun::Entries;
using forerun::half_power;
using forerun::half_to_float;

namespace avx2 {
#include "isa/avx2.h"
#include "kernels/all.h"
}  // namespace avx2
#endif
