"""The power of a certificate's layers as a picture: the chance that a deviation is found, by its size. SVG as text,
whose colours are those of the page around it."""

from __future__ import annotations

from collections.abc import Iterator

from forerun.audit.certificate import Certificate, Check
from forerun.audit.statistics import FOUND, power

_WIDTH, _HEIGHT = 640, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 16, 16, 52
_SMALLEST, _LARGEST = -3.5, 0.0
"""Powers of ten of the total variation at the axis's ends."""
_STEPS = 140
_COLOURS = ("--a", "--b", "--c")


def picture(certificate: Certificate) -> str:
    """A curve for each layer with p-values, of its test that sees least; empty without any."""
    curves = []
    for layer in certificate.layers:
        tests = [test for test in layer.tests if test.p_value is not None and test.freedom and test.found is not None]
        if tests and tests[0].what == "samples":
            curves.append((layer.name, max(tests, key=lambda test: test.found or 0.0)))
    if not curves:
        return ""
    names = " and ".join(name for name, _ in curves)
    label = f"Chance that a deviation is found, by its total variation: {names}"
    shapes = [*_axes()]
    for number, (name, test) in enumerate(curves):
        colour = f"var({_COLOURS[number % len(_COLOURS)]})"
        shapes.append(f'<polyline fill="none" stroke="{colour}" stroke-width="2.5" points="{_points(test)}"/>')
        y = _y(FOUND) + 22 + 18 * number  # below the dashed line
        shapes.append(_line(_LEFT + 10, y - 4, _LEFT + 34, y - 4, f'{colour}" stroke-width="2.5'))
        shapes.append(_text(_LEFT + 40, y, f"{name}: {test.name}", "start"))
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" role="img" aria-label="{label}" font-size="12" '
        f'fill="currentColor" font-family="system-ui, sans-serif">{"".join(shapes)}</svg>'
        '<p class="dim">Of each layer, the test that sees least. Logarithmic axis of total variation; '
        f"the dashed line is the probability {FOUND:g}.</p>"
    )


def _x(exponent: float) -> float:
    return _LEFT + (exponent - _SMALLEST) / (_LARGEST - _SMALLEST) * (_WIDTH - _LEFT - _RIGHT)


def _y(chance: float) -> float:
    return _TOP + (1 - chance) * (_HEIGHT - _TOP - _BOTTOM)


def _points(test: Check) -> str:
    assert test.freedom is not None
    assert test.level is not None
    found = []
    for step in range(_STEPS + 1):
        exponent = _SMALLEST + (_LARGEST - _SMALLEST) * step / _STEPS
        chance = power(test.num_samples, test.freedom, test.level, 10**exponent)
        found.append(f"{_x(exponent):.1f},{_y(chance if chance == chance else 1.0):.1f}")
    return " ".join(found)


def _axes() -> Iterator[str]:
    bottom = _HEIGHT - _BOTTOM
    for chance in (0.0, 0.25, 0.5, 0.75, 1.0):
        yield _line(_LEFT, _y(chance), _WIDTH - _RIGHT, _y(chance), "var(--line)")
        yield _text(_LEFT - 8, _y(chance) + 4, f"{chance:g}", "end")
    for exponent, name in ((-3, "0.1 %"), (-2, "1 %"), (-1, "10 %"), (0, "100 %")):
        yield _line(_x(exponent), _TOP, _x(exponent), bottom, "var(--line)")
        yield _text(_x(exponent), bottom + 18, name, "end" if exponent == 0 else "middle")
    yield _line(_LEFT, _y(FOUND), _WIDTH - _RIGHT, _y(FOUND), 'var(--dim)" stroke-dasharray="5 4')
    centre, middle = (_LEFT + _WIDTH - _RIGHT) / 2, (_TOP + bottom) / 2
    yield _text(centre, _HEIGHT - 12, "total variation between the cells' distributions", "middle")
    yield f'<g transform="rotate(-90 14 {middle})">{_text(14, middle, "chance of being found", "middle")}</g>'


def _line(x1: float, y1: float, x2: float, y2: float, stroke: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{stroke}"/>'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text}</text>'
