"""A peer in a process of its own: Transformers or OpenVINO GenAI, which answers JSON objects, one a line, over a pipe.

Run by path with the interpreter that has the peer; nothing of forerun is imported. The first line on standard input
says what to load. The worker answers "ready", then one line for every request, and leaves when its input ends:

    > {"kind": "openvino", "model": "FOLDER", "draft": null, "threads": 2, "lookup": 5, "dtype": "bfloat16", ...}
    < {"ready": {"version": "...", "instructions": "...", "precision": "int8", "methods": ["plain", "prompt lookup"]}}
    > {"method": "plain", "token_ids": [1, 2, 3], "max_tokens": 128}
    < {"token_ids": [...], "seconds": 1.2, "first_seconds": 0.1, "steps": 128}
    < {"error": "RuntimeError"}

All generation is greedy and goes on past any end of text. `seconds` is measured around the peer's generate call,
`first_seconds` until its first token, both on this side of the pipe; `steps` are forwards that gave tokens, null if the
peer does not report them.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PLAIN = "plain"
LOOKUP = "prompt lookup"
DRAFT = "draft model"
DRAFT_TOKENS = 5
"""That a draft model of OpenVINO's makes, where the lookup's number is not there to take."""


def answer_requests(open_engine: Callable[[dict[str, Any]], Any]) -> None:
    """Answer the lines of standard input until it ends.

    open_engine: makes, of the first line, an object with `ready` (what to report) and `generate(method, token_ids,
    max_tokens)`, which returns the answer to a request.
    """
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)  # what libraries print on standard output is no reply

    def reply(answer: dict[str, Any]) -> None:
        replies.write(json.dumps(answer) + "\n")

    first = sys.stdin.readline()
    if not first:
        return
    engine = open_engine(json.loads(first))
    try:
        reply({"ready": engine.ready})
        for line in sys.stdin:
            request = json.loads(line)
            try:
                reply(engine.generate(request["method"], request["token_ids"], request["max_tokens"]))
            except Exception as error:  # its text may hold what the prompt held
                reply({"error": type(error).__name__})
    finally:
        getattr(engine, "close", lambda: None)()


class Transformers:
    """Transformers' generate: greedy, by prompt lookup, and assisted by a draft model, with its own defaults."""

    def __init__(self, options: dict[str, Any]) -> None:
        import torch
        import transformers

        torch.set_num_threads(options["threads"])
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        self._model = self._load(options["model"], options["dtype"])
        self._draft = self._load(options["draft"], options["dtype"]) if options["draft"] else None
        self._lookup = options["lookup"]
        self.ready = {
            "version": f"transformers {transformers.__version__}, torch {torch.__version__}",
            "instructions": torch.backends.cpu.get_cpu_capability(),
            "precision": str(self._model.dtype).removeprefix("torch."),
            "methods": [PLAIN] + [LOOKUP] * bool(self._lookup) + [DRAFT] * (self._draft is not None),
        }

    @staticmethod
    def _load(name: str, dtype: str) -> Any:
        import transformers

        path = Path(name)
        more = {}
        if path.suffix == ".gguf":
            path, more = path.parent, {"gguf_file": path.name}
        where = str(path) if path.exists() else name
        model = transformers.AutoModelForCausalLM.from_pretrained(
            where, dtype=dtype, use_safetensors=True, trust_remote_code=False, **more
        )
        # what the folder recommends for sampling, penalties included, is left out
        model.generation_config = transformers.GenerationConfig(do_sample=False, pad_token_id=0)
        return model.eval()

    def generate(self, method: str, token_ids: list[int], max_tokens: int) -> dict[str, Any]:
        settings: dict[str, Any] = {}
        if method == LOOKUP:
            settings["prompt_lookup_num_tokens"] = self._lookup
        elif method == DRAFT:
            settings["assistant_model"] = self._draft
        tokens, times, seconds = generate_greedily(self._model, token_ids, max_tokens, **settings)
        return {"token_ids": tokens, "seconds": seconds, "first_seconds": times[0], "steps": len(times)}


