"""What drafters keep from one request to the next does not grow with their number."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np

from doubles import FakeModel
from forerun import SamplingParams
from forerun.config import EngineConfig
from forerun.drafters import Binding, Recycling
from forerun.drafters.cross_vocab import RestrictedModel
from forerun.drafters.lookup.token_recycling import Successors
from forerun.engine import Engine


def test_restricted_caches_are_forgotten_with_their_sequences() -> None:
    fake: Any = FakeModel()
    model = RestrictedModel(fake, [1, 2, 3])
    model.restrict = True
    for _ in range(30):
        model.new_cache().free()
        fake.caches.clear()
    gc.collect()
    assert len(model._restricted) <= 1


def test_a_shared_matrix_has_a_row_for_each_token_at_most() -> None:
    fake: Any = FakeModel()
    recycling = Recycling(share=True)
    recycling.bind(Binding(fake))
    engine = Engine(fake, recycling, config=EngineConfig(num_draft_tokens=4))
    sizes = []
    for first in range(11):
        engine.add([first, 3, first], SamplingParams(seed=first, max_tokens=30))
        while engine.has_work:
            engine.step()
        sizes.append(recycling.nbytes)
    assert recycling._shared is not None
    assert len(recycling._shared) <= fake.vocab_size
    assert sizes[-1] == sizes[5]
    assert not recycling._successors and not recycling._trees


def test_successors_grow_to_the_vocabulary_and_no_further() -> None:
    successors = Successors(300, 2)
    for turn in range(5):
        ids = list(range(300))
        successors.update(ids, np.full((300, 2), turn))
    assert len(successors) == 300
    assert len(successors._rows) == 300
