"""Looking up against reading every document; documents' borders are never crossed."""

import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from forerun.drafters.lookup.rest.build import append_index, build_index
from forerun.drafters.lookup.rest.index import Index
from forerun.errors import ConfigError

Documents = list[list[int]]


def corpus(rng: random.Random, values: int) -> Documents:
    return [[rng.randrange(values) for _ in range(rng.randint(1, 25))] for _ in range(rng.randint(1, 8))]


def naive(documents: Documents, ngram: list[int], length: int) -> list[list[int]]:
    """Return what follows each occurrence of the n-gram up to its document's end, which sorts last."""
    size = len(ngram)
    rows = [
        document[at + size : at + size + length]
        for document in documents
        for at in range(len(document) - size + 1)
        if document[at : at + size] == ngram
    ]
    return sorted(rows, key=lambda row: [*row, 2**40])


def cut(row: list[int], marker: int) -> list[int]:
    return row[: row.index(marker)] if marker in row else row


@pytest.mark.parametrize(("values", "vocab_size"), [(2, 10), (4, 65_535), (4, 70_000), (70_000, 70_000)])
def test_against_reading_everything(tmp_path: Path, values: int, vocab_size: int) -> None:
    rng = random.Random(values + vocab_size)
    for trial in range(25):
        documents = corpus(rng, values)
        build_index(tmp_path / f"{trial}", documents, vocab_size, depth=12)
        index = Index(tmp_path / f"{trial}")
        assert index.header.token_bytes == (2 if vocab_size <= 65_535 else 4)
        for _ in range(20):
            source = rng.choice(documents)
            at = rng.randint(0, len(source))
            context = [rng.randrange(values) for _ in range(rng.randint(0, 3))] + source[max(0, at - 6) : at]
            found = [n for n in range(2, 7) if n <= len(context) and naive(documents, context[-n:], 1)]
            match = index.find(context, 2, 6)
            assert (match.length if match else 0) == max(found, default=0)
            while match is not None:
                expected = naive(documents, context[-match.length :], 5)
                assert match.count == len(expected)
                rows = index.continuations(match, 5, 1000)
                assert [cut(row, index.header.marker) for row in rows.tolist()] == expected
                sizes = {n: len(naive(documents, context[-n:], 1)) for n in range(2, match.length)}
                more = [n for n, size in sizes.items() if size > match.count]
                shorter = index.find_more(context, 2, match)
                assert (shorter.length if shorter else 0) == max(more, default=0)
                match = shorter


def test_no_match_and_no_continuation_crosses_a_border(tmp_path: Path) -> None:
    build_index(tmp_path / "i", [[1, 2], [3, 4], [1, 2, 3]], 5)
    index = Index(tmp_path / "i")
    match = index.find([1, 2], 2, 2)
    assert match is not None and match.count == 2
    marker = index.header.marker
    assert [cut(row, marker) for row in index.continuations(match, 4, 9).tolist()] == [[3], []]
    assert index.find([2, 3, 4], 3, 3) is None
    assert index.find([2, marker, 3], 2, 3) is None  # the text holds that, the context cannot


def test_tokens_that_the_vocabulary_lacks(tmp_path: Path) -> None:
    build_index(tmp_path / "i", [[1, 2, 3, 4]], 60_000)
    index = Index(tmp_path / "i")
    for foreign in (60_000, 65_535, 65_536, 2**40, -1):
        match = index.find([1, foreign, 2, 3], 1, 4)
        assert match is not None and match.length == 2
        assert index.find([1, 2, 3, foreign], 1, 4) is None
    assert index.find([], 1, 4) is None


def test_of_many_places_some_at_even_distances(tmp_path: Path) -> None:
    build_index(tmp_path / "i", [[7, value] for value in range(100)], 200)
    index = Index(tmp_path / "i")
    match = index.find([7], 1, 1)
    assert match is not None
    assert [match.count, index.find([7, 3], 1, 2).length] == [101, 2]  # type: ignore[union-attr]
    assert index.continuations(match, 1, 10)[:, 0].tolist()[1:9] == [10, 20, 30, 40, 50, 60, 70, 80]
    assert len(index.continuations(match, 1, 10)) == 10


