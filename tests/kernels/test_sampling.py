"""The sampling kernel beyond its specs: a second source of the reference, exact cuts, long rows, what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from reference_kernels.sampling import sample, sampling_probabilities
from reference_kernels.sampling.kernel import _sample, config
from tests.sweeps import sweep

CUTS: list[dict[str, Any]] = [
    {},
    {"top_k": 3},
    {"top_k": 200},
    {"top_p": 0.83},
    {"top_p": 0.15},
    {"top_p": 0.0},
    {"top_k": 7, "top_p": 0.61},
    {"temperature": 0.0},
    {"temperature": 0.4, "top_k": 20, "top_p": 0.9},
]


def _logits(*shape: int, seed: int = 3) -> torch.Tensor:
    return 2 * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _by_definition(
    row: list[float],
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seen: Any = None,
    penalty: float = 1.0,
) -> list[float]:
    """One row in Python's own floats, by sorting and adding up term after term."""
    x = [
        (v / penalty if v > 0 else v * penalty) if seen is not None and s else v
        for v, s in zip(row, seen or row, strict=True)
    ]
    order = sorted(range(len(x)), key=lambda i: (-x[i], i))
    if temperature == 0:
        return [float(i == order[0]) for i in range(len(x))]
    kept = order[:top_k] if top_k else order
    weight = {i: math.exp((x[i] - x[order[0]]) / temperature) for i in kept}
    total, before = math.fsum(weight.values()), 0.0
    nucleus: list[int] = []
    for i in kept:
        if nucleus and top_p < 1 and before >= top_p * total:
            break
        nucleus.append(i)
        before += weight[i]
    total = math.fsum(weight[i] for i in nucleus)
    return [weight[i] / total if i in nucleus else 0.0 for i in range(len(x))]


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_the_reference_is_the_definition(cuts: dict[str, Any], penalty: float) -> None:
    """In float64 the reference is what sorting each row and adding up its terms one by one gives, ties included."""
    logits = torch.cat((_logits(3, 37), _logits(3, 37).round()))
    seen = _logits(6, 37, seed=4) > 0

    got = sampling_probabilities(logits, **cuts, seen=seen, penalty=penalty, compute=torch.float64)

    wanted = [
        _by_definition(row, **cuts, seen=s, penalty=penalty)
        for row, s in zip(logits.tolist(), seen.tolist(), strict=True)
    ]
    torch.testing.assert_close(got, torch.tensor(wanted, dtype=torch.float64), rtol=1e-12, atol=1e-15)


@sweep("cuts", CUTS, fast=2)
@sweep("vocab", [40, 1500])
def test_draws_are_distributed_as_the_reference_says(cuts: dict[str, Any], vocab: int) -> None:
    """Of 1000 draws none has probability 0, and their places in the cumulated probabilities are uniform, with the
    tokens in their own order and by falling probability, in rows of one tile and of several."""
    assert (vocab > config(1, vocab, torch.device("cpu"), interpreted=True).block) == (vocab == 1500)
    row = _logits(vocab).float()
    p = sampling_probabilities(row, **cuts).double()
    generator = torch.Generator().manual_seed(1)

    drawn = torch.cat([sample(row.expand(100, vocab), seed, **cuts) for seed in range(10)])

    assert bool((p[drawn] > 0).all())
    for order in (torch.arange(vocab), torch.sort(p, descending=True).indices):
        below = torch.empty_like(p).scatter_(0, order, p[order].cumsum(0) - p[order])
        places = below[drawn] + p[drawn] * torch.rand(1000, generator=generator, dtype=torch.float64)
        counts = torch.bincount((places * 10).long().clamp(0, 9), minlength=10)
        # 9 degrees of freedom: more than 33.7 has a probability of 1e-4.
        assert float(((counts - 100.0) ** 2 / 100.0).sum()) < 33.7


