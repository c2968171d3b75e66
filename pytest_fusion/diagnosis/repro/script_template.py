"""The code of each script that shows a failure again, with torch and the user's modules; ``CASE`` is filled in."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import os
import sys
import traceback
from collections.abc import Mapping
from contextlib import nullcontext
from math import inf, isfinite, nan
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

CASE: dict[str, Any] = {}

DEVICE = sys.argv[1] if __name__ == "__main__" and len(sys.argv) > 1 else CASE.get("device", "cpu")
HAS_FUSION = importlib.util.find_spec("pytest_fusion") is not None
if __name__ == "__main__":
    if importlib.util.find_spec("torch") is None:
        print(f"cannot be run here: {sys.executable} has no torch")
        raise SystemExit(2)
    os.environ["TRITON_INTERPRET"] = "1" if DEVICE == "cpu" else "0"  # before torch, which may import Triton
    if DEVICE == "cpu" and HAS_FUSION:
        importlib.import_module("pytest_fusion.interpreter").enable()

import torch  # noqa: E402 - Triton's interpreter is switched on first
from torch.utils.dlpack import from_dlpack  # noqa: E402

GUARD = 4096


class Missing(Exception):
    """The script cannot be run here; the message says why."""


def stand_in() -> None:
    """Make the test's file importable without pytest_fusion."""

    def fused_equivalent(reference: Any = None, **_: Any) -> Any:
        def decorate(test: Any) -> Any:
            test.fusion_spec = SimpleNamespace(fused=test, reference=reference)
            return test

        return decorate

    def make_spec(**fields: Any) -> Any:
        def test() -> None: ...

        spec = SimpleNamespace(**fields, test=lambda: test, with_=lambda **new: make_spec(**{**fields, **new}))
        test.fusion_spec = spec  # type: ignore[attr-defined]
        return spec

    sys.modules["pytest_fusion"] = MagicMock(fused_equivalent=fused_equivalent, FusionSpec=make_spec)
    sys.modules["pytest_fusion.values"] = MagicMock()
    if DEVICE == "cpu":  # launchers choose grids and tiles by these
        facts = {"get_device_properties": SimpleNamespace(**CASE["gpu"]), "get_device_capability": (9, 0)}
        for name, answer in {**facts, "current_device": 0}.items():
            setattr(torch.cuda, name, lambda *_, answer=answer: answer)
        torch.cuda.device = nullcontext  # type: ignore[assignment,misc]


def choose_configs() -> None:
    """Launch autotuned kernels with the configs of the case, others with their first one, without timing."""
    tuner = importlib.import_module("triton.runtime.autotuner").Autotuner
    upstream = tuner.prune_configs

    def chosen(self: Any, *args: Any) -> Any:
        config = CASE["configs"].get(self.base_fn.__name__)
        return upstream(self, *args)[:1] if config is None else [self.configs[config["number"]]]

    tuner.prune_configs, tuner._bench = chosen, lambda *_, **__: [0.0, 0.0, 0.0]


def load() -> tuple[Any, Any, dict[str, Any]]:
    """The fused call, the reference, and the kernel's inputs from the file beside this script."""
    if DEVICE != "cpu" and not torch.cuda.is_available():
        raise Missing(f"there is no {DEVICE}; without a GPU: {sys.argv[0]} cpu")
    above = (Path.cwd(), *Path.cwd().parents, *Path(__file__).resolve().parents)
    root = next((folder for folder in above if (folder / CASE["file"]).exists()), None)
    if root is None:
        raise Missing(f"{CASE['file']} is neither below {Path.cwd()} nor above this; run this in the project's folder")
    sys.path[:0] = [str(root / folder) for folder in CASE["folders"]]
    if not HAS_FUSION:
        stand_in()
    elif DEVICE == "cpu":
        importlib.import_module("pytest_fusion.interpreter.bridge.modelled_device").PROPERTIES.update(CASE["gpu"])
    if importlib.util.find_spec("triton") is not None:
        choose_configs()
    found: Any = None
    owner: Any = None
    try:
        if CASE["test"]:
            spec: Any = importlib.util.spec_from_file_location(CASE["module"], root / CASE["file"])
            found = sys.modules[CASE["module"]] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(found)
        saved = torch.load(Path(__file__).with_suffix(".pt"), weights_only=False)
        for name in CASE["test"]:
            owner, found = found, getattr(found, name)
        fused, reference = (found.fusion_spec.fused, found.fusion_spec.reference) if found else saved["functions"]
    except Exception as error:
        traceback.print_exc()
        raise Missing("the kernel, its reference or the inputs cannot be loaded") from error
    return functools.partial(fused, owner()) if CASE["method"] else fused, reference, saved


