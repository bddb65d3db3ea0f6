"""Devices: the check that one is there, and errors of devices as forerun's own."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from forerun.errors import ConfigError, DeviceError, DeviceMemoryError, ForerunError
from forerun.utils import machine
from forerun.utils.foreign_errors import is_out_of_memory

if TYPE_CHECKING:
    import torch

_log = logging.getLogger(__name__)

DEVICES = "cpu, cuda, cuda:0 (with its number) or mps"


def resolve_device(name: str | torch.device) -> torch.device:
    """Return the device of this name, with its index, so that it equals the device of its tensors.

    Raises:
        ConfigError: the name is no device that forerun runs on, or the device is not there.
    """
    import torch

    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        raise ConfigError(f"device is {name!r}, which PyTorch does not know. Give {DEVICES}.") from None
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    elif device.type == "mps":
        count = int(torch.backends.mps.is_available())
    else:
        raise ConfigError(f"device is {str(name)!r}, but forerun runs on {DEVICES}.")
    if not count:
        raise ConfigError(
            f"device is {str(name)!r}, but PyTorch {torch.__version__} finds no such device on this machine. "
            f"Give cpu, or install a driver and a build of PyTorch for {device.type}."
        )
    written = str(device).partition(":")[2]
    usual = torch.cuda.current_device() if device.type == "cuda" else 0
    number = int(written) if written else usual
    if number >= count:
        last = count - 1
        raise ConfigError(f"device is {str(name)!r}, but the last of its kind here is {device.type}:{last}. Give that.")
    return torch.device(device.type, number)


_BFLOAT16_FEATURES = ("amx_bf16", "avx512_bf16", "bf16")
"""Linux's words for instructions that multiply bfloat16, the first two on x86, the last on ARM."""


def bfloat16_features() -> tuple[str, ...]:
    """Return the instruction sets of this CPU by which PyTorch multiplies bfloat16; empty if it has none.

    Products with them take half to a tenth of the time of float32; without them, up to a hundred times as long. They
    are read from the processor, not timed: small products give either answer, depending on what else runs.
    """
    import torch

    library: Any = torch.backends.mkldnn
    if not (library.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()):
        return ()
    found = machine.features()
    return tuple(word for word in _BFLOAT16_FEATURES if word in found)


def is_quick_at_bfloat16() -> bool:
    """Return whether PyTorch's products of bfloat16 take no longer on this CPU than those of float32."""
    return bool(bfloat16_features())


_MEMORY_ALLOCATION = 2
"""cudaErrorMemoryAllocation: PyTorch raises it as an AcceleratorError where its own allocator had no part in it."""
_MAX_LENGTH = 300
"""Characters of a device's message."""


def device_error(error: BaseException, device: torch.device) -> DeviceError | DeviceMemoryError | None:
    """Return the device's error behind an exception that was raised while the device computed; None without one.

    An accelerator is synchronised: one that has failed fails at every later call. Not every error that it reports is of
    that kind, and Triton's launcher raises it as a plain RuntimeError. On a CPU, PyTorch's type of the exception, or of
    one that it was raised from, decides.
    """
    if isinstance(error, (DeviceError, DeviceMemoryError)):
        return error
    import torch

    raised = [error]
    while (cause := raised[-1].__cause__) is not None:
        raised.append(cause)
    reported = next((each for each in raised if isinstance(each, torch.AcceleratorError)), None)
    failed: BaseException | None = None
    if device.type != "cpu":
        try:
            torch.accelerator.synchronize(device)
        except RuntimeError as failure:
            failed = failure
    elif not _is_of_memory(reported):
        failed = reported
    if failed is not None:
        return DeviceError(
            f"The device {device} has failed: {_message(failed)}. Nothing more can be computed on it by this process. "
            "Start forerun again; if it fails again, look at the device (nvidia-smi, the kernel's log) or take another."
        )
    short = next((each for each in raised if isinstance(each, torch.OutOfMemoryError) or _is_of_memory(each)), None)
    if short is None:
        return None
    return DeviceMemoryError(
        f"The device {device} has no memory left: {_message(short)}. Lower max_batch or cache_memory, take weights of "
        "fewer bits (quantize), or end other programs that use the device."
    )


def raise_own(error: Exception, device: torch.device) -> None:
    """Raise what is forerun's own already, or is the device's fault (`device_error`)."""
    if isinstance(error, ForerunError):
        raise error
    if (found := device_error(error, device)) is not None:
        raise found from error


@contextmanager
def as_device_errors(device: torch.device) -> Iterator[None]:
    """Raise what a device raises in the block as forerun's own error; other exceptions pass.

    Raises:
        DeviceError, DeviceMemoryError: as `device_error` says.
    """
    try:
        yield
    except Exception as error:
        own = device_error(error, device)
        if own is None or own is error:
            raise
        raise own from error


class DeviceFaults:
    """Recognises errors of the device, and remembers that it has failed.

    Args:
        device: where target and drafter compute.

    Attributes:
        failure: why nothing can be computed any more, with the remedy; None while the device works.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.failure: str | None = None

    def own(self, error: Exception) -> Exception:
        """Return a device's error as forerun's own, any other error as it is."""
        if self.failure is not None:
            return DeviceError(self.failure)  # a failed device is the cause of every later error
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


def _is_of_memory(error: BaseException | None) -> bool:
    import torch

    if isinstance(error, torch.AcceleratorError):
        return getattr(error, "error_code", None) == _MEMORY_ALLOCATION
    return is_out_of_memory(error)


def _message(error: BaseException) -> str:
    """Return the first line of a device's message, which holds names of errors and sizes, and nothing of a request."""
    lines = str(error).splitlines()
    return lines[0].rstrip(". ")[:_MAX_LENGTH] if lines else type(error).__name__
