"""forerun as one of the peers: plain decoding and its drafters over one target, in a process of its own."""

from __future__ import annotations

import os
import time
from typing import Any

from forerun.config import INSTRUCTIONS_VARIABLE
from forerun.lab.bench.peers.worker import PLAIN, answer_requests


class Forerun:
    """An engine per drafter, K chosen automatically unless the drafter's text has it."""

    def __init__(self, options: dict[str, Any]) -> None:
        if options["instructions"]:
            os.environ[INSTRUCTIONS_VARIABLE] = options["instructions"]  # read when the kernels are loaded
        import torch

        from forerun import __version__
        from forerun.config import AUTO, OFF, REFERENCE
        from forerun.engine import LLM
        from forerun.kernels.provenance import machine_facts
        from forerun.lab.bench.methods import beside
        from forerun.models import number_format

        torch.set_num_threads(options["threads"])
        plain = LLM(
            options["model"], drafter=None, dtype=options["dtype"], quantize=options["quantize"], prefix_reuse=OFF
        )
        self._engines = {PLAIN: plain}
        for name, text in options["drafters"].items():
            self._engines[name] = beside(plain, text, AUTO)
        commit = machine_facts()["commit"]
        capability = torch.backends.cpu.get_cpu_capability()
        self.ready = {
            "version": f"forerun {__version__}{f' ({commit})' if commit else ''}, torch {torch.__version__}",
            "instructions": capability if plain.target.kernels == REFERENCE else plain.target.kernels,
            "precision": number_format(plain.target),
            "methods": list(self._engines),
            "eos_token_ids": sorted(plain.target.eos_token_ids),
            "context_length": plain.target.context_length,
        }

    def generate(self, method: str, token_ids: list[int], max_tokens: int) -> dict[str, Any]:
        from forerun.config import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        start = time.perf_counter()
        generation: Any = self._engines[method].generate(token_ids, params)
        seconds = time.perf_counter() - start
        return {
            "token_ids": generation.token_ids,
            "seconds": seconds,
            "first_seconds": generation.stats.time_first_token,
            "steps": generation.stats.num_forwards,
        }


if __name__ == "__main__":
    answer_requests(Forerun)
