"""The check that a resumed run has the options of the run it goes on from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from forerun.errors import ConfigError
from forerun.files.json_file import Fields
from forerun.files.write import write_json
from forerun.heads.fingerprint import same_target, target_fingerprint

FILE_NAME = "options.json"
TARGET = "target"
"""In the options of a run, the fingerprint of its target."""


class _Weights:
    """A Transformers model as fingerprints look at it."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self.name, self.num_parameters = str(model.name_or_path), model.num_parameters()
        self.vocab_size = len(model.get_input_embeddings().weight)

    def embedding_rows(self, token_ids: Tensor) -> Tensor:
        return self._rows(self._model.get_input_embeddings(), token_ids)

    def output_rows(self, token_ids: Tensor) -> Tensor:
        return self._rows(self._model.get_output_embeddings(), token_ids)

    def _rows(self, module: Any, token_ids: Tensor) -> Tensor:
        weight: Tensor = module.weight.detach()
        return weight[token_ids.to(weight.device)].float()


def pin_target(folder: Path, target: PreTrainedModel) -> None:
    """Write the target's fingerprint into `folder`, or compare it with that of a former run.

    Raises:
        ConfigError: the file is damaged, or the run there is one of another target.
    """
    path, found = folder / FILE_NAME, target_fingerprint(_Weights(target))
    if not path.exists():
        write_json(path, {TARGET: found}, error=ConfigError)
        return
    former = Fields.read(path, ConfigError, remedy="Give another --work, or --force to begin anew.").string(TARGET, "")
    if not same_target(former, found):
        raise ConfigError(
            f"{folder} belongs to a run of another target, whose weights are not these. Give that target, another "
            "--work, or --force to begin anew."
        )


def pin(folder: Path, options: dict[str, Any]) -> None:
    """Write `options` into `folder`, or compare them with those a former run wrote there.

    Raises:
        ConfigError: the file is damaged, or some differ: what is in the folder would not fit what is added to it.
    """
    path = folder / FILE_NAME
    plain = json.loads(json.dumps(options))
    if not path.exists():
        write_json(path, plain, error=ConfigError)
        return
    former = Fields.read(path, ConfigError, remedy="Give another --work, or --force to begin anew.").values
    changed = sorted(key for key in {*plain, *former} if plain.get(key) != former.get(key))
    if changed:
        described = ", ".join(f"{key} was {str(former.get(key))[:80]} and is {plain.get(key)}" for key in changed)
        raise ConfigError(f"{folder} belongs to another run: {described}. Give the same options, or another --work.")
