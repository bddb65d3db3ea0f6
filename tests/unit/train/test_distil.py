"""Distillation: what its loss counts, where a draft starts, and what a killed run is resumed to."""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

from forerun import LLM, DraftModel, SamplingParams
from forerun.errors import ConfigError, IncompatibleDrafterError
from forerun.models import Rows, load_draft_model
from forerun.train import accelerator, card as folder, commands
from forerun.train.checkpoint import CHECKPOINT
from forerun.train.corpus import SourceFile
from forerun.train.data.packed import PackedDocument, PackedShard, frequent_tokens, pack, token_counts
from forerun.train.defaults import DRAFT_RATE, FITTED_RATE, LOSSES, DraftTraining, LossName, Pruning
from forerun.train.draft import distil as distil_loss, samples
from forerun.train.draft.distil import DistillationLoss, first_gap
from forerun.train.draft.samples import mask_unproposed, output_tokens_of, restrict
from forerun.train.loop import Loop
from forerun.utils.vocabulary import fingerprint
from soft_labels import softmax_top
from tools.lm import Architecture, build_model, train_tokenizer

TARGET = Architecture(
    vocab_size=320, hidden_size=32, num_layers=8, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=64
)
OPTIONS = DraftTraining(
    window=64,
    top=8,
    tokens=8 * 64,
    tokens_per_step=64,
    threads=1,
    loss="hybrid",
    output_tokens=48,
    pruning=Pruning(layers="0,4", width=24),
)

COMMAND = "forerun train draft OUT"


def drawn(seed: int = 0, sizes: Architecture = TARGET) -> LlamaForCausalLM:
    model = build_model(sizes, 0, seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8)
    return model.eval()


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "Console", lambda: Console(quiet=True))


@pytest.fixture
def tokenizer(files: list[SourceFile]) -> PreTrainedTokenizerBase:
    return train_tokenizer((file.text for file in files), TARGET.vocab_size)


