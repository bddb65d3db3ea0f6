"""Each option and their combinations against Transformers' own processors, in the order `generate` puts them."""

import itertools
import math
from types import SimpleNamespace

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList
from transformers.generation.utils import GenerationMixin

from forerun.config import SamplingParams
from forerun.sampling import LogitsPipeline, LogitsRow
from forerun.types import Sequence

VOCAB, EOS = 60, (3, 4)
PROMPT = [5, 6, 7, 5, 9, 11, 5, 3]
OUTPUT = [6, 20, 21, 20]
PATHS = [(), (21,), (21, 5, 30), (30, 20, 20, 59)]

OPTIONS = {
    "temperature": {"temperature": 0.6},
    "hot": {"temperature": 1.7},
    "top_k": {"top_k": 7},
    "top_k of all": {"top_k": 1000},
    "top_p": {"top_p": 0.7},
    "small top_p": {"top_p": 0.01},
    "min_p": {"min_p": 0.15},
    "repetition": {"repetition_penalty": 1.4},
    "repetition below 1": {"repetition_penalty": 0.7},
    "presence": {"presence_penalty": 1.1},
    "frequency": {"frequency_penalty": -0.8},
    "bias": {"logit_bias": {6: 4.0, 20: -3.0, 59: 1.5}},
    "ban": {"logit_bias": {6: -1e9, 20: -1e9}},
    "min_tokens": {"min_tokens": 6},
    "min_tokens and stops": {"min_tokens": 7, "stop_token_ids": (20, 21)},
}


class CountPenalties(LogitsProcessor):
    """Presence and frequency penalty as OpenAI's interface defines them, on the output only."""

    def __init__(self, params, num_prompt):
        self.params, self.num_prompt = params, num_prompt

    def __call__(self, input_ids, scores):
        counts = torch.zeros_like(scores)
        for token in input_ids[0, self.num_prompt :].tolist():
            counts[0, token] += 1
        present = (counts > 0).to(scores.dtype)
        return scores - self.params.frequency_penalty * counts - self.params.presence_penalty * present


def reference(logits, params, tokens, num_prompt):
    """The distribution that Transformers' `generate` would draw from. logits: [1, V]."""
    config = GenerationConfig(
        do_sample=True,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p or None,
        repetition_penalty=params.repetition_penalty,
        sequence_bias={(token,): float(bias) for token, bias in params.logit_bias.items()} or None,
        min_new_tokens=params.min_tokens,
    )
    config._eos_token_tensor = torch.tensor([*EOS, *params.stop_token_ids])
    host = SimpleNamespace(
        config=SimpleNamespace(is_encoder_decoder=False),
        _merge_criteria_processor_list=GenerationMixin._merge_criteria_processor_list.__get__(None or object()),
    )
    processors = GenerationMixin._get_logits_processor(
        host,
        config,
        input_ids_seq_length=num_prompt,
        logits_processor=LogitsProcessorList([CountPenalties(params, num_prompt)]),
    )
    return processors(torch.tensor([tokens]), logits.clone()).log_softmax(-1)


def random_logits(rows, seed=0, vocab_size=VOCAB, dtype=torch.float64):
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed), dtype=dtype) * 3


def sequence_of(params, identity=0):
    return Sequence(identity, [*PROMPT, *OUTPUT], len(PROMPT), params)


def merged(names):
    options = {}
    for name in names:
        options.update(OPTIONS[name])
    return SamplingParams(**{"temperature": 1.0, **options})


SINGLES = [(name,) for name in OPTIONS]
PAIRS = list(itertools.combinations(OPTIONS, 2))
MORE = [
    ("temperature", "top_k", "top_p", "min_p"),
    ("bias", "repetition", "presence", "frequency", "min_tokens"),
    ("ban", "repetition below 1", "presence", "min_tokens and stops", "hot", "top_k", "top_p", "min_p"),
]


@pytest.mark.parametrize("names", [*SINGLES, *PAIRS, *MORE], ids=" + ".join)
def test_same_distribution_as_transformers(names):
    params = merged(names)
    sequence = sequence_of(params)
    logits = random_logits(len(PATHS), seed=len(names))
    before = logits.clone()
    probs = LogitsPipeline(VOCAB, EOS).process(logits, [LogitsRow(sequence, path) for path in PATHS])
    assert torch.equal(logits, before)
    for row, path in enumerate(PATHS):
        tokens = [*sequence.token_ids, *path]
        expected = reference(logits[row : row + 1], params, tokens, sequence.num_prompt)[0]
        assert torch.equal(probs[row].isneginf(), expected.isneginf())
        # Transformers keeps its bias in float32
        torch.testing.assert_close(probs[row].exp(), expected.exp(), atol=1e-6 if params.logit_bias else 1e-12, rtol=0)


