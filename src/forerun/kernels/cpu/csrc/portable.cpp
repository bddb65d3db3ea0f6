// The kernels for any processor.
#include "instructions.h"
namespace portable {
#include "isa/portable.h"
#include "kernels/all.h"
}  // namespace portable
OFFER(portable, 0)