def mapped(value: Any, function: Any) -> Any:
    """The same containers with each tensor replaced."""
    if isinstance(value, dict):
        return {key: mapped(item, function) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [mapped(item, function) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return function(value) if isinstance(value, torch.Tensor) else value


def leaves(value: Any, path: str = "out") -> dict[str, torch.Tensor]:
    """The tensors of a result by their place in it."""
    if isinstance(value, torch.Tensor):
        return {path: value}
    pairs: Any = enumerate(value) if isinstance(value, list | tuple) else ()
    items = [(f"[{key!r}]", item) for key, item in (value.items() if isinstance(value, Mapping) else pairs)]
    if dataclasses.is_dataclass(value):
        items = [(f".{one.name}", getattr(value, one.name)) for one in dataclasses.fields(value)]
    return {name: tensor for key, item in items for name, tensor in leaves(item, path + key).items()}


class Call:
    """One call: its results by name, the inputs written in place and the gradients among them, and stray writes."""

    def __init__(self, function: Any, saved: Mapping[str, Any], fill: int | None) -> None:
        self.memory: list[tuple[str, torch.Tensor, torch.Tensor, torch.Tensor]] = []
        given = {
            name: mapped(value, lambda t, name=name: self.placed(name, t, fill) if fill is not None else copied(t))
            for name, value in saved["inputs"].items()
        }
        for name in CASE["wanted"]:
            given[name].requires_grad_(True)
        # Named before the call: a list may hold other tensors afterwards.
        in_place = {
            f"{n}{f'[{i}]' if key else ''} (in place)": t
            for n in CASE["mutates"]
            for i, (key, t) in enumerate(leaves(given[n], "").items())
        }
        extra = {n: v for n, v in saved["fixtures"].items() if fill is not None or n in CASE["reference_takes"]}
        self.results = {**leaves(function(**given, **extra)), **in_place}
        if CASE["wanted"]:
            ends = {n: t for n, t in self.results.items() if t.requires_grad and n in (CASE["seeds"] or self.results)}
            inputs = [given[name] for name in CASE["wanted"]]
            upstream = [upstream_of(name, t) for name, t in ends.items()]
            found = torch.autograd.grad(list(ends.values()), inputs, upstream, allow_unused=True) if ends else ()
            self.results = {f"d{n}": t for n, t in zip(CASE["wanted"], found, strict=False) if t is not None}
        self.results = {name: copied(t.detach()) for name, t in self.results.items()}

    def placed(self, name: str, t: torch.Tensor, fill: int) -> torch.Tensor:
        """The tensor on the device, in its storage's layout, with ``fill`` between its elements and around them."""
        if not t.numel():
            return t.to(DEVICE)
        size, raw = t.element_size(), torch.empty(0, dtype=torch.uint8).set_(t.untyped_storage())
        own = torch.zeros_like(raw, dtype=torch.bool)
        once = [1 if stride == 0 else n for n, stride in zip(t.shape, t.stride(), strict=True)]
        own.as_strided((*once, size), (*(s * size for s in t.stride()), 1), t.storage_offset() * size).fill_(True)
        buffer = torch.full((len(raw) + 2 * GUARD,), fill, dtype=torch.uint8)
        buffer[GUARD:-GUARD][own] = raw[own]
        buffer = buffer.to(DEVICE)
        self.memory.append((name, buffer, buffer.clone(), torch.nn.functional.pad(own, (GUARD, GUARD)).to(DEVICE)))
        # Through DLPack the storage is exactly these bytes: the kernel sees no guards.
        storage = from_dlpack(buffer[GUARD:-GUARD]).untyped_storage()
        return torch.empty(0, dtype=t.dtype, device=DEVICE).set_(storage, t.storage_offset(), t.shape, t.stride())

    def stray_writes(self) -> list[str]:
        """Inputs that changed and may not, and writes around or between the elements of any."""
        written = [(name, buffer != before, own) for name, buffer, before, own in self.memory]
        around = [name for name, changed, own in written if bool((changed & ~own).any())]
        inside = [name for name, changed, own in written if bool((changed & own).any())]
        return [f"bytes around or between the elements of {name} were written" for name in around] + [
            f"the input {name} was changed" for name in inside if name not in CASE["may_change"]
        ]


def copied(t: torch.Tensor) -> torch.Tensor:
    """A contiguous copy on the device."""
    return t.to(DEVICE).resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)


def upstream_of(name: str, output: torch.Tensor) -> torch.Tensor:
    """An upstream gradient of the failure's kind and layout; on the CPU with the same numbers."""
    source = torch.Generator(output.device).manual_seed(CASE["seeds"].get(name, 0))
    shape = () if CASE["upstream"] == "expanded" else output.shape
    values = torch.randn(shape, generator=source, device=output.device)
    values = {"zero": values * 0, "negative": -values.abs()}.get(CASE["upstream"], values).to(output.dtype)
    if shape != output.shape or (laid := CASE["laid"].get(name)) is None:
        return values.expand(output.shape)
    return (
        values.new_full((laid["storage"],), nan).as_strided(output.shape, laid["strides"], laid["offset"]).copy_(values)
    )


def compared(name: str, got: torch.Tensor, right: torch.Tensor) -> list[str]:
    """The faults of a result, after printing how it differs from the reference's."""
    if (got.shape, got.dtype) != (right.shape, right.dtype):
        return [f"{name} is {got.dtype} {list(got.shape)}, the reference's {right.dtype} {list(right.shape)}"]
    a, b = (t.to(torch.complex128 if got.is_complex() else torch.float64) for t in (got, right))
    off = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, (a - b).abs().nan_to_num(inf, inf))
    most = max(off.flatten().tolist(), default=0.0)
    print(f"{name}: {int((off > 0).sum())} of {off.numel()} element(s) differ from the reference, by {most:g} at most")
    seen = CASE["seen"]
    if seen is None or seen["output"] != name or len(seen["index"]) != got.dim():
        return []
    now = float(got[tuple(seen["index"])])
    return [f"{name} at {seen['index']}: {now!r}, exact {seen['expected']!r}"] if wrong_again(now, seen) else []


