"""How the tensors of a drafter learn from segments: the loss, and what a draft would have accepted."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence as Seq
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from forerun.adaptation.ring import Excerpt
from forerun.drafters.base import TRAINING_RECORD, Adaptable
from forerun.drafters.model_drafter import AdaptableModel
from forerun.drafters.models.eagle.drafting import LearnableEagle
from forerun.drafters.models.head_files.folder import load_head, save_head
from forerun.drafters.models.learnable_draft import LearnableDraft
from forerun.errors import ConfigError, DrafterError, ModelLoadError
from forerun.kernels.torch.elementwise import softcap
from forerun.models import Model, find_tokenizer, load_transformers_model
from forerun.models.fused.native import NativeDecoder
from forerun.train.accelerator import columns_of
from forerun.train.card import save_model
from forerun.train.data.packed import NO_DOCUMENT
from forerun.train.eagle import EagleHeadModule, EagleKind
from forerun.train.heads.module import HeadRows, head_rows, predicted
from forerun.train.heads.options import EagleTraining
from forerun.train.heads.target_states import HeadInputs, TrainingTarget, learnt_layers
from forerun.train.losses import distillation_loss
from forerun.types import Needs
from forerun.utils.files import write_json

DEPTH = 3
"""Tokens of a draft that are learnt, and that judge."""
MOST_OUTPUTS = 1 << 16
"""Tokens that a drafter which learns may propose: their output rows are kept in float32."""
LIKELIEST = 32
"""Tokens of the target's at each position that a draft model learns from."""
_LOGIT_ROWS = 128
_LABEL_ROWS = 16
"""Rows of the target's output layer at once: requests are made way for between its products, and not within one."""


class Learner(ABC):
    """Teaches a kind of drafter.

    Attributes:
        needs: the states of the target that it learns from.
    """

    needs: Needs

    @abstractmethod
    def module(self, tensors: Mapping[str, Tensor]) -> nn.Module:
        """Return a module whose parameters are the tensors, by the same names."""

    @abstractmethod
    def loss(self, module: nn.Module, segment: Excerpt) -> Tensor:
        """Sum the loss over a segment's tokens."""

    def parameters(self, module: nn.Module) -> dict[str, Tensor]:
        """Return the tensors of a module by name, copied."""
        named = module.by_name() if isinstance(module, _Tensors) else dict(module.named_parameters())
        return {name: each.detach().clone() for name, each in named.items()}

    @abstractmethod
    def save(self, folder: Path, tensors: Mapping[str, Tensor], record: Mapping[str, Any]) -> None:
        """Write a copy with these tensors as a folder that can be loaded as a drafter. record: JSON.

        Raises:
            ConfigError: the folder cannot be written.
        """

    @abstractmethod
    def read(self, folder: Path) -> dict[str, Tensor]:
        """Return the tensors of a copy that was written.

        Raises:
            ModelLoadError: it cannot be read, or is a copy of another drafter.
        """

    @abstractmethod
    def accepted(self, module: nn.Module, segment: Excerpt) -> Tensor:
        """Return [n] how many of DEPTH tokens a greedy draft would have had accepted at each position of the segment
        where so many follow."""


