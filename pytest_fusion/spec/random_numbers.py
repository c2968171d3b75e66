"""A kernel's random numbers: ``rng=`` and ``distribution=``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pytest_fusion.errors import SpecError
from pytest_fusion.spec import keywords
from pytest_fusion.spec.dims import Shape, parse_shape
from pytest_fusion.spec.inputs import InputSpec
from pytest_fusion.spec.wording import checks_words, did_you_mean

# Default names of the reference's parameter and of the input; ``p`` as in torch.
MASK = "mask"
_PROBABILITIES = ("p", "dropout_p")


@dataclass(frozen=True, slots=True)
class Rng:
    """Where a kernel's random numbers come from, and how the reference gets its mask; `rng` explains the fields."""

    seed: str | None = None
    p: str | float | Callable[..., float] | None = None
    mask: str | None = None
    dims: Shape | None = None
    recover: Callable[..., Any] | None = None


@checks_words(SpecError)
def rng(
    seed: str | None = None,
    *,
    p: str | float | Callable[..., float] | None = None,
    mask: str | None = None,
    dims: str | None = None,
    recover: Callable[..., Any] | None = None,
) -> Rng:
    """The random numbers of a kernel, for ``rng=``; ``rng="seed"`` is ``rng=rng("seed")``. Raises ``SpecError``.

    ``seed``: the input that seeds the kernel, a whole number or an integer tensor; any number from 0 to 2^31 - 1 must
    work. Without it the kernel draws from torch's generator, which is seeded before each call. ``p``: the probability
    to drop an element, as an input's name, a number, or a function of inputs (``p=lambda keep: 1 - keep``). ``mask``:
    the reference's parameter for the mask, True where the kernel keeps an element; one called ``mask`` is the default.
    ``dims``: the mask's shape, such as ``"rows 1"``, where one draw decides for several elements. ``recover``: a
    function of inputs that returns the kernel's mask, for outputs that do not show it element by element.
    """
    if isinstance(p, bool) or (isinstance(p, int | float) and not 0 <= p <= 1):
        raise SpecError(f"rng(p={p!r}): expected a probability from 0 to 1, an input's name or a function of inputs")
    if recover is not None and not callable(recover):
        raise SpecError(f"rng(recover={recover!r}): expected a function of inputs that returns the kernel's mask")
    return Rng(seed, p, mask, None if dims is None else parse_shape(dims), recover)


def as_rng(value: Any, where: str) -> Rng | None:
    """``rng=`` as an object; raises ``SpecError``."""
    if value is None or value is False:
        return None
    if value is True:
        return Rng()
    if isinstance(value, str):
        return Rng(value)
    if isinstance(value, Rng):
        return value
    raise SpecError(
        f"{where}: rng={value!r}; expected the name of the input that seeds the kernel, True for torch's generator, or "
        "rng(seed=..., p=..., mask=...)"
    )


def completed(
    own: Rng,
    where: str,
    inputs: Mapping[str, InputSpec],
    known: Iterable[str],
    reference: Mapping[str, inspect.Parameter] | None,
) -> Rng:
    """``own`` with default names. Raises ``SpecError`` for a name that is no input or no parameter of ``reference``."""
    known = set(known)
    for keyword, name in (("seed", own.seed), ("p", own.p)):
        if isinstance(name, str) and name not in inputs:
            raise SpecError(f"{where}: rng {keyword}={name!r} names no input{did_you_mean(name, inputs)}")
    if own.mask is not None and own.mask in known:
        raise SpecError(f"{where}: rng mask={own.mask!r} is an input; name a parameter that the reference alone takes")
    parameters = reference or {}
    untaken = own.mask is not None and reference is not None and own.mask not in parameters
    if untaken and not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        hint = did_you_mean(str(own.mask), parameters)
        raise SpecError(f"{where}: rng mask={own.mask!r} is no parameter of the reference{hint}")
    if own.mask is None and MASK in parameters and MASK not in known:
        own = replace(own, mask=MASK)
    if own.mask is None and (own.recover is not None or own.dims is not None):
        raise SpecError(
            f"{where}: rng recover= and dims= describe a mask that the reference does not take; give it a parameter "
            f"{MASK!r}, or name the one it has by rng(mask=...)"
        )
    if own.mask is not None and own.p is None:
        own = replace(own, p=next((name for name in _PROBABILITIES if name in inputs), None))
    return own


def as_outputs(value: bool | str | Sequence[str], where: str) -> tuple[str, ...]:
    """The outputs that ``distribution=`` names, as in reports; ``True`` is a lone result."""
    if isinstance(value, bool):
        return ("out",) if value else ()
    return keywords.names(value, where, "distribution")
