"""Recordings as cases: what was recorded comes back, and what cannot is counted with its reason."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from pytest_fusion import FusionSpec, canary, derived, dim, optional, tensor, values
from pytest_fusion.canary.recording import recordings
from pytest_fusion.canary.recording.matching import UnmatchedError, match
from pytest_fusion.case import regimes
from pytest_fusion.case.case_model import Case
from pytest_fusion.case.make import make_inputs
from pytest_fusion.case.stated import misfit
from pytest_fusion.errors import CanaryError
from pytest_fusion.run.placing import place
from tests.forked import run_pytest

CPU = torch.device("cpu")


def norm(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    return x


def spec_of(function: Callable[..., Any] = norm, inputs: dict[str, Any] | None = None, **more: Any) -> FusionSpec:
    given = inputs or {"x": tensor("*batch hidden"), "weight": optional(tensor("hidden")), "eps": 1e-6}
    return FusionSpec(fused=function, reference=function, inputs=given, name="norm", **more)


def recorded(folder: Path, function: Callable[..., Any], *calls: tuple[Any, ...], **options: Any) -> Path:
    """Calls are tuples of positional arguments, the last of them a dict of keywords."""
    recorder = canary.record("norm", function, folder, interval_s=3600, **options)
    for *args, kwargs in calls:
        recorder(*args, **kwargs)
    recorder.close()
    return folder


def only(found: recordings.Cases) -> Case:
    assert found.unmatched == {}
    (one,) = found.found
    return one.case


VIEWS = {
    "contiguous": lambda: torch.randn(2, 3, 8),
    "rows of a wider buffer": lambda: torch.randn(2, 3, 24)[..., 8:16],
    "transposed": lambda: torch.randn(3, 2, 8).transpose(0, 1),
    "every other": lambda: torch.randn(2, 3, 16)[..., ::2],
    "expanded": lambda: torch.randn(1, 3, 8).expand(2, 3, 8),
    "misaligned": lambda: torch.randn(100)[7:55].view(2, 3, 8),
    "empty": lambda: torch.randn(2, 0, 8),
    "vector": lambda: torch.randn(8),
}


@pytest.mark.parametrize("name", VIEWS)
def test_the_kernel_gets_the_layout_that_it_had(tmp_path: Path, name: str) -> None:
    """Shape, strides and alignment of the replayed tensor are the recorded one's, and its values are of its range."""
    x = VIEWS[name]()
    spec = spec_of()

    case = only(recordings.cases(recorded(tmp_path, norm, (x, torch.ones(8), {})), spec))
    logical = make_inputs(spec, case, CPU)
    placed = place(logical, case, CPU, "nan").arguments["x"]

    assert misfit(spec, case) is None
    assert Case.from_json(json.loads(json.dumps(case.as_json()))) == case
    assert (placed.shape, placed.stride(), placed.dtype) == (x.shape, x.stride(), x.dtype)
    assert (placed.data_ptr() - x.data_ptr()) % 64 == 0
    assert bool(placed.storage_offset()) >= bool(x.storage_offset())
    if x.numel():
        assert float(placed.min()) == pytest.approx(float(x.min()))
        assert float(placed.max()) == pytest.approx(float(x.max()))
    assert torch.equal(logical["weight"], torch.ones(8))


def test_recorded_tensors_come_back_to_the_bit(tmp_path: Path) -> None:
    """With tensors=True a case holds the very elements, NaN and signed zeros too."""
    pytest.importorskip("safetensors")
    x = torch.tensor([[0.0, -0.0, torch.nan, 5.0], [1e-40, -torch.inf, 2.0, 3.0]])[:, ::2]
    spec = spec_of()

    case = only(recordings.cases(recorded(tmp_path, norm, (x, {}), tensors=True), spec))
    made = make_inputs(spec, case, CPU)["x"]

    assert torch.equal(made.view(torch.int32), x.contiguous().view(torch.int32))
    assert case.absent == ("weight",)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize(
    ("x", "special"),
    [(torch.full((3, 8), 5e4), True), (torch.tensor([[1.0, torch.nan] * 4]), True), (torch.randn(3, 8) * 50, False)],
    ids=["huge", "nan", "ordinary"],
)
def test_special_values_are_told_from_others(tmp_path: Path, x: Tensor, special: bool, keep: bool) -> None:
    """Checks that leave NaN and values near overflow alone know them in recorded cases too."""
    if keep:
        pytest.importorskip("safetensors")
    case = only(recordings.cases(recorded(tmp_path, norm, (x.half(), {}), tensors=keep), spec_of()))

    assert regimes.is_special(case.tensors["x"].regime) is special


