"""Exact speculative decoding for Hugging Face models: the same text, sooner.

from forerun import LLM, SamplingParams

llm = LLM("bundled", drafter="draft-model")
print(llm.generate("def quicksort(items):", SamplingParams(temperature=0)).text)
"""

from typing import TYPE_CHECKING, Any

from forerun.drafters.registry import DRAFTERS
from forerun.utils.deferred import HANDED_IN, DeferredModule, exporting

__version__ = "0.1.0"

if TYPE_CHECKING:
    from forerun.config import Grammar as Grammar, SamplingParams as SamplingParams
    from forerun.drafters import *  # noqa: F403
    from forerun.drafters import Drafter as Drafter
    from forerun.engine import (
        LLM as LLM,
        AsyncLLM as AsyncLLM,
        Choice as Choice,
        Generation as Generation,
        SequenceStats as SequenceStats,
        StreamChunk as StreamChunk,
    )
    from forerun.errors import (
        BatchError as BatchError,
        ConfigError as ConfigError,
        DrafterError as DrafterError,
        EngineClosedError as EngineClosedError,
        FetchError as FetchError,
        ForerunError as ForerunError,
        GrammarDeadEndError as GrammarDeadEndError,
        GrammarError as GrammarError,
        IncompatibleDrafterError as IncompatibleDrafterError,
        InterruptedRequestError as InterruptedRequestError,
        ModelLoadError as ModelLoadError,
        NonFiniteError as NonFiniteError,
        PromptError as PromptError,
        RequestError as RequestError,
        SamplingError as SamplingError,
        UnsupportedModelError as UnsupportedModelError,
    )
    from forerun.types import Draft as Draft, Sequence as Sequence, Step as Step, Verdict as Verdict

HANDED_IN["adaptation"] = DeferredModule("forerun.adaptation")  # it loads the code of training, which takes seconds

# Names are fetched on first use, so that `forerun --help` and `import forerun.config` need not load torch.
_HOMES = {
    "forerun.config": ("Grammar", "SamplingParams"),
    "forerun.engine": ("LLM", "AsyncLLM", "Choice", "Generation", "SequenceStats", "StreamChunk"),
    "forerun.errors": (
        "BatchError",
        "ConfigError",
        "DrafterError",
        "EngineClosedError",
        "FetchError",
        "ForerunError",
        "GrammarDeadEndError",
        "GrammarError",
        "IncompatibleDrafterError",
        "InterruptedRequestError",
        "ModelLoadError",
        "NonFiniteError",
        "PromptError",
        "RequestError",
        "SamplingError",
        "UnsupportedModelError",
    ),
    "forerun.drafters": ("Drafter", *(row.class_name for row in DRAFTERS.values())),
    "forerun.types": ("Draft", "Sequence", "Step", "Verdict"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
_exported = exporting(__name__, _HOME_OF)

_CALLED = {
    "AsyncLLMEngine": "take AsyncLLM.",
    "AsyncEngineArgs": "give the options to AsyncLLM(...).",
    "EngineArgs": "give the options to LLM(...).",
    "LLMEngine": "take LLM, or AsyncLLM.",
    "RequestOutput": "results are Generation.",
    "CompletionOutput": "the outputs of a Generation are Choice.",
    "GuidedDecodingParams": "take SamplingParams(grammar=Grammar.json_schema(...)).",
    "StructuredOutputsParams": "take SamplingParams(grammar=Grammar.json_schema(...)).",
    "BeamSearchParams": "there is no beam search.",
    "GenerationConfig": "take SamplingParams.",
    "AutoModelForCausalLM": "take LLM(model).",
    "AutoTokenizer": "take LLM(model).get_tokenizer().",
    "TextStreamer": "LLM.stream(prompt) yields chunks.",
    "pipeline": "take LLM(model), and its generate or chat.",
}
"""Names of vLLM's and Transformers' -> what there is here."""

if not TYPE_CHECKING:  # type checkers take the names imported above
    __all__ = sorted([*_HOME_OF, "__version__"], key=lambda name: (not name.isupper(), name.startswith("_"), name))


def __getattr__(name: str) -> Any:
    if name in _CALLED:  # of an AttributeError, `from forerun import` would not show the text
        raise ImportError(f"forerun has no {name}: {_CALLED[name]}")
    return _exported(name)


def __dir__() -> list[str]:
    return sorted([*_HOME_OF, "__version__"])
