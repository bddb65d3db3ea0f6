"""Triton kernels for CUDA devices. Only these modules import Triton."""
