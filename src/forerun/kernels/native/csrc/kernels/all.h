// Everything that is compiled once for each instruction set.
#include "rows.h"
#include "products.h"
#include "attention.h"
#include "run.h"
#include "layers.h"
#include "eagle.h"
#include "block.h"
#include "entries.h"
