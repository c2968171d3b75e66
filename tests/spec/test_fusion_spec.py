"""``FusionSpec`` refuses what contradicts itself, and says how to mend it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from pytest_fusion import values
from pytest_fusion.errors import SpecError
from pytest_fusion.spec.dims import Dim, dim
from pytest_fusion.spec.fusion_spec import FusionSpec
from pytest_fusion.spec.inputs import derived, optional, tensor
from pytest_fusion.spec.promises import Tolerance


def one(x: Any) -> Any:
    return x


def make(**changes: Any) -> FusionSpec:
    return FusionSpec(**{"fused": one, "reference": one, "inputs": {"x": tensor("rows hidden")}, **changes})


def test_an_input_that_the_reference_does_not_take_is_an_error_with_the_fix() -> None:
    """The message names the reference, its parameters, the input, and two ways to mend it."""
    with pytest.raises(SpecError) as caught:
        make(fused=lambda x, eps: x, inputs={"x": tensor("n"), "eps": 1e-6})
    text = str(caught.value)
    assert "reference one(x) does not take the input 'eps'" in text
    assert "Add 'eps' to its parameters" in text
    assert "reference=lambda eps" in text


def test_arguments_of_the_reference_with_defaults_are_fine() -> None:
    """Only a parameter that nothing gives is an error."""
    make(reference=lambda x, eps=1e-6: x)
    with pytest.raises(SpecError, match="the reference needs 'eps'"):
        make(reference=lambda x, eps: x)


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"fused": 3}, ["fused=3 cannot be called"]),
        ({"inputs": {}}, ["no inputs", "tensor("]),
        ({"inputs": [tensor("n")]}, ["inputs= is a list; expected a dict from names to inputs"]),
        ({"inputs": {1: tensor("n")}}, ["inputs={1: ...}; expected the name of a parameter"]),
        ({"dims": ["hidden"]}, ["dims=['hidden']; expected a dict from names to bounds"]),
        ({"mutates": True}, ["mutates=True; expected a name or several"]),
        ({"invariant": True}, ["invariant=True; expected a name or several"]),
        ({"grad": 3}, ["grad=3; expected a name or several"]),
        ({"grad": True, "inputs": {"x": tensor("n", dtype=torch.int64)}}, ["grad=True, but no input is"]),
        ({"rng": True, "distribution": 3}, ["distribution=3; expected a name or several"]),
        ({"dtypes": [torch.int32]}, ["not floating", "dtype=torch.int64"]),
        ({"dims": {"hiden": dim(1)}}, ["'hiden'", "did you mean 'hidden'"]),
        ({"dims": {"hidden": "8"}}, ["expected dim(min, max"]),
        ({"dims": {"hidden": Dim(5, 3)}}, ["no size is at least 5 and at most 3"]),
        ({"mutates": "y"}, ["mutates='y' names no input"]),
        ({"clobbers": ["y"]}, ["clobbers='y' names no input"]),
        ({"grad": ["y"]}, ["grad='y' names no input"]),
        ({"deterministic": "out"}, ["deterministic='out'", "expected True, False or a dict"]),
        ({"deterministic": {"out": "no"}}, ["deterministic={'out': 'no'}"]),
        ({"invariant": "row"}, ["did you mean 'rows'"]),
        ({"tolerance": "loose"}, ["expected 'auto' or Tolerance"]),
        ({"rejects": [3]}, ["is not an exception type"]),
        ({"rejects": "ValueError"}, ["rejects='ValueError' is not an exception type"]),
        ({"rejects": ValueError("no")}, ["is not an exception type"]),
        ({"without": ["repeat"]}, ["expected a dict from names to reasons"]),
        ({"without": {"repeat": None}}, ["without={'repeat': None} gives no reason"]),
        ({"without": {"repeat": " "}}, ["gives no reason"]),
        ({"max_launches": "1"}, ["max_launches='1'; expected a whole number"]),
        ({"max_launches": True}, ["max_launches=True; expected a whole number"]),
        ({"max_recompiles": -1}, ["expected a whole number of 0 or more"]),
        ({"max_launches": -1}, ["expected a whole number of 0 or more"]),
        ({"tolerence": "auto"}, ["'tolerence'", "did you mean 'tolerance'"]),
    ],
)
def test_a_contradiction_is_an_error_that_names_it(changes: dict[str, Any], parts: list[str]) -> None:
    """Each wrong keyword or value is refused by a message with the fix in it."""
    with pytest.raises(SpecError) as caught:
        make(**changes)
    assert all(part in str(caught.value) for part in parts), str(caught.value)


def test_none_is_nothing_and_one_size_to_measure_needs_no_list() -> None:
    """What builds a spec by program says None where a person says nothing."""
    nothing = dict.fromkeys(("mutates", "clobbers", "invariant", "rejects", "without", "dims", "bench"))
    spec, plain = make(**nothing), make()
    assert all(getattr(spec, name) == getattr(plain, name) for name in nothing)
    sizes = {"rows": 8, "hidden": 8}
    assert make(bench=sizes).bench == (sizes,)


def test_gradients_of_what_may_float_may_be_asked() -> None:
    """What is derived or drawn may be a floating tensor, and a constant tensor may be one."""
    for given in (
        derived(lambda hidden: hidden),
        st.just(1),
        torch.ones(3),
        tensor("n", dtype=[torch.int8, torch.float16]),
    ):
        make(inputs={"x": given}, dims={"hidden": dim(1)} if hasattr(given, "needs") else {}, grad=True)


def test_only_tensors_are_written_in_place() -> None:
    """``mutates`` of a constant is refused."""
    with pytest.raises(SpecError, match="not a tensor"):
        make(fused=lambda x, eps: x, reference=lambda x, eps: x, inputs={"x": tensor("n"), "eps": 1}, mutates="eps")


def test_only_floating_inputs_have_gradients() -> None:
    """``grad`` of indices would silently ask for nothing."""
    inputs = {"x": tensor("n"), "i": tensor("n", dtype=torch.int64)}
    with pytest.raises(SpecError, match="grad='i' names an input of dtype int64"):
        make(fused=lambda x, i: x, reference=lambda x, i: x, inputs=inputs, grad=["x", "i"])


@pytest.mark.parametrize(
    ("inputs", "dims"),
    [
        ({"x": tensor("n k"), "k": st.integers(1, 4)}, {"k": dim(1, 4)}),
        ({"x": tensor("n k"), "k": st.integers(1, 4)}, {}),
        ({"x": tensor("n k"), "k": 4}, {}),
        ({"x": derived(lambda k: k), "k": tensor("n k")}, {}),
        ({"x": derived(lambda b, k: (b, k)), "k": optional(st.integers(1, 4)), "b": 1}, {"k": 3}),
    ],
)
def test_a_dim_and_an_input_of_one_name_are_refused(inputs: dict[str, Any], dims: dict[str, Any]) -> None:
    """Whoever asks for the name gets one of them, and not always the one that is meant; the message names both."""
    with pytest.raises(SpecError, match="'k' is the name of a dim and of an input") as caught:
        make(fused=lambda **k: k, reference=lambda **k: k, inputs=inputs, dims=dims)
    assert ("derived input 'x' needs it" in str(caught.value)) == (not isinstance(inputs["x"], type(tensor("n"))))


def test_a_tensor_may_be_called_as_an_axis_is() -> None:
    """Nobody takes ``bias`` for the length of ``bias``, nor a size that is derived for another one."""
    inputs = {"x": tensor("rows bias"), "bias": tensor("bias"), "rows": derived(lambda x: x.shape[0])}
    make(fused=lambda **k: k, reference=lambda **k: k, inputs=inputs, dims={"rows": dim(1), "bias": dim(1)})


def test_dims_in_a_circle_are_refused() -> None:
    """Two dims that are multiples of each other have no order to draw them in."""
    with pytest.raises(SpecError, match="in a circle"):
        make(dims={"rows": dim(multiple_of="hidden"), "hidden": dim(multiple_of="rows")})


def test_a_batch_is_no_single_size() -> None:
    """``*batch`` can neither be bounded nor stand in a bound."""
    batched = {"x": tensor("*batch hidden")}
    with pytest.raises(SpecError, match="cannot be bounded"):
        make(inputs=batched, dims={"batch": dim(1)})
    with pytest.raises(SpecError, match="several dimensions"):
        make(inputs=batched, dims={"hidden": dim(multiple_of="batch")})
    with pytest.raises(SpecError, match="several dimensions"):
        make(inputs={"x": tensor("*batch hidden", dtype=torch.int64, values=values.indices("batch"))})


def test_a_derived_input_needs_something_that_exists() -> None:
    """A parameter that names neither input, dim nor generator is refused unless it has a default."""
    inputs = {"x": tensor("rows"), "y": derived(lambda row: row)}
    with pytest.raises(SpecError, match="did you mean 'rows'"):
        make(fused=lambda x, y: x, reference=lambda x, y: x, inputs=inputs)
    inputs["y"] = derived(lambda x, scale=2: x)
    make(fused=lambda x, y: x, reference=lambda x, y: x, inputs=inputs)


def test_derived_inputs_in_a_circle_are_refused_when_the_spec_is_written() -> None:
    """Two inputs derived from each other are an error before anything runs."""
    inputs = {"x": derived(lambda y: y), "y": derived(lambda x: x)}
    with pytest.raises(SpecError, match=r"\['x', 'y'\] need each other in a circle"):
        make(fused=lambda x, y: x, reference=lambda x, y: x, inputs=inputs)


def test_a_derived_input_named_like_a_dim_cannot_take_it() -> None:
    """``n`` is both; whoever wants the dim as an argument is told to rename one, not of a circle."""
    inputs = {"x": tensor("rows n"), "n": derived(lambda n: n)}
    with pytest.raises(SpecError, match=r"'n' needs 'n', itself; rename the dim or the input"):
        make(fused=lambda x, n: x, reference=lambda x, n: x, inputs=inputs)


def test_a_dim_is_narrowed_by_the_dims_that_are_multiples_of_it() -> None:
    """With 1 to 32 heads that are a multiple of kv_heads, kv_heads is 1 to 32 too; without a minimum, 0 stays."""
    inputs = {"x": tensor("heads kv")}
    narrow = make(inputs=inputs, dims={"heads": dim(1, 32, multiple_of="kv")})
    assert narrow.bound("kv") == Dim(1, 32)
    assert make(inputs=inputs, dims={"heads": dim(0, 32, multiple_of="kv")}).bound("kv") == Dim(0, 32)
    assert narrow.with_(name="again").dims == narrow.dims


def test_bounds_that_no_two_sizes_satisfy_are_refused() -> None:
    """At most 4 heads cannot be a multiple of 8 kv_heads; where 0 heads are allowed, they can."""
    inputs = {"x": tensor("heads kv")}
    with pytest.raises(SpecError, match="no size of 'kv' has one within these bounds"):
        make(inputs=inputs, dims={"kv": 8, "heads": dim(1, 4, multiple_of="kv")})
    make(inputs=inputs, dims={"kv": 8, "heads": dim(0, 4, multiple_of="kv")})


def test_names_may_be_given_alone_or_in_a_sequence() -> None:
    """A single name, a single exception type and a sequence are normalised to tuples."""
    spec = make(mutates="x", rejects=ValueError, invariant=["rows"], grad="x")
    assert (spec.mutates, spec.rejects, spec.invariant, spec.grad) == (("x",), (ValueError,), ("rows",), ("x",))


def test_the_spec_knows_its_dims_wherever_they_are_named() -> None:
    """Shapes, bounds of values and multiples all name dims of a case."""
    spec = make(
        fused=lambda x, ids, k: x,
        reference=lambda x, ids, k: x,
        inputs={
            "x": tensor("*batch hidden"),
            "ids": optional(tensor("n", dtype=torch.int64, values=values.indices("vocab"))),
            "k": st.integers(1, 3),
        },
        dims={"hidden": dim(multiple_of="group")},
    )
    assert set(spec.dim_names) == {"batch", "hidden", "n", "vocab", "group"}
    assert spec.batch_names == ("batch",)
    assert spec.dim_order.index("group") < spec.dim_order.index("hidden")


def test_a_copy_of_a_spec_is_equal_in_its_parts() -> None:
    """Copying and ``with_`` go through the same checks and change nothing else."""
    spec = make(tolerance=Tolerance(1e-3))
    assert copy.copy(spec).inputs == spec.inputs
    assert spec.with_(name="other").tolerance == Tolerance(1e-3)
    with pytest.raises(SpecError, match="did you mean 'dims'"):
        spec.with_(dimms={})


@pytest.mark.parametrize("wrong", [{"rtol": -1.0}, {"atol": float("nan")}])
def test_a_tolerance_is_finite_and_not_negative(wrong: dict[str, float]) -> None:
    """Infinite, negative and NaN tolerances are refused."""
    with pytest.raises(SpecError, match="finite number"):
        Tolerance(**wrong)
