"""Greedy sampling takes the highest logit, draws follow the distribution, and rows are independent."""

import random
from collections.abc import Sequence
from math import inf, nan

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from runtime.drivers.interface import Sampling
from runtime.drivers.native import sampler
from runtime.drivers.native.sampler import SamplingChoice, choose_tokens

torch.set_num_threads(1)


def sampling(temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> Sampling:
    return Sampling(max_tokens=1, temperature=temperature, top_k=top_k, top_p=top_p)


GREEDY = SamplingChoice(sampling(temperature=0.0), 0.5)
SETTINGS = [
    pytest.param(sampling(), id="plain"),
    pytest.param(sampling(temperature=0.7), id="temperature"),
    pytest.param(sampling(top_k=5), id="top-k"),
    pytest.param(sampling(top_p=0.8), id="top-p"),
    pytest.param(sampling(temperature=1.3, top_k=7, top_p=0.7), id="temperature, then top-k, then top-p"),
    pytest.param(sampling(top_k=100), id="a top-k wider than the vocabulary"),
]


def wanted(logits: torch.Tensor, how: Sampling) -> torch.Tensor:
    """The distribution as transformers' processors make it."""
    scores = logits[None]
    nothing = torch.zeros(1, 1, dtype=torch.long)
    scores = TemperatureLogitsWarper(how.temperature)(nothing, scores)
    if how.top_k:
        scores = TopKLogitsWarper(how.top_k)(nothing, scores)
    if how.top_p < 1:
        scores = TopPLogitsWarper(how.top_p)(nothing, scores)
    distribution: torch.Tensor = scores[0].softmax(-1)
    return distribution


def chi_square(counts: Sequence[int], expected: Sequence[float]) -> float:
    return sum((count - due) ** 2 / due for count, due in zip(counts, expected, strict=True))


@pytest.mark.parametrize("how", SETTINGS)
def test_draws_fit_the_distribution_of_transformers(how: Sampling) -> None:
    """20,000 draws at a fixed seed fit the distribution of transformers (chi-square, 0.1 %), and a wrong one not."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(12, generator=generator) * 1.5
    draws = random.Random(5)
    total = 20_000
    tokens = choose_tokens(logits.expand(total, -1), [SamplingChoice(how, draws.random()) for _ in range(total)])
    probabilities = wanted(logits, how).tolist()
    support = [token for token, probability in enumerate(probabilities) if probability > 0]
    assert set(tokens) <= set(support)
    counts = [tokens.count(token) for token in support]
    expected = [total * probabilities[token] for token in support]
    limit = 2 * len(support) + 18  # over the 99.9th percentile for 1 to 11 degrees of freedom
    assert chi_square(counts, expected) < limit
    if len(support) > 2:
        # Negative control: two probabilities exchanged.
        assert chi_square(counts, [expected[-1], *expected[1:-1], expected[0]]) > limit


def test_stratified_draws_give_the_exact_distribution() -> None:
    """Draws at equal distances hit each token as often as its probability says, within one."""
    logits = torch.tensor([0.1, 0.2, 0.3, 0.4]).log()
    total = 1000
    tokens = choose_tokens(
        logits.expand(total, -1), [SamplingChoice(sampling(), (i + 0.5) / total) for i in range(total)]
    )
    assert [tokens.count(token) for token in range(4)] == pytest.approx([100, 200, 300, 400], abs=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_greedy_is_the_highest(dtype: torch.dtype) -> None:
    """Temperature 0 takes the highest logit, whatever the draw and the cuts."""
    logits = torch.tensor([[1.0, 3.0, 2.0], [-5.0, -6.0, -4.0]], dtype=dtype)
    choices = [
        SamplingChoice(sampling(temperature=0.0), 0.99),
        SamplingChoice(sampling(temperature=0.0, top_k=2, top_p=0.1), 0.0),
    ]
    assert choose_tokens(logits, choices) == [1, 2]


@pytest.mark.parametrize(
    "row",
    [
        pytest.param([0.0, nan, 1.0], id="a NaN among numbers"),
        pytest.param([nan, nan, nan], id="nothing but NaN"),
        pytest.param([0.0, inf, 1.0], id="an infinite logit"),
        pytest.param([-inf, -inf, -inf], id="nothing possible"),
    ],
)
@pytest.mark.parametrize("how", [sampling(temperature=0.0), *[param.values[0] for param in SETTINGS]])
def test_a_bad_row_harms_no_other(row: list[float], how: Sampling) -> None:
    """A row without a finite highest logit gives None; its neighbours choose as they would alone."""
    good = [0.5, -0.5, 2.0]
    assert choose_tokens(
        torch.tensor([good, row, good]), [GREEDY, SamplingChoice(how, 0.4), SamplingChoice(how, 0.4)]
    ) == [
        2,
        None,
        choose_tokens(torch.tensor([good]), [SamplingChoice(how, 0.4)])[0],
    ]


@pytest.mark.parametrize(
    ("how", "allowed"),
    [
        pytest.param(sampling(top_k=1), {3}, id="top-k 1 is greedy"),
        pytest.param(sampling(top_p=1e-9), {3}, id="a tiny top-p is greedy"),
        pytest.param(sampling(temperature=1e-300), {3}, id="a temperature below float32 is greedy"),
        pytest.param(sampling(top_k=2), {3, 1}, id="top-k 2 leaves two"),
        pytest.param(sampling(), {0, 1, 3}, id="a logit of -inf is never drawn"),
    ],
)
@pytest.mark.parametrize("draw", [0.0, 0.3, 0.7, 1 - 2**-53])
def test_extreme_draws_give_possible_tokens(how: Sampling, allowed: set[int], draw: float) -> None:
    """At both ends of the draw and of every setting a possible token comes out."""
    logits = torch.tensor([[1.0, 2.0, -inf, 3.0, -inf]])
    assert set(choose_tokens(logits, [SamplingChoice(how, draw)])) <= allowed


def test_a_flat_nucleus_sorts_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the first candidates hold less than top_p, all are sorted, with the same result."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(64, 300, generator=generator) * 0.2
    choices = [SamplingChoice(sampling(top_p=0.9), row / 64) for row in range(64)]
    whole = choose_tokens(logits, choices)
    monkeypatch.setattr(sampler, "_NUCLEUS_WIDTH", 16)
    assert choose_tokens(logits, choices) == whole
    kept = {int(token) for row in logits for token in (row.softmax(-1).sort(descending=True)).indices[:16]}
    assert not set(whole) <= kept


@given(
    seed=st.integers(0, 2**32),
    company=st.lists(st.sampled_from([param.values[0] for param in SETTINGS] + [GREEDY.sampling]), max_size=6),
    mine=st.sampled_from([param.values[0] for param in SETTINGS]),
)
def test_token_does_not_depend_on_other_rows(seed: int, company: list[Sampling], mine: Sampling) -> None:
    """A row's token depends on its logits, settings and draw, not on the rows beside it."""
    draws = random.Random(seed)
    logits = torch.randn(len(company) + 1, 50, generator=torch.Generator().manual_seed(seed))
    choices = [SamplingChoice(how, draws.random()) for how in [*company, mine]]
    assert choose_tokens(logits, choices)[-1] == choose_tokens(logits[-1:], choices[-1:])[0]
