"""A step that mixes rules gives every sequence what its own rule would give it alone."""

from __future__ import annotations

import torch

from doubles import tree_draft
from forerun.types import Draft, PackedDrafts
from forerun.verification import VERIFIERS, verify_step

VOCAB = 6
RULES = ["traversal", "walk", "block", "coupled", "token", "block", "multi-step", "walk", "traversal", "coupled"]


def drafted(rule: str, generator: torch.Generator, near: torch.Tensor) -> Draft:
    """A draft such as the rule is for, drawn from distributions near the target's."""

    def probs(rows: int) -> torch.Tensor:
        return (near[:rows] + torch.randn(rows, VOCAB, generator=generator, dtype=torch.float64)).softmax(-1)

    if rule in ("block", "token"):
        own = probs(4)
        return Draft.chain(torch.multinomial(own[:3], 1, generator=generator)[:, 0].tolist(), own)
    if rule in ("traversal", "multi-step"):
        own = probs(5)
        parents = [-1, -1, 0, 1]
        tokens = [int(torch.multinomial(own[parent + 1], 1, generator=generator)) for parent in parents]
        return tree_draft(tokens, parents, probs=own)
    return Draft.chain(near[:3].argmax(-1).tolist())


def numbers_wanted(rule: str, part: PackedDrafts) -> int:
    if rule == "coupled":
        return 0
    if rule == "walk":
        return part.offsets[-1]
    return len(part.drafts) * (max(draft.num_candidates for draft in part.drafts) + 1)


def test_mixed_rules_give_what_each_rule_gives_alone(given_noise) -> None:
    """Block and traversal too, whose verdicts hang on their rows, their drafts and their random numbers."""
    lengths: dict[str, set[int]] = {rule: set() for rule in RULES}
    for seed in range(30):
        generator = torch.Generator().manual_seed(seed)
        rules = [RULES[i] for i in torch.randperm(len(RULES), generator=generator).tolist()]
        near = [2 * torch.randn(5, VOCAB, generator=generator, dtype=torch.float64) for _ in rules]
        drafts = [drafted(rule, generator, own) for rule, own in zip(rules, near)]
        packed = PackedDrafts.of(drafts)
        logprobs = torch.cat([own[: len(draft) + 1] for own, draft in zip(near, drafts)]).log_softmax(-1)
        uniforms = torch.rand(200, dtype=torch.float64, generator=generator).tolist()
        gumbel = -torch.rand(len(logprobs), VOCAB, dtype=torch.float64, generator=generator).log().neg().log()
        mixed = verify_step(packed, logprobs, rules, given_noise(uniforms, gumbel))
        at = 0
        for rule in dict.fromkeys(rules):
            members = [i for i, own in enumerate(rules) if own == rule]
            part = PackedDrafts.of([drafts[i] for i in members])
            rows = [row for i in members for row in range(packed.offsets[i], packed.offsets[i + 1])]
            wanted = numbers_wanted(rule, part)
            noise = given_noise(uniforms[at : at + wanted], gumbel[rows])
            at += wanted
            assert [mixed[i] for i in members] == VERIFIERS[rule].verify(part, logprobs[rows], noise), rule
            assert noise.uniforms == []
            lengths[rule] |= {len(mixed[i].path) for i in members}
    for rule, seen in lengths.items():
        assert {0, 1, 2} <= seen, (rule, seen)  # or the verdicts would be no test of anything
