"""For a run with AddressSanitizer, `-p exact_memory`: packed weights lie in memory of their exact size."""

import torch

from forerun.kernels.cpu import linear as native_linear

native_linear.weight_memory = lambda nbytes: torch.empty(nbytes, dtype=torch.uint8)
