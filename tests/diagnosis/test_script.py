"""Scripts for bug reports: what the kernel got is saved bit for bit, and what the script does with it."""

from __future__ import annotations

import io
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from pytest_fusion.case.case_model import Case, Layout, TensorCase
from pytest_fusion.case.containers import tensors_by_name
from pytest_fusion.case.layouts import geometry
from pytest_fusion.case.make import make_inputs
from pytest_fusion.checks.verdict import failed
from pytest_fusion.diagnosis.repro import script as scripts
from pytest_fusion.diagnosis.repro.replay_file import Replay
from pytest_fusion.diagnosis.repro.script import Script, compose
from pytest_fusion.diagnosis.repro.script_template import leaves, wrong_again
from pytest_fusion.run.memory import FILLS
from pytest_fusion.run.placing import place
from pytest_fusion.spec.fusion_spec import FusionSpec
from pytest_fusion.spec.inputs import ConstantSpec, derived, tensor

CPU = torch.device("cpu")
ONE = Case({"n": 3}, "float32", {"x": TensorCase("float32")})


def script_of(inputs: dict[str, Any], case: Case, **more: Any) -> Script:
    spec = more.pop("spec", None) or FusionSpec(fused=torch.clone, reference=torch.clone, inputs=inputs)
    replay = Replay("some", "some", "values", None, case)
    options = {"device": CPU, "extra": {}, "root": Path("/nowhere"), "shown": "script.py", **more}
    return compose(spec, replay, options.pop("verdict", failed("values", "off")), **options)


def defined(script: Script, **changes: Any) -> Any:
    """The script as a module, with ``CASE`` changed."""
    module = ModuleType("a_script")
    module.__file__ = "script.py"
    exec(compile(script.text, "script.py", "exec"), vars(module))  # noqa: S102
    module.__dict__["CASE"].update(changes)
    return module


def saved(script: Script) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(io.BytesIO(script.saved), weights_only=False)
    return found


LAYOUTS = [Layout(), Layout("padded", 3), Layout("padded", 0, 1), Layout("transposed"), Layout("step", 1)]
LAYOUTS += [Layout("expanded"), Layout("expanded", 2, 1), Layout("contiguous", 5)]
DTYPES = ("float32", "float16", "bfloat16", "float64", "float8_e4m3fn", "int64", "uint8", "bool", "complex64")


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_scripts_tensors_are_those_of_the_case(dtype: str) -> None:
    """Shape, strides, offset, elements and the size of the storage are the same, whatever lies between elements."""
    inputs = {f"x{i}": tensor("rows n", dtype=getattr(torch, dtype)) for i in range(len(LAYOUTS))}
    tensors = {name: TensorCase(dtype, layout, "nan") for name, layout in zip(inputs, LAYOUTS, strict=True)}
    case = Case({"rows": 3, "n": 5}, "float32", tensors, seed=11)
    spec = FusionSpec(fused=lambda **given: given, reference=lambda **given: given, inputs=inputs)
    wanted = place(make_inputs(spec, case, CPU), case, CPU, FILLS[0]).tensors
    script = script_of(inputs, case, spec=spec)
    module = defined(script)
    given = saved(script)["inputs"]
    call = module.Call(lambda **given: dict(given), {"inputs": {}, "fixtures": {}}, 0xFF)
    for fill in (0, 1):
        for name, t in given.items():
            made = call.placed(name, t, fill)
            expected = wanted[name]
            assert (made.shape, made.stride(), made.storage_offset()) == (
                expected.shape,
                expected.stride(),
                expected.storage_offset(),
            )
            assert made.untyped_storage().nbytes() == expected.untyped_storage().nbytes()
            assert made.clone().contiguous().view(torch.uint8).equal(expected.clone().contiguous().view(torch.uint8))
    assert call.stray_writes() == []