@pytest.mark.parametrize("vocab_size", [9, 70_000])
def test_appending_is_building_from_both(tmp_path: Path, vocab_size: int) -> None:
    rng = random.Random(0)
    for _ in range(10):
        first, second, third = corpus(rng, 3), corpus(rng, 3), corpus(rng, 9)
        build_index(
            tmp_path / "whole", [*first, *second, *third], vocab_size, tokenizer="t", fingerprint="f", force=True
        )
        build_index(tmp_path / "grown", first, vocab_size, tokenizer="t", fingerprint="f", force=True)
        old = Index(tmp_path / "grown")
        before = old.tokens.tolist()
        append_index(tmp_path / "grown", second, fingerprint="f")
        header = append_index(tmp_path / "grown", third, fingerprint="f")
        assert (tmp_path / "grown").read_bytes() == (tmp_path / "whole").read_bytes()
        assert header == Index(tmp_path / "whole").header
        assert old.tokens.tolist() == before  # whoever has the old one open goes on with it


def test_another_tokenizer_appends_nothing(tmp_path: Path) -> None:
    build_index(tmp_path / "i", [[1]], 9, tokenizer="t", fingerprint="f", force=True)
    before = (tmp_path / "i").read_bytes()
    with pytest.raises(ConfigError, match=r"another tokenizer \(t\).*is f, not g"):
        append_index(tmp_path / "i", [[2]], fingerprint="g")
    assert (tmp_path / "i").read_bytes() == before


@pytest.mark.parametrize(
    ("documents", "words"),
    [([], "Nothing to index"), ([[], []], "Nothing to index"), ([[1, 9]], "token 9"), ([[-1]], "token -1")],
)
def test_what_cannot_be_built(tmp_path: Path, documents: Documents, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build_index(tmp_path / "i", documents, 9)
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_leaves_the_old_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build_index(tmp_path / "i", [[1, 2]], 9)
    before = (tmp_path / "i").read_bytes()

    def fail(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(ConfigError, match="No space left"):
        build_index(tmp_path / "i", [[3]], 9, force=True)
    assert [path.name for path in tmp_path.iterdir()] == ["i"]
    assert (tmp_path / "i").read_bytes() == before


def test_ids_may_come_as_arrays(tmp_path: Path) -> None:
    build_index(tmp_path / "a", [np.array([1, 2], dtype=np.uint16)], 9)
    build_index(tmp_path / "b", [[1, 2]], 9)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_looking_up_reads_few_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(0)
    build_index(tmp_path / "i", [[rng.randrange(4) for _ in range(20_000)]], 4)
    index = Index(tmp_path / "i")
    reads = 0
    reader = Index._reader

    def counted(self: Index, size: int) -> Callable[[int], bytes]:
        read = reader(self, size)

        def one(position: int) -> bytes:
            nonlocal reads
            reads += 1
            return read(position)

        return one

    monkeypatch.setattr(Index, "_reader", counted)
    index.find([rng.randrange(4) for _ in range(16)], 2, 16)
    assert 0 < reads < 6 * 17


def test_what_several_append_at_once_is_all_there(tmp_path: Path) -> None:
    path = tmp_path / "i"
    build_index(path, [[1]], 100)
    start = threading.Barrier(4)

    def append(first: int) -> None:
        start.wait(10)
        for value in range(first, first + 5):
            append_index(path, [[value]])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(append, range(10, 90, 20), timeout=60))
    index = Index(path)
    assert index.header.num_documents == 21
    values = {first + i for first in range(10, 90, 20) for i in range(5)}
    assert set(index.tokens.tolist()) == {1, 65_535, *values}
    assert list(tmp_path.iterdir()) == [path]


def test_an_index_is_not_replaced_without_being_asked(tmp_path: Path) -> None:
    path = tmp_path / "i"
    build_index(path, [[1]], 9)

    def documents() -> Iterator[list[int]]:
        yield [2]
        build_index(path, [[3]], 9, force=True)

    with pytest.raises(ConfigError, match="exists"):
        build_index(path, [[2]], 9)
    path.unlink()
    with pytest.raises(ConfigError, match="exists"):  # another came meanwhile
        build_index(path, documents(), 9)
    assert Index(path).tokens.tolist() == [3, 65_535]