def sizes(x: Tensor, y: Tensor | None = None, **_: Any) -> Tensor:
    return x


@pytest.mark.parametrize(
    ("shapes", "dims", "bounds", "expected"),
    [
        (["a b", "b"], [(3, 5), (5,)], {}, {"a": 3, "b": 5}),
        (["rows 2*half", "rows half"], [(3, 10), (3, 5)], {}, {"rows": 3, "half": 5}),
        (["2*half", ""], [(10,), ()], {}, {"half": 5}),
        (["n+1", ""], [(6,), ()], {}, {"n": 5}),
        (["heads*width", "width"], [(12,), (4,)], {}, {"heads": 3, "width": 4}),
        (["k k//2", ""], [(9, 4), ()], {}, {"k": 9}),
        (["*b n", "*b"], [(2, 3, 4), (2, 3)], {}, {"b": (2, 3), "n": 4}),
        (["n 4", ""], [(7, 4), ()], {}, {"n": 7}),
        (["a", ""], [(3,), ()], {"fixed": 12}, {"a": 3, "fixed": 12}),
    ],
)
def test_sizes_are_solved(
    tmp_path: Path, shapes: list[str], dims: list[tuple[int, ...]], bounds: dict[str, int], expected: dict[str, Any]
) -> None:
    """Names, expressions of one unknown, batches, literals and dims of one size follow from the shapes."""
    inputs: dict[str, Any] = {"x": tensor(shapes[0]), "y": tensor(shapes[1])}
    if bounds:
        inputs["z"] = derived(lambda fixed: fixed)
    folder = recorded(tmp_path, sizes, (*[torch.ones(d) for d in dims], {}))

    case = only(recordings.cases(folder, spec_of(sizes, inputs, dims=bounds)))

    assert case.sizes == expected


@pytest.mark.parametrize(
    ("shapes", "dims", "why"),
    [
        (["a a", ""], [(3, 4), ()], "size of 4 where 'a' is 3"),
        (["2*half", ""], [(7,), ()], "size of 7 where the spec has '2 * half'"),
        (["a b", ""], [(3,), ()], "1 dimensions where the spec has 'a b'"),
        (["*b n", "*b"], [(2, 3, 4), (3, 2)], "'*b' is (2, 3)"),
        (["a*b", ""], [(12,), ()], "follows from no argument"),
        (["a//2", ""], [(4,), ()], "follows from no argument"),
        (["a 5", ""], [(4, 4), ()], "size of 4 where '5' is 5"),
        (["small", ""], [(99,), ()], "outside of its bounds"),
    ],
)
def test_shapes_that_are_not_the_specs_are_told(
    tmp_path: Path, shapes: list[str], dims: list[tuple[int, ...]], why: str
) -> None:
    """A call of other shapes is no case, and neither is one that leaves a size open: nothing is guessed."""
    folder = recorded(tmp_path, sizes, (*[torch.ones(d) for d in dims], {}))
    bounds = {"small": dim(0, 50)} if "small" in shapes else {}

    found = recordings.cases(folder, spec_of(sizes, {"x": tensor(shapes[0]), "y": tensor(shapes[1])}, dims=bounds))

    assert found.found == []
    (reason,) = found.unmatched
    assert why in reason


X = torch.randn(3, 8)


