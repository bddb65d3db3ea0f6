"""What automatic budgets begin with: costs and acceptance that were measured before, in a file (`forerun tune`).

Costs hold for the machine and the number of threads that they were measured on, and are left out on others. Acceptance
depends on the models, the drafter and the prompts; it has the weight of a few trials.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from forerun.errors import ConfigError
from forerun.files.json_file import Fields
from forerun.files.write import write_json
from forerun.policy.acceptance import Acceptance
from forerun.policy.cost_store import key_here, suggest
from forerun.policy.costs import CostModel

_VERSION = 1
_DAMAGE = (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError)
"""What a damaged file may raise."""
_acceptance: dict[str, Any] = {}


def costs_setting(cost_key: tuple[str, ...]) -> tuple[str, ...]:
    """All that costs depend on besides the machine."""
    return (*cost_key, str(torch.get_num_threads()))


def prior(cost_key: tuple[str, ...]) -> Acceptance:
    """Acceptance as it begins for these models and drafter: with what a file has told, or with nothing."""
    acceptance = Acceptance()
    state = _acceptance.get(_plain_key(cost_key))
    if state is not None:
        acceptance.restore(state)
    return acceptance


def entry(cost_key: tuple[str, ...], costs: CostModel, acceptance: Acceptance) -> dict[str, Any]:
    """What a file holds of one budget."""
    return {
        "setting": _plain_key(cost_key),
        "costs_setting": key_here(costs_setting(cost_key)),
        "costs": costs.state(),
        "acceptance": acceptance.state(),
    }


def write_start(path: Path, entries: list[Mapping[str, Any]]) -> None:
    """Write a file that `read_start` reads. Raises ConfigError where it cannot be written."""
    write_json(path, {"version": _VERSION, "entries": entries}, error=ConfigError, indent=None)


def read_start(path: Path) -> None:
    """Have budgets that are made from now on begin with what a file tells.

    Raises:
        ConfigError: it cannot be read, or is something else.
    """
    fields = Fields.read(path, ConfigError, remedy="Give a start file that forerun tune wrote.")
    version = fields.integer("version")
    if version != _VERSION:
        raise ConfigError(f"{path} has version {version}, but this forerun reads {_VERSION}. Run forerun tune again.")
    try:
        for each in fields.list_of("entries", dict):
            Acceptance().restore(each["acceptance"])
            suggest(str(each["costs_setting"]), CostModel.restored(each["costs"]))
            _acceptance[str(each["setting"])] = each["acceptance"]
    except _DAMAGE as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path} is damaged, or was not written by forerun tune. Run it again.") from None


def _plain_key(cost_key: tuple[str, ...]) -> str:
    return hashlib.sha256("\n".join(cost_key).encode()).hexdigest()[:32]
