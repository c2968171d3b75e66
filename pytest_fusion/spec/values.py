"""Value profiles: which numbers a tensor may hold. A bound is a number or a dim expression (``"2*half"``)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pytest_fusion.errors import FusionError, SpecError
from pytest_fusion.spec.wording import checks_words, did_you_mean

Bound = int | float | str
# From (shape, dtype, generator) to a tensor.
Function = Callable[..., Any]
_LENGTHS = ("even", "ragged", "empty first", "empty last", "some empty", "one long")
# The kinds of each profile of structure, plainest first.
KINDS: Mapping[str, tuple[str, ...]] = {
    "indices": ("even", "zipf", "hot", "equal", "sorted", "runs", "gaps", "ends", "once"),
    "offsets": _LENGTHS,
    "lengths": _LENGTHS,
    "routing": ("even", "balanced", "all to one", "starved"),
    "page_table": ("even", "in order", "reversed", "holes"),
}


@dataclass(frozen=True, slots=True)
class ValueProfile:
    """A named family of values; ``params`` are numbers or dim expressions, ``choices`` nested profiles.

    One of the kind ``"function"`` stands for a user's ``function`` of ``(shape, dtype, generator)`` among the choices.
    Choices of structure have a ``label``, which a case names; others are named by their position.
    """

    kind: str
    params: tuple[tuple[str, Bound], ...] = ()
    choices: tuple[ValueProfile, ...] = ()
    function: Function | None = None
    label: str = ""

    @property
    def names(self) -> list[str]:
        """The names of its choices in a case, plainest first."""
        return [choice.label or str(position) for position, choice in enumerate(self.choices)]

    def choice(self, name: str) -> ValueProfile:
        """The choice of this name in a case, without one the plainest. Raises ``SpecError`` for an unknown name."""
        if name not in (*self.names, "", "unit"):
            raise SpecError(f"values of the kind {name!r} do not exist{did_you_mean(name, self.names)}")
        return self.choices[self.names.index(name) if name in self.names else 0]

    def plainer(self, regime: str) -> Iterator[str]:
        """The names in a case of plainer choices than this one, plainest first."""
        name, _, inner = regime.partition("/")
        if name in self.names:
            yield from self.names[: self.names.index(name)]
            if inner:  # the choice's own plainest kind, and those between
                yield name
                yield from (f"{name}/{plainer}" for plainer in list(self.choice(name).plainer(inner))[1:])

    def __str__(self) -> str:
        if self.function is not None:
            return f"function {getattr(self.function, '__name__', type(self.function).__name__)}"
        choices = [str(choice) for choice in self.choices if not choice.label]
        inner = ", ".join([f"{key}={value}" for key, value in self.params] + choices)
        return f"{self.kind}({inner})"


def _check_order(kind: str, low: Bound, high: Bound) -> None:
    if not isinstance(low, str) and not isinstance(high, str) and high < low:
        raise SpecError(f"values.{kind}({low}, {high}): the upper bound is below the lower one")


def default() -> ValueProfile:
    """Every regime: scales, offsets, cancelling pairs, outliers, tiny rows, ties, NaN, infinities, subnormals."""
    return ValueProfile("default")


def finite() -> ValueProfile:
    """As :func:`default` without NaN, infinities, values near overflow and subnormals."""
    return ValueProfile("finite")


@checks_words(SpecError)
def normal(mean: float = 0.0, std: float = 1.0) -> ValueProfile:
    """Bell-shaped, within five standard deviations of ``mean``, with powers of two in some tensors."""
    if std < 0:
        raise SpecError(f"values.normal(std={std}): expected 0 or more")
    return ValueProfile("normal", (("mean", mean), ("std", std)))


@checks_words(SpecError)
def uniform(low: Bound = 0.0, high: Bound = 1.0) -> ValueProfile:
    """Evenly from ``[low, high)``, with powers of two in some tensors."""
    _check_order("uniform", low, high)
    return ValueProfile("uniform", (("low", low), ("high", high)))


@checks_words(SpecError)
def positive(low: float = 1e-3, high: float = 8.0) -> ValueProfile:
    """Strictly positive, otherwise as :func:`uniform`."""
    if low <= 0:
        raise SpecError(f"values.positive(low={low}): expected more than 0")
    _check_order("positive", low, high)
    return ValueProfile("uniform", (("low", low), ("high", high)))


def probabilities() -> ValueProfile:
    """Non-negative rows that add up to one along the last axis; some have zeros, tiny elements, or one element of 1."""
    return ValueProfile("probabilities")


@checks_words(SpecError)
def booleans(share: float = 0.5) -> ValueProfile:
    """True with probability ``share``, in some tensors half of each row at once."""
    if not 0 <= share <= 1:
        raise SpecError(f"values.booleans(share={share}): expected 0 to 1")
    return ValueProfile("booleans", (("share", share),))


@checks_words(SpecError)
def integers(low: Bound, high: Bound) -> ValueProfile:
    """Evenly from ``low`` to ``high``, both included."""
    _check_order("integers", low, high)
    return ValueProfile("integers", (("low", low), ("high", high)))


def _structured(kind: str, size: Bound, *, without: str = "") -> ValueProfile:
    """A profile that draws one of several kinds of structure for each case."""
    params = (("size", size),)
    labels = (label for label in KINDS[kind] if label != without)
    return ValueProfile(kind, params, tuple(ValueProfile(kind, params, label=label) for label in labels))


@checks_words(SpecError)
def indices(size: Bound) -> ValueProfile:
    """From ``0`` to ``size - 1``: even (both ends occur where there is room), and as real data are.

    Zipf's law, one hot row, all equal, sorted, runs, rows that are never used, both ends alone, each once.
    """
    return _structured("indices", size)


@checks_words(SpecError)
def offsets(total: Bound) -> ValueProfile:
    """Where packed sequences begin, and ``total`` at the end, along the last axis (``cu_seqlens``): n + 1 numbers.

    Of lengths that are even, ragged, empty at the first, the last or some places, or all but one of one element.
    """
    return _structured("offsets", total)


@checks_words(SpecError)
def lengths(total: Bound) -> ValueProfile:
    """Lengths of sequences that add up to ``total`` along the last axis; the kinds of :func:`offsets`."""
    return _structured("lengths", total)


@checks_words(SpecError)
def routing(experts: Bound) -> ValueProfile:
    """Different experts for each row of ``(tokens, k)``: drawn, balanced, all to one, or some experts with none."""
    return _structured("routing", experts)


@checks_words(SpecError)
def page_table(pages: Bound, *, holes: bool = False) -> ValueProfile:
    """Different pages from ``0`` to ``pages - 1``: permuted, in order, reversed; ``holes``: rows may end in -1."""
    return _structured("page_table", pages, without="" if holes else "holes")


def permutation() -> ValueProfile:
    """Each row a permutation of ``0 .. n-1`` along the last axis."""
    return ValueProfile("permutation")


@checks_words(SpecError)
def constant(value: float) -> ValueProfile:
    """One value everywhere."""
    return ValueProfile("constant", (("value", value),))


def one_of(*choices: ValueProfile | Function | Sequence[ValueProfile | Function]) -> ValueProfile:
    """One of several profiles, or functions of ``(shape, dtype, generator)``, drawn per case."""
    flat: list[Any] = []
    for choice in choices:
        alone = isinstance(choice, ValueProfile) or callable(choice) or not isinstance(choice, Iterable)
        flat.extend([choice] if alone else choice)  # type: ignore[arg-type]
    if not flat:
        raise SpecError("values.one_of() needs at least one profile")
    return ValueProfile("one_of", choices=tuple(map(_choice, flat)))


def _choice(given: Any) -> ValueProfile:
    if isinstance(given, ValueProfile):
        return given
    if not callable(given):
        raise SpecError(
            f"values.one_of({given!r}): expected profiles such as values.normal(), or functions of (shape, dtype, "
            "generator); of single values, values.constant(...) each"
        )
    if getattr(given, "__module__", None) == __name__:
        called = f"values.{getattr(given, '__name__', '...')}"
        raise SpecError(f"values.one_of({called}): that is the function that makes a profile; call it: {called}(...)")
    return ValueProfile("function", function=given)


# Profiles that plugins add, by the name that ``values="name"`` uses.
_added: dict[str, ValueProfile | Function] = {}


def extend_profiles(profiles: Iterable[tuple[str, ValueProfile | Function]]) -> None:
    """Make these the profiles of plugins. Raises ``FusionError`` for a name that is taken, or for no profile."""
    found: dict[str, ValueProfile | Function] = {}
    for name, profile in profiles:
        if not isinstance(profile, ValueProfile) and not callable(profile):
            raise FusionError(
                f"pytest_fusion_value_profiles: {name!r} is neither a profile of pytest_fusion.values nor a function "
                "of (shape, dtype, generator)"
            )
        if name in found or getattr(globals().get(name), "__module__", "") == __name__:
            raise FusionError(f"pytest_fusion_value_profiles: another profile has the name {name!r}; choose another")
        found[name] = profile
    _added.clear()
    _added.update(found)


def named_profile(name: str, where: str) -> ValueProfile | Function:
    """The profile of this name. Raises ``SpecError``."""
    if name not in _added:
        known = ", ".join(_added) or "none; our own are functions, as values.normal()"
        raise SpecError(
            f"{where}: no plugin gives a value profile {name!r}{did_you_mean(name, _added)} (known: {known})"
        )
    return _added[name]