@pytest.mark.parametrize(
    ("call", "spec", "why"),
    [
        ((X, {"eps": 1e-5}), spec_of(), "eps=1e-05 where the spec always has 1e-06"),
        ((X.double(), {}), spec_of(), "'x' is float64, which is not among"),
        ((X, torch.ones(8).half(), {}), spec_of(), "one dtype for both"),
        ((X, None, {}), spec_of(inputs={"x": tensor("a b"), "weight": tensor("b")}), "'weight' is None where"),
        (
            (X, torch.ones(8), {}),
            spec_of(inputs={"x": tensor("a b")}),
            "weight is a tensor [8], and the spec has no input of that name",
        ),
        ((X.t(), {}), spec_of(inputs={"x": tensor("a b", layouts="contiguous")}), "the spec draws contiguous only"),
        ((X.as_strided((3, 4), (1, 1)), {}), spec_of(inputs={"x": tensor("a b")}), "elements overlap"),
        ((X.expand(2, 3, 8), {}), spec_of(inputs={"x": tensor("a b c")}, mutates="x"), "is written, and its strides"),
        ((X / 0, {}), spec_of(inputs={"x": tensor("a b", values=values.finite())}), "NaN or infinities, which values="),
        (
            (torch.tensor([5, 9]), {}),
            spec_of(inputs={"x": tensor("n", dtype=torch.int64, values=values.integers(0, 8))}),
            "'x' held 5 to 9, where values=integers(low=0, high=8) is 0 to 8",
        ),
        ((object(), {}), spec_of(), "'x' is object where the spec has a tensor"),
        (([X, X], {}), spec_of(), "'x' is a container with tensors where"),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)
def test_what_a_spec_cannot_express_is_counted_with_its_reason(
    tmp_path: Path, call: tuple[Any, ...], spec: FusionSpec, why: str
) -> None:
    """No such call becomes a case that it is not, and none is dropped: the calls add up."""
    found = recordings.cases(recorded(tmp_path, norm, call, call), spec)

    assert found.found == []
    (reason,) = found.unmatched
    assert why in reason
    assert found.unmatched[reason] == found.total == 2
    assert any(f"no case for 2 calls: {reason}" == line for line in found.lines())


def lookup(table: Tensor, index: Tensor, mode: str = "sum", scale: float = 1.0, out: Tensor | None = None) -> Tensor:
    return table


def test_indices_stay_indices_and_drawn_values_are_those_of_the_call(tmp_path: Path) -> None:
    """Indices are drawn in their range, a dim that only they show is large enough, plain arguments are the call's."""
    inputs = {
        "table": tensor("n width"),
        "index": tensor("k", dtype=[torch.int64, torch.int32], values=values.indices("n")),
        "mode": st.sampled_from(["sum", "max"]),
        "scale": st.floats(0, 4),
    }
    spec = spec_of(lookup, inputs)
    call = (torch.randn(50, 4), torch.tensor([7, 3, 44], dtype=torch.int32), {"mode": "max", "scale": 2.5})

    case = only(recordings.cases(recorded(tmp_path, lookup, call), spec))
    made = make_inputs(spec, case, CPU)

    assert (made["mode"], made["scale"], made["index"].dtype) == ("max", 2.5, torch.int32)
    assert int(made["index"].max()) <= 44
    alone = spec_of(lookup, {"table": tensor("m width"), **{k: v for k, v in inputs.items() if k != "table"}})
    assert only(recordings.cases(tmp_path, alone)).sizes["n"] == 45


def test_what_is_not_as_recorded_is_noted(tmp_path: Path) -> None:
    """Derived inputs, values that a spec computes, shared memory: the case says in what it differs from the call."""

    def function(x: Tensor, y: Tensor, perm: Tensor, lengths: list[int]) -> Tensor:
        return x

    inputs = {
        "x": tensor("n"),
        "y": tensor("n"),
        "perm": tensor("n", dtype=torch.int64, values=values.permutation()),
        "lengths": derived(lambda n: [n]),
    }
    base = torch.randn(5)
    spec = spec_of(function, inputs)

    found = recordings.cases(recorded(tmp_path, function, (base, base, torch.arange(5), [5], {})), spec)

    notes = " | ".join(found.found[0].notes)
    assert "'lengths' is computed by the spec" in notes
    assert "the values of 'perm' are the spec's own, permutation()" in notes
    assert "x and y shared memory" in notes
    assert sorted(make_inputs(spec, found.found[0].case, CPU)["perm"].tolist()) == [0, 1, 2, 3, 4]


def test_processes_add_up_and_weights_are_calls(tmp_path: Path) -> None:
    """Calls of several processes count together, a bucket that one of them kept nothing of counts with the others'."""
    recorded(tmp_path, norm, *[(torch.randn(4, 8), {})] * 100)
    recorded(tmp_path, norm, *[(torch.randn(4, 8), {})] * 30, *[(torch.randn(40, 8), {})] * 10)
    third = canary.record("norm", norm, tmp_path, interval_s=3600)
    with third._tending:
        third(torch.randn(4, 8))
        third._waiting.clear()
    third.close()
    spec = spec_of()

    found = recordings.cases(tmp_path, spec)

    small = [one.weight for one in found.found if one.case.sizes["batch"] == (4,)]
    assert (found.total, found.files, found.covered) == (141, 3, pytest.approx(1.0))
    assert sum(weight for _, weight in found) == pytest.approx(141)
    assert sum(small) == pytest.approx(131)
    assert (len(found), len(small)) == (64 + 30 + 10, 64 + 30)
    few = recordings.cases(tmp_path, spec, per_bucket=3)
    assert (len(few), sum(weight for _, weight in few)) == (6, pytest.approx(141))


def test_traffic_of_which_nothing_is_kept_is_not_forgotten(tmp_path: Path) -> None:
    """Counted calls without a sample are uncovered traffic, and never a recording that is complete."""
    recorder = canary.record("norm", norm, tmp_path, interval_s=3600)
    with recorder._tending:
        for _ in range(5):
            recorder(torch.randn(4, 8))
        recorder._waiting.clear()
    recorder.close()

    found = recordings.cases(tmp_path, spec_of())

    assert (found.total, found.covered, found.uncovered) == (5, 0.0, {"float32[2^2,2^3]": 5})
    assert "none of them is in the sample" in found.lines()[-1]


def test_parameters_of_other_names_are_matched_by_hand(tmp_path: Path) -> None:
    """``rename`` tells the spec's names; without it the reason names the argument that is missing."""
    folder = recorded(tmp_path, lambda hidden_states, w: hidden_states, (X, torch.ones(8), {}))

    without = recordings.cases(folder, spec_of())
    case = only(recordings.cases(folder, spec_of(), rename={"hidden_states": "x", "w": "weight"}))

    assert list(without.unmatched) == ["the call has no argument 'x'"]
    assert case.sizes == {"batch": (3,), "hidden": 8}


def test_what_the_caller_left_to_the_function_needs_no_input(tmp_path: Path) -> None:
    """A default of the recorded function that the spec does not know is no reason; the same value, given, is one."""

    def function(x: Tensor, eps: float = 1e-6, inplace: bool = False, *, groups: int = 4) -> Tensor:
        return x

    spec = spec_of(inputs={"x": tensor("a b"), "eps": 1e-6})
    left = recordings.cases(recorded(tmp_path / "left", function, (X, {})), spec)
    given = recordings.cases(recorded(tmp_path / "given", function, (X, {"groups": 4})), spec)

    assert only(left).sizes == {"a": 3, "b": 8}
    assert list(given.unmatched) == ["groups is 4, and the spec has no input of that name"]


def test_a_drawn_input_may_be_left_out(tmp_path: Path) -> None:
    """None for an optional drawn value is a case without it."""
    spec = spec_of(inputs={"x": tensor("a b"), "eps": optional(st.floats(0, 1))})

    case = only(recordings.cases(recorded(tmp_path, norm, (X, {"eps": None})), spec))

    assert make_inputs(spec, case, CPU)["eps"] is None
    assert misfit(spec, case) is None


def test_a_method_is_recorded_without_its_object(tmp_path: Path) -> None:
    """A recorder stands where a method stands; ``rename`` leaves out ``self``, which no spec has."""

    class Layer:
        forward = canary.record("norm", lambda self, x: x + 1, tmp_path, interval_s=3600)

    assert torch.equal(Layer().forward(X), X + 1)
    Layer.forward.close()

    without = recordings.cases(tmp_path, spec_of())
    case = only(recordings.cases(tmp_path, spec_of(), rename={"self": None}))

    assert list(without.unmatched) == ["self is Layer, and the spec has no input of that name"] or "self is" in str(
        without
    )
    assert case.sizes == {"batch": (3,), "hidden": 8}


def test_several_functions_in_a_folder_are_told_apart(tmp_path: Path) -> None:
    """The spec's name chooses; without one of that name the choice is the user's, and a wrong one gets a hint."""
    recorded(tmp_path, norm, (X, {}))
    other = canary.record("softmax", norm, tmp_path, interval_s=3600)
    other(X)
    other.close()

    assert recordings.cases(tmp_path, spec_of()).total == 1
    with pytest.raises(CanaryError, match=r"recordings of norm, softmax; choose one, as in name='norm'"):
        recordings.cases(tmp_path, spec_of().with_(name="other"))
    with pytest.raises(CanaryError, match="'sofmax' was not recorded; did you mean 'softmax'"):
        recordings.cases(tmp_path, spec_of(), name="sofmax")
    with pytest.raises(CanaryError, match="cannot read the recording"):
        recordings.cases(tmp_path / "nowhere", spec_of())
    (tmp_path / "empty").mkdir()
    with pytest.raises(CanaryError, match="nothing was recorded in"):
        recordings.cases(tmp_path / "empty", spec_of())


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"{}\n",
        b"[1, 2]\n",
        b'{"event":"call","bucket":"b","place":0,"call":0,"arguments":{"x":{"tensor":[3,8]}}}\n',
        b'{"event":"call","bucket":"b","place":0,"call":0,"arguments":{"x":3}}\n',
        b'{"event":"call","bucket":"b","arguments":{}}\n',
        b'{"event":"calls","calls":{"b":7',
        b"\xff\xfe\n",
    ],
)
def test_damaged_lines_are_no_cases_and_no_errors(tmp_path: Path, line: bytes) -> None:
    """What a kill, a full disk or a stranger left in a file costs that line alone."""
    (path,) = recorded(tmp_path, norm, (X, {})).glob("*.recording.jsonl")
    with path.open("ab") as file:
        file.write(line)

    found = recordings.cases(path, spec_of())

    assert len(found) == 1
    assert found.total == 1 + sum(found.unmatched.values())


