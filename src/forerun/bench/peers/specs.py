"""The peers that a user names: KIND=PROGRAM, and after a colon options with commas between them.

    transformers=PYTHON                         an interpreter that has Transformers
    openvino=PYTHON:model=FOLDER                one that has OpenVINO GenAI; the folder of an exported model
    llama.cpp=FOLDER:model=FILE.gguf,draft=FILE the folder of llama-server

Only the names of options end a path, so paths may hold colons and commas.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from forerun.errors import ConfigError

TRANSFORMERS, OPENVINO, LLAMA = "transformers", "openvino", "llama.cpp"
KINDS = (TRANSFORMERS, OPENVINO, LLAMA)
SERVER = "llama-server"
OPTIONS = ("model", "draft", "name", "lookup")
LOOKUPS = {TRANSFORMERS: "10", OPENVINO: "5", LLAMA: "ngram-simple"}
"""Prompt lookup where the spec gives none: draft tokens for Transformers and OpenVINO, the type for llama.cpp."""
LLAMA_LOOKUPS = ("ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-cache")
"""Types that read the request's own text. The others keep what earlier requests said, this one's repetitions too."""
SIZED = LLAMA_LOOKUPS[:3]
"""Those of them whose lengths can be set."""
_FORM = "KIND=PROGRAM:model=PATH,draft=PATH,name=TEXT,lookup=VALUE"
_STARTS = "|".join(OPTIONS)


@dataclass(frozen=True, slots=True)
class PeerSpec:
    """One peer.

    Attributes:
        kind: one of KINDS.
        program: an interpreter, or the folder of llama-server.
        model: what it loads; None stands for forerun's own target.
        draft: its draft model; None leaves that method out.
        name: what its rows are called; empty: by kind and precision.
        lookup: draft tokens of its prompt lookup, or of llama.cpp the type.
    """

    kind: str
    program: str
    model: str | None
    draft: str | None
    name: str
    lookup: str


def read_spec(text: str) -> PeerSpec:
    """A peer from its text.

    Raises:
        ConfigError: not of that form, or an option that does not fit the kind.
    """
    kind, equals, rest = text.partition("=")
    if not equals or kind not in KINDS or not rest:
        raise ConfigError(f"--peer is {text!r}, but must be {_FORM}, where KIND is one of {', '.join(KINDS)}.")
    program, *after = re.split(rf":(?=(?:{_STARTS})=)", rest, maxsplit=1)
    options: dict[str, str] = {}
    for part in re.split(rf",(?=(?:{_STARTS})=)", after[0]) if after else ():
        key, _, value = part.partition("=")
        if not value or key in options:
            raise ConfigError(f"--peer is {text!r}: give {key}= once, and a value after it. The form is {_FORM}.")
        options[key] = value
    if re.search(r":[a-z_]+=", program):
        raise ConfigError(f"--peer is {text!r}, but its options are {', '.join(OPTIONS)}. The form is {_FORM}.")
    spec = PeerSpec(
        kind,
        program,
        options.get("model"),
        options.get("draft"),
        options.get("name", ""),
        options.get("lookup", LOOKUPS[kind]),
    )
    _check(spec, text)
    return spec


def read_specs(texts: Sequence[str]) -> list[PeerSpec]:
    """All peers of a command line. Raises ConfigError, of the same peer given twice too."""
    specs = [read_spec(text) for text in texts]
    for index, spec in enumerate(specs):
        if spec in specs[:index]:
            raise ConfigError(f"--peer {texts[index]!r} is given twice. Give each peer once.")
    return specs


def _check(spec: PeerSpec, text: str) -> None:
    if spec.kind != TRANSFORMERS and spec.model is None:
        what = "the folder of an exported model" if spec.kind == OPENVINO else "a GGUF file"
        raise ConfigError(f"--peer is {text!r}, but {spec.kind} needs model=PATH, {what}.")
    if spec.kind == LLAMA:
        kind, *sizes = spec.lookup.split("/")
        sized = not sizes or (kind in SIZED and len(sizes) == 2 and all(map(_is_count, sizes)))
        if kind not in LLAMA_LOOKUPS or not sized:
            raise ConfigError(
                f"--peer is {text!r}: lookup must be one of {', '.join(LLAMA_LOOKUPS)} for llama.cpp; those of "
                f"{', '.join(SIZED)} may have lengths in 1..128, of what is looked up and of what is drafted: TYPE/3/8."
            )
    elif not _is_count(spec.lookup):
        raise ConfigError(f"--peer is {text!r}: lookup is the number of draft tokens, a whole number in 1..128.")


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 4 and 0 < int(text) <= 128
