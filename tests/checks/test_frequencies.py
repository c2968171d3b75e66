"""Draws by classes of entries and in pairs: fair ones look fair, and each kind of fault shows in its own family."""

from __future__ import annotations

import torch

from pytest_fusion.checks.randomness import chance
from pytest_fusion.checks.randomness.frequencies import CALLS, CLASSES, ROWS, Seen, described, pooled, seen_in

T = torch.Tensor
ROWS_OF_CALL, VOCABULARY, NUMBER_OF_CALLS = 40, 12, 100


def given(seed: int) -> tuple[T, T, torch.Generator]:
    """Probabilities, an input beside them, and a generator for draws."""
    generator = torch.Generator().manual_seed(seed)
    logits, other = torch.randn(2, ROWS_OF_CALL, VOCABULARY, generator=generator, dtype=torch.float64)
    return torch.softmax(logits, -1), other, generator


def drawn(p: T, generator: torch.Generator) -> T:
    return torch.multinomial(p, NUMBER_OF_CALLS, replacement=True, generator=generator).T


def least(seen: Seen) -> dict[str, float]:
    """The least probability of each family, times its number of classes."""
    return {family: float(found.p.min()) * len(found.p) for family, found in seen.items()}


def test_fair_draws_look_fair() -> None:
    """Of 40 samples none is as odd in any family as one in a hundred thousand, alone or all together."""
    every: Seen = {}
    for seed in range(40):
        p, other, generator = given(seed)
        seen = seen_in([p], drawn(p, generator), {"other": other}, seed)
        assert min(least(seen).values()) > 1e-5, least(seen)
        every = pooled(seen, every)
    assert min(least(every).values()) > 1e-4, least(every)
    assert every["by falling other"].draws == 40 * ROWS_OF_CALL * NUMBER_OF_CALLS
    assert not any("single rows" in family for family in every)


def test_what_another_input_pulls_shows_in_its_order_alone() -> None:
    """A tenth more for the entry at which the input is largest is seen there, and is no news in the row's own order."""
    p, other, generator = given(1)
    largest = torch.nn.functional.one_hot(other.argmax(-1), VOCABULARY)
    found = least(seen_in([p], drawn(0.9 * p + 0.1 * largest, generator), {"other": other}, 0))
    assert found["by falling other"] < 1e-12
    assert found["in its own order"] > 1e-4


def test_the_stated_share_is_found_about_as_often_as_stated() -> None:
    """Moved between halves of each row in 200 samples, the stated share is missed in few, a fifth is not seen."""
    alpha = 2e-3 / CLASSES
    share = chance.needed(ROWS_OF_CALL * NUMBER_OF_CALLS, alpha, 0.25)
    found = {share: 0, share / 5: 0}
    for moved in found:
        for seed in range(200):
            p, _, generator = given(seed)
            falling, order = p.sort(dim=-1, descending=True)
            upper = ((0.5 - (falling.cumsum(-1) - falling)) / falling).clamp(0, 1)
            wrong = torch.zeros_like(p).scatter(-1, order, falling * (1 + 2 * moved * (2 * upper - 1)))
            seen = seen_in([p], drawn(wrong, generator), {}, seed)
            found[moved] += bool((seen["by falling probability"].p < alpha).any())
    assert found[share] >= 194, found
    assert found[share / 5] <= 10, found


def test_a_fault_of_one_row_shows_in_single_rows() -> None:
    """The last of 40 rows draws its first entry alone."""
    p, _, generator = given(2)
    wrong = p.clone()
    wrong[-1] = torch.nn.functional.one_hot(torch.tensor(0), VOCABULARY)
    seen = seen_in([p], drawn(wrong, generator), {}, 0)
    family = "in its own order in single rows"
    assert least(seen)[family] < 1e-12
    index = int(seen[family].p.argmin())
    assert described(family, index).endswith("of row 39, in its own order")
    assert len(seen[family].p) == CLASSES * ROWS_OF_CALL


def test_rows_and_calls_that_share_numbers_show_in_pairs() -> None:
    """Rows of one call with one number, and calls of which half the rows repeat the one before."""
    p, _, generator = given(3)
    p = p[:1].expand(ROWS_OF_CALL, -1).contiguous()
    fair = drawn(p, generator)
    assert least(seen_in([p], fair[:, :1].expand(-1, ROWS_OF_CALL), {}, 0))[ROWS] < 1e-12
    again = fair.clone()
    for call in range(1, NUMBER_OF_CALLS):
        repeats = torch.rand(ROWS_OF_CALL, generator=generator) < 0.5
        again[call] = torch.where(repeats, again[call - 1], fair[call])
    assert least(seen_in([p], again, {}, 0))[CALLS] < 1e-12


def test_the_rounding_that_fits_best_counts() -> None:
    """Draws from other probabilities than the first are right where a rounding of the reference has those."""
    p, _, generator = given(4)
    rounded = p.square() / p.square().sum(-1, keepdim=True)
    draws = drawn(rounded, generator)
    assert min(least(seen_in([p], draws, {}, 0)).values()) < 1e-12
    ordered = {f: v for f, v in least(seen_in([p, rounded], draws, {}, 0)).items() if f not in (ROWS, CALLS)}
    assert min(ordered.values()) > 1e-4, ordered