def wrong_again(now: float, seen: Mapping[str, Any]) -> bool:
    """Whether the wrong element is further off than allowed, or at least half as far as it was."""
    exact, then = float(seen["expected"]), float(seen["got"])
    if not (isfinite(now) and isfinite(exact)):
        return str(now) != str(exact)
    before = abs(then - exact) if isfinite(then) else inf
    allowed = inf if seen["allowed"] is None else float(seen["allowed"])
    return abs(now - exact) > (allowed if before > allowed else before / 2)


def failures(fused: Any, reference: Any, saved: dict[str, Any]) -> list[str]:
    """What is wrong with the kernel."""
    try:
        right = Call(reference, saved, None).results
        first, *others = (Call(fused, saved, fill) for fill in (0xFF, 0x7B, 0xFF))  # NaN and huge, as any float
        if CASE["check"] == "unwritten":  # torch fills fresh memory with NaN
            torch.use_deterministic_algorithms(True, warn_only=True)
            others.append(Call(fused, saved, 0xFF))
            torch.use_deterministic_algorithms(False)
    except Exception as error:
        traceback.print_exc()
        if CASE["raised"] == type(error).__name__:
            return [f"the kernel raised {CASE['raised']}"]
        raise Missing(f"the kernel or its reference raised {type(error).__name__}") from error
    found = [f"{name} is missing" for name in right if name not in first.results]
    for name, got in first.results.items():
        found += compared(name, got, right[name]) if name in right else []
        bits = [one.results[name].flatten().view(torch.uint8) for one in (first, *others) if name in one.results]
        if not CASE["varies"] and not all(torch.equal(bits[0], other) for other in bits):
            found.append(f"{name} differs between calls, or with what is around the inputs or in fresh memory")
    return found + first.stray_writes()


def main() -> int:
    """0 if the failure does not show, 1 if it does, 2 if something is missing."""
    try:
        for what, why in CASE["missing"].items():
            raise Missing(f"{what}: {why}")
        found = failures(*load())
        if not found and CASE["beyond"]:
            raise Missing(CASE["beyond"])
    except Missing as error:
        print(f"cannot be run here: {error}")
        return 2
    for line in found:
        print(f"WRONG: {line}")
    print("the failure shows" if found else f"the failure ({CASE['check']}) does not show on {DEVICE}")
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
