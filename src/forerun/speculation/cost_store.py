"""Measured costs, kept for the next engine of the same models on the same machine, and for the next process."""

from __future__ import annotations

import torch

from forerun.speculation.cost_model import CostModel
from forerun.utils.entry_file import EntryFile, key_here
from forerun.utils.home import COSTS_STEM

FILE = EntryFile(COSTS_STEM, 4, "measured costs", CostModel.restored, CostModel.state)

_known: dict[str, CostModel] = {}


class StoredCosts:
    """The costs of one setting, which all its engines in this process share.

    Args:
        setting: all that costs depend on, such as models, number format and threads; the machine is added.

    Attributes:
        costs: the present ones.
        is_from_file: another process has measured them, and this one has only just read them.

    Raises:
        ConfigError: FORERUN_COST_CACHE is neither 0 nor 1.
    """

    def __init__(self, setting: tuple[str, ...]) -> None:
        self._key = key_here(setting)
        read = None if self._key in _known else FILE.read().get(self._key)
        self.costs = _known.setdefault(self._key, read or CostModel())
        self.is_from_file = read is not None

    def forget(self) -> None:
        """Begin anew, for engines that are made from now on."""
        self.costs = _known[self._key] = CostModel()

    def save(self) -> None:
        """Write what was measured, beside what other settings have written. Only calibrations do: what is learned in
        use depends on what else the machine does."""
        FILE.put(self._key, self.costs)


def forward_costs(target: str) -> StoredCosts:
    """Return the costs of a target's steps, drafting apart, which all its drafters share. target: what `identity`
    says."""
    return StoredCosts(costs_setting((target, "steps")))


def costs_setting(cost_key: tuple[str, ...]) -> tuple[str, ...]:
    """Return all that costs depend on besides the machine."""
    return (*cost_key, str(torch.get_num_threads()))
