// The kernels for AVX2 with AVX-VNNI.
#include "instructions.h"
#if defined(__x86_64__)
#define AVX_VNNI
using forerun::Entries;
using forerun::half_power;
using forerun::half_to_float;

namespace avxvnni {
#include "isa/avx2.h"
#include "kernels/all.h"
}  // namespace avxvnni
#endif