class EagleLearner(Learner):
    """Teaches EAGLE heads, by the loss of their training.

    Raises:
        DrafterError: the head proposes too many tokens.
    """

    def __init__(self, adaptable: Adaptable, learnable: LearnableEagle) -> None:
        target = adaptable.target
        head = learnable.head
        assert isinstance(target, Model)
        vocabulary = head.token_ids
        if len(vocabulary) > MOST_OUTPUTS:
            raise DrafterError(
                f"adapt is on, but {adaptable.name} proposes {len(vocabulary):,} tokens, and what learns may propose "
                f"{MOST_OUTPUTS:,}. Give a head with a draft vocabulary."
            )
        self.needs = Needs(layers=learnt_layers(head.config.layers, target.num_layers), states=True)
        self._head = head
        self._kind = EagleKind(EagleTraining(unroll=DEPTH))
        rows = target.output_rows(vocabulary).float().clone()
        states: object = None  # they come with the segments
        self._target = TrainingTarget(target, states, rows, columns_of(vocabulary, target.vocab_size))  # type: ignore[arg-type]

    def module(self, tensors: Mapping[str, Tensor]) -> EagleHeadModule:
        module = EagleHeadModule(self._head.config)
        module.load_state_dict(dict(tensors))
        return module

    def loss(self, module: nn.Module, segment: Excerpt) -> Tensor:
        assert isinstance(module, EagleHeadModule)
        inputs, piece = self._inputs(segment)
        return self._kind.summed_loss(module, inputs, piece)

    @torch.no_grad()
    def accepted(self, module: nn.Module, segment: Excerpt) -> Tensor:
        assert isinstance(module, EagleHeadModule)
        inputs, _ = self._inputs(segment)
        rows = inputs.rows
        parts = self._kind.predict(module, inputs)
        text = self._target.columns[rows.token_ids[(rows.tokens + 1).clamp(max=len(rows.token_ids) - 1)]]
        matches = torch.stack([_matches([(f[step], w) for f, w in parts], text[step]) for step in range(rows.steps)])
        whole = predicted(rows).all(1)
        return matches[:, whole].cumprod(0).sum(0)

    def save(self, folder: Path, tensors: Mapping[str, Tensor], record: Mapping[str, Any]) -> None:
        head = self._head
        save_head(
            folder,
            head.config,
            tensors,
            head.d2t,
            {**head.record, **record},
            fingerprint=head.fingerprint,
            number_format=head.number_format,
            quantize="int8" if head.quantized else None,
        )

    def read(self, folder: Path) -> dict[str, Tensor]:
        head = load_head(folder)
        if (head.config, head.fingerprint) != (self._head.config, self._head.fingerprint):
            raise ModelLoadError(f"{folder} holds a copy of another head. Remove it, or give another folder.")
        return _like(head.tensors, self._head.tensors, folder)

    def _inputs(self, segment: Excerpt) -> tuple[HeadInputs, tuple[Tensor, ...]]:
        tokens = segment.token_ids[None]
        wanted = (torch.arange(len(segment.token_ids)) >= segment.first)[None]
        documents = torch.zeros_like(tokens)
        rows: HeadRows = head_rows(tokens, wanted, documents, DEPTH)
        states = segment.states.float()
        states = torch.cat([states, torch.zeros_like(states[:1])])  # of the last token, which no row reads
        inputs = HeadInputs(self._target, rows, states, self._target.embeddings(rows.token_ids))
        return inputs, (tokens, wanted, documents, torch.full_like(tokens, NO_DOCUMENT), torch.zeros(1))


def _matches(parts: Seq[tuple[Tensor, Tensor]], text: Tensor) -> Tensor:
    """Return [n] whether the most probable columns are the text's. parts: features [n, F] and layers [V, F]. text:
    [n], -1 for a token that no column stands for."""
    found = []
    for start in range(0, len(text), _LOGIT_ROWS):
        here = slice(start, start + _LOGIT_ROWS)
        logits = torch.stack([features[here] @ layer.T for features, layer in parts]).sum(0)
        found.append(logits.argmax(-1) == text[here])
    return torch.cat(found).long() if found else torch.zeros(0, dtype=torch.int64)


