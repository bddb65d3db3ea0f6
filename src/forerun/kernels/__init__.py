"""Tensor operations: references in PyTorch, and native and Triton kernels that must agree with them."""
