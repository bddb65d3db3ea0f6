"""Peers as the user specifies them, and their measurement: all on all prompts, in turn, without those that fail."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun.config import BUNDLED_MODELS, DTYPES, INSTRUCTIONS
from forerun.errors import ConfigError
from forerun.lab.bench.peers.peer import Peer, PeerAnswer, PeerError, PeerStart
from forerun.lab.bench.peers.worker import PLAIN
from forerun.lab.bench.prompts import BenchPrompt
from forerun.models.loading.folder import is_gguf
from forerun.models.loading.source import find_source
from forerun.utils.fetch import path_of
from forerun.utils.stores import find_stored

Say = Callable[[str], None]
WARM_UP_TOKENS = 32
"""Of the first prompt's answer, by every method before anything is measured."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A peer, or one of its methods, that the tables go on without."""

    peer: str
    reason: str


@dataclass(frozen=True, slots=True)
class MeasuredPeers:
    """The answers of all peers.

    Attributes:
        peers: those that took part in everything.
        answers: (peer, method) -> an answer for each prompt and round, in the same order for all.
        left_out: those that did not, and methods that failed.
        interrupted: Ctrl-C ended it; the answers are of the prompts that were complete.
    """

    peers: Sequence[Peer]
    answers: Mapping[tuple[str, str], Sequence[PeerAnswer]]
    left_out: Sequence[LeftOut]
    interrupted: bool = False

    @property
    def num_answers(self) -> int:
        """Return the number of answers of each method."""
        return min(map(len, self.answers.values()), default=0)


class Peers:
    """Running peers, by name, and those that were left out."""

    def __init__(self, say: Say) -> None:
        self.say = say
        self.running: dict[str, Peer] = {}
        self.left_out: list[LeftOut] = []

    def start(self, start: PeerStart) -> Peer | None:
        """Start a further peer; None where it cannot take part. A peer whose name is taken gets a number."""
        self.say(f"starting {start.text}")
        try:
            peer = Peer.start(start)
        except PeerError as error:
            self._leave_out(start.text, str(error))
            return None
        taken = sum(name == peer.name or name.startswith(f"{peer.name} #") for name in self.running)
        peer.name += f" #{taken + 1}" if taken else ""
        self.running[peer.name] = peer
        return peer

    def generate(self, peer: Peer, method: str, token_ids: Sequence[int], max_tokens: int) -> PeerAnswer | None:
        """Generate once; None where the peer or the method failed, which is left out from then on."""
        try:
            answer = peer.generate(method, token_ids, max_tokens)
        except PeerError as error:
            peer.worker.stop(at_once=True)
            del self.running[peer.name]
            self._leave_out(peer.name, f"{method}: {error}")
            return None
        if answer is None:
            self._leave_out(f"{peer.name}, {method}", peer.refused[method])
        return answer

    def close(self) -> None:
        """End all processes."""
        for peer in self.running.values():
            peer.worker.stop()

    def _leave_out(self, name: str, reason: str) -> None:
        self.left_out.append(LeftOut(name, reason))
        self.say(f"going on without {name}: {reason}")


def run_peers(
    peers: Peers, requests: Sequence[BenchPrompt], max_tokens: int, rounds: int, own: Peer | None = None
) -> MeasuredPeers:
    """Run every method of every peer on every prompt, in turn; the beginning of the first also warms all of them up.

    Args:
        own: forerun, whose plain answer to a prompt says how many tokens all generate: up to its end of text. None:
            `max_tokens` of every prompt.

    Raises:
        KeyboardInterrupt: before a prompt was complete.
    """
    answers: dict[tuple[str, str], list[PeerAnswer]] = {}
    interrupted = False
    try:
        for number, request in enumerate(requests, 1):
            peers.say(
                f"prompt {number} of {len(requests)}: {sum(len(p.methods) for p in peers.running.values())} methods"
            )
            count = max_tokens if own is None else _answer_length(peers, own, request, max_tokens)
            for turn in range(rounds + (number == 1)):
                is_warm = number > 1 or turn > 0
                for peer, method in [(each, method) for each in peers.running.values() for method in each.methods]:
                    if peer.name not in peers.running:
                        continue
                    answer = peers.generate(
                        peer, method, request.token_ids, count if is_warm else min(count, WARM_UP_TOKENS)
                    )
                    if answer is not None and is_warm:
                        answers.setdefault((peer.name, method), []).append(answer)
    except KeyboardInterrupt:
        interrupted = True
    complete = {(peer.name, method) for peer in peers.running.values() for method in peer.methods}
    count = min((len(answers.get(key, ())) for key in complete), default=0) // rounds * rounds
    if interrupted and not count:
        raise KeyboardInterrupt
    kept = {key: each[:count] for key, each in answers.items() if key in complete}
    return MeasuredPeers(list(peers.running.values()), kept, list(peers.left_out), interrupted)