@pytest.mark.parametrize("names", [("top_k",), ("top_p",), ("min_p",), ("top_k", "top_p", "min_p")], ids=" + ".join)
def test_equal_logits(names):
    """As many stay as in Transformers; top_p, which leaves open which, keeps the lowest ids."""
    params = merged(names)
    logits = torch.randint(0, 4, (20, VOCAB), generator=torch.Generator().manual_seed(1)).double()
    probs = LogitsPipeline(VOCAB, EOS).process(logits, [LogitsRow(sequence_of(params))] * len(logits))
    for row, distribution in enumerate(probs):
        expected = reference(logits[row : row + 1], params, [*PROMPT, *OUTPUT], len(PROMPT))[0]
        assert torch.equal(distribution.sort().values.isneginf(), expected.sort().values.isneginf())
        kept = ~distribution.isneginf()
        for value in logits[row].unique():
            of_value = kept[logits[row] == value].tolist()
            assert of_value == sorted(of_value, reverse=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("vocab_size", [61, 5000])
def test_a_row_does_not_depend_on_its_company(vocab_size, dtype):
    """To the last bit: otherwise a seeded request would depend on the batch it runs in."""
    each = [merged(names) for names in [*SINGLES, *MORE]] + [SamplingParams(temperature=0), SamplingParams()]
    sequences = [sequence_of(params, index) for index, params in enumerate(each)]
    rows = [LogitsRow(sequence, path) for sequence in sequences for path in PATHS]
    logits = random_logits(len(rows), vocab_size=vocab_size, dtype=dtype)
    together = LogitsPipeline(vocab_size, EOS).process(logits, rows)
    for index, row in enumerate(rows):
        alone = LogitsPipeline(vocab_size, EOS).process(logits[index : index + 1].clone(), [row])
        assert torch.equal(alone[0], together[index])


def test_wide_nucleus_is_found_beyond_the_first_guesses():
    vocab_size = 5000
    logits = random_logits(2, vocab_size=vocab_size) / 30
    for top_p in (0.1, 0.5, 0.999):
        params = SamplingParams(top_p=top_p)
        probs = LogitsPipeline(vocab_size).process(logits, [LogitsRow(sequence_of(params))] * 2)
        for row, distribution in enumerate(probs):
            expected = reference(logits[row : row + 1], params, PROMPT, len(PROMPT))[0]
            assert torch.equal(distribution.isneginf(), expected.isneginf())


def test_greedy_rows_hold_one_token_the_first_of_equal_ones():
    logits = torch.tensor([[1.0, 5.0, 5.0, 0.0], [2.0, 1.0, 0.0, 2.0]])
    params = SamplingParams(temperature=0, top_k=2, top_p=0.5, min_p=0.1)
    probs = LogitsPipeline(4).process(logits, [LogitsRow(Sequence(0, [1], 1, params))] * 2)
    assert probs.exp().tolist() == [[0, 1, 0, 0], [1, 0, 0, 0]]
    penalised = SamplingParams(temperature=0, repetition_penalty=2.0)
    probs = LogitsPipeline(4).process(logits, [LogitsRow(Sequence(0, [1], 1, penalised), path) for path in ([], [2])])
    assert probs.argmax(-1).tolist() == [2, 0]


def test_greedy_beside_sampling():
    rows = [LogitsRow(sequence_of(params)) for params in (SamplingParams(), SamplingParams(temperature=0))]
    logits = random_logits(2)
    probs = LogitsPipeline(VOCAB).process(logits, rows)
    torch.testing.assert_close(probs[0], logits[0].log_softmax(-1))
    assert probs[1].exp().sum() == 1 and probs[1].argmax() == logits[1].argmax()


@pytest.mark.parametrize(
    ("options", "identity"),
    [
        ({}, True),
        ({"top_k": 5, "top_p": 0.5, "min_p": 0.1, "seed": 3}, True),
        ({"temperature": 0.1}, False),
        ({"repetition_penalty": 1.1}, False),
        ({"presence_penalty": 0.1}, False),
        ({"frequency_penalty": -0.1}, False),
        ({"logit_bias": {1: 1.0}}, False),
        ({"min_tokens": 1}, False),
    ],
)
def test_is_identity(options, identity):
    assert LogitsPipeline(VOCAB, EOS).is_identity(SamplingParams(**{"temperature": 0, **options})) is identity


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("temperature", [0, 1e-45, 1e-3, 1.0, 100.0])
@pytest.mark.parametrize(
    "options",
    [
        {"logit_bias": dict.fromkeys(range(VOCAB), -1e38)},
        {"logit_bias": dict.fromkeys(range(VOCAB), -1e300)},
        {"logit_bias": {1: 1e300, 2: 1e300}},
        {"logit_bias": {1: 1e38, 2: -1e38}, "repetition_penalty": 0.01},
        {"min_tokens": 50, "stop_token_ids": tuple(range(VOCAB))},
        {"min_tokens": 50, "stop_token_ids": tuple(range(1, VOCAB)), "top_k": 3, "top_p": 0.5, "min_p": 1.0},
    ],
)
def test_extreme_options_never_give_nan(options, temperature, dtype):
    params = SamplingParams(temperature=temperature, **options)
    row = LogitsRow(Sequence(0, [1, 2, 1, 2], 2, params), [1])
    probs = LogitsPipeline(VOCAB, EOS).process(random_logits(3, dtype=dtype), [row] * 3)
    assert not probs.isnan().any()
    torch.testing.assert_close(probs.exp().sum(-1), torch.ones(3, dtype=dtype))


def test_masking_every_token_keeps_the_models_distribution():
    params = SamplingParams(min_tokens=5, stop_token_ids=tuple(range(VOCAB)))
    logits = random_logits(1)
    probs = LogitsPipeline(VOCAB, EOS).process(logits, [LogitsRow(sequence_of(params))])
    torch.testing.assert_close(probs, logits.log_softmax(-1))


def test_counts_follow_the_sequence_without_rescanning_it():
    params = SamplingParams(repetition_penalty=1.5, frequency_penalty=0.3, presence_penalty=0.2)
    sequence, pipeline = sequence_of(params), LogitsPipeline(VOCAB, EOS)
    logits = random_logits(1)
    for appended in ([], [7], [30, 30, 2], []):
        sequence.token_ids += appended
        distribution = pipeline.process(logits, [LogitsRow(sequence)])
        assert torch.equal(distribution, LogitsPipeline(VOCAB, EOS).process(logits, [LogitsRow(sequence)]))
    counts = pipeline._penalties[sequence.id]._counts
    ids, seen, output = counts.with_paths([[30, 59], []])
    table = {token: (seen[:, i].tolist(), output[:, i].tolist()) for i, token in enumerate(ids.tolist())}
    assert table[30] == ([True, True], [3, 2]) and table[5] == ([True, True], [0, 0])
    assert table[59] == ([True, False], [1, 0])
    del sequence.token_ids[-3:]  # a cut at a stop
    distribution = pipeline.process(logits, [LogitsRow(sequence)])
    assert torch.equal(distribution, LogitsPipeline(VOCAB, EOS).process(logits, [LogitsRow(sequence)]))
    pipeline.stop(sequence)
    assert not pipeline._penalties


def test_another_sequence_of_the_same_id_is_not_confused():
    params = SamplingParams(repetition_penalty=1.5)
    pipeline, logits = LogitsPipeline(VOCAB), random_logits(1)
    pipeline.process(logits, [LogitsRow(Sequence(0, [1, 2, 3], 3, params))])
    other = Sequence(0, [4, 5, 6], 3, params)
    expected = LogitsPipeline(VOCAB).process(logits, [LogitsRow(other)])
    assert torch.equal(pipeline.process(logits, [LogitsRow(other)]), expected)


def test_tokens_outside_a_smaller_vocabulary_are_ignored():
    params = SamplingParams(repetition_penalty=1.5, logit_bias={70: 3.0}, min_tokens=3, stop_token_ids=(80,))
    sequence = Sequence(0, [1, 65, 2], 1, params)
    distribution = LogitsPipeline(VOCAB, {90}).process(random_logits(1), [LogitsRow(sequence, [66])])
    assert math.isclose(float(distribution.exp().sum()), 1)


def test_the_choices_of_a_request_share_its_bias() -> None:
    params = SamplingParams(logit_bias={token: token / 7 for token in range(VOCAB)})
    sequences = [Sequence(index, list(PROMPT), len(PROMPT), params, 0, 99) for index in range(3)]
    pipeline, logits = LogitsPipeline(VOCAB, EOS), torch.randn(3, VOCAB)
    adjusted = pipeline.adjust(logits, [LogitsRow(sequence) for sequence in sequences])
    assert torch.equal(adjusted, logits + torch.arange(VOCAB).double().div(7).to(logits))
    assert len({id(each.bias) for each in pipeline._penalties.values()}) == 1