@pytest.fixture
def target(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> Path:
    folder.save_model(drawn(), tokenizer, tmp_path / "target")
    return tmp_path / "target"


def rows_of(lengths: list[int], width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, documents and wanted, [2, width]: documents of these lengths, of which a random part is wanted."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, TARGET.vocab_size, (2, width), generator=generator)
    documents = torch.full((2, width), -1, dtype=torch.int32)
    documents[:, : sum(lengths)] = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).int()
    wanted = (torch.rand(2, width, generator=generator) < 0.6) & (documents >= 0)
    wanted[:, 1:] &= documents[:, 1:] == documents[:, :-1]
    wanted[:, 0] = False
    return tokens, documents, wanted


@pytest.mark.parametrize("name", LOSSES)
def test_the_loss_of_packed_rows_is_that_of_their_wanted_tokens(name: LossName) -> None:
    """Beside a slow loop over documents, of a draft that proposes half of the tokens."""
    target, draft = drawn(), drawn(1)
    lengths = [9, 2, 7]
    tokens, documents, wanted = rows_of(lengths, 21)
    ids, values = softmax_top(target, tokens, 8, documents)
    proposed = torch.arange(0, TARGET.vocab_size, 2)
    columns = (ids // 2).where(ids % 2 == 0, -1)
    rows = (tokens.int(), columns.int(), values.half(), documents, wanted, torch.arange(2))
    found = DistillationLoss(name, proposed).mean(draft, rows, 0.3)
    logits, at_ids, at_values = [], [], []
    for row in range(2):
        start = 0
        for length in lengths:
            alone = draft(tokens[None, row, start : start + length - 1]).logits[0]
            for place in range(length - 1):
                if wanted[row, start + place + 1]:
                    logits.append(alone[place, proposed])
                    at_ids.append(columns[row, start + place])
                    at_values.append(values[row, start + place])
            start += length
    by_hand = distil_loss.distillation_loss(
        torch.stack(logits), torch.stack(at_ids), torch.stack(at_values), name, variation_share=0.3
    )
    assert len(logits) == int(wanted.sum()) > 10
    assert float(found.detach()) == pytest.approx(float(by_hand.detach()), rel=2e-3)  # probabilities in float16


def test_a_loss_in_parts_is_the_whole_one_and_so_are_its_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    target, generator = drawn(), torch.Generator().manual_seed(2)
    tokens = torch.randint(0, TARGET.vocab_size, (3, 17), generator=generator)
    ids, probs = softmax_top(target, tokens, 8)
    everywhere = torch.ones(3, 17, dtype=torch.bool)
    rows = (tokens.int(), ids.int(), probs.half(), torch.zeros(3, 17, dtype=torch.int32), everywhere, torch.arange(3))
    gradients, values = [], []
    for at_once in (1 << 25, 5 * TARGET.vocab_size):
        monkeypatch.setitem(distil_loss.LOGITS_AT_ONCE, "cpu", at_once)
        draft = drawn(1)
        loss = DistillationLoss("forward-kl").mean(draft, rows, 0.0)
        loss.backward()
        values.append(loss.detach())
        gradients.append(draft.model.embed_tokens.weight.grad)
    torch.testing.assert_close(values[1], values[0])
    torch.testing.assert_close(gradients[1], gradients[0], atol=1e-4, rtol=0.05)


def test_the_tokens_that_answers_hold_most_often_are_proposed(tmp_path: Path) -> None:
    answers = [PackedDocument([4, 4, 4, 5, 7], [False] * 3 + [True] * 2), PackedDocument([4, 9, 7, 7], [True] * 4)]
    rows = pack(answers, tmp_path, window=16, vocab_size=12, made_from={})
    counts = token_counts(rows, 12)
    assert frequent_tokens(counts, 2, []).tolist() == [5, 7]  # 7 three times, 5 and 9 once
    assert frequent_tokens(counts, 3, [11]).tolist() == [5, 7, 11]
    assert frequent_tokens(counts, 6, [99]).tolist() == [0, 1, 4, 5, 7, 9]  # then what prompts hold, then the first
    assert frequent_tokens(token_counts(rows, 8), 3, []).tolist() == [4, 5, 7]  # of a draft without logits of 9
    with pytest.raises(ConfigError, match="output_tokens is 13, but the vocabulary has 12"):
        frequent_tokens(counts, 13, [])


@pytest.mark.parametrize(
    ("kept", "first"),
    [([0, 1, 2, 5, 6], 2), ([0, 1, 2], 2), ([0, 4], 0), ([1, 2, 3, 5], 0), ([0], 0), ([0, 1, 5, 7], 1)],
)
def test_the_first_state_that_enters_another_layer_is_found(kept: list[int], first: int) -> None:
    assert first_gap(kept) == first


class Killed(Exception):
    pass


@pytest.mark.parametrize("is_fitted", [True, False])
def test_a_cut_draft_is_killed_in_any_stage_resumed_saved_and_served(
    target: Path, source_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_fitted: bool
) -> None:
    begins = ("distil",) if is_fitted else ("imitation", "distil")
    for user in (commands, distil_loss):
        monkeypatch.setattr(user, "can_fit", lambda _: is_fitted)
    whole, draft = tmp_path / "whole", tmp_path / "draft"
    monkeypatch.setattr(accelerator, "is_quick_at_bfloat16", lambda: False)

    def run(out: Path, work: str, options: DraftTraining = OPTIONS, name: Path = target, **more: object) -> None:
        commands.train_draft(out, tmp_path / work, str(name), source_folder, options, COMMAND, **more)  # type: ignore[arg-type]

    run(whole, "a")
    original: Callable[..., float | Tensor] = Loop._step
    always = replace(OPTIONS, checkpoint_seconds=0.0)
    if is_fitted:  # once: a run that is killed while it computes labels has it

        def unlabelled(*_: object) -> None:
            raise Killed

        with monkeypatch.context() as patched:
            patched.setattr(samples.Labels, "write", unlabelled)
            with pytest.raises(Killed):
                run(draft, "b", always)
        (tmp_path / "b" / "distil" / CHECKPOINT).unlink()  # as what is said of a damaged one advises
        with monkeypatch.context() as patched:
            patched.setattr(samples.Labels, "write", unlabelled)
            with pytest.raises(ConfigError, match="loss was hybrid and is forward-kl"):  # before it is fitted again
                run(draft, "b", replace(always, loss="forward-kl"), resume=True)
            with pytest.raises(Killed):
                run(draft, "b", always, resume=True)
        monkeypatch.setattr(distil_loss, "fit", lambda *_: pytest.fail("it was fitted"))
    for stage in begins:

        def dying(self: Loop, batch: object, progress: float, stage: str = stage) -> float | Tensor:
            if progress >= 0.5 and self.folder.name == stage:
                raise Killed
            return original(self, batch, progress)

        monkeypatch.setattr(Loop, "_step", dying)
        with pytest.raises(Killed):
            run(draft, "b", always, resume=is_fitted or stage != begins[0])
        assert (tmp_path / "b" / stage / CHECKPOINT).exists()
        monkeypatch.setattr(accelerator, "is_quick_at_bfloat16", lambda: True)  # a run keeps the type it began with
    monkeypatch.setattr(Loop, "_step", original)
    other = tmp_path / "other"
    folder.save_model(drawn(5), folder.load_model_and_tokenizer(target)[1], other)
    with pytest.raises(ConfigError, match="samples holds labels of another target, whose weights are not these"):
        run(draft, "b", OPTIONS, other, resume=True, start=str(target))
    small = tmp_path / "small"
    folder.save_model(drawn(5, replace(TARGET, num_layers=1)), folder.load_model_and_tokenizer(target)[1], small)
    for start in (other, small):
        with pytest.raises(ConfigError, match=f"{begins[0]} was started from other weights than those of"):
            run(draft, "b", resume=True, start=str(start))
    for changed, message in (
        (replace(OPTIONS, loss="forward-kl"), "loss was hybrid and is forward-kl"),
        (replace(OPTIONS, dtype="bfloat16"), "dtype was float32 and is bfloat16"),
        (replace(OPTIONS, output_tokens=50), "output_tokens was" if is_fitted else "vocabulary was"),
    ):
        with pytest.raises(ConfigError, match=message):
            run(draft, "b", changed, resume=True)
    run(draft, "b", resume=True)
    assert folder.read_record(draft)["options"]["dtype"] == "float32"
    assert (draft / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    assert folder.read_record(draft)["options"]["learning_rate"] == (FITTED_RATE if is_fitted else DRAFT_RATE)
    stages = {name: stage["steps"] for name, stage in folder.read_record(draft)["stages"].items()}
    assert stages["distillation"] == (8 if is_fitted else 6) and stages.get("imitation") == (None if is_fitted else 2)
    assert ("fit" in folder.read_record(whole)["stages"]) is ("fit" in stages) is is_fitted

    stored, _ = folder.load_model_and_tokenizer(draft, torch.float32)
    proposed = output_tokens_of(stored)
    assert proposed is not None and len(proposed) == 48 and 0 in proposed  # the end of text is
    assert (stored.config.num_hidden_layers, stored.config.intermediate_size) == (2, 24)
    began, _ = folder.load_model_and_tokenizer(target, torch.float32)
    assert torch.equal(stored.model.embed_tokens.weight, began.model.embed_tokens.weight)  # it is not trained
    queries = [each.model.layers[0].self_attn.q_proj.weight for each in (stored, began)]
    assert not torch.equal(*queries)
    served = load_draft_model(draft, "float32")
    logits = served.forward([Rows(served.new_cache(), [5, 6, 7])]).logits
    with mask_unproposed(stored), torch.inference_mode():
        wanted = stored(torch.tensor([[5, 6, 7]])).logits[0]
    torch.testing.assert_close(logits, wanted, atol=1e-4, rtol=1e-4)
    assert folder.read_record(draft)["command"] == COMMAND
    assert f"Command: `{COMMAND}`" in (draft / "README.md").read_text()


def documents(tokenizer: PreTrainedTokenizerBase, files: list[SourceFile]) -> list[PackedDocument]:
    texts = [tokenizer(file.text)["input_ids"][:40] for file in files]
    return [
        PackedDocument(ids, [place > 4 for place in range(len(ids))], held_out=number % 4 == 3)
        for number, ids in enumerate(texts[:24])
    ]


def test_packed_rows_are_learnt_from(
    target: Path, tokenizer: PreTrainedTokenizerBase, files: list[SourceFile], tmp_path: Path
) -> None:
    made_from = {"tokenizer": fingerprint(tokenizer)}
    rows = pack(documents(tokenizer, files), tmp_path / "rows", window=63, vocab_size=320, made_from=made_from)
    options = replace(OPTIONS, output_tokens=None, pruning=Pruning(layers="1"))
    commands.train_draft(tmp_path / "draft", tmp_path / "a", str(target), rows.folder, options, COMMAND)
    record = folder.read_record(tmp_path / "draft")
    assert record["data"]["training_files"] == 18 and record["data"]["held_out_files"] == 6
    assert [row["temperature"] for row in record["acceptance"]] == [0.0, 1.0]
    assert all(row["tokens"] > 20 for row in record["acceptance"])
    assert record["held_out"]["tokens"] > 20 and "18 documents" in (tmp_path / "draft" / "README.md").read_text()
    # a trained draft is a start again, and what it proposes stays
    start, _ = folder.load_model_and_tokenizer(tmp_path / "draft", torch.float32)
    restrict(start, torch.tensor([0, 7, 9]))
    folder.save_model(start, tokenizer, tmp_path / "draft")
    again = replace(options, pruning=Pruning())
    commands.train_draft(
        tmp_path / "next", tmp_path / "b", str(target), rows.folder, again, COMMAND, start=str(tmp_path / "draft")
    )
    tokens = output_tokens_of(folder.load_model_and_tokenizer(tmp_path / "next")[0])
    assert tokens is not None and tokens.tolist() == [0, 7, 9]
    assert list(folder.read_record(tmp_path / "next")["stages"]) == ["labels", "distillation"]  # nothing was cut
    assert folder.read_record(tmp_path / "next")["started_from"]["command"] == COMMAND


def test_a_draft_in_no_time_is_saved_and_one_without_held_out_rows_is_not_judged(
    target: Path,
    tokenizer: PreTrainedTokenizerBase,
    files: list[SourceFile],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(distil_loss, "can_fit", lambda _: False)
    console = Console(file=io.StringIO(), width=500)
    monkeypatch.setattr(commands, "Console", lambda: console)
    kept = [replace(each, held_out=False) for each in documents(tokenizer, files)]
    made_from = {"tokenizer": fingerprint(tokenizer)}
    rows = pack(kept, tmp_path / "rows", window=63, vocab_size=320, made_from=made_from)
    monkeypatch.setitem(samples.SHARD_ROWS, "cpu", 2)
    hurried, out = replace(OPTIONS, minutes=1e-6), tmp_path / "draft"
    commands.train_draft(out, tmp_path / "a", str(target), rows.folder, hurried, COMMAND)
    record, labels = folder.read_record(out), tmp_path / "a" / "samples"
    assert record["stages"]["distillation"]["steps"] == 1 and len(list(labels.glob("*.tokens.npy"))) == 1
    assert record["acceptance"] == [] and "nothing to judge by" in (out / "README.md").read_text()
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert "distil: ended by --minutes after step 1 of 6" in printed and "nothing to judge by" in printed
    assert "0.000" not in printed and "bits per byte" not in (out / "README.md").read_text()
    patient = replace(hurried, minutes=None)
    commands.train_draft(out, tmp_path / "a", str(target), rows.folder, patient, COMMAND, resume=True)
    stages = folder.read_record(out)["stages"]
    assert stages["distillation"]["steps"] == 6 and stages["imitation"]["steps"] == 1  # whose end distillation began at
    assert len(list(labels.glob("*.tokens.npy"))) == 1  # it learns from the rows that it began with


def test_a_bounded_run_that_is_killed_in_imitation_learns_from_the_same_rows(
    target: Path,
    tokenizer: PreTrainedTokenizerBase,
    files: list[SourceFile],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(distil_loss, "can_fit", lambda _: False)
    made_from = {"tokenizer": fingerprint(tokenizer)}
    rows = pack(documents(tokenizer, files), tmp_path / "rows", window=63, vocab_size=320, made_from=made_from)
    monkeypatch.setitem(samples.SHARD_ROWS, "cpu", 2)

    def run(options: DraftTraining, **more: bool) -> None:
        commands.train_draft(*(tmp_path / "draft", tmp_path / "a", str(target), rows.folder, options, COMMAND), **more)

    def dying(self: Loop, *_: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(Loop, "_step", dying)
        with pytest.raises(Killed):
            run(replace(OPTIONS, minutes=1e-6))
    labels = tmp_path / "a" / "samples"
    assert len(rows) > 2 and len(list(labels.glob("shard-*.tokens.npy"))) == 1
    run(OPTIONS, resume=True)
    assert len(list(labels.glob("shard-*.tokens.npy"))) == 1
    assert f"2 of {len(rows)} packed rows" in (tmp_path / "draft" / "README.md").read_text()


def test_what_does_not_fit_together_is_refused(
    target: Path,
    tokenizer: PreTrainedTokenizerBase,
    files: list[SourceFile],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run(data: Path, options: DraftTraining = OPTIONS, start: Path | None = None) -> None:
        commands.train_draft(
            *(tmp_path / "draft", tmp_path / "run", str(target), data, options, COMMAND),
            force=True,
            start=None if start is None else str(start),
        )

    made, made_from = documents(tokenizer, files), {"tokenizer": fingerprint(tokenizer)}
    foreign = pack(made, tmp_path / "foreign", window=63, vocab_size=320, made_from={"tokenizer": "other"})
    with pytest.raises(ConfigError, match="packed with another tokenizer"):
        run(foreign.folder)
    ours = pack(made, tmp_path / "ours", window=63, vocab_size=320, made_from=made_from)
    with pytest.raises(ConfigError, match="A draft starts from trained weights"):
        run(ours.folder, replace(OPTIONS, pruning=Pruning()))
    with pytest.raises(ConfigError, match="more than a quarter of its target's"):
        run(ours.folder, replace(OPTIONS, pruning=Pruning(layers="6")))
    with pytest.raises(ConfigError, match="the start's layers are 0 to 7"):
        run(ours.folder, replace(OPTIONS, pruning=Pruning(layers="0,9")))
    with pytest.raises(ConfigError, match="the start has 8 layers"):
        run(ours.folder, replace(OPTIONS, pruning=Pruning(layers="9")))
    stranger = tmp_path / "stranger"
    folder.save_model(drawn(3), train_tokenizer(["other text"], TARGET.vocab_size), stranger)
    with pytest.raises(IncompatibleDrafterError, match="the draft to start from cannot draft for the target"):
        run(ours.folder, start=stranger)
    with pytest.raises(ConfigError, match="loss is 'luck', but must be one of"):
        replace(OPTIONS, loss="luck")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1_000))
    with pytest.raises(ConfigError, match=r"has too little room: checkpoints, labels and the result need"):
        run(ours.folder)
    assert PackedShard(ours.folder).num_documents == 18


@pytest.mark.parametrize(("size", "count"), [(304, None), (304, 48), (336, 48)])
def test_a_start_with_other_padding_is_trained(
    size: int, count: int | None, files: list[SourceFile], source_folder: Path, tmp_path: Path
) -> None:
    """As Qwen2.5's models of 0.5 B and 7 B have 151,936 and 152,064 logits of the same tokens."""
    tokenizer = train_tokenizer((file.text for file in files), 300)
    target, start, out = (tmp_path / name for name in ("target", "start", "draft"))
    folder.save_model(drawn(), tokenizer, target)
    folder.save_model(drawn(1, replace(TARGET, vocab_size=size)), tokenizer, start)
    options = replace(OPTIONS, output_tokens=count, pruning=Pruning(layers="1"))
    commands.train_draft(out, tmp_path / "run", str(target), source_folder, options, COMMAND, start=str(start))
    stored, _ = folder.load_model_and_tokenizer(out)
    proposed = output_tokens_of(stored)
    assert stored.config.vocab_size == size and (None if proposed is None else len(proposed)) == count
    params = SamplingParams(temperature=0, max_tokens=12)
    plain, drafted = (LLM(str(target), drafter, num_draft_tokens=3) for drafter in (None, DraftModel(out)))
    found = drafted.generate([5, 6, 7], params)
    assert found.token_ids == plain.generate([5, 6, 7], params).token_ids and found.stats.num_draft_tokens > 5
