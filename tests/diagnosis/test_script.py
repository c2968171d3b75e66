"""Stand-alone scripts: values as exact text, tensors bit for bit, and sources that need nothing of ours."""

from __future__ import annotations

import ast
import enum
import functools
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from pytest_fusion.case.case_model import Case, Layout, TensorCase
from pytest_fusion.case.layouts import geometry
from pytest_fusion.case.make import make_inputs
from pytest_fusion.checks.verdict import failed
from pytest_fusion.diagnosis.repro.embedded import machinery
from pytest_fusion.diagnosis.repro.literal import LITERAL_BYTES, Unwritable, literal
from pytest_fusion.diagnosis.repro.replay_file import Replay
from pytest_fusion.diagnosis.repro.script import Script, compose
from pytest_fusion.diagnosis.repro.standalone.failure import _upstream, as_recorded
from pytest_fusion.diagnosis.repro.standalone.project import describe_gpu
from pytest_fusion.diagnosis.repro.standalone.tensors import Maker
from pytest_fusion.interpreter.bridge.modelled_device import PROPERTIES
from pytest_fusion.run.memory import FILLS
from pytest_fusion.run.placing import place
from pytest_fusion.spec import values
from pytest_fusion.spec.fusion_spec import FusionSpec
from pytest_fusion.spec.inputs import ConstantSpec, derived, tensor

CPU = torch.device("cpu")


class Colour(enum.Enum):
    RED = 1


class Pair(NamedTuple):
    left: int
    right: float


def double(x: torch.Tensor, times: int = 2) -> torch.Tensor:
    return x * times


def script_of(inputs: dict[str, Any], case: Case, **more: Any) -> Script:
    spec = FusionSpec(fused=lambda **given: given, reference=lambda **given: given, inputs=inputs)
    replay = Replay("some", "some", "values", None, case)
    options = {"device": CPU, "extra": {}, "root": Path("/nowhere"), "shown": "script.py", **more}
    return compose(spec, replay, options.pop("verdict", failed("values", "off")), **options)


def namespace(script: Script) -> dict[str, Any]:
    """What the script defines, without running it."""
    module = ModuleType("a_script")
    module.__file__ = "script.py"
    sys.modules["a_script"] = module  # dataclasses look their own module up
    exec(compile(script.text.replace("os.environ[", "{}["), "script.py", "exec"), vars(module))  # noqa: S102
    return vars(module)


def raw(t: torch.Tensor) -> bytes:
    """Every byte of the storage."""
    return bytes(torch.empty(0, dtype=torch.uint8).set_(t.untyped_storage()).tolist())


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, -3, 1e-6, 0.1, "a 'b' \"c\"", b"x", 1j, torch.bfloat16, Path("a/b"), Colour.RED, torch.relu),
        *((1,), (), [1, [2.5]], {"a": (1, 2)}, Pair(1, -math.inf), double),
    ],
    ids=map(str, range(18)),  # some texts hold addresses, and two processes must collect alike
)
def test_plain_values_are_written_exactly(value: Any) -> None:
    """The text of a value evaluates to an equal one."""
    known = namespace(script_of({"x": tensor("n")}, Case({"n": 1}, "float32", {"x": TensorCase("float32")})))
    assert eval(literal(value, repr), known) == value  # noqa: S307


def test_partials_and_nan_are_written_too() -> None:
    """A partial keeps function and keywords; NaN, which equals nothing, stays NaN."""
    known = {"functools": functools, "named": lambda _: double}
    made = eval(literal(functools.partial(double, times=3), repr), known)  # noqa: S307
    assert (made.func, made.keywords) == (double, {"times": 3})
    assert math.isnan(eval(literal(math.nan, repr)))  # noqa: S307


@pytest.mark.parametrize(
    "value", [lambda x: x, object(), (1, lambda x: x), iter([])], ids=["lambda", "object", "in", "it"]
)
def test_what_has_no_text_is_refused_by_name(value: Any) -> None:
    """Closures and foreign objects are not written as something else."""
    with pytest.raises(Unwritable, match="neither plain data nor can it be imported"):
        literal(value, repr)