@pytest.mark.parametrize("sizes", [{"rows": 0, "n": 5}, {"rows": 3, "n": 0}])
def test_empty_tensors_are_saved(sizes: dict[str, int]) -> None:
    """A size of zero gives a tensor of that shape."""
    case = Case(sizes, "float32", {"x": TensorCase("float32", Layout("padded", 2))})
    script = script_of({"x": tensor("rows n")}, case)
    call = defined(script).Call(lambda x: x, saved(script), 0xFF)
    assert tuple(call.results["out"].shape) == tuple(sizes.values())


def test_nested_tensors_and_constants_keep_their_layout() -> None:
    """A tensor inside a constant is saved with the strides that it has, and placed so."""
    inner = torch.arange(12.0).reshape(3, 4).t()
    inputs = {"x": tensor("n"), "pair": ConstantSpec((inner, 2)), "twice": derived(lambda x: x * 2)}
    script = script_of(inputs, ONE)
    given: dict[str, Any] = {}
    defined(script).Call(lambda **found: given.update(found), saved(script), 1)
    assert torch.equal(given["pair"][0], inner)
    assert given["pair"][0].stride() == inner.stride()
    assert given["pair"][1] == 2
    assert torch.equal(given["twice"], given["x"] * 2)


def test_what_could_not_be_saved_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Closures, a fixture that cannot be pickled and a tensor of gigabytes are named with the reason."""
    monkeypatch.setattr(scripts, "_MOST_BYTES", 64)
    spec = FusionSpec(fused=lambda x: x, reference=lambda x: x, inputs={"x": tensor("n")})
    script = script_of({}, ONE.with_(sizes={"n": 32}), spec=spec, extra={"scale": lambda x: x, "k": 2})
    assert set(script.missing) == {"the fused call and the reference", "input x", "fixture scale"}
    assert saved(script)["fixtures"] == {"k": 2}
    assert "its storage spans" in script.missing["input x"]
    assert "NOT COMPLETE, input x" in script.text
    assert defined(script).main() == 2
    assert "cannot be run here: input x" in capsys.readouterr().out


def test_functions_that_no_test_leads_to_are_saved_by_name(tmp_path: Path) -> None:
    """A spec without a test is loaded from where its functions can be imported."""
    script = script_of({"x": tensor("n")}, ONE)
    assert not script.missing
    assert saved(script)["functions"] == (torch.clone, torch.clone)
    (tmp_path / "s.pt").write_bytes(script.saved)
    (tmp_path / "s.py").write_text(script.text)
    done = subprocess.run([sys.executable, "s.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "0 of 3 element(s) differ" in done.stdout


def test_an_access_that_only_the_interpreter_sees_is_none_that_does_not_show() -> None:
    """A store past a result leaves no trace in what the script compares, and the script says so."""
    seen = failed("bounds", "past its end", access="out-of-bounds-store", file="/home/kernels.py", line=7)
    for verdict, there in ((seen, True), (failed("bounds", "bytes around x were written"), False)):
        told = defined(script_of({"x": tensor("n")}, ONE, verdict=verdict)).CASE["beyond"]
        assert ("the out-of-bounds-store at kernels.py:7" in told) == there


def test_a_python_without_torch_cannot_tell(tmp_path: Path) -> None:
    """An import that fails would leave 1, which stands for a failure that shows."""
    script = tmp_path / "script.py"
    script.write_text(script_of({"x": tensor("n")}, ONE).text)
    done = subprocess.run([sys.executable, "-I", "-S", script], capture_output=True, text=True, check=False)
    assert (done.returncode, "has no torch" in done.stdout) == (2, True), done.stderr


def element(got: float, expected: float, allowed: float | None) -> dict[str, Any]:
    return {"output": "out", "index": [1], "got": got, "expected": expected, "allowed": allowed}


@pytest.mark.parametrize(
    ("seen", "now", "again"),
    [
        (element(2.0, 1.0, 0.1), 2.0, True),
        (element(2.0, 1.0, 0.1), 1.2, True),
        (element(2.0, 1.0, 0.1), 1.05, False),
        (element(1.05, 1.0, 0.1), 1.04, True),
        (element(1.05, 1.0, 0.1), 1.01, False),
        (element(0.0, math.nan, None), 0.0, True),
        (element(0.0, math.nan, None), math.nan, False),
        (element(math.nan, 1.0, None), math.nan, True),
        (element(math.nan, 1.0, None), 1.0, False),
        (element(math.inf, -math.inf, None), -math.inf, False),
    ],
)
def test_a_right_element_is_told_from_a_wrong_one(seen: dict[str, Any], now: float, again: bool) -> None:
    """Beyond what was allowed, or half as far off as before where a statistic failed; NaN in its place."""
    assert wrong_again(now, seen) is again


@pytest.mark.parametrize("layout", [*LAYOUTS[:5], Layout("transposed", 0, 1), Layout("unflattenable", 3, 1)], ids=str)
@pytest.mark.parametrize("kind", ["random", "negative", "zero"])
def test_an_upstream_gradient_is_laid_as_it_was(kind: str, layout: Layout) -> None:
    """Every variant of a layout has its strides, offset and numbers, with NaN in the gaps."""
    output = torch.zeros(3, 2, 4)
    plan = geometry((3, 2, 4), layout)
    laid = {"strides": list(plan.strides), "offset": plan.offset, "storage": plan.storage}
    module = defined(script_of({"x": tensor("n")}, ONE), upstream=kind, seeds={"out": 7}, laid={"out": laid})
    made = module.upstream_of("out", output)
    drawn = torch.randn(3, 2, 4, generator=torch.Generator().manual_seed(7))
    wanted = {"random": drawn, "negative": -drawn.abs(), "zero": drawn * 0}[kind]
    assert torch.equal(made, wanted)
    assert (made.stride(), made.storage_offset()) == (plan.strides, plan.offset)
    whole = torch.empty(0).set_(made.untyped_storage())
    assert len(whole) == plan.storage
    assert int(whole.isnan().sum()) == plan.storage - made.numel()


def test_writes_around_a_tensor_are_seen() -> None:
    """A byte changed before, between or behind the elements is outside of them, one of theirs is not."""
    call = defined(script_of({"x": tensor("n")}, ONE), may_change=["x"]).Call(lambda: None, EMPTY, 0xFF)
    writes: list[Callable[[torch.Tensor], Any]] = [lambda b: b[0].add_(1), lambda b: b[-1].add_(1)]
    writes.append(lambda b: b[4096 + 3 * 4].add_(1))  # between the rows
    for write in writes:
        call.memory.clear()
        call.placed("x", torch.zeros(8).as_strided((2, 2), (4, 1), 1), 0).fill_(1.0)
        assert call.stray_writes() == []
        write(call.memory[0][1])
        assert call.stray_writes() == ["bytes around or between the elements of x were written"]


EMPTY: dict[str, Any] = {"inputs": {}, "fixtures": {}}


def test_scripts_call_the_tensors_the_same() -> None:
    """What a script compares has the names that the report has."""
    a, b, c = torch.zeros(3, 1).unbind()
    module = defined(script_of({"x": tensor("n")}, ONE), mutates=["ps"])
    for value in (a, [a, b], {"m": [a, b], "v": (c,)}, [], [[a], None, {"x": b}], SimpleNamespace()):
        call = module.Call(lambda ps: None, {"inputs": {"ps": value}, "fixtures": {}}, 0xFF)
        assert list(call.results) == [f"{name} (in place)" for name in tensors_by_name("ps", value)]
    assert list(leaves({"m": [a, b], "v": (c,)})) == ["out['m'][0]", "out['m'][1]", "out['v'][0]"]


def test_a_result_is_its_bytes() -> None:
    """A lone element of any stride, a view of complex numbers and a scalar have the bytes of their values."""
    copied = defined(script_of({"x": tensor("n")}, ONE)).copied
    odd = torch.arange(10.0).as_strided((1,), (5,), 5)
    for view, plain in ((odd, [5.0]), (torch.tensor([1 + 2j]).conj(), [1 - 2j]), (torch.tensor(3.0), 3.0)):
        assert copied(view).flatten().view(torch.uint8).equal(torch.tensor(plain).flatten().view(torch.uint8))