def _answer_length(peers: Peers, own: Peer, request: BenchPrompt, max_tokens: int) -> int:
    """Return the tokens of forerun's plain answer with its end of text; at least 2, as the first one is timed apart."""
    answer = peers.generate(own, PLAIN, request.token_ids, max_tokens)
    ends = frozenset(own.about.list_of("eos_token_ids", int))
    ids = () if answer is None else answer.token_ids
    return max(2, next((index for index, token in enumerate(ids, 1) if token in ends), max_tokens))


def answer_of(peers: Peers, own: Peer, tokenizer: Any, max_tokens: int) -> Callable[[list[int]], str]:
    """Return a function that answers turns by forerun's plain decoding, up to the end of text, for all peers alike."""
    ends = frozenset(own.about.list_of("eos_token_ids", int))

    def answer(token_ids: list[int]) -> str:
        given = peers.generate(own, PLAIN, token_ids, max_tokens)
        if given is None:
            raise ConfigError(
                f"forerun could not answer a turn: {peers.left_out[-1].reason}. Lower --max-tokens, or give no turns."
            )
        ids = list(given.token_ids)
        end = next((index for index, token in enumerate(ids) if token in ends), len(ids))
        text: str = tokenizer.decode(ids[:end], skip_special_tokens=True)
        return text

    return answer


# The peers that a user names: KIND=PROGRAM, and after a colon options with commas between them.
#
# transformers=PYTHON                         an interpreter that has Transformers
# openvino=PYTHON:model=PATH                  one that has OpenVINO GenAI; an exported model's folder, or a GGUF file
# llama.cpp=FOLDER:model=FILE.gguf,draft=FILE the folder of llama-server
# forerun=PYTHON:instructions=avx2            forerun once more, by an interpreter that has it
#
# Without a model, a peer loads forerun's.
#
# Only the names of options end a path, so paths may hold colons and commas.

