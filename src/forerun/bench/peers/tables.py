"""What `forerun bench peers` prints: who took part, the speeds within each class of precision, and who was left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from forerun.bench.peers.peer import Peer
from forerun.bench.peers.rows import PeerRow, PrecisionClass, by_category, classes
from forerun.bench.peers.run import Measured
from forerun.bench.report import Columns, Report, Table, decimal, percent

COLUMNS: Columns[PeerRow] = {
    "peer, method": lambda row: row.label,
    "tokens/s": lambda row: f"{row.tokens_per_second:.1f}",
    "over reference": lambda row: decimal(row.over_reference),
    "over its own plain": lambda row: decimal(row.over_plain),
    "decoding tokens/s": lambda row: "–" if row.decoding is None else f"{row.decoding.median:.1f}",
    "first token ms": lambda row: "–" if row.first_token is None else f"{1000 * row.first_token:.0f}",
    "mean acceptance length": lambda row: decimal(row.mean_acceptance_length),
    "text as its own plain": lambda row: percent(row.same_text),
    "first tokens as forerun's": lambda row: "–" if row.shared_prefix is None else f"{row.shared_prefix:.0f}",
}


def report(
    measured: Measured, own: str | None, categories: Sequence[str], about: str, facts: Mapping[str, Any], avx512: bool
) -> Report:
    """Everything as tables and as facts.

    Args:
        own: the name of forerun's peer whose plain decoding is the reference; None if it was left out.
        categories: of each answer.
        about: prompts, tokens and threads, for the titles.
        facts: the settings, for the file.
        avx512: whether the processor has AVX-512.
    """
    every = classes(measured, own)
    parts = by_category(measured, own, categories) if len(set(categories)) > 1 else {}
    tables = [peer_table(measured, avx512)]
    for each in every:
        title = f"{each.title}, {about}; ratios over {each.reference}"
        tables.append(Table.of(title, COLUMNS, each.rows))
        if parts:
            tables.append(category_table(each, parts))
    if measured.left_out:
        rows = [[each.peer, each.reason] for each in measured.left_out]
        tables.append(Table("Left out", ["peer", "reason"], rows))
    found = {
        "peers": [_peer_facts(peer, avx512) for peer in measured.peers],
        "classes": every,
        "categories": parts,
        "left_out": measured.left_out,
    }
    return Report("peers", tables, settings=facts, details=found)


def category_table(whole: PrecisionClass, parts: dict[str, list[PrecisionClass]]) -> Table:
    """Tokens per second of each method by category."""
    found = {
        name: {row.label: f"{row.tokens_per_second.median:.1f}" for each in part for row in each.rows}
        for name, part in parts.items()
    }
    rows = [[row.label, *(found[name].get(row.label, "–") for name in parts)] for row in whole.rows]
    return Table(f"{whole.title}: tokens/s by category", ["peer, method", *(name or "–" for name in parts)], rows)


def peer_table(measured: Measured, avx512: bool) -> Table:
    """What each peer is, and which instruction sets it says it uses."""
    rows = []
    for peer in measured.peers:
        lacks = "; without AVX-512, which the processor has" if peer.lacks_avx512(avx512) else ""
        rows.append([peer.name, peer.version, peer.precision, peer.instructions + lacks])
    return Table("Peers", ["peer", "version", "weights", "instruction sets"], rows)


def _peer_facts(peer: Peer, avx512: bool) -> dict[str, Any]:
    return {
        "name": peer.name,
        "version": peer.version,
        "weights": peer.precision,
        "bits": peer.bits,
        "instructions": peer.instructions,
        "lacks_avx512": peer.lacks_avx512(avx512),
    }
