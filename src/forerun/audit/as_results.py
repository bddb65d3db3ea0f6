"""A certificate as results, for `forerun bench report`."""

from __future__ import annotations

from forerun.audit.certificate import Certificate, table_of
from forerun.results import DrafterFacts, Environment, Figure, Results, TableFacts, TargetFacts
from forerun.results.write import without_folders


def audit_results(certificate: Certificate, command: str, environment: Environment) -> Results:
    """The certificate of a model in this process, in the schema of results. No text is in it."""
    subject = certificate.subject
    drafter = without_folders(str(subject["drafter"]))
    figures, tables = [], []
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