def generate_greedily(
    model: Any, token_ids: list[int], max_tokens: int, ends: list[int] | None = None, **settings: Any
) -> tuple[list[int], list[float], float]:
    """Generate greedily with a model of Transformers.

    Args:
        ends: tokens that end the text; None for none.
        settings: further arguments of its `generate`.

    Returns:
        The new tokens, the seconds until those of each forward came, and the seconds of the whole generation.
    """
    import torch

    ids = torch.tensor([token_ids], device=model.device)
    watch = TokenTimes()
    start = time.perf_counter()
    with torch.inference_mode():
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=ends,
            pad_token_id=0,
            streamer=watch,
            **settings,
        )
    seconds = time.perf_counter() - start
    return output[0, len(token_ids) :].tolist(), [each - start for each in watch.times[1:]], seconds


class TokenTimes:
    """A streamer of Transformers' that notes when tokens come: first the prompt, then those of each forward."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: object) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None: ...


class OpenVINO:
    """OpenVINO GenAI's LLMPipeline on the CPU, one pipeline per method. No prompt is kept for later ones."""

    def __init__(self, options: dict[str, Any]) -> None:
        import numpy
        import openvino
        import openvino_genai

        self._numpy = numpy
        self._openvino = openvino
        self._genai = openvino_genai
        self._lookup = options["lookup"]
        model = options["model"]
        draft = options["draft"]
        self._pipelines = {PLAIN: self._pipeline(model, options["threads"])}
        if self._lookup:
            self._pipelines[LOOKUP] = self._pipeline(model, options["threads"], prompt_lookup=True)
        if draft:
            helper = openvino_genai.draft_model(draft, "CPU", INFERENCE_NUM_THREADS=options["threads"])
            self._pipelines[DRAFT] = self._pipeline(model, options["threads"], draft_model=helper)
        core = openvino.Core()
        self.ready = {
            "version": f"openvino-genai {openvino_genai.__version__}",
            "instructions": " ".join(core.get_property("CPU", "OPTIMIZATION_CAPABILITIES")),
            "precision": options["file_type"] or self._precision(Path(model), core),
            "methods": list(self._pipelines),
        }

    def _pipeline(self, model: str, threads: int, **more: Any) -> Any:
        scheduler = self._genai.SchedulerConfig()
        scheduler.enable_prefix_caching = False
        scheduler.max_num_batched_tokens = sys.maxsize  # a prompt is computed at once, as by default
        return self._genai.LLMPipeline(
            model, "CPU", scheduler_config=scheduler, INFERENCE_NUM_THREADS=threads, PERFORMANCE_HINT="LATENCY", **more
        )

    @staticmethod
    def _precision(folder: Path, core: Any) -> str:
        """Return the type of most of the weights' bytes; of 16-bit weights, the type that the processor computes in."""
        held: dict[str, int] = {}
        for node in core.read_model(folder / "openvino_model.xml").get_ops():
            if node.get_type_name() == "Constant":
                name = node.get_element_type().get_type_name()
                held[name] = held.get(name, 0) + node.get_byte_size()
        most = max(held, key=lambda name: held[name])
        if most in ("f16", "bf16", "f32"):
            return str(core.get_property("CPU", "INFERENCE_PRECISION_HINT").get_type_name())
        return {"u8": "int8", "i8": "int8", "u4": "int4", "i4": "int4"}.get(most, most)

    def generate(self, method: str, token_ids: list[int], max_tokens: int) -> dict[str, Any]:
        config = self._genai.GenerationConfig(max_new_tokens=max_tokens, ignore_eos=True, do_sample=False)
        if method == LOOKUP:
            config.num_assistant_tokens = self._lookup
            config.max_ngram_size = 3
        elif method == DRAFT:
            config.num_assistant_tokens = self._lookup or DRAFT_TOKENS
        ids = self._openvino.Tensor(self._numpy.array([token_ids], dtype=self._numpy.int64))
        start = time.perf_counter()
        result = self._pipelines[method].generate(ids, config)
        seconds = time.perf_counter() - start
        tokens = [int(each) for each in result.tokens[0]]
        per_step = list(result.perf_metrics.raw_metrics.m_batch_sizes)
        return {
            "token_ids": tokens,
            "seconds": seconds,
            "first_seconds": result.perf_metrics.get_ttft().mean / 1000,
            "steps": len(per_step) if sum(per_step) == len(tokens) else None,
        }


ENGINES = {"transformers": Transformers, "openvino": OpenVINO}

if __name__ == "__main__":
    answer_requests(lambda options: ENGINES[options["kind"]](options))
