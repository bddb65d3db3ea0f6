"""Exact speculative decoding for Hugging Face models: the same text, sooner.

from forerun import LLM, SamplingParams

llm = LLM("bundled", drafter="draft-model")
print(llm.generate("def quicksort(items):", SamplingParams(temperature=0)).text)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from forerun.config import EngineConfig as EngineConfig
    from forerun.config import SamplingParams as SamplingParams
    from forerun.drafters import Drafter as Drafter
    from forerun.drafters.cross_vocab.cross_vocab import CrossVocab as CrossVocab
    from forerun.drafters.hybrid.hybrid import Hybrid as Hybrid
    from forerun.drafters.model.draft_model import DraftModel as DraftModel
    from forerun.drafters.model.draft_tree import DraftTree as DraftTree
    from forerun.drafters.model.staged import Staged as Staged
    from forerun.drafters.target.early_exit import EarlyExit as EarlyExit
    from forerun.drafters.target.lookahead import Lookahead as Lookahead
    from forerun.drafters.target.recycling import Recycling as Recycling
    from forerun.drafters.text.prediction import Prediction as Prediction
    from forerun.drafters.text.prompt_lookup import PromptLookup as PromptLookup
    from forerun.drafters.text.rest import Rest as Rest
    from forerun.drafters.text.suffix import Suffix as Suffix
    from forerun.engine import LLM as LLM
    from forerun.engine import Choice as Choice
    from forerun.engine import Generation as Generation
    from forerun.engine import SequenceStats as SequenceStats
    from forerun.engine import StreamChunk as StreamChunk
    from forerun.errors import ConfigError as ConfigError
    from forerun.errors import DrafterError as DrafterError
    from forerun.errors import ForerunError as ForerunError
    from forerun.errors import IncompatibleDrafterError as IncompatibleDrafterError
    from forerun.errors import MissingExtraError as MissingExtraError
    from forerun.errors import ModelLoadError as ModelLoadError
    from forerun.errors import PromptError as PromptError
    from forerun.errors import SamplingError as SamplingError
    from forerun.errors import UnsupportedModelError as UnsupportedModelError
    from forerun.types import Draft as Draft
    from forerun.types import Sequence as Sequence
    from forerun.types import Step as Step
    from forerun.types import Verdict as Verdict
    from forerun.types import Verifier as Verifier

# Names are fetched on first use, so that `forerun --help` and `import forerun.config` need not load torch.
_HOMES = {
    "forerun.config": ("EngineConfig", "SamplingParams"),
    "forerun.drafters.cross_vocab.cross_vocab": ("CrossVocab",),
    "forerun.drafters.model.draft_model": ("DraftModel",),
    "forerun.drafters.model.draft_tree": ("DraftTree",),
    "forerun.drafters.target.early_exit": ("EarlyExit",),
    "forerun.drafters.hybrid.hybrid": ("Hybrid",),
    "forerun.drafters.target.lookahead": ("Lookahead",),
    "forerun.drafters.text.prediction": ("Prediction",),
    "forerun.drafters.text.prompt_lookup": ("PromptLookup",),
    "forerun.drafters.target.recycling": ("Recycling",),
    "forerun.drafters.text.rest": ("Rest",),
    "forerun.drafters.model.staged": ("Staged",),
    "forerun.drafters.text.suffix": ("Suffix",),
    "forerun.engine": ("LLM", "Choice", "Generation", "SequenceStats", "StreamChunk"),
    "forerun.errors": (
        "ConfigError",
        "DrafterError",
        "ForerunError",
        "IncompatibleDrafterError",
        "MissingExtraError",
        "ModelLoadError",
        "PromptError",
        "SamplingError",
        "UnsupportedModelError",
    ),
    "forerun.drafters": ("Drafter",),
    "forerun.types": ("Draft", "Sequence", "Step", "Verdict", "Verifier"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "LLM",
    "Choice",
    "ConfigError",
    "CrossVocab",
    "Draft",
    "DraftModel",
    "DraftTree",
    "Drafter",
    "DrafterError",
    "EarlyExit",
    "EngineConfig",
    "ForerunError",
    "Generation",
    "Hybrid",
    "IncompatibleDrafterError",
    "Lookahead",
    "MissingExtraError",
    "ModelLoadError",
    "Prediction",
    "PromptError",
    "PromptLookup",
    "Recycling",
    "Rest",
    "SamplingError",
    "SamplingParams",
    "Sequence",
    "SequenceStats",
    "Staged",
    "Step",
    "StreamChunk",
    "Suffix",
    "UnsupportedModelError",
    "Verdict",
    "Verifier",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'forerun' has no attribute {name!r}")
    value = getattr(import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
