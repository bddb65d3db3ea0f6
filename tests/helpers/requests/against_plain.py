"""Any requests, through an engine with a drafter and through one without."""

import random

from doubles import FakeModel
from forerun.config import EngineConfig, SamplingParams
from forerun.drafters import Drafter
from forerun.engine.engine import Engine


def assert_output_is_plain(fake: FakeModel, drafter: Drafter, config: EngineConfig, rng: random.Random) -> None:
    """Six requests of all kinds together: the same tokens with the drafter, some of which it drafted."""
    engine, plain = Engine(fake, drafter, config=config), Engine(fake, None, config=config)
    for _ in range(6):
        prompt = [rng.randrange(6) for _ in range(rng.randint(1, 9))]
        drawn = {"seed": rng.randrange(99), "temperature": rng.choice([0.5, 1.0]), "n": rng.randint(1, 2)}
        params = SamplingParams(
            **(rng.choice([{"temperature": 0.0}, drawn])),
            max_tokens=rng.randint(1, 60),
            ignore_eos=rng.random() < 0.5,
            frequency_penalty=rng.choice([0.0, 0.3]),
        )
        engine.add(prompt, params)
        plain.add(prompt, params)
    ours, theirs = {}, {}
    for each, results in ((engine, ours), (plain, theirs)):
        while each.has_work:
            results.update({(o.request_id, o.chunk.index): o.choice for o in each.step()})
    assert {key: choice.token_ids for key, choice in ours.items()} == {
        key: choice.token_ids for key, choice in theirs.items()
    }
    assert sum(choice.stats.num_accepted_tokens for choice in ours.values()) > 0
