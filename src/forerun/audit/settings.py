"""How much an audit computes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from forerun.fields import Checked, option

FAMILY_ERROR = 1e-4
"""The chance that an audit of a lossless engine fails, whatever the number of its tests."""

NEEDS_DRAFTER = "An audit compares speculation with plain decoding, so it needs a drafter: --drafter NAME."


@dataclass(frozen=True, slots=True)
class AuditOptions(Checked):
    """Sizes of the layers, and the seed of everything drawn. The grid of options is the same at every size."""

    samples: int = option(100_000, "Samples of each acceptance rule (Rule); 0 leaves the layer out.", low=0, high=10**7)
    requests: int = option(
        8_000, "Requests answered with speculation (Engine), all tests together; 0 leaves the layer out.", low=0
    )
    num_prompts: int = option(8, "Prompts on which plain and speculative answers are compared (Bits).", low=1)
    max_tokens: int = option(40, "Tokens of each of those answers.", low=8)
    num_draft_tokens: int = option(8, "The largest K of the grid.", low=1, high=64)
    seed: int = option(0, "Seed of everything that the audit draws: the same seed, the same verdict.", low=0)


def quick(settings: AuditOptions) -> AuditOptions:
    """The same grid in half a minute on the bundled pair: no size is larger than these."""
    return replace(
        settings,
        samples=min(settings.samples, 8_000),
        requests=min(settings.requests, 1_600),
        num_prompts=min(settings.num_prompts, 2),
        max_tokens=min(settings.max_tokens, 20),
    )
