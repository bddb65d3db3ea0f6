"""Ranks that torchrun has started beside the first: they compute what that one asks for, and run nothing else."""

from __future__ import annotations

from forerun.cli.options import LLMOptions


def follow_launched(model: str, settings: LLMOptions) -> str:
    """The model's name, on the first rank. Another one computes its part of the model until the first ends, and leaves.

    Raises:
        ForerunError: as `LLM`.
    """
    if settings.tensor_parallel == 1:
        return model
    from forerun.models.sharded import check_tensor_parallel, load_sharded_model
    from forerun.ranks.joining import launched_rank

    launched = launched_rank()
    if launched is not None and launched[0] > 0:
        check_tensor_parallel(settings.tensor_parallel, settings.device, settings.adapter)
        load_sharded_model(model, settings.dtype, settings.tensor_parallel, settings.quantize)
    return model
