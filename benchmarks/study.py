"""The parts of the study of acceptance that no command of forerun is for (benchmarks/study.sh).

python benchmarks/study.py prompts FOLDER      the prompts that are made of bundled ones
python benchmarks/study.py unwindowed FOLDER   the bundled draft without its sliding window
python benchmarks/study.py keep RAW SMALL      what is committed of a file of `forerun bench acceptance --json`
python benchmarks/study.py memory FILE         bytes of drafters and of their targets
python benchmarks/study.py pictures            docs/study/*.svg, and the tables of docs/study.md
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from forerun.config import EngineConfig
from forerun.results import load as load_results
from forerun.workloads import Case, load, save

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "study"
COUNT = 10
"""Prompts of a category."""
CATEGORIES = {"code": "code", "factual": "prose", "formulaic": "copying"}
"""Category -> the bundled workload that stands for it; stories.jsonl is the fourth."""
LENGTHS = (64, 128, 256, 512, 1024, 1856)
"""Tokens of context before one and the same place of a held-out file."""
EDGE_LENGTHS = (448, 512, 576, 640, 768, 896)
"""About the length of context that the bundled draft was distilled at."""
MADE = "build/study/"
"""Where models are made; names leave it out."""
DRAFTERS = {
    "bundled": (
        "draft-model",
        "draft-model:model=build/study/earlier-draft",
        "draft-model:model=build/study/sibling",
        "draft-model:model=build/study/earlier-target",
        "draft-model:model=bundled,quantize=int8",
        "draft-model:model=bundled,quantize=int4",
        "cross-vocab",
        "eagle",
    ),
    "smollm2": ("eagle", "draft-model:model=smollm2,quantize=int4"),
}


def prompts(folder: Path) -> None:
    """Write categories.jsonl, contexts.jsonl and edge.jsonl."""
    every = [
        replace(case, category=category) for category, name in CATEGORIES.items() for case in load(name, limit=COUNT)
    ]
    save([*every, *load(str(RESULTS / "stories.jsonl"))], folder / "categories.jsonl")
    save(list(_contexts(LENGTHS)), folder / "contexts.jsonl")
    save(list(_contexts(EDGE_LENGTHS)), folder / "edge.jsonl")


def _contexts(lengths: Sequence[int]) -> Iterator[Case]:
    """The text before token 1856 of long held-out files, cut to each length."""
    from transformers import AutoTokenizer

    from forerun.config import ASSETS
    from forerun.train.corpus import read_held_out

    tokenizer = AutoTokenizer.from_pretrained(ASSETS / "target")
    files = [(file.name, tokenizer.encode(file.text, add_special_tokens=False)) for file in read_held_out()]
    for name, ids in [(name, ids) for name, ids in files if len(ids) > LENGTHS[-1] + 64][:COUNT]:
        for length in lengths:
            text = tokenizer.decode(ids[LENGTHS[-1] - length : LENGTHS[-1]])
            yield Case(f"{name}, {length}", text, category=f"{length} tokens")


def unwindowed(folder: Path) -> None:
    """A copy of the bundled draft with the same weights, whose layers see all of the context."""
    own = ROOT / "src" / "forerun" / "assets" / "draft"
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("model.safetensors", "tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(own / name, folder / name)
    config = json.loads((own / "config.json").read_text(encoding="utf-8"))
    config |= {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    del config["sliding_window"]
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")


def keep(raw: Path, small: Path) -> None:
    """The rows of a file of acceptance with what made them; a row is what its prompts came to together."""
    found = load_results(raw)
    at, target = found.environment, found.target
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    for figure in found.figures:
        labels = figure.labels
        drafter = str(labels["drafter"]).replace(MADE, "")
        key = (labels["category"], drafter, labels["num_draft_tokens"], labels["temperature"])
        row = rows.setdefault(key, {"positions": []})
        if figure.name == "position_acceptance":
            row["positions"].append(round(figure.value or 0.0, 3))
        else:
            row[figure.name], row["prompts"] = figure.value, figure.samples
    small.parent.mkdir(parents=True, exist_ok=True)
    head = {
        "command": found.command,
        "target": None if target is None else f"{target.name}, {target.number_format}",
        "date": at.date[:10],
        "machine": f"{at.processor} ({at.cores} cores, {at.threads} threads), kernels {at.kernels}",
        "versions": f"forerun {at.forerun} ({at.commit}), Python {at.python}, torch {at.torch}, "
        f"Transformers {at.transformers}",
        "columns": ["category", "drafter", "K", "temperature", "prompts", "length", "rate", "positions"],
    }
    lines = [
        [*key, row["prompts"], round(row["acceptance_length"], 3), round(row["acceptance_rate"], 4), row["positions"]]
        for key, row in rows.items()
    ]
    _write(small, head, lines)


def memory(path: Path) -> None:
    """Weights and keys and values of every drafter that has any, by the headers of its files."""
    from forerun.engine.memory_plan import MemoryPlan
    from forerun.errors import ForerunError
    from forerun.kernels.page_layout import PAGE

    lines = []
    for target, drafters in DRAFTERS.items():
        for drafter in drafters:
            try:
                plan = MemoryPlan.of(target, drafter, EngineConfig())
            except ForerunError as error:
                print(f"left out: {target}, {drafter}: {error}", file=sys.stderr)
                continue
            own, *drafts = plan.as_object()["models"]
            bytes_of = [sum(each[name] for each in drafts) for name in ("weight_bytes", "page_bytes")]
            name = drafter.replace(MADE, "")
            lines.append(
                [target, name, own["weight_bytes"], own["page_bytes"] // PAGE, bytes_of[0], bytes_of[1] // PAGE]
            )
    columns = ["target", "drafter", "target weights", "target a position", "drafter weights", "drafter a position"]
    _write(path, {"command": "python benchmarks/study.py memory FILE", "unit": "bytes", "columns": columns}, lines)


def _write(path: Path, head: dict[str, Any], lines: list[list[Any]]) -> None:
    """JSON with a row on each line."""
    text = json.dumps(head, ensure_ascii=False, indent=1)[:-2]
    body = ",\n".join(f"  {json.dumps(line, ensure_ascii=False)}" for line in lines)
    path.write_text(f'{text},\n "rows": [\n{body}\n ]\n}}\n', encoding="utf-8")


def main(arguments: list[str]) -> None:
    """One of the five."""
    match arguments:
        case ["prompts", folder]:
            prompts(Path(folder))
        case ["unwindowed", folder]:
            unwindowed(Path(folder))
        case ["keep", raw, small]:
            keep(Path(raw), Path(small))
        case ["memory", path]:
            memory(Path(path))
        case ["pictures"]:
            from study_pictures import write

            write()
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
