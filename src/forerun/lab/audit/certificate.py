"""The certificate of an audit: tests in layers, each with a verdict and the deviation that it would have found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from forerun.kernels.provenance import Environment
from forerun.lab.audit.statistics import FOUND, Deviation, GTest, Numbers, detectable, deviation
from forerun.lab.bench.tables import markdown_table
from forerun.lab.results.files import without_folders
from forerun.lab.results.schema import DrafterFacts, Figure, Results, TableFacts, TargetFacts

Verdict = Literal["pass", "fail", "inconclusive", "measured", "not run"]
"""measured: a lossy rule was requested, and its deviation is reported. inconclusive: neither pass nor fail."""
_WORST_FIRST: tuple[Verdict, ...] = ("fail", "inconclusive", "measured", "pass", "not run")

FORMAT = 1
"""Version of the JSON object."""
_LAYER_KEYS = ("name", "about", "verdict", "power", "reason", "findings", "notes", "tests")
"""Of a layer, in the JSON object."""
_SAYS = (
    "A pass of Bits says that the compared answers are equal, to the last bit of each log-probability; of Rule and "
    "Engine, that no deviation was seen between the cells that were counted: what would have been found stands beside "
    "each test. It says nothing of other models, machines, versions, options or drafters, nor of an error that the "
    "model makes with and without speculation."
)


@dataclass(frozen=True, slots=True)
class Check:
    """One line of a layer.

    Attributes:
        name: what was tested.
        verdict: of it.
        what: what was counted: "answers", "samples".
        num_samples: how many.
        freedom: degrees of freedom, cells less one for each prompt; None where they were compared one by one.
        p_value: None where nothing was random.
        level: a p-value below it fails.
        found: the smallest distance that would have been found with probability `FOUND`: total variation between the
            cells' distributions, or the share of answers that differ; None where nothing is stated.
        num_drafted, num_accepted: draft tokens verified and accepted meanwhile.
        deviation: of a lossy rule.
        note: a sentence, or nothing.
    """

    name: str
    verdict: Verdict
    what: str = "samples"
    num_samples: int = 0
    freedom: int | None = None
    p_value: float | None = None
    level: float | None = None
    found: float | None = None
    num_drafted: int = 0
    num_accepted: int = 0
    deviation: Deviation | None = None
    note: str = ""

    @classmethod
    def of(cls, name: str, outcome: GTest, level: float, **more: Any) -> Check:
        """Judge a G-test: it passes unless its p-value is below the level. more: other attributes."""
        p_value = outcome.p_value
        found = detectable(outcome.num_samples, outcome.freedom, level)
        verdict: Verdict = "fail" if p_value < level else "pass"
        if verdict == "pass" and outcome.freedom == 0:
            verdict = "inconclusive"
            more = {"note": "too few samples to be compared", **more}
        return cls(
            name,
            verdict,
            num_samples=outcome.num_samples,
            freedom=outcome.freedom,
            p_value=p_value,
            level=level,
            found=found,
            **more,
        )

    @classmethod
    def measured(cls, name: str, strata: Seq[tuple[Numbers, Numbers]], **more: Any) -> Check:
        """Measure the deviation of a lossy rule.

        Args:
            strata: counts [C] and probabilities [C] of each prompt's cells, which count as cells of their own.
            more: other attributes.
        """
        counts = np.concatenate([seen for seen, _ in strata])
        total = max(float(counts.sum()), 1.0)
        cells = np.concatenate([probabilities * (seen.sum() / total) for seen, probabilities in strata])
        found = deviation(counts, cells)
        return cls(name, "measured", num_samples=int(total), freedom=len(counts) - 1, deviation=found, **more)


@dataclass(slots=True)
class Layer:
    """One of the certificate's layers.

    Attributes:
        name: "Bits", "Rule" or "Engine".
        about: what it compares, in a sentence.
        tests: lines.
        findings: what is wrong, each a sentence; without text or tokens of any prompt.
        notes: what else should be known.
        reason: why it was not run; empty if it was.
    """

    name: str
    about: str
    tests: list[Check] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    reason: str = ""

    @property
    def verdict(self) -> Verdict:
        """Return the worst verdict of its tests."""
        return worst([test.verdict for test in self.tests])

    @property
    def power(self) -> str:
        """Return a sentence on what its tests would have found."""
        found = [test.found for test in self.tests if test.found is not None]
        if not found:
            return ""
        what = "share of differing answers" if self.tests[0].what == "answers" else "total variation"
        best = f"{100 * min(found):.2g} %"
        most = f"{100 * max(found):.2g} %"
        span = best if best == most else f"{best} to {most}, by test,"
        return f"A {what} of {span} would have been found with probability {FOUND:g}."


@dataclass(slots=True)
class Certificate:
    """All layers of one audit.

    Attributes:
        subject: what was audited: model, drafter, options.
        layers: in the order in which they ran.
        family_error: the probability that any of the tests fails though nothing is wrong.
        seconds: that it took.
        environment: the machine and the versions.
    """

    subject: Mapping[str, Any]
    layers: Seq[Layer]
    family_error: float
    seconds: float = 0.0
    environment: Mapping[str, Any] = field(default_factory=dict)

    @property
    def verdict(self) -> Verdict:
        """Return the worst verdict of the layers."""
        return worst([layer.verdict for layer in self.layers])

    @property
    def failed(self) -> list[str]:
        """Return the names of the layers that failed."""
        return [layer.name for layer in self.layers if layer.verdict == "fail"]

    @property
    def headline(self) -> str:
        """Return the outcome in a sentence."""
        drafter = self.subject.get("drafter")
        match self.verdict:
            case "fail":
                return f"Not lossless: {', '.join(self.failed)} failed."
            case "inconclusive":
                names = [layer.name for layer in self.layers if layer.verdict == "inconclusive"]
                return f"Inconclusive, neither pass nor fail: {', '.join(names)}."
            case "measured":
                return f"Lossy, as requested ({self.subject.get('acceptance')}): the deviation is measured."
            case "not run":
                return "Nothing was tested."
        return f"No loss was found with {drafter}." if drafter else "No loss was found."

    def markdown(self) -> str:
        """Format the certificate as Markdown."""
        parts = [f"# {self.headline}"]
        for layer in self.layers:
            parts += [f"## {layer.name}: {layer.verdict}", layer.about]
            parts += [f"Not run: {layer.reason}."] if layer.reason else []
            parts += [markdown_table(*table_of(layer.tests))] if layer.tests else []
            parts += ["\n".join(f"- {finding}" for finding in layer.findings)] if layer.findings else []
            parts += [layer.power] if layer.power else []
            parts += layer.notes
        facts = {**self.subject, **self.environment}
        parts += [
            _SAYS,
            f"All tests together fail by chance with probability {self.family_error:g} at most, if nothing is wrong.",
            "; ".join(f"{name.replace('_', ' ')}: {value}" for name, value in facts.items() if value is not None) + ".",
            f"{self.verdict.upper()}: {self.headline} {self.seconds:.0f} s.",
        ]
        return "\n\n".join(parts)

    def as_object(self) -> dict[str, Any]:
        """Return the object that is written as JSON; dataclasses are left in it."""
        return {
            "format": FORMAT,
            "verdict": self.verdict,
            "headline": self.headline,
            "failed": self.failed,
            "subject": dict(self.subject),
            "family_error": self.family_error,
            "seconds": round(self.seconds, 1),
            "layers": [{name: getattr(layer, name) for name in _LAYER_KEYS} for layer in self.layers],
            "machine": dict(self.environment),
        }


COLUMNS = ("test", "verdict", "compared", "df", "p", "level", f"found with {FOUND:g}", "accepted/drafted", "note")


def table_of(tests: Seq[Check]) -> tuple[list[str], list[list[str]]]:
    """Return the header and the rows of a layer's tests, without columns that are empty in all."""
    rows = [_row(test) for test in tests]
    used = [column for column in range(len(COLUMNS)) if any(row[column] for row in rows)]
    return [COLUMNS[column] for column in used], [[row[column] for column in used] for row in rows]