LAYOUTS = [Layout(), Layout("padded", 3), Layout("padded", 0, 1), Layout("transposed"), Layout("step", 1)]
LAYOUTS += [Layout("expanded"), Layout("expanded", 2, 1), Layout("contiguous", 5)]
DTYPES = ("float32", "float16", "bfloat16", "float64", "float8_e4m3fn", "int64", "uint8", "bool", "complex64")


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_scripts_tensors_are_those_of_the_case(dtype: str) -> None:
    """Shape, strides, offset and every byte of the storage, the gaps under both fills included, are the same."""
    inputs = {f"x{i}": tensor("rows n", dtype=getattr(torch, dtype)) for i in range(len(LAYOUTS))}
    tensors = {name: TensorCase(dtype, layout, "nan") for name, layout in zip(inputs, LAYOUTS, strict=True)}
    case = Case({"rows": 3, "n": 5}, "float32", tensors, seed=11)
    spec = FusionSpec(fused=lambda **given: given, reference=lambda **given: given, inputs=inputs)
    logical = make_inputs(spec, case, CPU)
    script = namespace(script_of(inputs, case))
    for number, fill in enumerate(FILLS):
        wanted = place(logical, case, CPU, fill).tensors
        maker = script["Maker"]("cpu", number)
        made, _ = script["inputs"](maker)
        for name, t in made.items():
            assert (t.shape, t.stride(), t.storage_offset()) == (
                wanted[name].shape,
                wanted[name].stride(),
                wanted[name].storage_offset(),
            )
            assert raw(t) == raw(wanted[name]), name


@pytest.mark.parametrize("sizes", [{"rows": 0, "n": 5}, {"rows": 3, "n": 0}])
def test_empty_tensors_are_written(sizes: dict[str, int]) -> None:
    """A size of zero gives a tensor of that shape."""
    case = Case(sizes, "float32", {"x": TensorCase("float32", Layout("padded", 2))})
    script = namespace(script_of({"x": tensor("rows n")}, case))
    made, _ = script["inputs"](script["Maker"]("cpu", 0))
    assert tuple(made["x"].shape) == tuple(sizes.values())


PROFILES = [
    None,
    values.normal(1, 3),
    values.uniform(0, "n"),
    values.probabilities(),
    values.indices("2*n"),
    values.one_of(values.positive()),
]


@pytest.mark.parametrize("profile", PROFILES, ids=str)
def test_large_tensors_come_from_a_generator_of_the_same_bits(profile: Any) -> None:
    """Beyond what anyone reads in digits, the script computes the values, expanded axes once."""
    integers = profile is not None and profile.kind == "indices"
    inputs = {"x": tensor("rows n", values=profile, dtype=torch.int64 if integers else torch.float16)}
    dtype, regime = ("int64", "unit") if integers else ("float16", "0/nan" if profile is PROFILES[-1] else "cancelling")
    case = Case({"rows": 9, "n": LITERAL_BYTES}, "float16", {"x": TensorCase(dtype, Layout("step"), regime)}, seed=4)
    script = script_of(inputs, case)
    assert "generated(" in script.text
    assert len(script.text) < 60_000
    known = namespace(script)
    made, _ = known["inputs"](known["Maker"]("cpu", 0))
    spec = FusionSpec(fused=lambda **given: given, reference=lambda **given: given, inputs=inputs)
    wanted = make_inputs(spec, case, CPU)["x"]
    assert torch.equal(made["x"].contiguous().view(torch.uint8), wanted.contiguous().view(torch.uint8))


def test_a_large_tensor_of_a_function_among_profiles_is_missing() -> None:
    """The script has no such function, and says so; where the case took a profile it has the generator."""
    inputs = {"x": tensor("n", values=values.one_of(values.normal(), lambda shape, *_: torch.rand(shape)))}
    script = {
        regime: script_of(
            inputs, Case({"n": 4 * LITERAL_BYTES}, "float32", {"x": TensorCase("float32", regime=regime)})
        )
        for regime in "01"
    }
    assert "generated(" in script["0"].text
    assert "generated(" not in script["1"].text
    assert "input x" in str(script["1"].missing)


def test_nested_tensors_and_constants_keep_their_layout() -> None:
    """A tensor inside a constant is written with the strides that it has."""
    inner = torch.arange(12.0).reshape(3, 4).t()
    inputs = {"x": tensor("n"), "pair": ConstantSpec((inner, 2)), "twice": derived(lambda x: x * 2)}
    script = namespace(script_of(inputs, Case({"n": 3}, "float32", {"x": TensorCase("float32")})))
    made, _ = script["inputs"](script["Maker"]("cpu", 1))
    assert torch.equal(made["pair"][0], inner)
    assert made["pair"][0].stride() == inner.stride()
    assert torch.equal(made["twice"], made["x"] * 2)


def test_what_could_not_be_written_is_said() -> None:
    """A closure, a fixture of no text and a large tensor of the user's own values are named with the reason."""

    def own(shape: Any, dtype: Any, generator: Any) -> torch.Tensor:
        return torch.ones(shape, dtype=dtype)

    case = Case({"n": LITERAL_BYTES}, "float32", {"x": TensorCase("float32")})
    script = script_of({"x": tensor("n", values=own)}, case, extra={"monkeypatch": object(), "k": 2})
    assert set(script.missing) == {"the fused call", "the reference", "input x", "fixture monkeypatch"}
    assert "test_script.py:" in script.missing["the fused call"]
    assert "too many to be written down" in script.missing["input x"]
    assert "NOT COMPLETE, input x" in script.text
    assert namespace(script)["main"](None, None, None, "cpu", script.missing) == 2


