"""`Case`: one input in full, as plain data; tensors are made from it, so it replays bit for bit on any device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from pytest_fusion.case.value_json import decode, encode
from pytest_fusion.errors import ReplayError
from pytest_fusion.spec.dims import Size

# The plainest kind of values: of floating tensors, of several profiles, of structured whole numbers.
ORDINARY = ("unit", "0", "even")


@dataclass(frozen=True, slots=True)
class Layout:
    """A tensor's placement in its storage: a kind of ``LAYOUTS``, a variant of it, a storage offset in elements."""

    kind: str = "contiguous"
    offset: int = 0
    variant: int = 0

    @property
    def plain(self) -> bool:
        return self == Layout()

    def __str__(self) -> str:
        text = self.kind if not self.variant else f"{self.kind}/{self.variant}"
        return f"{text}+{self.offset}" if self.offset else text


@dataclass(frozen=True, slots=True)
class TensorCase:
    """One tensor of a case: dtype name, layout, and the regime its values come from."""

    dtype: str
    layout: Layout = Layout()
    regime: str = "unit"

    @property
    def ordinary(self) -> bool:
        """Whether its values are of the plainest kind."""
        return self.regime in ORDINARY


@dataclass(frozen=True, slots=True)
class Config:
    """The config of an autotuned kernel, by its ``number`` in the kernel's list.

    ``launch``: ``chosen`` is a config that the kernel's pruning leaves, or another in place of one that it drops;
    ``stale`` is one that it drops, but that an earlier call with the same key chose; with ``tuning`` the first launch
    for a key runs several configs, as a benchmark does.
    """

    number: int = 0
    launch: Literal["chosen", "stale", "tuning"] = "chosen"

    def __str__(self) -> str:
        how = {"chosen": "", "stale": ", chosen by an earlier call with the same key", "tuning": ", tuned by the call"}
        return f"config {self.number}{how[self.launch]}"


@dataclass(frozen=True, slots=True)
class Case:
    """Sizes, dtypes, layouts, value regimes and a seed: everything that decides the inputs of one call.

    ``multiprocessors`` is what the modelled device reports, ``None`` for its own number. ``configs`` are those of
    autotuned kernels by name; others take their first.
    """

    sizes: Mapping[str, Size]
    dtype: str
    tensors: Mapping[str, TensorCase]
    absent: tuple[str, ...] = ()
    drawn: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    multiprocessors: int | None = None
    configs: Mapping[str, Config] = field(default_factory=dict)

    def with_(self, **changes: Any) -> Case:
        return replace(self, **changes)

    def with_tensor(self, name: str, **changes: Any) -> Case:
        return replace(self, tensors={**self.tensors, name: replace(self.tensors[name], **changes)})

    def contiguous(self, names: Iterable[str] | None = None) -> Case:
        """The case with these tensors, or all, contiguous at the start of their storage."""
        case = self
        for name in self.tensors if names is None else names:
            case = case.with_tensor(name, layout=Layout())
        return case

    def key(self) -> str:
        """A stable text that is equal exactly for equal cases."""
        return repr(self.as_json())

    def as_json(self) -> dict[str, Any]:
        sizes = sorted(self.sizes.items())
        data: dict[str, Any] = {
            "dims": {name: list(size) if isinstance(size, tuple) else size for name, size in sizes},
            "dtype": self.dtype,
            "inputs": {
                name: {
                    "dtype": tensor.dtype,
                    "layout": tensor.layout.kind,
                    "variant": tensor.layout.variant,
                    "offset": tensor.layout.offset,
                    "values": tensor.regime,
                }
                for name, tensor in sorted(self.tensors.items())
            },
            "absent": sorted(self.absent),
            "drawn": {name: encode(value) for name, value in sorted(self.drawn.items())},
            "seed": self.seed,
        }
        if self.multiprocessors is not None:
            data["multiprocessors"] = self.multiprocessors
        if self.configs:
            data["configs"] = {kernel: asdict(config) for kernel, config in sorted(self.configs.items())}
        return data

    @classmethod
    def from_json(cls, data: Any) -> Case:
        """Raises ``ReplayError`` where the data are not a case."""
        try:
            return cls(
                sizes={str(n): tuple(map(int, s)) if isinstance(s, list) else int(s) for n, s in data["dims"].items()},
                dtype=str(data["dtype"]),
                tensors={
                    str(name): TensorCase(
                        str(entry["dtype"]),
                        Layout(str(entry["layout"]), int(entry["offset"]), int(entry["variant"])),
                        str(entry["values"]),
                    )
                    for name, entry in data["inputs"].items()
                },
                absent=tuple(map(str, data["absent"])),
                drawn={str(name): decode(value) for name, value in data["drawn"].items()},
                seed=int(data["seed"]),
                multiprocessors=int(data["multiprocessors"]) if "multiprocessors" in data else None,
                configs={str(kernel): Config(**config) for kernel, config in data.get("configs", {}).items()},
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ReplayError(f"this is not a case ({type(error).__name__}: {error}); was the file edited?") from None
