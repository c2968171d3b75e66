"""Which ``config`` decides about which kernel, and the rows of the table at whose shapes it is tuned."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from benchmarks.suite import candidates
from benchmarks.suite.model import Row, Span, UnknownName

_KERNELS = "reference_kernels."


@dataclass(frozen=True, slots=True)
class Tunable:
    """``place`` is ``"module:function"``, the module being the one that calls the function by that name, or several of
    them with commas between, of which some may not be there; ``rows`` are the beginnings of rows' names.
    ``vary(tile, arguments)`` gives the other tiles."""

    name: str
    place: str
    rows: tuple[str, ...]
    span: Span = "forward"
    vary: Callable[[Any, Sequence[Any]], list[Any]] = candidates.others


def _by(made: Callable[[Any], Iterator[Any]]) -> Callable[[Any, Sequence[Any]], list[Any]]:
    """The tiles that ``made`` yields, but for the one in use."""
    return lambda tile, _: [each for each in dict.fromkeys(made(tile)) if each != tile]


_flat = _by(lambda tile: candidates.blocks(tile, 0))

TUNABLES = (
    Tunable("pointwise", "pointwise.kernel:config", ("pointwise: relu",), vary=_flat),
    Tunable("pointwise backward", "pointwise.kernel:backward_config", ("pointwise: relu",), "both"),
    Tunable("elementwise", "_elementwise:tile_of", ("pointwise: silu", "glu: SwiGLU, 16384"), vary=_flat),
    Tunable("elementwise backward", "_elementwise:tile_of", ("glu: SwiGLU, 16384",), "both", vary=_flat),
    Tunable("dropout", "pointwise.seeded_dropout:config", ("pointwise: dropout",)),
    Tunable(
        "softmax",
        "softmax.kernel:config",
        (
            "softmax: plain, 32768x8192",
            "softmax: plain, 16384x131072",
            "softmax: scale and mask",
            "softmax: plain, width 1024",
            "softmax: plain, width 2048",
            "softmax: plain, width 16384",
            "softmax: plain, width 32768",
            "softmax: plain, width 65536",
        ),
    ),
    Tunable("softmax backward", "softmax.backward:config_backward", ("softmax: plain, 32768x8192",), "both"),
    Tunable(
        "rms_norm",
        "rms_norm.kernel:config",
        (
            "rms_norm: 16384x8192",
            "rms_norm: residual, 16384x8192",
            *(f"rms_norm: width {n}" for n in (1024, 2048, 16384, 32768, 65536, 131072)),
        ),
    ),
    Tunable(
        "layer_norm",
        "layer_norm.kernel:config",
        ("layer_norm: 16384x8192", *(f"layer_norm: width {n}" for n in (1024, 32768, 131072))),
    ),
    Tunable(
        "norm backward",
        "_norm_backward:config_backward",
        (
            "rms_norm: 16384x8192",
            "layer_norm: 16384x8192",
            "rms_norm: width 1024",
            "rms_norm: width 16384",
        ),
        "both",
    ),
    Tunable(
        "norm backward, columns",
        "_norm_backward:config_columns",
        ("rms_norm: width 16384", "rms_norm: width 65536"),
        "both",
        vary=_by(candidates.column_tiles),
    ),
    Tunable("cross_entropy", "cross_entropy.kernel:config", ("cross_entropy: 8192x128256",)),
    Tunable(
        "cross_entropy backward",
        "cross_entropy.kernel:config_backward",
        ("cross_entropy: 8192x128256",),
        "both",
        vary=_flat,
    ),
    Tunable("rope", "rope.kernel:config", ("rope: q32/k8, 8x",)),
    Tunable(
        "norm_quant",
        "norm_quant.kernel:config",
        ("norm_quant: rms, fp8, 16384", "norm_quant: residual", "norm_quant: rms, fp8 by 128"),
    ),
    Tunable("linear", "linear.kernel:config", ("linear: bias, gelu, 8192^3", "linear: bias, gelu, 16384")),
    Tunable("qkv", "linear.qkv:config", ("linear: queries, keys, values, 1x", "linear: queries, keys, values, 64x")),
    Tunable("gate_up", "linear.gate_up:config_gate_up, linear.gated:config_gated", ("linear: gate and up, 8192",)),
    Tunable("lora", "linear.lora:config_described", ("linear: LoRA, r 16, 4096",)),
    Tunable(
        "flash_attention",
        "flash_attention.kernel:config",
        (
            "flash_attention: causal, 32/8 heads, 4x4096x128",
            "flash_attention: causal, 32/8 heads, 4x4096x64",
            "flash_attention: window",
        ),
    ),
    Tunable(
        "flash_attention backward, queries",
        "flash_attention.backward:config_queries",
        ("flash_attention: causal, 32/8 heads, 4x4096x128",),
        "both",
    ),
    Tunable(
        "flash_attention backward, keys",
        "flash_attention.backward:config_keys",
        ("flash_attention: causal, 32/8 heads, 4x4096x128",),
        "both",
    ),
    Tunable("decode_attention", "decode_attention.kernel:config", ("decode_attention:",)),
    Tunable("sampling", "sampling.kernel:config", ("sampling: top-k 50", "sampling: top-k 0")),
    Tunable(
        "moe_gate", "moe_gate.kernel:config", ("moe_gate:",), vary=_by(lambda tile: candidates.gate_tiles(tile, 0))
    ),
    Tunable(
        "dequant_matmul",
        "dequant_matmul.kernel:config",
        (
            "dequant_matmul: int8, 16x",
            "dequant_matmul: int4, 16x",
            "dequant_matmul: int8, 512x",
            "dequant_matmul: int4, 512x",
        ),
        vary=candidates.dequant_tiles,
    ),
    Tunable("float8", "dequant_matmul.float8:config_float8", ("dequant_matmul: fl",)),
    Tunable(
        "linear_cross_entropy",
        "linear_cross_entropy.kernel:config",
        ("linear_cross_entropy: 8192x4096 by 128256",),
        "both",
        vary=_by(candidates.logit_chunks),
    ),
    Tunable("embedding_bag", "embedding.kernel:config", ("embedding: 26 bags",), vary=_by(candidates.bag_tiles)),
    Tunable(
        "batch_norm",
        "batch_norm.layout:config",
        ("batch_norm: 64x256x56x56, bf", "batch_norm: residual, relu, channels last"),
        vary=_flat,
    ),
    Tunable("adamw", "adamw.kernel:config", ("adamw: 16",), vary=_by(candidates.chunk_tiles)),
)


def chosen(only: Sequence[str], rows: Sequence[Row]) -> list[tuple[Tunable, Row]]:
    """Each tunable at each of its rows, of those named or whose name begins with one of ``only``. Raises `UnknownName`
    for a name that fits none."""
    found = [each for each in TUNABLES if not only or any(each.name.startswith(name) for name in only)]
    for name in only:
        if not any(each.name.startswith(name) for each in TUNABLES):
            known = ", ".join(each.name for each in TUNABLES)
            raise UnknownName(f"nothing to tune is called {name!r}; known: {known}")
    return [(each, row) for each in found for row in rows if any(row.name.startswith(start) for start in each.rows)]


def functions(place: str) -> list[tuple[Any, str]]:
    """Modules and names of the functions of ``place`` that there are."""
    found = []
    for each in place.split(","):
        module, _, name = each.strip().partition(":")
        with suppress(ModuleNotFoundError):
            made = importlib.import_module(_KERNELS + module)
            if hasattr(made, name):
                found.append((made, name))
    return found


class Knob:
    """A kernel's ``config`` in the hands of a tuner: it notes what is asked for, and answers otherwise where told."""

    def __init__(self, original: Callable[..., Any]) -> None:
        self._original = original
        self.asked: tuple[Any, ...] | None = None
        self.current: Any = None
        self.answer: Any = None

    def __call__(self, *arguments: Any, **more: Any) -> Any:
        found = self._original(*arguments, **more)
        if self.asked is None:
            self.asked, self.current = arguments, found
        return self.answer if self.answer is not None and arguments == self.asked else found


@contextmanager
def taken(place: str) -> Iterator[Knob]:
    """The function at ``place`` replaced by a `Knob` meanwhile."""
    there = functions(place)
    if not there:
        raise ValueError(f"there is no {place} in reference_kernels")
    originals = [getattr(module, name) for module, name in there]
    knob = Knob(originals[0])
    for module, name in there:
        setattr(module, name, knob)
    try:
        yield knob
    finally:
        for (module, name), original in zip(there, originals, strict=True):
            setattr(module, name, original)
