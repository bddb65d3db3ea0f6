// The kernels for AVX-512 with VNNI.
#include "instructions.h"
#if defined(__x86_64__)
using forerun::Entries;
using forerun::half_power;
using forerun::half_to_float;

namespace avx512 {
#include "isa/avx512.h"
#include "kernels/all.h"
}  // namespace avx512
#endif
