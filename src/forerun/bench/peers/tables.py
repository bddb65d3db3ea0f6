"""What `forerun bench peers` prints: who took part, the speeds within each class of precision, and who was left out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forerun.bench.peers.rows import PeerRow, classes
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


def report(measured: Measured, own: str, about: str, facts: Mapping[str, Any], avx512: bool) -> Report:
    """Everything as tables and as facts.

    Args:
        own: the name of forerun's peer whose plain decoding is the reference.
        about: prompts, tokens and threads, for the titles.
        facts: the settings, for the file.
        avx512: whether the processor has AVX-512.
    """
    peers = [[peer.name, peer.version, peer.precision, peer.instruction_text(avx512)] for peer in measured.peers]
    header = ["peer", "version", "weights", "instruction sets"]
    tables, every = [Table("Peers", header, peers)], classes(measured, own)
    tables += [Table.of(f"{each.title}, {about}; ratios over {each.reference}", COLUMNS, each.rows) for each in every]
    if measured.left_out:
        rows = [[each.peer, each.reason] for each in measured.left_out]
        tables.append(Table("Left out", ["peer", "reason"], rows))
    facts_of = [
        {"name": each.name, "version": each.version, "weights": each.precision, "bits": each.bits}
        for each in measured.peers
    ]
    details = {"peers": facts_of, "classes": every, "left_out": measured.left_out}
    return Report("peers", tables, settings=facts, details=details)
