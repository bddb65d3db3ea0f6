"""All peers on all prompts, in turn: whoever fails is left out with the reason, and the others go on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from forerun.bench.peers.peer import Answer, Peer, Start
from forerun.bench.peers.pipe import PeerError
from forerun.bench.peers.worker import PLAIN
from forerun.bench.prompts import Request
from forerun.errors import ConfigError

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A peer, or one of its methods, that the tables go on without."""

    peer: str
    reason: str


@dataclass(frozen=True, slots=True)
class Measured:
    """What came of it.

    Attributes:
        peers: those that took part in everything.
        answers: (peer, method) -> an answer for each prompt and round, in the same order for all.
        left_out: the others.
        interrupted: Ctrl-C ended it; the answers are of the prompts that were complete.
    """

    peers: Sequence[Peer]
    answers: Mapping[tuple[str, str], Sequence[Answer]]
    left_out: Sequence[LeftOut]
    interrupted: bool = False

    @property
    def num_answers(self) -> int:
        """Of each method."""
        return min(map(len, self.answers.values()), default=0)


class Peers:
    """Running peers, by name, and those that were left out."""

    def __init__(self, say: Say) -> None:
        self.say = say
        self.running: dict[str, Peer] = {}
        self.left_out: list[LeftOut] = []

    def start(self, start: Start) -> Peer | None:
        """A further peer; None where it cannot take part. Of a name that is taken, it gets a number."""
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

    def generate(self, peer: Peer, method: str, token_ids: Sequence[int], max_tokens: int) -> Answer | None:
        """One generation; None where the peer or the method failed, which is left out from then on."""
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

    def stop(self) -> None:
        """End all processes."""
        for peer in self.running.values():
            peer.worker.stop()

    def _leave_out(self, name: str, reason: str) -> None:
        self.left_out.append(LeftOut(name, reason))
        self.say(f"going on without {name}: {reason}")


@contextmanager
def running(say: Say) -> Iterator[Peers]:
    """Peers that are ended with the block, whatever happens in it."""
    peers = Peers(say)
    try:
        yield peers
    finally:
        peers.stop()


def measure(peers: Peers, requests: Sequence[Request], max_tokens: int, rounds: int) -> Measured:
    """Every method of every peer on every prompt, in turn; the first prompt also warms all of them up.

    Raises:
        KeyboardInterrupt: before a prompt was complete.
    """
    answers: dict[tuple[str, str], list[Answer]] = {}
    interrupted = False
    try:
        _measure(peers, requests, max_tokens, rounds, answers)
    except KeyboardInterrupt:
        interrupted = True
    left = {(peer.name, method) for peer in peers.running.values() for method in peer.methods}
    count = min((len(answers.get(key, ())) for key in left), default=0) // rounds * rounds
    if interrupted and not count:
        raise KeyboardInterrupt
    kept = {key: each[:count] for key, each in answers.items() if key in left}
    return Measured(list(peers.running.values()), kept, list(peers.left_out), interrupted)


def _measure(
    peers: Peers,
    requests: Sequence[Request],
    max_tokens: int,
    rounds: int,
    answers: dict[tuple[str, str], list[Answer]],
) -> None:
    for number, request in enumerate(requests, 1):
        peers.say(f"prompt {number} of {len(requests)}: {sum(len(p.methods) for p in peers.running.values())} methods")
        for turn in range(rounds + (number == 1)):
            for peer in list(peers.running.values()):
                for method in list(peer.methods):
                    answer = peers.generate(peer, method, request.token_ids, max_tokens)
                    if answer is not None and (number > 1 or turn > 0):
                        answers.setdefault((peer.name, method), []).append(answer)
                    if peer.name not in peers.running:
                        break


def answer_of(peers: Peers, own: Peer, tokenizer: Any, max_tokens: int) -> Callable[[list[int]], str]:
    """The answers between turns: those of forerun's plain decoding, up to the end of text, for all peers alike."""
    ends = frozenset(own.about.list_of("eos_token_ids", int))

    def answer(token_ids: list[int]) -> str:
        given = peers.generate(own, PLAIN, token_ids, max_tokens)
        if given is None:
            raise ConfigError(
                f"forerun could not answer a turn: {peers.left_out[-1].reason}. Lower --max-tokens, or give no turns."
            )
        ids = list(given.token_ids)
        end = next((place for place, token in enumerate(ids) if token in ends), len(ids))
        text: str = tokenizer.decode(ids[:end], skip_special_tokens=True)
        return text

    return answer
