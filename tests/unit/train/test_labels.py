"""Labels are the target's own distributions, the same bytes after a kill, in columns of what a draft proposes."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
import torch

from families import VOCAB, make_family, tiny_model
from forerun.errors import ConfigError
from forerun.models import LanguageModel, Rows, load_model
from forerun.train.checkpoint import FILE_NAME, TARGET
from forerun.train.draft import samples
from forerun.train.draft.distil import DistillationLoss
from forerun.train.draft.samples import Labels, ShardBatches
from forerun.train.heads import target_states
from forerun.train.losses import at_tokens, distillation_loss
from gguf_files import write_gguf
from soft_labels import drawn_rows

LENGTHS = [20, 9, 14, 25, 6, 30, 11]
TOP = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family("qwen2", tmp_path_factory.mktemp("targets"))


@pytest.fixture(scope="module")
def target(folder: Path) -> LanguageModel:
    return load_model(folder, "float32")


def quantized(kind: str, folder: Path, tmp_path: Path) -> LanguageModel:
    """The target in float32, at 8 bits, or of a GGUF file whose layers have blocks of 4 bits."""
    if kind != "gguf":
        return load_model(folder, "float32", quantize=None if kind == "float32" else kind)
    write_gguf(tmp_path / "it.gguf", tiny_model("qwen2"), "Q4_0")
    return load_model(tmp_path / "it.gguf")


@pytest.mark.parametrize("kind", ["float32", "int8", "gguf"])
def test_labels_are_the_targets_own_distributions(
    kind: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of several documents in a row, each fed alone here and many at once there."""
    target = quantized(kind, folder, tmp_path)
    rows = drawn_rows(tmp_path / "rows", VOCAB, LENGTHS)
    monkeypatch.setitem(target_states.FORWARD_ROWS, "cpu", 40)
    batch = rows.rows(list(range(len(rows))))
    shard = Labels(target, rows, tmp_path / "labels", TOP).of(batch)
    seen = 0
    for row, documents in enumerate(batch.documents):
        assert row > 0 or int(documents.max()) > 0
        for number in range(int(documents.max()) + 1):
            places = (documents == number).nonzero()[:, 0]
            cache = target.new_cache()
            logits = target.forward([Rows(cache, batch.tokens[row, places].tolist())]).logits
            cache.free()
            for place, probs in zip(places[1:].tolist(), torch.softmax(logits.float(), -1), strict=False):
                if batch.wanted[row, place]:
                    values, ids = probs.topk(TOP)
                    found = torch.from_numpy(shard.probs.ids[row, place - 1].astype("int64"))
                    assert found[0] == ids[0] and found.unique().numel() == TOP
                    torch.testing.assert_close(probs[found], values, atol=1e-5, rtol=1e-3)
                    kept = torch.from_numpy(shard.probs.probabilities[row, place - 1]).float()
                    torch.testing.assert_close(kept, values, atol=1e-5, rtol=2e-3)
                    seen += 1
    assert seen == int(batch.wanted.sum()) == sum(length - 3 for length in LENGTHS)
    assert not shard.probs.probabilities[~batch.wanted[:, 1:].numpy()].any()


class Killed(Exception):
    pass