def _row(test: Check) -> list[str]:
    """Return the cells of a test's line under COLUMNS."""
    note = test.note
    if test.deviation is not None:
        seen = test.deviation
        note = f"deviation {100 * seen.seen:.2g} %, between {100 * seen.low:.2g} and {100 * seen.high:.2g} %"
    return [
        test.name,
        test.verdict,
        f"{test.num_samples} {test.what}",
        "" if test.freedom is None else str(test.freedom),
        "" if test.p_value is None else f"{test.p_value:.2g}",
        "" if test.level is None else f"{test.level:.1g}",
        "" if test.found is None else f"{100 * test.found:.2g} %",
        f"{test.num_accepted}/{test.num_drafted}" if test.num_drafted else "",
        note,
    ]


def worst(verdicts: Seq[Verdict]) -> Verdict:
    """Return the worst of several verdicts; "not run" of none."""
    return next((verdict for verdict in _WORST_FIRST if verdict in verdicts), "not run")


def audit_results(certificate: Certificate, command: str, environment: Environment) -> Results:
    """Convert the certificate of a model in this process to the schema of results, without any text of prompts."""
    subject = certificate.subject
    drafter = without_folders(str(subject["drafter"]))
    figures = []
    tables = []
    for layer in certificate.layers:
        for test in layer.tests:
            labels = {"layer": layer.name, "method": test.name}
            figures.append(Figure("compared", labels, float(test.num_samples)))
            if test.found is not None:
                figures.append(Figure("found", labels, test.found, samples=test.num_samples))
            if test.p_value is not None:
                figures.append(Figure("p_value", labels, test.p_value, samples=test.num_samples))
        header, rows = table_of(layer.tests) if layer.tests else (["verdict"], [[layer.verdict]])
        tables.append(TableFacts(f"{layer.name}: {layer.verdict}. {layer.power}".rstrip(), header, rows))
    return Results(
        kind="audit",
        command=command,
        environment=environment,
        target=TargetFacts(
            without_folders(str(subject["model"])),
            str(subject.get("number_format") or ""),
            exact=str(subject.get("exact")) == "yes",
        ),
        settings={"seed": subject.get("seed"), "family_error": certificate.family_error},
        drafters=[DrafterFacts(drafter, drafter)],
        figures=figures,
        tables=tables,
        details={
            "verdict": certificate.verdict,
            "headline": certificate.headline,
            "layers": {layer.name: layer.verdict for layer in certificate.layers},
            "findings": [finding for layer in certificate.layers for finding in layer.findings],
        },
    )
