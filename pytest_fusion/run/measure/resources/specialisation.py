"""What one launch makes Triton compile, as plain data; and why a sweep of sizes compiles again."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

# None, bool, int, float, str, and lists and string-keyed dicts of them.
Json = Any


@dataclass(frozen=True, slots=True)
class Place:
    """Where a function is defined."""

    file: str
    line: int


@dataclass(frozen=True, slots=True)
class Argument:
    """One parameter of a kernel as Triton's specialiser sees it: Triton's ``type`` (``"*fp16"``, ``"i32"``,
    ``"constexpr"``), a further guarantee as ``hint`` (``"D"``: divisible by 16), a constant's ``value``. Tuples have
    lists of each."""

    name: str
    type: Json
    hint: Json = None
    value: Json = None


@dataclass(frozen=True, slots=True)
class Specialisation:
    """A kernel, its arguments as the compiler sees them, the launch's options, and plain ``globals`` that it reads."""

    kernel: str
    place: Place
    arguments: tuple[Argument, ...]
    options: dict[str, Json] = field(default_factory=dict)
    globals: dict[str, Json] = field(default_factory=dict)

    def as_json(self) -> dict[str, Json]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Any) -> Specialisation:
        arguments = tuple(Argument(**argument) for argument in data["arguments"])
        return cls(**{**data, "place": Place(**data["place"]), "arguments": arguments})

    def key(self) -> str:
        """A text that is equal exactly if Triton compiles once."""
        return json.dumps(self.as_json(), sort_keys=True)

    def parts(self) -> dict[str, tuple[str, Json, Json, Json]]:
        """``(kind, type, hint, value)`` of each argument and option, by name."""
        given = {a.name: ("argument", a.type, a.hint, a.value) for a in self.arguments}
        return given | {name: ("option", "option", None, value) for name, value in self.options.items()}

    @property
    def constants(self) -> dict[str, str]:
        """The compile-time arguments and options as text."""
        given = {a.name: shown(a.value) for a in self.arguments if a.type == "constexpr"}
        return given | {name: shown(value) for name, value in self.options.items()}


def shown(value: Json) -> str:
    """A type or a constant as short text."""
    match value:
        case {"tuple": list(items)} | list(items):
            return f"({', '.join(map(shown, items))})"
        case dict() if len(value) == 1:
            return str(next(iter(value.values())))
    return str(value)


_NOTHING = ("argument", None, None, None)


def recompilations(launches: Iterable[Specialisation]) -> list[tuple[str, int]]:
    """``(reason, count)`` of every compilation but each kernel's first over a sweep's ``launches``, most frequent
    first. A reason has all differences from the most similar earlier compilation."""
    known: dict[tuple[str, str, int], list[Specialisation]] = {}
    seen: set[str] = set()
    reasons: Counter[str] = Counter()
    for launch in launches:
        if launch.key() in seen:
            continue
        seen.add(launch.key())
        earlier = known.setdefault((launch.place.file, launch.kernel, launch.place.line), [])
        if earlier:
            fewest = min((_changes(before, launch) for before in earlier), key=len)
            changed = "; ".join(fewest) or "a module variable that the kernel reads changed"
            reasons[f"{launch.kernel}: {changed}"] += 1
        earlier.append(launch)
    return sorted(reasons.items(), key=lambda item: (-item[1], item[0]))


def _changes(before: Specialisation, after: Specialisation) -> list[str]:
    old, new = before.parts(), after.parts()
    both = ((name, old.get(name, _NOTHING), new.get(name, _NOTHING)) for name in dict.fromkeys([*old, *new]))
    return [_change(name, was, now) for name, was, now in both if was != now]


def _change(name: str, old: tuple[str, Json, Json, Json], new: tuple[str, Json, Json, Json]) -> str:
    kind, old_type, old_hint, old_value = old
    _, new_type, new_hint, new_value = new
    if "option" in (kind, new[0]):
        given = _NOTHING not in (old, new)
        return f"{name} {shown(old_value)} or {shown(new_value)}" if given else f"{name} given or not"
    if old_type == new_type == "constexpr":
        return f"constexpr {name} {_ordered(old_value, new_value)}"
    if "constexpr" in (old_type, new_type):
        constant = old_value if old_type == "constexpr" else new_value
        if constant is None:
            return f"{name} is None or not"
        return f"{name} equal to {shown(constant)} or not"
    if old_type != new_type:
        return f"type of {name} {_ordered(old_type, new_type)}"
    if old_hint != new_hint:
        pointer = isinstance(new_type, str) and new_type.startswith("*")
        return f"divisibility by 16 of {'the address of ' if pointer else ''}{name}"
    return f"{name} changed"


def _ordered(old: Json, new: Json) -> str:
    """Both in one order, so that a change and its reverse are one reason."""
    return " or ".join(sorted((shown(old), shown(new)), key=lambda text: (len(text), text)))
