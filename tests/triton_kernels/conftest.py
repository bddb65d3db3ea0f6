"""The tests of the Triton kernels: on a GPU, or in Triton's interpreter (`triton_rig`)."""

from triton_rig import INTERPRETED, quicken

if INTERPRETED:
    quicken()