TRANSFORMERS = "transformers"
OPENVINO = "openvino"
LLAMA = "llama.cpp"
FORERUN = "forerun"
KINDS = (TRANSFORMERS, OPENVINO, LLAMA, FORERUN)
SERVER = "llama-server"
OPTIONS = ("model", "draft", "name", "lookup", "dtype", "instructions")
NO_LOOKUP = "none"
LOOKUPS = {TRANSFORMERS: "10", OPENVINO: "5", LLAMA: "ngram-simple", FORERUN: NO_LOOKUP}
"""Prompt lookup where the spec gives none: draft tokens for Transformers and OpenVINO, the type for llama.cpp."""
LLAMA_LOOKUPS = ("ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-cache")
"""Types that read the request's own text. Other types keep earlier requests, also repetitions of this one."""
SIZED = LLAMA_LOOKUPS[:3]
"""Those of them whose lengths can be set."""
_FORM = "KIND=PROGRAM:model=PATH,draft=PATH,name=TEXT,lookup=VALUE,dtype=VALUE,instructions=VALUE"
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
        lookup: draft tokens of its prompt lookup, or of llama.cpp the type; NO_LOOKUP leaves that method out.
        dtype: in which Transformers computes; None stands for forerun's.
        instructions: the instruction set that forerun computes with; None stands for the processor's best.
    """

    kind: str
    program: str
    model: str | None
    draft: str | None
    name: str
    lookup: str
    dtype: str | None = None
    instructions: str | None = None


def read_spec(text: str) -> PeerSpec:
    """Parse the text of one --peer.

    Raises:
        ConfigError: not of that form, or an option that does not fit the kind.
    """
    kind, equals, description = text.partition("=")
    if not equals or kind not in KINDS or not description:
        raise ConfigError(f"--peer is {text!r}, but must be {_FORM}, where KIND is one of {', '.join(KINDS)}.")
    program, *after = re.split(rf":(?=(?:{_STARTS})=)", description, maxsplit=1)
    options: dict[str, str] = {}
    for part in re.split(rf",(?=(?:{_STARTS})=)", after[0]) if after else ():
        key, _, value = part.partition("=")
        if not value or key in options:
            raise ConfigError(f"--peer is {text!r}: give {key}= once, and a value after it. The form is {_FORM}.")
        options[key] = value
    if re.search(r"[:,][a-z_]+=", program):
        raise ConfigError(
            f"--peer is {text!r}, but options follow a colon, with commas between them, and are {', '.join(OPTIONS)}. "
            f"The form is {_FORM}."
        )
    spec = PeerSpec(
        kind,
        program,
        options.get("model"),
        options.get("draft"),
        options.get("name", ""),
        options.get("lookup", LOOKUPS[kind]),
        options.get("dtype"),
        options.get("instructions"),
    )
    if spec.kind == FORERUN and options.keys() - {"name", "instructions"}:
        raise ConfigError(f"--peer is {text!r}, but forerun has its target and drafters: give name and instructions.")
    if spec.instructions is not None and (spec.kind != FORERUN or spec.instructions not in INSTRUCTIONS):
        raise ConfigError(
            f"--peer is {text!r}: instructions is one of {', '.join(INSTRUCTIONS)}, and for forerun alone."
        )
    if spec.dtype is not None and (spec.kind != TRANSFORMERS or spec.dtype not in DTYPES):
        raise ConfigError(f"--peer is {text!r}: dtype is one of {', '.join(DTYPES)}, and for transformers alone.")
    if spec.lookup == NO_LOOKUP:
        return spec
    if spec.kind == LLAMA:
        kind, *sizes = spec.lookup.split("/")
        sized = not sizes or (kind in SIZED and len(sizes) == 2 and all(map(_is_count, sizes)))
        if kind not in LLAMA_LOOKUPS or not sized:
            raise ConfigError(
                f"--peer is {text!r}: lookup must be {NO_LOOKUP} or one of {', '.join(LLAMA_LOOKUPS)} for llama.cpp; "
                f"those of {', '.join(SIZED)} may have lengths in 1..128, of what is looked up and of what is drafted: "
                "TYPE/3/8."
            )
    elif not _is_count(spec.lookup):
        raise ConfigError(
            f"--peer is {text!r}: lookup is the number of draft tokens, a whole number in 1..128, or {NO_LOOKUP}."
        )
    return spec


def read_specs(texts: Sequence[str]) -> list[PeerSpec]:
    """Parse all peers of a command line. Raises ConfigError, also where the same peer is given twice."""
    specs = [read_spec(text) for text in texts]
    for index, spec in enumerate(specs):
        if spec in specs[:index]:
            raise ConfigError(f"--peer {texts[index]!r} is given twice. Give each peer once.")
    return specs


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 4 and 0 < int(text) <= 128


_MODULES = "forerun.lab.bench.peers"


def own_start(
    model: str, drafters: Mapping[str, str], dtype: str, threads: int, quantize: str | None = None
) -> PeerStart:
    """Return how forerun's worker is started. drafters: name -> the drafter's text."""
    options: dict[str, Any] = {"model": model, "drafters": dict(drafters), "dtype": dtype, "quantize": quantize}
    return PeerStart(
        FORERUN,
        [sys.executable, "-m", f"{_MODULES}.forerun_worker"],
        {"kind": FORERUN, "name": "", **options, "threads": threads, "instructions": None},
    )


def start_of(spec: PeerSpec, own: PeerStart) -> PeerStart:
    """Return how a peer is started. own: forerun's start, whose target a peer without a model loads."""
    if spec.kind == FORERUN:
        text = spec.name or f"{FORERUN} {spec.instructions or spec.program}"
        more = {"name": spec.name, "instructions": spec.instructions}
        return PeerStart(text, [spec.program, *own.command[1:]], {**own.options, **more})
    is_llama = spec.kind == LLAMA
    target = own.options["model"]
    model = spec.model or str(BUNDLED_MODELS.get(target) or path_of(target) or find_stored(target) or target)
    lookup = None if spec.lookup == NO_LOOKUP else spec.lookup
    command = (
        [sys.executable, "-m", f"{_MODULES}.llama_worker"]
        if is_llama
        else [spec.program, str(Path(__file__).with_name("worker.py"))]
    )
    options = {
        "kind": spec.kind,
        "name": spec.name,
        "program": spec.program,
        "model": model,
        "file_type": find_source(model).file_type() if spec.kind == OPENVINO and is_gguf(Path(model)) else None,
        "draft": spec.draft,
        "dtype": spec.dtype or own.options["dtype"],
        "threads": own.options["threads"],
        "lookup": lookup if is_llama or lookup is None else int(lookup),
    }
    return PeerStart(spec.name or ", ".join(each for each in (spec.kind, spec.model) if each), command, options)
