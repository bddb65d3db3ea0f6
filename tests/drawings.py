"""Draw docs/images/layers.svg, from the imports, and docs/images/step.svg: `python tests/drawings.py`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from html import escape

from unit.test_layers import LAYER_OF, LAYERS, SRC, imports

IMAGES = SRC.parents[1] / "docs" / "images"
STYLE = """<style>
svg { background: #fff; font-family: system-ui, sans-serif; font-size: 14px; }
rect { fill: #e8eaf6; stroke: #3f51b5; }
.given { fill: #c8e6c9; stroke: #2e7d32; }
.dropped { fill: #fff; stroke: #999; stroke-dasharray: 4 3; }
.arrow { fill: none; stroke: #555; marker-end: url(#head); }
text { fill: #222; text-anchor: middle; }
.small { font-size: 12px; fill: #555; }
.left { text-anchor: start; }
</style>
<defs><marker id="head" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" orient="auto">
<path d="M0 0 8 4 0 8z" fill="#555"/></marker></defs>"""

COLUMN = {"lab": 1.8, "cli": 2, "train": 3, "export": 4, "engine": 2, "drafters": 3, "models": 4, "speculation": 2}
COLUMN |= {"integrations": 0.8, "server": 1, "chat": 0, "verification": 1, "sampling": 3, "kv_cache": 4, "kernels": 4}
COLUMN["adaptation"] = 3
"""Where entries of the package stand in their layer's row. Those of the lowest layer stand side by side."""


def imported() -> dict[str, set[str]]:
    """Return which entries each entry of the package imports; those of the lowest layer are left out."""
    found: dict[str, set[str]] = {name: set() for name, layer in LAYER_OF.items() if layer}
    for path in sorted(SRC.rglob("*.py")):
        parts = path.relative_to(SRC).parts
        if parts[0] in found:
            package = ".".join(["forerun", *parts[:-1]])
            names = {name.split(".")[1] for name in imports(path.read_text(), package) if name.startswith("forerun.")}
            found[parts[0]] |= names & found.keys() - {parts[0]}
    return found


def without_implied(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """Return the graph without the edges that a longer path implies."""

    def reached(name: str) -> set[str]:
        return graph[name].union(*map(reached, graph[name]))

    return {name: below.difference(*map(reached, below)) for name, below in graph.items()}


def layers_svg() -> str:
    """Draw a box for each entry of the package and an arrow to what it imports."""
    pitch, height = 150, 78
    places = {name: (150 + pitch * column, height * (len(LAYERS) - LAYER_OF[name])) for name, column in COLUMN.items()}
    lowest = {name: (150 + pitch * (0.5 + at), height * len(LAYERS)) for at, name in enumerate(LAYERS[0])}
    shapes = []
    for name, below in without_implied(imported()).items():
        x, y = places[name]
        for other in sorted(below):
            to_x, to_y = places[other]
            if to_y > y:
                shapes.append(arrow(f"M{x:g} {y + 18}L{to_x:g} {to_y - 18}"))
            else:  # an arc below the boxes of the row
                shapes.append(arrow(f"M{x:g} {y + 18}Q{(x + to_x) / 2:g} {y + 60} {to_x - 20:g} {y + 18}"))
    for name, (x, y) in (places | lowest).items():
        shapes += box(x, y, 110, name)
    shapes += [text(25, height * (len(LAYERS) - at), str(at + 1), "small") for at in range(len(LAYERS))]
    shapes.append(text(25, 30, "layer", "small"))
    note = "An arrow leads to what is imported. Arrows that others imply, and those to layer 1, are left out."
    return svg(840, height * len(LAYERS) + 70, [*shapes, text(420, height * len(LAYERS) + 50, note, "small")])


STAGES = (
    ("schedule", "engine/scheduler.py", ("which sequences,", "how many rows, K")),
    ("draft", "drafters/", ("a tree of", "tokens each")),
    ("forward", "models/", ("one row for each", "node of all trees")),
    ("verify", "verification/", ("keep what the", "target agrees with")),
    ("commit", "kv_cache/", ("keys and values", "of the kept path")),
    ("deliver", "engine/step.py", ("text, times,", "verdict to drafter")),
)
"""Title, place below src/forerun and what is done, of each part of a step."""
NODES = {"(": (0, 1, ""), "x": (1, 0, "("), ",": (2, 0, "x"), "self": (1, 2, "("), ")": (2, 2, "self")}
"""The drawn tree below the last token: token -> depth, row, parent."""
KEPT, DROPPED = ("(", "self", ")"), ("x", ",")


def step_svg() -> str:
    """Draw the parts of a step in their order, and what they do with a tree of five tokens."""
    shapes = []
    for at, (title, place, lines) in enumerate(STAGES):
        x = 90 + 160 * at
        shapes += [*box(x, 60, 120, title), text(x, 100, place, "small")]
        shapes += [text(x, 122 + 17 * row, line, "small") for row, line in enumerate(lines)]
        if at:
            shapes.append(arrow(f"M{x - 100} 60L{x - 60} 60"))
    shapes.append(arrow("M890 42C890 5 90 5 90 42"))
    shapes.append(text(90, 235, "… def f", ""))
    shapes.append(text(90, 255, "the last token: f", "small"))
    shapes += tree(190, lambda token: "")
    for row, token in enumerate(("f", *NODES)):
        shapes += box(410, 175 + 30 * row, 60, token, height=24)
    shapes.append(text(410, 355, "six rows of logits", "small"))
    shapes += tree(510, lambda token: "given" if token in KEPT else "dropped")
    shapes.append(text(570, 340, "three accepted,", "small"))
    shapes.append(text(570, 355, 'and ":" of the target', "small"))
    for row, token in enumerate(("f", *KEPT)):
        shapes += box(730, 175 + 30 * row, 60, token, "given", 24)
    for row, token in enumerate(DROPPED):
        shapes += box(730, 295 + 30 * row, 60, token, "dropped", 24)
    shapes.append(text(730, 355, "rolled back: x ,", "small"))
    shapes.append(text(890, 235, "(self):", ""))
    shapes.append(text(890, 255, "four tokens, one forward", "small"))
    return svg(980, 380, shapes)


def tree(left: float, kind: Callable[[str], str]) -> Iterator[str]:
    """Yield the shapes of the drawn tree. kind: token -> class of its box."""
    places = {token: (left + 10 + 55 * depth, 205 + 35 * row) for token, (depth, row, _) in NODES.items()}
    for token, (x, y) in places.items():
        parent = NODES[token][2]
        if parent:
            yield arrow(f"M{places[parent][0] + 19} {places[parent][1]}L{x - 19} {y}")
        yield from box(x, y, 38, token, kind(token), 24)


def box(x: float, y: float, width: float, label: str, kind: str = "", height: float = 36) -> list[str]:
    """Return a box around (x, y) with its label."""
    corner = f'x="{x - width / 2:g}" y="{y - height / 2:g}"'
    return [
        f'<rect class="{kind}" {corner} width="{width:g}" height="{height:g}" rx="5"/>',
        text(x, y + 5, label, ""),
    ]


def arrow(path: str) -> str:
    """Return an arrow along an SVG path."""
    return f'<path class="arrow" d="{path}"/>'


def text(x: float, y: float, words: str, kind: str) -> str:
    """Return a line of text around x."""
    return f'<text class="{kind}" x="{x:g}" y="{y:g}">{escape(words)}</text>'


def svg(width: int, height: int, shapes: Collection[str]) -> str:
    """Return the file."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
    return "\n".join([head, STYLE, *shapes, "</svg>\n"])


DRAWINGS = {"layers.svg": layers_svg, "step.svg": step_svg}

if __name__ == "__main__":
    for name, drawn in DRAWINGS.items():
        (IMAGES / name).write_text(drawn(), encoding="utf-8")
