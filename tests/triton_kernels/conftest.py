"""The tests of the Triton kernels: on a GPU, or in Triton's interpreter (`triton_rig`)."""

from failed_device import pytest_runtest_logfinish, pytest_runtest_makereport
from triton_rig import INTERPRETED, quicken

__all__ = ["pytest_runtest_logfinish", "pytest_runtest_makereport"]

if INTERPRETED:
    quicken()