def test_a_later_schema_is_refused(tmp_path: Path) -> None:
    """A file of another version's form is an error that says so, not a recording of nothing."""
    (path,) = recorded(tmp_path, norm, (X, {})).glob("*.recording.jsonl")
    path.write_text(path.read_text().replace('"schema":1', '"schema":2'))

    with pytest.raises(CanaryError, match="has schema 2, this version reads 1"):
        recordings.cases(path, spec_of())


def test_a_line_names_no_file_elsewhere() -> None:
    """Tensors are those of the recording's own folder, whatever a line says; else the summary is what there is."""
    node = {"tensor": [2], "dtype": "float32", "device": "cpu", "strides": [1], "offset": 0, "pointer": 0}
    seen = {"low": 0, "high": 1, "mean": 0.5, "rms": 0.6, "absolute": 0.5}
    spec = spec_of(inputs={"x": tensor("a")})

    for name, kind in (
        ("../../x.safetensors", "like("),
        ("/etc/x.safetensors", "like("),
        ("ab.safetensors", "stored(/f/ab"),
    ):
        event = {"tensors": name, "arguments": {"x": {**node, "values": seen}}}
        assert match(spec, event, Path("/f")).case.tensors["x"].regime.startswith(kind)


def test_a_layout_that_no_case_affords_takes_the_nearest() -> None:
    """Slices a gigabyte apart are replayed as rows with gaps, and the case says so."""
    node = {"tensor": [4, 8], "dtype": "float32", "device": "cpu", "strides": [1 << 28, 1], "offset": 0, "pointer": 0}
    event = {
        "arguments": {
            "x": {**node, "values": {"seen": 32, "low": 0, "high": 1, "mean": 0.5, "rms": 0.6, "absolute": 0.5}}
        }
    }

    matched = match(spec_of(inputs={"x": tensor("a b")}), event)

    assert matched.case.tensors["x"].layout.kind == "padded"
    assert "too far apart for a case" in matched.notes[0]
    with pytest.raises(UnmatchedError, match="not that of a recording"):
        match(spec_of(), {})


