"""Tests that need an accelerator."""

from failed_device import pytest_runtest_logfinish, pytest_runtest_makereport

__all__ = ["pytest_runtest_logfinish", "pytest_runtest_makereport"]