class DraftLearner(Learner):
    """Teaches the last layers of draft models, as Transformers computes them, by the target's likeliest tokens."""

    def __init__(self, adaptable: Adaptable, learnable: LearnableDraft) -> None:
        target = adaptable.target
        assert isinstance(target, Model)
        self.needs = Needs(layers=(target.num_layers,), states=True)
        self._target = target
        self._learnable = learnable
        self._model = learnable.modules
        outputs = self._outputs = learnable.output_tokens
        self._columns = None if outputs is None else columns_of(outputs, target.vocab_size)

    def module(self, tensors: Mapping[str, Tensor]) -> nn.Module:
        return _Tensors(tensors)

    def loss(self, module: nn.Module, segment: Excerpt) -> Tensor:
        logits = self._logits(module, segment)
        ids, probs = self._labels(segment.states[segment.first - 1 :, -1].float())
        ids = ids if self._columns is None else self._columns[ids]
        return distillation_loss(logits, ids, probs) * len(logits)

    @torch.no_grad()
    def accepted(self, module: nn.Module, segment: Excerpt) -> Tensor:
        logits = self._logits(module, segment)
        text = segment.token_ids[segment.first :]
        matches = (logits.argmax(-1) == (text if self._columns is None else self._columns[text])).long()
        return matches.unfold(0, DEPTH, 1).cumprod(1).sum(1) if len(matches) >= DEPTH else matches[:0]

    def save(self, folder: Path, tensors: Mapping[str, Tensor], record: Mapping[str, Any]) -> None:
        model = load_transformers_model(self._learnable.file, "float32")  # what learns goes on meanwhile
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name in tensors:
                    parameter.copy_(tensors[name])
        tokenizer = find_tokenizer(self._learnable.file)
        save_model(model, getattr(tokenizer, "full", tokenizer), folder)
        write_json(folder / TRAINING_RECORD, dict(record), error=ConfigError)

    def read(self, folder: Path) -> dict[str, Tensor]:
        known = self._learnable.tensors()
        stored = dict(load_transformers_model(folder, "float32").named_parameters())
        return _like({name: stored[name].detach() for name in known.keys() & stored.keys()}, known, folder)

    def _logits(self, module: nn.Module, segment: Excerpt) -> Tensor:
        """Return the logits of the tokens that are learnt, [n, V], over those that it proposes."""
        tokens = torch.cat([segment.before, segment.token_ids[:-1]])
        count = segment.num_tokens
        assert isinstance(module, _Tensors)
        given = {"input_ids": tokens[None], "use_cache": False, "logits_to_keep": count}
        logits: Tensor = functional_call(self._model, module.by_name(), (), given).logits[0, -count:]
        return logits if self._outputs is None else logits[:, self._outputs]

    @torch.no_grad()
    def _labels(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return the target's likeliest tokens after these states, [n, k], and their probabilities."""
        layer = self._target.output_layer
        assert layer is not None
        output = self._target.decoder.spec.output if isinstance(self._target.decoder, NativeDecoder) else None
        ids = []
        probs = []
        for part in torch.split(states, _LABEL_ROWS):
            logits = layer.forward(part)
            if output is not None:
                logits = logits * output.scale
                logits = logits if output.softcap is None else softcap(logits, output.softcap)
            top = torch.softmax(logits, -1).topk(min(LIKELIEST, logits.shape[1]))
            ids.append(top.indices)
            probs.append(top.values)
        return torch.cat(ids), torch.cat(probs)


class _Tensors(nn.Module):
    """Parameters by names with points, which modules' own have not."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._names = list(tensors)
        self._all = nn.ParameterList([nn.Parameter(each.clone()) for each in tensors.values()])

    def by_name(self) -> dict[str, Tensor]:
        """Return them."""
        return dict(zip(self._names, self._all, strict=True))


def _like(tensors: Mapping[str, Tensor], known: Mapping[str, Tensor], folder: Path) -> dict[str, Tensor]:
    """Return tensors that were read, in float32. Raises ModelLoadError if they are not those that learn."""
    shapes = {name: each.shape for name, each in tensors.items()}
    if shapes != {name: each.shape for name, each in known.items()}:
        raise ModelLoadError(f"{folder} holds a copy of another drafter. Remove it, or give another folder.")
    return {name: each.float() for name, each in tensors.items()}


def learner_of(adaptable: Adaptable) -> Learner:
    """Return what teaches a drafter.

    Raises:
        DrafterError: nothing does, or it cannot be taught as it is.
    """
    learnable = adaptable.learnable if isinstance(adaptable, AdaptableModel) else None
    if isinstance(adaptable.target, Model) and isinstance(learnable, LearnableEagle):
        return EagleLearner(adaptable, learnable)
    if isinstance(adaptable.target, Model) and isinstance(learnable, LearnableDraft):
        return DraftLearner(adaptable, learnable)
    raise DrafterError(f"adapt is on, but nothing teaches {adaptable.name}. Give an EAGLE head or a draft model.")