def test_cases_are_pinned_for_the_test_of_their_spec(tmp_path: Path, pytester: pytest.Pytester) -> None:
    """The heaviest cases become files that the test with that spec runs first: a bug in them is found by name."""
    recorded(tmp_path, norm, *[(torch.randn(37, 24)[:, :8], {})] * 9, (torch.randn(2, 8), {}))
    found = recordings.cases(tmp_path, spec_of())
    with pytest.raises(CanaryError, match="named fusion_replays"):
        recordings.pin(found, spec_of(), tmp_path / "pins")

    pins = recordings.pin(found, spec_of(), pytester.path / "fusion_replays", most=9)
    pytester.makepyfile(
        """
        import torch
        from pytest_fusion import FusionSpec, tensor, optional

        def right(x, weight, eps):
            return x * 2

        def fused(x, weight, eps):
            return x * (3 if x.shape == (37, 8) and x.stride(0) == 24 else 2)

        INPUTS = {"x": tensor("*batch hidden"), "weight": optional(tensor("hidden")), "eps": 1e-6}
        test_norm = FusionSpec(fused=fused, reference=right, inputs=INPUTS, name="norm").test()
        """
    )
    result = run_pytest(pytester, "--fusion-device", "cpu", "-p", "no:cacheprovider")

    assert len(pins) == 9
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*a recorded call fails, pinned in fusion_replays/*"])
    result.stdout.no_fnmatch_line("*mended*")