def test_labels_after_a_kill_are_the_same_bytes(
    target: LanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(samples.SHARD_ROWS, "cpu", 1)
    rows = drawn_rows(tmp_path / "rows", VOCAB, LENGTHS)
    whole, killed = (Labels(target, rows, tmp_path / name, TOP, torch.arange(0, VOCAB, 2)) for name in ("a", "b"))
    assert whole.missing_bytes(len(whole)) > 1_000
    assert whole.write(lambda *_: None, len(whole)) == len(rows) > 3 and whole.missing_bytes(len(whole)) == 0

    def kill(done: int, _: int) -> None:
        if done == 2:
            raise Killed

    with pytest.raises(Killed):
        killed.write(kill, len(killed))
    killed.path(1).unlink()  # killed before the last part of it was there
    killed.path(1, "ids").write_bytes(b"half")
    killed.write(lambda *_: None, len(killed))
    files = [{path.name: path.read_bytes() for path in each.folder.glob("*.npy")} for each in (whole, killed)]
    assert files[0] == files[1] and len(files[0]) == 5 * len(rows)


def test_labels_of_something_else_are_refused(target: LanguageModel, tmp_path: Path) -> None:
    rows = drawn_rows(tmp_path / "rows", VOCAB, LENGTHS)
    Labels(target, rows, tmp_path / "labels", TOP).pin()
    Labels(target, rows, tmp_path / "labels", TOP).pin()
    other = load_model(make_family("qwen2", tmp_path, seed=5), "float32")
    with pytest.raises(ConfigError, match="labels holds labels of another target, whose weights are not these"):
        Labels(other, rows, tmp_path / "labels", TOP).pin()
    with pytest.raises(ConfigError, match=r"vocabulary was None and is \w"):
        Labels(target, rows, tmp_path / "labels", TOP, torch.arange(5)).pin()
    anew = drawn_rows(tmp_path / "other", VOCAB, LENGTHS, data="other")
    with pytest.raises(ConfigError, match="packed was "):
        Labels(target, anew, tmp_path / "labels", TOP).pin()
    with pytest.raises(ConfigError, match="output_tokens is 65,536, but at most 65,535 can be learnt"):
        Labels(target, rows, tmp_path / "labels", TOP, torch.arange(1 << 16))


def test_a_full_disk_leaves_no_shard_that_looks_whole(
    target: LanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    labels = Labels(target, drawn_rows(tmp_path / "rows", VOCAB, LENGTHS), tmp_path / "labels", TOP)

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(
            ConfigError, match=r"shard-0000\.\w+\.npy cannot be written: No space left on device\. Give"
        ):
            labels.write(lambda *_: None, 1)
    assert not labels.path(0).exists()
    assert labels.write(lambda *_: None, 1) == 1


def test_a_token_that_the_draft_does_not_propose_has_no_column_and_no_gradient(
    target: LanguageModel, tmp_path: Path
) -> None:
    vocabulary = torch.arange(1, VOCAB, 2)
    rows = drawn_rows(tmp_path / "rows", VOCAB, LENGTHS)
    whole, cut = (Labels(target, rows, tmp_path / name, TOP, kept) for name, kept in (("a", None), ("b", vocabulary)))
    for labels in (whole, cut):
        labels.write(lambda *_: None, 1)
    every, some = (ShardBatches(labels, 1, 10_000, 0).batch(0) for labels in (whole, cut))
    ids = every[1].long()
    wanted = every[4][:, 1:]
    assert torch.equal(some[1][wanted].long(), ((ids - 1) // 2).where(ids % 2 == 1, -1)[wanted])
    assert torch.equal(some[2], every[2])

    draft = tiny_model("qwen2", seed=3)
    DistillationLoss("kl-then-tv", vocabulary).mean(draft, some, 0.5).backward()
    gradient = draft.lm_head.weight.grad
    assert gradient is not None and not gradient[::2].any() and gradient[1::2].any()
    logits = torch.randn(4, len(vocabulary), requires_grad=True)
    columns = torch.arange(len(vocabulary)).expand(4, -1)
    torch.testing.assert_close(at_tokens(logits, columns).exp().sum(-1), torch.ones(4))  # q renormalises
    outside = torch.full((4, TOP), -1)
    distillation_loss(logits, outside, torch.full((4, TOP), 0.1), "forward-kl").backward()
    assert logits.grad is not None and not logits.grad.any()


def test_a_token_of_which_the_draft_has_no_logit_is_outside(target: LanguageModel, tmp_path: Path) -> None:
    """The target has more tokens, and there are too many for columns of 16 bits."""
    rows = drawn_rows(tmp_path / "rows", VOCAB, LENGTHS)
    labels = Labels(target, rows, tmp_path / "labels", TOP, size=VOCAB // 2)
    labels.write(lambda *_: None, len(labels))
    every = ShardBatches(labels, len(labels), 10_000, 0).batch(0)
    wanted = every[1][every[4][:, 1:]]
    assert int(wanted.max()) < VOCAB // 2 and int(wanted.min()) == -1


def test_labels_go_on_in_another_number_format_and_on_another_device(
    target: LanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = drawn_rows(tmp_path / "rows", VOCAB, LENGTHS)
    monkeypatch.setitem(samples.SHARD_ROWS, "cpu", 1)
    first = Labels(target, rows, tmp_path / "labels", TOP)
    first.pin()
    path = first.folder / FILE_NAME
    written = json.loads(path.read_text())
    fingerprint = written[TARGET]
    written[TARGET] = fingerprint[:-1] + f"{int(fingerprint[-1], 16) ^ 1:x}"  # a sign that rounding has changed
    path.write_text(json.dumps(written))
    monkeypatch.setitem(samples.SHARD_ROWS, "cpu", 64)
    again = Labels(target, rows, tmp_path / "labels", TOP)
    again.pin()
    assert len(again) == len(first) == len(rows)
    del written["shard_rows"]  # of an earlier version
    path.write_text(json.dumps(written))
    Labels(target, rows, tmp_path / "labels", TOP).pin()
    assert json.loads(path.read_text())["shard_rows"] == 64
