"""Where tensors live: the check that a device is there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forerun.errors import ConfigError

if TYPE_CHECKING:
    import torch

DEVICES = "cpu, cuda, cuda:0 (with its number) or mps"


def resolve_device(name: str | torch.device) -> torch.device:
    """The device of this name, with its number where its kind has numbers, so that it equals that of its tensors.

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
