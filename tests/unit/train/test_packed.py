"""Packed rows: nothing is lost or cut without need, and what is read depends on three numbers."""

import random
from pathlib import Path

import pytest
import torch

from forerun.errors import ConfigError
from forerun.train.data import packed as packing
from forerun.train.data.packed import NO_DOCUMENT, PackedDocument, PackedShard, pack


def documents(count: int, longest: int, seed: int = 0) -> list[PackedDocument]:
    """Documents of which each token is one more than the token before, the second half wanted."""
    rng = random.Random(seed)
    made = []
    for number in range(count):
        size = rng.randint(2, longest)
        first = 100 * number
        made.append(
            PackedDocument(
                list(range(first, first + size)),
                [place >= size // 2 for place in range(size)],
                held_out=number % 5 == 4,
            )
        )
    return made


def packed(folder: Path, given: list[PackedDocument], window: int = 15) -> PackedShard:
    return pack(given, folder, window=window, vocab_size=100_000, made_from={"data": "made up"})


def read(rows: PackedShard) -> list[tuple[list[int], list[bool]]]:
    """The documents of all rows."""
    found = []
    batch = rows.rows(list(range(len(rows))))
    for tokens, wanted, numbers in zip(batch.tokens, batch.wanted, batch.documents, strict=True):
        for number in range(int(numbers.max()) + 1):
            places = numbers == number
            found.append((tokens[places].tolist(), wanted[places].tolist()))
    return found


def test_every_document_lies_whole_in_one_row_of_its_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "SHARD_BYTES", 9 * 16 * 3)  # three rows
    given = documents(60, 16)
    rows = packed(tmp_path / "packed", given)
    expected = {part: [] for part in (False, True)}  # type: dict[bool, list[tuple[list[int], list[bool]]]]
    for document in given:
        expected[document.held_out].append((list(document.tokens), [False, *document.wanted[1:]]))
    assert sorted(read(rows)) == sorted(expected[False])
    assert sorted(read(rows.held_out())) == sorted(expected[True])
    assert rows.num_documents == 48 and rows.num_tokens == sum(len(tokens) for tokens, _ in expected[False])
    assert len(list((tmp_path / "packed").glob("train-*.safetensors"))) == -(-len(rows) // 3) > 1
    assert rows.num_tokens > 0.8 * len(rows) * 16  # 60 documents fill rows of 16 to more than four fifths


def test_a_long_document_is_cut_from_its_end_and_parts_with_nothing_wanted_go(tmp_path: Path) -> None:
    long = PackedDocument(list(range(40)), [place >= 30 for place in range(40)])
    rows = packed(tmp_path / "packed", [long])
    # 40 = 8 + 16 + 16, of which only the last 16 hold what is wanted
    assert read(rows) == [(list(range(24, 40)), [place >= 30 for place in range(24, 40)])]


def test_positions_begin_anew_in_each_document(tmp_path: Path) -> None:
    given = [PackedDocument(list(range(size)), [True] * size) for size in (7, 5)]
    batch = packed(tmp_path / "packed", given).rows([0])
    assert batch.documents[0].tolist() == [0] * 7 + [1] * 5 + [NO_DOCUMENT] * 4


def test_a_batch_depends_on_step_rows_and_seed_and_an_epoch_reads_each_row_once(tmp_path: Path) -> None:
    packed(tmp_path / "packed", documents(60, 16))
    first, again = PackedShard(tmp_path / "packed"), PackedShard(tmp_path / "packed")
    assert torch.equal(first.batch(7, 4, 1).tokens, again.batch(7, 4, 1).tokens)
    assert not torch.equal(first.batch(7, 4, 1).tokens, first.batch(7, 4, 2).tokens)
    steps = [first.batch(step, len(first) // 3, 0).tokens for step in range(3)]
    rows = {tuple(row.tolist()) for tokens in steps for row in tokens}
    assert len(rows) == len(first) // 3 * 3
    assert len(first.batch(0, 2 * len(first) + 1, 0).tokens) == 2 * len(first) + 1  # more than an epoch at once


def test_what_cannot_be_packed_leaves_the_former_folder_as_it_was(tmp_path: Path) -> None:
    folder = tmp_path / "packed"
    before = read(packed(folder, documents(10, 16)))
    with pytest.raises(ConfigError, match="no token to be trained on"):
        packed(folder, [PackedDocument([1, 2], [False, False])])
    with pytest.raises(ConfigError, match="100000, but the target's vocabulary"):
        packed(folder, [PackedDocument([1, 100_000], [True, True])])
    assert read(PackedShard(folder)) == before
    assert [path.name for path in tmp_path.iterdir()] == ["packed"]


def test_a_damaged_shard_is_refused(tmp_path: Path) -> None:
    packed(tmp_path / "packed", documents(10, 16))
    shard = tmp_path / "packed" / "train-00000.safetensors"
    content = bytearray(shard.read_bytes())
    content[-20] ^= 1
    shard.write_bytes(content)
    with pytest.raises(ConfigError, match=r"train-00000\.safetensors is damaged"):
        PackedShard(tmp_path / "packed")
    shard.unlink()
    with pytest.raises(ConfigError, match="cannot be read"):
        PackedShard(tmp_path / "packed")
