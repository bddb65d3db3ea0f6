"""Where a draft's weights start, and which sizes make sense beside a target."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from forerun.errors import ConfigError
from forerun.train.token_ids import model_vocabulary
from forerun.vocabulary import Vocabulary, check_same_tokens

MAX_SHARE = 0.1
"""A draft made from nothing with more than a tenth of its target's work a token costs more than it saves."""
MAX_TRAINED_SHARE = 0.25
"""One that starts from trained weights agrees more often, and may cost more."""


def step_parameters(model: PreTrainedModel, num_outputs: int | None = None) -> int:
    """The parameters that every token is computed with: all but the rows of the embedding that are not looked up.

    num_outputs: rows of the output layer that are computed; None for all.
    """
    embedding: Tensor = model.get_input_embeddings().weight
    head: Tensor = model.get_output_embeddings().weight
    inner: int = sum(parameter.numel() for parameter in model.parameters() if parameter is not embedding)
    if head is not embedding:
        inner -= head.numel()
    return inner + (len(head) if num_outputs is None else num_outputs) * head.shape[1]


def check_size(draft_parameters: int, target_parameters: int, share: float = MAX_SHARE) -> None:
    """Refuse a draft whose step costs more than this share of its target's, by `step_parameters` of both.

    Raises:
        ConfigError: with both sizes.
    """
    if draft_parameters <= share * target_parameters:
        return
    limit = "a tenth" if share == MAX_SHARE else "a quarter"
    remedy = "Take fewer layers or a smaller hidden size."
    if share != MAX_SHARE:
        remedy = "Keep fewer layers (--prune-layers), channels (--prune-width) or output tokens (--output-tokens)."
    raise ConfigError(
        f"a draft that computes each token with {draft_parameters:,} parameters has more than {limit} of its target's "
        f"{target_parameters:,}, and would cost more than it saves. {remedy}"
    )


def check_start(
    start: PreTrainedModel,
    start_tokenizer: PreTrainedTokenizerBase,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    """Refuse a model to start from whose tokens are not the target's.

    Raises:
        ConfigError: it has another number of them.
        IncompatibleDrafterError: names the first that differs.
    """
    ours, theirs = model_vocabulary(target), model_vocabulary(start)
    if ours != theirs:
        raise ConfigError(
            f"The draft to start from has {theirs:,} tokens and its target {ours:,}. Start from a draft of this "
            "target, or leave --start out."
        )
    check_same_tokens(
        Vocabulary("the target", ours, tokenizer), Vocabulary("the draft to start from", theirs, start_tokenizer)
    )


@torch.no_grad()
def inherit_embeddings(draft: LlamaForCausalLM, target: PreTrainedModel) -> None:
    """Start the draft's (tied) embeddings as the target's, on their principal axes.

    Two thirds of so small a draft are embeddings, and they are what little data teaches slowest. They are scaled to the
    standard deviation of random ones, so that the first loss is near ln V whatever the target's scale is.
    Nothing happens if the draft is wider than the target.
    """
    source = target.get_input_embeddings().weight.float().cpu()
    width = draft.config.hidden_size
    if width > source.shape[1] or len(source) != draft.config.vocab_size:
        return
    _, vectors = torch.linalg.eigh(source.T @ source)
    inherited = source @ vectors[:, -width:]
    scale = draft.config.initializer_range / inherited.std().clamp(min=1e-12)
    draft.model.embed_tokens.weight.copy_(inherited * scale)
