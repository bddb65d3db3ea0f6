"""What becomes of an engine whose device has failed, or has no memory left for a step."""

from __future__ import annotations

import logging

import torch

from forerun.device_errors import device_error
from forerun.errors import DeviceError

_log = logging.getLogger(__name__)


class DeviceFaults:
    """Tells errors of the device from all others, and remembers that it has failed.

    Args:
        device: where target and drafter compute.

    Attributes:
        failure: the reason for which nothing can be computed any more, with its remedy; None: all is well.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.failure: str | None = None

    def own(self, error: Exception) -> Exception:
        """The error as forerun's own, where it is the device's."""
        if self.failure is not None:
            return DeviceError(self.failure)  # whatever it says, it comes of that
        found = device_error(error, self._device)
        if found is None or found is error:
            return error
        if isinstance(found, DeviceError):
            self.failure = str(found)
            _log.error("%s", found, exc_info=error)
        found.__cause__ = error.with_traceback(None)  # whose frames hold the tensors for which there is no memory
        return found

    def check(self) -> None:
        """Raise DeviceError if the device has failed."""
        if self.failure is not None:
            raise DeviceError(self.failure)
