"""The measurement runs whole steps and prints as many cells as titles."""

from forerun.bench.sampling_time import COLUMNS, measure


def test_every_kind_of_step_is_measured_at_every_vocabulary() -> None:
    said: list[str] = []
    rows = measure([64, 5000], num_draft_tokens=2, rounds=3, say=said.append)
    assert [row.vocab_size for row in rows] == [64, 64, 5000, 5000]
    assert [row.step for row in rows[:2]] == ["drawn chain, K = 2", "plain, temperature=0.8 top_k=50 top_p=0.9 seed=1"]
    for row in rows:
        assert row.total >= row.fast > 0
        assert [cell(row) for cell in COLUMNS.values()][:2] == [row.step, str(row.vocab_size)]
    assert len(said) == 2
