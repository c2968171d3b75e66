"""Why a sweep of sizes makes Triton compile again: which argument's divisibility, value 1, type or constant changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from pytest_fusion.run.measure.resources.specialisation import Json, Specialisation, shown

_NOTHING = ("argument", None, None, None)


def recompilations(launches: Iterable[Specialisation]) -> list[tuple[str, int]]:
    """``(reason, how often)`` for every compilation but each kernel's first, most frequent reason first.

    ``launches`` are those of a sweep, in order. A compilation is explained against the one before it that differs in
    the fewest arguments and options; where several differ, all are given.
    """
    known: dict[tuple[str, str, int], list[Specialisation]] = {}
    seen: set[str] = set()
    reasons: Counter[str] = Counter()
    for launch in launches:
        if launch.key() in seen:
            continue
        seen.add(launch.key())
        earlier = known.setdefault((launch.place.file, launch.kernel, launch.place.line), [])
        if earlier:
            reasons[f"{launch.kernel}: {_difference(launch, earlier)}"] += 1
        earlier.append(launch)
    return sorted(reasons.items(), key=lambda item: (-item[1], item[0]))


def _difference(launch: Specialisation, earlier: list[Specialisation]) -> str:
    fewest = min((_changes(before, launch) for before in earlier), key=len)
    return "; ".join(fewest) or "a module variable that the kernel reads changed"


def _changes(before: Specialisation, after: Specialisation) -> list[str]:
    old, new = before.parts(), after.parts()
    names = dict.fromkeys([*old, *new])
    return [
        _change(name, old.get(name, _NOTHING), new.get(name, _NOTHING))
        for name in names
        if old.get(name, _NOTHING) != new.get(name, _NOTHING)
    ]


def _change(name: str, old: tuple[str, Json, Json, Json], new: tuple[str, Json, Json, Json]) -> str:
    kind, old_type, old_hint, old_value = old
    _, new_type, new_hint, new_value = new
    if "option" in (kind, new[0]):
        return (
            f"{name} {shown(old_value)} or {shown(new_value)}" if _NOTHING not in (old, new) else f"{name} given or not"
        )
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
    """Both in one order, so that going there and back is one reason."""
    return " or ".join(sorted((shown(old), shown(new)), key=lambda text: (len(text), text)))