def _kept(row: torch.Tensor, **cuts: Any) -> set[int]:
    """Whatever some of 400 draws at a temperature that makes all of them nearly alike returns."""
    return set(sample(row.expand(400, -1), 5, temperature=1e38, **cuts).tolist())


@pytest.mark.slow
@pytest.mark.parametrize("k", [1, 2, 5, 17])
def test_exactly_k_stay(k: int) -> None:
    """Top-k keeps the k largest however they are spaced: ties by the lower index, neighbours in float32, both zeros,
    subnormals, an outlier, less than k that are not -inf."""
    one = torch.tensor(1.0)
    neighbours = [float(one)]
    for _ in range(30):
        neighbours.append(float(torch.nextafter(torch.tensor(neighbours[-1]), 2 * one)))
    rows = {
        "ties": [2.0, 3.0] * 15,
        "neighbours": neighbours,
        "reversed": neighbours[::-1],
        "zeros": [-0.0, 0.0, -1.0] * 10,
        "subnormal": [i * 1e-45 for i in range(-15, 15)],
        "outlier": [1e38, -1e38, *(0.01 * i for i in range(28))],
        "masked": [-torch.inf] * 10 + [1.0] * 3 + [-torch.inf] * 20,
    }
    for name, values in rows.items():
        row = torch.tensor(values)
        order = sorted(range(len(values)), key=lambda i: (-float(row[i]), i))
        wanted = {i for i in order[:k] if values[i] > -torch.inf}

        assert _kept(row, top_k=k) == wanted, name


@sweep(("p", "most"), [(0.0, 1), (0.05, 1), (0.0501, 2), (0.5, 10), (0.951, 20), (1.0, 20)])
def test_the_token_that_crosses_p_stays(p: float, most: int) -> None:
    """Of 20 equal logits the first ones stay until they hold p together, the one that gets there included."""
    assert _kept(torch.full((20,), -3.0), top_p=p) == set(range(most))
    assert _kept(torch.full((25,), -3.0), top_k=20, top_p=p) == set(range(most))


def test_what_no_cut_can_reach_counts_in_the_whole() -> None:
    """Tokens too light to be listed still make the whole heavier: 1.026 of 1.14 need the second token, 0.99 of 1.1
    would not."""
    row = torch.tensor([1.0, 0.1] + [0.04 / 98] * 98).log()

    assert set(sample(row.expand(400, 100), 2, top_p=0.9).tolist()) == {0, 1}


def test_a_row_without_probabilities_gives_minus_one() -> None:
    """NaN, +inf and rows of nothing but -inf give -1, in every way to cut, and spare the rows beside them."""
    rows = torch.zeros(5, 30)
    rows[0, 7], rows[1, 3], rows[2] = torch.nan, torch.inf, -torch.inf
    for cuts in CUTS:
        drawn = sample(rows, 1, **cuts)
        cold = cuts.get("temperature") == 0.0
        assert drawn[[0, 2]].tolist() == [-1, -1]
        assert int(drawn[1]) == (3 if cold else -1)
        assert bool((drawn[3:] >= 0).all())


def test_numbers_by_row() -> None:
    """Tensors by row do what the same numbers do for all, whatever number of rows a program takes."""
    logits = _logits(70, 50).float()
    assert config(70, 50, logits.device, interpreted=True).programs < 70
    for cuts in CUTS:
        numbers: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "penalty": 1.2} | cuts
        seen = _logits(50, seed=9) > 0
        by_row = {
            name: torch.full((70,), value, dtype=torch.int32 if name == "top_k" else torch.float32)
            for name, value in numbers.items()
        }

        assert torch.equal(sample(logits, 3, seen=seen, **by_row), sample(logits, 3, seen=seen, **numbers))


def test_the_draw_does_not_follow_the_layout() -> None:
    """The same logits at the same seed draw the same tokens transposed, expanded and of three dimensions."""
    logits = _logits(6, 40).float()
    wanted = sample(logits, 11, top_k=9)

    assert torch.equal(sample(logits.t().contiguous().t(), 11, top_k=9), wanted)
    assert torch.equal(sample(logits.view(2, 3, 40), 11, top_k=9), wanted.view(2, 3))
    assert not torch.equal(sample(logits, 12, top_k=9), wanted)


