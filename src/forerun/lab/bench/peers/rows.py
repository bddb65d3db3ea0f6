"""From the peers' answers to rows: speeds, and their ratios within a class of precision."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from forerun.lab.bench.measure import Interval, bootstrap, ratio
from forerun.lab.bench.peers.peer import Peer, PeerAnswer
from forerun.lab.bench.peers.run import MeasuredPeers
from forerun.lab.bench.peers.worker import PLAIN
from forerun.lab.bench.recorded import figures_of
from forerun.lab.bench.tables import Columns, Report, Table, decimal, percent
from forerun.lab.results.schema import Figure, TargetFacts


@dataclass(frozen=True, slots=True)
class PeerRow:
    """One method of one peer. Ratios are above 1 where this method is faster; they are over the same prompts.

    Attributes:
        peer: its name.
        method: "plain", or what it drafts with.
        bits: the class of its precision; None where unknown.
        tokens_per_second: tokens over the whole generation, prompt included.
        decoding: tokens per second after the first; None where the peer does not report when it came.
        first_token: seconds until the first token; None where the peer does not report it.
        over_reference: speed over the class's reference.
        over_plain: speed over the peer's own plain decoding; None where that was left out.
        mean_acceptance_length: tokens per forward that gave tokens; None where the peer does not report them.
        same_text: share of prompts on which its tokens are those of its own plain decoding.
        same_as_forerun: share of prompts on which its tokens are those of forerun's plain decoding; None without it.
        shared_prefix: median number of first tokens that are those of forerun's plain decoding; None without it.
    """

    peer: str
    method: str
    bits: int | None
    tokens_per_second: Interval
    decoding: Interval | None
    first_token: Interval | None
    over_reference: Interval
    over_plain: Interval | None
    mean_acceptance_length: float | None
    same_text: float | None
    same_as_forerun: float | None
    shared_prefix: float | None

    @property
    def label(self) -> str:
        return f"{self.peer}, {self.method}"


@dataclass(frozen=True, slots=True)
class PrecisionClass:
    """Peers whose weights have about as many bits.

    Attributes:
        bits: of a weight; None where unknown.
        reference: the row that speeds are divided by: forerun's plain decoding where it is in the class, else the
            first row.
        rows: in the order in which the peers were named.
    """

    bits: int | None
    reference: str
    rows: Sequence[PeerRow]

    @property
    def title(self) -> str:
        return "Unknown precision" if self.bits is None else f"{self.bits} bit"


def classes(measured: MeasuredPeers, own: str) -> list[PrecisionClass]:
    """Group the rows by precision, the widest first; peers with an unknown one last.

    own: the name of forerun's peer whose plain decoding is the reference.
    """
    held: dict[int | None, list[tuple[Peer, str]]] = {}
    for peer in measured.peers:
        for method in peer.methods:
            if (peer.name, method) in measured.answers:
                held.setdefault(peer.bits, []).append((peer, method))
    ordered = sorted(held, key=lambda bits: -1 if bits is None else bits, reverse=True)
    return [_class(measured, bits, held[bits], own) for bits in ordered]


def _class(
    measured: MeasuredPeers,
    bits: int | None,
    members: Sequence[tuple[Peer, str]],
    own: str,
) -> PrecisionClass:
    def answers(name: str, method: str) -> list[PeerAnswer]:
        return list(measured.answers.get((name, method), ()))

    first, method = next(((peer, how) for peer, how in members if (peer.name, how) == (own, PLAIN)), members[0])
    reference = answers(first.name, method)
    rows = [
        _row(peer.name, how, bits, answers(peer.name, how), reference, answers(peer.name, PLAIN), answers(own, PLAIN))
        for peer, how in members
    ]
    return PrecisionClass(bits, f"{first.name}, {method}", rows)


def _row(
    name: str,
    method: str,
    bits: int | None,
    answers: Sequence[PeerAnswer],
    reference: Sequence[PeerAnswer],
    plain: Sequence[PeerAnswer],
    text: Sequence[PeerAnswer],
) -> PeerRow:
    seconds = [answer.seconds_per_token for answer in answers]
    steps = [answer.steps for answer in answers if answer.steps is not None]
    first = [answer.first_seconds for answer in answers if answer.first_seconds is not None]
    decoding = [speed for answer in answers if (speed := _decoding_speed(answer)) is not None]
    tokens = sum(len(answer.token_ids) for answer in answers)
    as_plain = [_shared(a.token_ids, b.token_ids) for a, b in zip(answers, plain, strict=True)] if plain else []
    shared = [_shared(a.token_ids, b.token_ids) for a, b in zip(answers, text, strict=True)] if text else []
    return PeerRow(
        name,
        method,
        bits,
        tokens_per_second=bootstrap([1 / each for each in seconds]),
        decoding=bootstrap(decoding) if len(decoding) == len(answers) else None,
        first_token=bootstrap(first) if len(first) == len(answers) else None,
        over_reference=ratio([answer.seconds_per_token for answer in reference], seconds),
        over_plain=ratio([answer.seconds_per_token for answer in plain], seconds) if plain else None,
        mean_acceptance_length=tokens / sum(steps) if len(steps) == len(answers) else None,
        same_text=_share_of_whole(as_plain, answers),
        same_as_forerun=_share_of_whole(shared, answers),
        shared_prefix=statistics.median(shared) if shared else None,
    )


def _share_of_whole(shared: Sequence[int], answers: Sequence[PeerAnswer]) -> float | None:
    """Return the share of answers of which all tokens are shared; None without any."""
    whole = [count == len(answer.token_ids) for count, answer in zip(shared, answers, strict=False)]
    return sum(whole) / len(whole) if whole else None


def _decoding_speed(answer: PeerAnswer) -> float | None:
    """Return the tokens per second after the first token."""
    if answer.first_seconds is None or len(answer.token_ids) < 2 or answer.seconds <= answer.first_seconds:
        return None
    return (len(answer.token_ids) - 1) / (answer.seconds - answer.first_seconds)


def _shared(one: Sequence[int], other: Sequence[int]) -> int:
    """Count the first tokens that are the same."""
    pairs = zip(one, other, strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


COLUMNS: Columns[PeerRow] = {
    "peer, method": lambda row: row.label,
    "tokens/s": lambda row: f"{row.tokens_per_second:.1f}",
    "over reference": lambda row: decimal(row.over_reference),
    "over its own plain": lambda row: decimal(row.over_plain),
    "decoding tokens/s": lambda row: "–" if row.decoding is None else f"{row.decoding:.1f}",
    "first token ms": lambda row: "–" if row.first_token is None else f"{1000 * row.first_token.median:.0f}",
    "mean acceptance length": lambda row: decimal(row.mean_acceptance_length),
    "text as its own plain": lambda row: percent(row.same_text),
    "text as forerun's plain": lambda row: percent(row.same_as_forerun),
    "first tokens as forerun's": lambda row: "–" if row.shared_prefix is None else f"{row.shared_prefix:.0f}",
}


def peer_figures(rows: Iterable[PeerRow], samples: int) -> list[Figure]:
    """Return the figures of each row. samples: answers of each."""
    found: list[Figure] = []
    for row in rows:
        values = {
            "tokens_per_second": row.tokens_per_second,
            "decoding": row.decoding,
            "first_token": row.first_token,
            "over_plain": row.over_plain,
            "acceptance_length": row.mean_acceptance_length,
            "same_text": row.same_text,
            "same_as_forerun": row.same_as_forerun,
            "shared_prefix": row.shared_prefix,
        }
        found += figures_of({"method": row.label, "peer": row.peer, "drafter": row.method}, values, samples)
    return found


def peers_report(
    measured: MeasuredPeers, own: str, about: str, target: TargetFacts, facts: Mapping[str, Any], avx512: bool
) -> Report:
    """Collect everything as tables and as facts.

    Args:
        own: the name of forerun's peer whose plain decoding is the reference.
        about: prompts, tokens and threads, for the titles.
        facts: the settings, for the file.
        avx512: whether the processor has AVX-512.
    """
    peers = [[peer.name, peer.version, peer.precision, peer.instruction_text(avx512)] for peer in measured.peers]
    header = ["peer", "version", "weights", "instruction sets"]
    tables = [Table("Peers", header, peers)]
    every = classes(measured, own)
    tables += [Table.of(f"{each.title}, {about}; ratios over {each.reference}", COLUMNS, each.rows) for each in every]
    if measured.left_out:
        rows = [[each.peer, each.reason] for each in measured.left_out]
        tables.append(Table("Left out", ["peer", "reason"], rows))
    facts_of = [
        {"name": each.name, "version": each.version, "weights": each.precision, "bits": each.bits}
        for each in measured.peers
    ]
    details = {"peers": facts_of, "classes": every, "left_out": measured.left_out}
    figures = peer_figures((row for each in every for row in each.rows), measured.num_answers)
    return Report("peers", tables, target, settings=facts, figures=figures, details=details)
