"""Which other families than those of the fused decoder are served, found out with a tiny random model of each.

    PYTHONPATH=src:tests python -m served_families     # writes the table of docs/models.md

A family is a class of Transformers; what it can do depends on the version that is installed.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import transformers as tf

from families import DESCRIBED, TINY, tiny_model
from forerun.errors import UnsupportedModelError
from forerun.models import Rows, load_model

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
START, END = "<!-- table: python -m served_families -->", "<!-- end of table -->"
OTHERS = [model_type for model_type in TINY if model_type not in DESCRIBED]


@dataclass(frozen=True)
class Served:
    """What became of a family: the decoder that serves it ("" if it is refused), and the reason of what it lacks."""

    family: str
    model_type: str
    decoder: str
    exact: bool
    reason: str

    def row(self) -> str:
        outcome = f"{self.decoder} decoder" if self.decoder else "refused"
        return f"| {self.family} | `{self.model_type}` | {outcome} | {'yes' if self.exact else 'no'} | {self.reason} |"


def serve(model_type: str) -> Served:
    """Make a tiny random model of the family, and load it in float32. Where it is served, its logits must be those that
    Transformers computes."""
    made = tiny_model(model_type)
    made.set_attn_implementation("eager")  # the only form that has soft caps and sinks
    family = type(made.config).__name__.removesuffix("Config")
    with TemporaryDirectory() as folder:
        made.save_pretrained(folder)
        try:
            model = load_model(folder, "float32")
        except UnsupportedModelError as error:
            reason = str(error).partition("cannot be served: ")[2].partition(". ")[0].rstrip(".")
            return Served(family, model_type, "", False, reason)
        tokens = list(range(1, 41))
        ours = model.forward([Rows(model.new_cache(), tokens)]).logits
        with torch.inference_mode():
            torch.testing.assert_close(ours, made(torch.tensor([tokens])).logits[0], atol=2e-4, rtol=2e-4)
    return Served(family, model_type, model.kind, model.exactness.exact, model.exactness.reason or "")


def table(outcomes: list[Served]) -> str:
    head = "| family | model type | served by | same bits | why not |\n|---|---|---|---|---|\n"
    return head + "\n".join(served.row() for served in outcomes) + "\n"


def main() -> None:
    tf.logging.set_verbosity_error()
    tf.logging.disable_progress_bar()
    text = PAGE.read_text(encoding="utf-8")
    made = table([serve(model_type) for model_type in OTHERS])
    before, after = text.partition(START)[0], text.partition(END)[2]
    PAGE.write_text(f"{before}{START}\n\n{made}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