@pytest.mark.slow
def test_a_row_draws_the_same_in_longer_batches() -> None:
    """The first rows' tokens are the same whether others follow or not, in rows of several tiles."""
    logits = _logits(50, 700).float()
    for cuts in CUTS:
        assert torch.equal(sample(logits[:9], 4, **cuts), sample(logits, 4, **cuts)[:9])


@pytest.mark.slow
def test_opcheck() -> None:
    """Schema, fake kernel and tracing hold, with numbers for all and by row."""
    logits = _logits(4, 30).float()
    numbers = [1.0, 3.0, 0.9, 1.1]
    torch.library.opcheck(_sample, (logits, 7, None, [None] * 4, numbers))
    by_row = [torch.ones(4), torch.ones(4, dtype=torch.int64), None, None]
    torch.library.opcheck(_sample, (logits.t().contiguous().t(), 7, logits > 0, by_row, numbers))


@pytest.mark.slow
def test_one_graph() -> None:
    """The kernel compiles without a graph break."""
    logits = _logits(4, 30).float()

    def plain(x: torch.Tensor) -> torch.Tensor:
        return sample(x, 5, top_k=4, top_p=0.9) + 1

    whole = torch.compile(plain, fullgraph=True, backend="aot_eager")(logits)

    assert torch.equal(whole, plain(logits))


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 8), (2, 0, 4)])
def test_sizes_of_zero(shape: tuple[int, ...]) -> None:
    """No rows give no tokens, and no tokens to draw from give -1."""
    for cuts in CUTS:
        drawn = sample(torch.ones(shape), 3, **cuts)
        assert drawn.shape == shape[:-1]
        assert bool((drawn == -1).all())


@pytest.mark.parametrize(
    ("error", "words", "call"),
    [
        (TypeError, "logits is float64, allowed: float32", lambda x: sample(x.double(), 1)),
        (TypeError, "seen is uint8, allowed: bool", lambda x: sample(x, 1, seen=x.byte())),
        (TypeError, "top_k is float32, allowed: int32, int64", lambda x: sample(x, 1, top_k=x[:, 0])),
        (TypeError, "a whole number", lambda x: sample(x, 1, top_k=1.5)),  # type: ignore[arg-type]
        (ValueError, "at least one", lambda x: sample(x[0, 0], 1)),
        (ValueError, r"seed is -1, allowed: 0 to 2\*\*63 - 1", lambda x: sample(x, -1)),
        (ValueError, "temperature is -0.5, allowed: 0 or more", lambda x: sample(x, 1, temperature=-0.5)),
        (ValueError, "temperature is inf", lambda x: sample(x, 1, temperature=math.inf)),
        (ValueError, "top_p is nan", lambda x: sample(x, 1, top_p=math.nan)),
        (ValueError, "top_k is -1", lambda x: sample(x, 1, top_k=-1)),
        (ValueError, "penalty is 0.0, allowed: more than 0", lambda x: sample(x, 1, penalty=0.0)),
        (ValueError, "does not broadcast to logits", lambda x: sample(x, 1, seen=torch.ones(3, dtype=torch.bool))),
        (ValueError, "one number for each row", lambda x: sample(x, 1, temperature=x)),
        (ValueError, "top_p is on meta", lambda x: sample(x, 1, top_p=x[:, 0].to("meta"))),
        (ValueError, "supported: up to", lambda x: sample(x[:, :1].expand(2, 2**31 - 1), 1)),
    ],
)
def test_what_is_refused(error: type[Exception], words: str, call: Callable[[torch.Tensor], object]) -> None:
    """What the kernel does not support is refused in words, before anything is launched."""
    with pytest.raises(error, match=words):
        call(torch.ones(2, 4))
