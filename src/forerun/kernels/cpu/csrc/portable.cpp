// The kernels for any processor.
#include "instructions.h"
using forerun::Entries;
using forerun::half_power;
using forerun::half_to_float;

namespace portable {
#include "isa/portable.h"
#include "kernels/all.h"
}  // namespace portable
