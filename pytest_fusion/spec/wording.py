"""Exceptions as text, names near a wrong one, and counted nouns."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Iterable, Iterator, Sequence

from pytest_fusion.errors import NotModelledError

# The most characters of one line of another package's exception.
_LONGEST_LINE = 500

# On a full card contexts, kernels and the handles of libraries cannot be loaded either. None of these asks torch's
# allocator, which alone raises torch's OutOfMemoryError.
_OUT_OF_MEMORY = (
    "CUDA error: out of memory",
    "HIP error: out of memory",
    "Triton Error [CUDA]: out of memory",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED",
)


def not_modelled(error: BaseException | None) -> NotModelledError | None:
    """The refusal of the CPU lane that an exception, or one of those it came from, is."""
    return next((one for one in _origins(error) if isinstance(one, NotModelledError)), None)


def raised_by_filter(error: BaseException | None) -> str | None:
    """The line of a warnings filter that lets the warning pass which an exception, or one that it came from, is.

    ``None`` where it is none, or no filter of now makes its kind an error.
    """
    for one in _origins(error):
        if isinstance(one, Warning) and _made_error(one):
            kind = type(one)
            name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
            return f"ignore::{name}"
    return None


def _made_error(warning: Warning) -> bool:
    """Whether the first filter that matches this warning makes it an error. Its module is not known here."""
    for action, message, category, module, _ in warnings.filters:
        if isinstance(warning, category) and (message is None or message.match(words(warning))):
            if action == "error":
                return True
            if module is None:
                return False
    return False


def _origins(error: BaseException | None) -> Iterator[BaseException]:
    """An exception and those it came from, the last first."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        yield error
        seen.append(error)
        error = error.__cause__ or error.__context__


def words(error: object) -> str:
    """A text or an exception's message, encodable as UTF-8; where ``__str__`` raises, that is the message."""
    try:
        return str(error).encode("utf-8", "backslashreplace").decode()
    except Exception as failure:  # noqa: BLE001 - a broken __str__ may raise anything
        return f"<str() of it raised {type(failure).__name__}>"


def first_line(error: object) -> str:
    """The first line of a text or of an exception's message, which may be as long as a printed tensor."""
    line = words(error).strip().partition("\n")[0]
    return line if len(line) <= _LONGEST_LINE else f"{line[:_LONGEST_LINE]}..."


def out_of_memory(error: BaseException | None) -> bool:
    """Whether an exception means that memory was lacking, of the device or of the host, whoever raised it."""
    if isinstance(error, MemoryError) or any(kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__):
        return True
    return isinstance(error, RuntimeError) and first_line(error).startswith(_OUT_OF_MEMORY)


def brief(error: BaseException) -> str:
    """``"ValueError: the first line of its message"``; the type alone where it has none."""
    return f"{type(error).__name__}: {first_line(error)}".rstrip(": ")


def is_near(word: str, known: Iterable[str]) -> bool:
    """Whether something close to ``word`` is known."""
    return bool(difflib.get_close_matches(word, known))


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """``"; did you mean 'rows'?"`` when something close to ``word`` is known, else the list of what is."""
    names = sorted(known)
    close = difflib.get_close_matches(word, names, n=1)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; known: {', '.join(names)}" if names else ""


def with_number(names: Sequence[str]) -> str:
    """The first of ``names``, and how many more there are: ``"a"``, ``"a and 2 more"``."""
    return f"{names[0]} and {len(names) - 1} more" if len(names) > 1 else names[0]


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
