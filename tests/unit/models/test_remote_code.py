"""No code of a model's folder is run, and the user is not prompted to allow it."""

from __future__ import annotations

import ast
import builtins
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from families import make_family
from forerun import LLM, SamplingParams
from forerun.drafters import Binding
from forerun.drafters.build import make_drafter
from forerun.errors import ModelLoadError, UnsupportedModelError
from forerun.models import load_model, load_tokenizer
from forerun.train import card as train_folder

SRC = Path(__file__).parents[3] / "src" / "forerun"
CODE = """
from pathlib import Path
(Path(__file__).parent / "marker").write_text("this code was run")
(Path({folder!r}) / "marker").write_text("this code was run")
"""
CONFIG_MAP = {"AutoConfig": "evil.EvilConfig", "AutoModelForCausalLM": "evil.EvilModel"}
TOKENIZER_MAP = {"AutoTokenizer": ["evil.EvilTokenizer", None]}


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_family("llama", tmp_path_factory.mktemp("healthy"))
    load_tokenizer("bundled").save_pretrained(folder)
    return folder


@pytest.fixture
def folder(healthy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Build a model with a Python file that its JSON files do not name yet; reading standard input fails."""
    copy = shutil.copytree(healthy, tmp_path / "model")
    (copy / "evil.py").write_text(CODE.format(folder=str(copy)))

    def ask(*_: object) -> str:
        pytest.fail("a question was asked on standard input")

    monkeypatch.setattr(builtins, "input", ask)
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    return copy


def change(path: Path, **values: Any) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**content, **values}), encoding="utf-8")


def serve(folder: Path) -> None:
    LLM(folder, None)


def draft(spec: str) -> Callable[[Path], None]:
    def bind(folder: Path) -> None:
        target = load_model("bundled-draft")
        make_drafter(spec.format(folder), Binding(target, load_tokenizer("bundled-draft")))

    return bind


def train(folder: Path) -> None:
    train_folder.load_model_and_tokenizer(folder)


@pytest.mark.parametrize(
    "use",
    [serve, train, *map(draft, ("{}", "draft-tree:model={}", "staged:model={}", "cross-vocab:model={}"))],
    ids=["target", "train", "drafter", "draft-tree", "staged", "cross-vocab"],
)
def test_a_model_of_an_unknown_type_is_refused(use: Callable[[Path], None], folder: Path) -> None:
    change(folder / "config.json", model_type="evil", auto_map=CONFIG_MAP)
    with pytest.raises(UnsupportedModelError, match=r"auto_map asks for \(evil\.EvilConfig, evil\.EvilModel\)"):
        use(folder)
    assert not (folder / "marker").exists()


@pytest.mark.parametrize("auto_map", [TOKENIZER_MAP, ["evil.EvilTokenizer", None]])
@pytest.mark.parametrize("use", [serve, train, load_tokenizer], ids=["target", "train", "tokenizer"])
def test_a_tokenizer_of_an_unknown_kind_is_refused(use: Callable[[Path], None], auto_map: Any, folder: Path) -> None:
    change(folder / "tokenizer_config.json", tokenizer_class="EvilTokenizer", auto_map=auto_map)
    with pytest.raises(ModelLoadError, match=r"auto_map asks for \(evil\.EvilTokenizer\) is not run"):
        use(folder)
    assert not (folder / "marker").exists()


def test_a_model_of_a_known_type_is_served_without_its_code(folder: Path, healthy: Path) -> None:
    change(folder / "config.json", auto_map=CONFIG_MAP, custom_generate="evil", transformers_weights="evil.bin")
    change(folder / "tokenizer_config.json", auto_map=TOKENIZER_MAP)
    (folder / "custom_generate").mkdir()
    shutil.copy(folder / "evil.py", folder / "custom_generate" / "generate.py")
    answers = [LLM(f, None).generate([1, 2, 3], SamplingParams(max_tokens=5, temperature=0)) for f in (folder, healthy)]
    assert answers[0].choices[0].token_ids == answers[1].choices[0].token_ids
    assert not list(folder.rglob("marker"))


def test_one_module_lets_transformers_read_folders() -> None:
    """Check that each call forbids remote code; so does the worker of a peer, which runs without forerun."""
    readers = {SRC / "models/loading/transformers_modules.py", SRC / "lab/bench/peers/worker.py"}
    for path in SRC.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            if node.func.attr == "from_pretrained":
                assert path in readers
                options = {keyword.arg: keyword.value for keyword in node.keywords}
                assert isinstance(value := options["trust_remote_code"], ast.Constant) and value.value is False
