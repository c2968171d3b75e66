"""A case in words and as JSON for reports, with the shapes and strides that follow from it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from pytest_fusion.case.case_model import ORDINARY, Case, Config
from pytest_fusion.case.layouts import geometry
from pytest_fusion.case.make import ImpossibleCase, InputFailed, make_inputs, shape_of
from pytest_fusion.case.plan import regimes_of
from pytest_fusion.case.value_json import written
from pytest_fusion.spec.fusion_spec import FusionSpec
from pytest_fusion.spec.inputs import ConstantSpec

# The most elements shown, and of a longer tensor how many from each end.
_SHOWN, _FIRST, _LAST = 12, 6, 3
# Floats are longer.
_SHOWN_FLOATS = 8


def describe(spec: FusionSpec, case: Case) -> dict[str, Any]:
    """The case as JSON, each tensor with its ``shape`` and ``strides`` in elements."""
    data = case.as_json()
    for name, entry in data["inputs"].items():
        plan = geometry(shape_of(spec.tensors[name], case.sizes), case.tensors[name].layout)
        entry.update(shape=list(plan.shape), strides=list(plan.strides), offset=plan.offset)
    data["text"] = one_line(data)
    return data


def unseen_values(spec: FusionSpec, case: Case, device: torch.device) -> dict[str, dict[str, str]]:
    """Values that sizes and seed do not show: derived inputs (lengths, labels), small tensors, constants."""

    def most(name: str) -> int:
        own = regimes_of(spec.tensors[name], covered=False) and case.tensors[name].dtype.startswith(("float", "bfloat"))
        return _SHOWN_FLOATS if own else _SHOWN

    held = [
        name
        for name in case.tensors
        if name not in case.absent and 0 < math.prod(shape_of(spec.tensors[name], case.sizes)) <= most(name)
    ]
    constants = {
        name: repr(declared.value)
        for name, declared in spec.inputs.items()
        if isinstance(declared, ConstantSpec) and isinstance(declared.value, int | float | str | None)
    }
    if not (spec.derived or held):
        return {"constants": constants} if constants else {}
    try:
        logical: Mapping[str, Any] = make_inputs(spec, case, device)
    except (ImpossibleCase, InputFailed):
        return {}
    found = {
        "derived": {name: _in_words(logical.get(name)) for name in spec.derived},
        "held": {name: " ".join(_items(logical[name])) for name in held},
        "constants": constants,
    }
    return {key: words for key, words in found.items() if words}


def _in_words(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        text = repr(value)
        return f"{text if len(text) <= 80 else text[:77] + '...'}, derived"
    dtype = str(value.dtype).removeprefix("torch.")
    return f"{dtype} {list(value.shape)}, derived: {' '.join(_items(value)) or 'no elements'}"


def _items(t: torch.Tensor) -> list[str]:
    """The elements of a short tensor, both ends of a long one."""
    flat = t.detach().flatten()
    long = flat.numel() > _SHOWN
    shown = [*flat[:_FIRST].tolist(), *flat[-_LAST:].tolist()] if long else flat.tolist()
    items = [f"{item:g}" if isinstance(item, float) else str(item) for item in shown]
    return [*items[:_FIRST], "...", *items[_FIRST:]] if long else items


def configs_of(data: Mapping[str, Any]) -> list[str]:
    """The configs of a case's autotuned kernels, in words."""
    return [f"{kernel} with {Config(**config)}" for kernel, config in data.get("configs", {}).items()]


def one_line(data: dict[str, Any]) -> str:
    """Sizes, then what is unusual: ``rows=3 hidden=129; x float16 step+1 nan``."""
    parts = [" ".join(f"{name}={size}" for name, size in data["dims"].items())]
    for name, entry in data["inputs"].items():
        if name in data["absent"]:
            parts.append(f"{name} None")
            continue
        layout = entry["layout"] if not entry["variant"] else f"{entry['layout']}/{entry['variant']}"
        words = [name, entry["dtype"]]
        if layout != "contiguous":
            words.append(layout)
        if entry["offset"]:
            words.append(f"offset {entry['offset']}")
        if entry["values"] not in ORDINARY:
            words.append(f"values {entry['values']}")
        parts.append(" ".join(words))
    parts.extend(f"{name}={written(value)}" for name, value in data["drawn"].items())
    if "multiprocessors" in data:
        parts.append(f"on {data['multiprocessors']} multiprocessors")
    parts.extend(configs_of(data))
    return "; ".join(part for part in parts if part)
