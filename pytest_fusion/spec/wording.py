"""Exceptions as text, names near a wrong one, and counted nouns."""

from __future__ import annotations

import difflib
import functools
import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from pytest_fusion.errors import NotModelledError

_Called = TypeVar("_Called", bound=Callable[..., Any])
_Key = TypeVar("_Key")
_Item = TypeVar("_Item")

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
    """The `NotModelledError` among an exception and those it came from."""
    return next((one for one in origins(error) if isinstance(one, NotModelledError)), None)


def raised_by_filter(error: BaseException | None) -> str | None:
    """The filter line that lets pass a warning that a filter made an error; ``None`` where it is none."""
    for one in origins(error):
        if isinstance(one, Warning) and _made_error(one):
            kind = type(one)
            name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
            return f"ignore::{name}"
    return None


def _made_error(warning: Warning) -> bool:
    """Whether the first filter that matches this warning makes it an error, in whatever module."""
    for action, message, category, module, _ in warnings.filters:
        if isinstance(warning, category) and (message is None or message.match(words(warning))):
            if action == "error":
                return True
            if module is None:
                return False
    return False


def origins(error: BaseException | None) -> Iterator[BaseException]:
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


def checks_words(error: type[Exception]) -> Callable[[_Called], _Called]:
    """A decorator for a function or a class: wrong arguments raise ``error`` with the right word, no ``TypeError``."""

    def decorate(called: _Called) -> _Called:
        inner: Any = called.__init__ if isinstance(called, type) else called  # type: ignore[misc]

        @functools.wraps(inner)
        def call(*args: Any, **keywords: Any) -> Any:
            try:
                return inner(*args, **keywords)
            except TypeError:
                wrong = _wrong_words(inner, args, keywords)
                if wrong is None:
                    raise
            raise error(f"{called.__name__}() {wrong}")

        if not isinstance(called, type):
            return call  # type: ignore[return-value]
        called.__init__ = call  # type: ignore[misc]
        return called

    return decorate


def _wrong_words(function: Callable[..., Any], args: Sequence[Any], keywords: Mapping[str, Any]) -> str | None:
    """What is wrong with the arguments; ``None`` where the function takes them."""
    signature = inspect.signature(function)
    try:
        signature.bind(*args, **keywords)
    except TypeError as error:
        known = {name: one for name, one in signature.parameters.items() if name != "self"}
        unknown = [name for name in keywords if name not in known]
        if unknown and not any(one.kind is one.VAR_KEYWORD for one in known.values()):
            return f"has no keyword {unknown[0]!r}{did_you_mean(unknown[0], known)}"
        if str(error).startswith("too many"):
            first = [name for name, p in known.items() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
            return f"takes {' and '.join(first) or 'nothing'} by position; give what follows by name"
        return f"{'is' if str(error).startswith('missing') else 'has'} {error}"
    return None


def grouped(pairs: Iterable[tuple[_Key, _Item]]) -> dict[_Key, list[_Item]]:
    """The second parts of ``pairs`` by their first parts, both in order."""
    found: dict[_Key, list[_Item]] = {}
    for key, item in pairs:
        found.setdefault(key, []).append(item)
    return found


def with_number(names: Sequence[str]) -> str:
    """The first of ``names``, and how many more there are: ``"a"``, ``"a and 2 more"``."""
    return f"{names[0]} and {len(names) - 1} more" if len(names) > 1 else names[0]


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