def test_an_access_that_only_the_lane_sees_is_none_that_does_not_show() -> None:
    """A store past a result leaves no trace in what the script looks at, which is told as what it cannot tell."""
    case = Case({"n": 3}, "float32", {"x": TensorCase("float32")})
    seen = failed("bounds", "past its end", access="out-of-bounds-store", file="/home/kernels.py", line=7)
    for verdict, there in ((seen, True), (failed("bounds", "bytes around x were written"), False)):
        told = namespace(script_of({"x": tensor("n")}, case, verdict=verdict))["failure"]().beyond
        assert ("saw the out-of-bounds-store at kernels.py:7" in told) == there


def test_a_python_without_torch_cannot_tell(tmp_path: Path) -> None:
    """An import that fails would leave 1, which is said of a failure that shows."""
    script = tmp_path / "script.py"
    script.write_text(script_of({"x": tensor("n")}, Case({"n": 3}, "float32", {"x": TensorCase("float32")})).text)
    done = subprocess.run([sys.executable, "-I", "-S", script], capture_output=True, text=True, check=False)
    assert (done.returncode, "has no torch" in done.stdout) == (2, True), done.stderr


@pytest.mark.parametrize("generator", [False, True])
def test_the_sources_need_torch_alone(generator: bool) -> None:
    """Nothing that is copied into a script imports this package or anything that comes with it."""
    tree = ast.parse(machinery(generator=generator))
    names = {a.name for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names}
    names |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.partition(".")[0] for name in names} - sys.stdlib_module_names == {"torch"}


def test_a_script_without_a_gpu_answers_what_launchers_ask_of_one() -> None:
    """As the CPU lane does, so that the same grids are launched; where there is a GPU nothing changes."""
    cuda = SimpleNamespace(device_count=lambda: 0)
    describe_gpu(cuda, PROPERTIES["multi_processor_count"])
    with cuda.device(None):
        facts = vars(cuda.get_device_properties(0))
    shared = facts.keys() & PROPERTIES.keys() - {"name"}
    assert {key: facts[key] for key in shared} == {key: PROPERTIES[key] for key in shared}
    assert facts.keys() <= PROPERTIES.keys()
    assert cuda.get_device_capability() == (PROPERTIES["major"], PROPERTIES["minor"])
    describe_gpu(cuda, 8)
    assert cuda.get_device_properties(0).multi_processor_count == 8
    real = SimpleNamespace(device_count=lambda: 1)
    describe_gpu(real, 8)
    assert vars(real).keys() == {"device_count"}


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
def test_a_mended_element_is_told_from_a_wrong_one(seen: dict[str, Any], now: float, again: bool) -> None:
    """Beyond what was allowed, or half as far off as before where a statistic failed; NaN in its place."""
    assert as_recorded(torch.tensor([0.0, now], dtype=torch.float64), seen) is again


@pytest.mark.parametrize("layout", [*LAYOUTS[:5], Layout("transposed", 0, 1), Layout("unflattenable", 3, 1)], ids=str)
@pytest.mark.parametrize("kind", ["random", "negative", "zero"])
def test_an_upstream_gradient_is_laid_as_it_was(kind: str, layout: Layout) -> None:
    """Every variant of a layout has its strides, offset and numbers, with NaN in the gaps."""
    output = torch.zeros(3, 2, 4)
    plan = geometry((3, 2, 4), layout)
    laid = {"strides": list(plan.strides), "offset": plan.offset, "storage": plan.storage}
    made = _upstream(output, kind, laid, 7)
    drawn = torch.randn(3, 2, 4, generator=torch.Generator().manual_seed(7))
    wanted = {"random": drawn, "negative": -drawn.abs(), "zero": drawn * 0}[kind]
    assert torch.equal(made, wanted)
    assert (made.stride(), made.storage_offset()) == (plan.strides, plan.offset)
    whole = torch.empty(0).set_(made.untyped_storage())
    assert len(whole) == plan.storage
    assert int(whole.isnan().sum()) == plan.storage - made.numel()


def test_writes_around_a_tensor_are_seen() -> None:
    """A byte changed before, between and behind the elements is outside of them, one of theirs is not."""
    maker = Maker("cpu", 0)
    x = maker(
        "x",
        "float32",
        [2, 2],
        [4, 1],
        offset=1,
        storage=8,
        around="7f800001 7149f2ca",
        bits="0 0 0 0".replace("0", "00000000"),
    )
    placed = maker.placed[0]
    outside: Callable[[], int] = lambda: int(((placed.buffer != placed.before) & ~placed.own).sum())  # noqa: E731
    x.fill_(1.0)
    assert outside() == 0
    whole = torch.empty(0).set_(x.untyped_storage())
    whole[3] = 0.0
    placed.buffer[0] ^= 1
    placed.buffer[-1] ^= 1
    assert outside() == 2 + 3
