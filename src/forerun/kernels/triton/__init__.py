"""Kernels in Triton, for CUDA devices: each beside what it computes, in PyTorch. Triton is imported by those alone."""
