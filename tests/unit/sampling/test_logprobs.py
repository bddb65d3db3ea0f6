import pytest
import torch

from forerun.sampling import token_logprobs


def test_values_are_log_softmax_of_the_logits():
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(0)) * 5
    expected = logits.log_softmax(-1)
    reports = token_logprobs(logits, [3, 0, 49, 7], 5)
    for row, report in enumerate(reports):
        assert report.logprob == expected[row, report.token_id].item()
        values, ids = expected[row].topk(5)
        assert report.top == tuple(zip(ids.tolist(), values.tolist()))
    assert [report.token_id for report in reports] == [3, 0, 49, 7]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_ties_go_to_the_lowest_id(dtype):
    logits = torch.zeros(2, 300, dtype=dtype)
    logits[0, 200] = 1
    first, second = token_logprobs(logits, torch.tensor([200, 5]), 4)
    assert [token for token, _ in first.top] == [200, 0, 1, 2]
    assert [token for token, _ in second.top] == [0, 1, 2, 3]


def test_edges():
    logits = torch.tensor([[1e30, -torch.inf, 0.0]])
    report = token_logprobs(logits, [1], 20)[0]
    assert report.logprob == -torch.inf and [token for token, _ in report.top] == [0, 2, 1]
    assert token_logprobs(logits, [0], 0)[0].top == ()
    assert token_logprobs(torch.empty(0, 3), [], 2) == []
