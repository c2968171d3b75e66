"""`FusionSpec`: one description of a fused kernel that serves the test, the benchmark and the canary."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from pytest_fusion.errors import SpecError
from pytest_fusion.spec import keywords as given
from pytest_fusion.spec.dims import Dim, dim, parse_expression
from pytest_fusion.spec.dtypes import FLOATING, normalise_dtypes
from pytest_fusion.spec.inputs import ConstantSpec, DerivedSpec, TensorSpec, as_input, unwrap
from pytest_fusion.spec.promises import Tolerance
from pytest_fusion.spec.random_numbers import Rng, as_outputs, as_rng, completed
from pytest_fusion.spec.values import ValueProfile
from pytest_fusion.spec.wording import checks_words, did_you_mean

# In ``clobbers=``: backward may overwrite the upstream gradient.
UPSTREAM = "grad_outputs"

DEFAULT_DTYPES = ("float32", "float16", "bfloat16")

_test_factory: list[Callable[[FusionSpec], Callable[..., None]]] = []


def register_test_factory(factory: Callable[[FusionSpec], Callable[..., None]]) -> None:
    """Set how a spec becomes a pytest test; the plugin calls this."""
    _test_factory[:] = [factory]


@checks_words(SpecError)
@dataclass(frozen=True, kw_only=True)
class FusionSpec:
    """A fused kernel, its unfused reference, and the inputs on which they must agree.

    Both are called with the inputs by keyword. ``fused_equivalent`` explains the fields. Raises ``SpecError`` when they
    contradict each other.
    """

    fused: Callable[..., Any]
    reference: Callable[..., Any]
    inputs: Mapping[str, Any]
    name: str = ""
    dims: Mapping[str, Any] = field(default_factory=dict)
    dtypes: Any = DEFAULT_DTYPES
    grad: bool | str | Sequence[str] = False
    deterministic: bool | Mapping[str, bool] = True
    rng: bool | str | Rng | None = None
    distribution: bool | str | Sequence[str] = ()
    invariant: str | Sequence[str] = ()
    mutates: str | Sequence[str] = ()
    clobbers: str | Sequence[str] = ()
    rejects: type[BaseException] | Sequence[type[BaseException]] = ()
    max_launches: int | None = None
    # Recompilations over a sweep of sizes; a bound switches the check `compile` on.
    max_recompiles: int | None = None
    compile: bool = False
    # The call waits for the device, on purpose.
    syncs: bool = False
    # Calls that break the spec must be refused, or be right.
    malformed: bool = False
    tolerance: str | Tolerance = "auto"
    without: Mapping[str, str] = field(default_factory=dict)
    # Findings that are accepted, by code, with the reason.
    allow: Mapping[str, str] = field(default_factory=dict)
    # Hazards fail the test; ``None``: as --fusion-strict says.
    strict: bool | None = None
    bench: Sequence[Mapping[str, Any]] | Mapping[str, Any] = ()
    # Store outputs of a few pinned cases with the baseline of --fusion-bench.
    golden: bool = False
    bench_limits: Mapping[str, Any] = field(default_factory=dict)
    requires: Any = ()
    # Parameters of a decorated test that are fixtures or parametrizations: no inputs, but known to both functions.
    fixtures: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        def put(name: str, value: Any) -> None:
            object.__setattr__(self, name, value)

        for role in ("fused", "reference"):
            if not callable(getattr(self, role)):
                raise SpecError(f"{role}={getattr(self, role)!r} cannot be called; pass the function itself")
        put("name", self.name or getattr(self.fused, "__name__", type(self.fused).__name__))
        put("inputs", {name: as_input(value, name) for name, value in given.inputs(self.inputs, self.name).items()})
        put("dtypes", normalise_dtypes(self.dtypes, where=f"{self.name}: dtypes"))
        for attribute in ("invariant", "mutates", "clobbers"):
            put(attribute, given.names(getattr(self, attribute), self.name, attribute))
        if not isinstance(self.grad, bool):
            put("grad", given.names(self.grad, self.name, "grad"))
        put("rejects", given.exception_types(self.rejects, self.name))
        for attribute, example in (("without", "{'repeat': 'atomics'}"), ("allow", "{'hidden-sync': 'reads lengths'}")):
            put(attribute, given.reasons(getattr(self, attribute), self.name, attribute, example))
        for attribute in ("max_launches", "max_recompiles"):
            put(attribute, given.count(getattr(self, attribute), self.name, attribute))
        put("bench", given.several(self.bench, Mapping | str))
        put("bench_limits", given.bench_limits(self.bench_limits, self.name))
        put("dims", given.bounds(self.dims, self.name))
        self._check_dtypes()
        self._check_names()
        self._check_dims()
        self._check_derived()
        self._check_ambiguous()
        put("dims", self._narrowed())
        own = as_rng(self.rng, self.name)
        known, parameters = (*self.inputs, *self.fixtures), parameters_of(self.reference)
        put("rng", own and completed(own, self.name, self.inputs, known, parameters))
        put("distribution", as_outputs(self.distribution, self.name))
        self._check_signatures()
        self._check_policies()

    @property
    def tensors(self) -> dict[str, TensorSpec]:
        """The tensor inputs, optional ones among them."""
        return {name: spec for name, one in self.inputs.items() if isinstance(spec := unwrap(one), TensorSpec)}

    @property
    def derived(self) -> dict[str, DerivedSpec]:
        """The derived inputs, optional ones among them."""
        return {name: spec for name, one in self.inputs.items() if isinstance(spec := unwrap(one), DerivedSpec)}

    @property
    def invariant_configs(self) -> bool:
        """Whether every autotune config promises the same bits (``"configs"`` in ``invariant``, no dim's name)."""
        return "configs" in self.invariant and "configs" not in self.dim_names

    @property
    def invariant_dims(self) -> tuple[str, ...]:
        """The dims along which slices must not depend on each other."""
        return tuple(name for name in self.invariant if not (name == "configs" and self.invariant_configs))

    @property
    def given_up(self) -> tuple[str, ...]:
        """The inputs that the kernel may write: those of ``mutates`` and ``clobbers``."""
        return tuple(name for name in (*self.mutates, *self.clobbers) if name in self.inputs)

    @property
    def gives_up_upstream(self) -> bool:
        """Whether backward may overwrite the upstream gradient."""
        return UPSTREAM in self.clobbers and UPSTREAM not in self.inputs

    @property
    def dim_names(self) -> tuple[str, ...]:
        """Every named size of a case, plain ones and batches, in order of appearance."""
        names: list[str] = []
        for spec in self.tensors.values():
            names += (*spec.shape.names, *_bound_names(spec.values))
        for bound in self.dims.values():
            if isinstance(bound.multiple_of, str):
                names += parse_expression(bound.multiple_of).names
        # A dim may be declared for a derived input or a values function alone.
        return tuple(dict.fromkeys([*names, *self.dims]))

    @property
    def batch_names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for spec in self.tensors.values() for name in spec.shape.batch_names))

    def bound(self, name: str) -> Dim:
        found = self.dims.get(name, Dim())
        assert isinstance(found, Dim)
        return found

    @property
    def uses_case_dtype(self) -> bool:
        """Whether an input is, or a derived one is computed, in the case's floating dtype."""
        own = "dtype" in self.inputs or "dtype" in self.dim_names
        return any(spec.follows_case_dtype for spec in self.tensors.values()) or (
            not own and any("dtype" in spec.required for spec in self.derived.values())
        )

    @property
    def random(self) -> Rng | None:
        """``rng=`` with its defaults filled in."""
        assert self.rng is None or isinstance(self.rng, Rng)
        return self.rng

    @property
    def sampled(self) -> tuple[str, ...]:
        """The outputs that ``distribution=`` names."""
        assert isinstance(self.distribution, tuple)
        return self.distribution

    def with_(self, **changes: Any) -> FusionSpec:
        """A copy with some fields replaced."""
        return replace(self, **changes)

    def test(self) -> Callable[..., None]:
        """The pytest test of this spec: ``test_rms_norm = SPEC.test()``."""
        if not _test_factory:
            raise SpecError("FusionSpec.test() needs the plugin; import FusionSpec from pytest_fusion")
        return _test_factory[0](self)

    def _check_dtypes(self) -> None:
        wrong = [name for name in self.dtypes if name not in FLOATING]
        if wrong:
            raise SpecError(
                f"{self.name}: dtypes={wrong} are not floating; dtypes are those of inputs that fix none. "
                "Give an integer input its own: tensor(..., dtype=torch.int64)"
            )

    def _check_names(self) -> None:
        self._check_inputs_named("mutates", self.mutates)
        self._check_inputs_named("clobbers", self.clobbers, UPSTREAM)
        if self.gives_up_upstream and not self.grad:
            raise SpecError(f"{self.name}: clobbers={UPSTREAM!r} is about backward, and grad= is False; leave one out")
        if not isinstance(self.grad, bool):
            self._check_inputs_named("grad", self.grad)
            for name in self.grad:
                mine = self.tensors.get(name)
                if mine is not None and not mine.may_float():
                    raise SpecError(f"{self.name}: grad={name!r} names an input of dtype {', '.join(mine.dtypes)}")
        for name in self.mutates:
            if name not in self.tensors and name not in self.derived:
                raise SpecError(f"{self.name}: mutates={name!r} names an input that is not a tensor")

    def _check_inputs_named(self, keyword: str, names: Iterable[str], *others: str) -> None:
        known = (*self.inputs, *others)
        for name in names:
            if name not in known:
                raise SpecError(f"{self.name}: {keyword}={name!r} names no input{did_you_mean(name, known)}")

    def _check_dims(self) -> None:
        used: set[str] = set()
        derived_needs = {need for spec in self.derived.values() for need in spec.needs}
        for name, spec in self.tensors.items():
            used.update(spec.shape.names, _bound_names(spec.values))
            self._forbid_batch(_bound_names(spec.values), f"values= of input {name!r}")
        for name, bound in self.dims.items():
            if isinstance(bound.multiple_of, str):
                needed = parse_expression(bound.multiple_of, where=f"dims[{name!r}]").names
                self._forbid_batch(needed, f"dims[{name!r}]")
                used.update(needed)
        for name in self.dims:
            if name not in used and name not in derived_needs:
                raise SpecError(
                    f"{self.name}: dims={{{name!r}: ...}} bounds a dim that no input uses{did_you_mean(name, used)}"
                )
            if name in self.batch_names:
                raise SpecError(f"{self.name}: '*{name}' stands for several dimensions and cannot be bounded by dim()")
        for name in self.invariant_dims:
            if name not in used:
                raise SpecError(f"{self.name}: invariant={name!r} names no dim{did_you_mean(name, used)}")

    def _forbid_batch(self, names: Iterable[str], where: str) -> None:
        for name in set(names) & set(self.batch_names):
            raise SpecError(
                f"{self.name}: {where} uses {name!r}, but '*{name}' stands for several dimensions; name a single one"
            )

    def _check_derived(self) -> None:
        known = set(self.dim_names)
        for name, spec in self.derived.items():
            for need in spec.required:
                if need not in self.inputs and need not in known and need not in ("generator", "dtype"):
                    raise SpecError(
                        f"{self.name}: derived input {name!r} needs {need!r}, which is neither an input, a dim, "
                        f"'generator' nor 'dtype'{did_you_mean(need, known | set(self.inputs))}"
                    )
        waiting = {name: set(spec.needs) for name, spec in self.derived.items()}
        while waiting:
            ready = [name for name, needs in waiting.items() if not needs & set(waiting)]
            if not ready:
                own = next((name for name, needs in waiting.items() if name in needs), None)
                if own is not None and own in known:
                    raise SpecError(
                        f"{self.name}: derived input {own!r} needs {own!r}, itself; rename the dim or the input"
                    )
                raise SpecError(f"{self.name}: the derived inputs {sorted(waiting)} need each other in a circle")
            for name in ready:
                del waiting[name]

    def _check_ambiguous(self) -> None:
        """Raises where a dim and an input share a name, unless it is a tensor or derived and no other needs it."""
        for name in self.dim_names:
            if name not in self.inputs:
                continue
            needing = [other for other, spec in self.derived.items() if name in spec.needs]
            if needing:
                why = f", and derived input {needing[0]!r} needs it"
            elif name in self.derived or name in self.tensors:
                continue
            else:
                why = "; their sizes and values are drawn apart"
            raise SpecError(f"{self.name}: {name!r} is the name of a dim and of an input{why}. Rename the dim")

    def _narrowed(self) -> dict[str, Dim]:
        """The bounds, each dim's narrowed by its multiples; raises where no size is left."""
        # Else ``heads=dim(1, 32, multiple_of="kv_heads")`` rejects nearly every case: few ``kv_heads`` have multiples
        # up to 32.
        bounds = {name: self.bound(name) for name in self.dim_order}
        for name in reversed(self.dim_order):
            own = bounds[name]
            if not isinstance(own.multiple_of, str):
                continue
            base = parse_expression(own.multiple_of).text
            if base not in bounds or own.max == 0:
                continue  # an expression is known case by case, and 0 is a multiple of all
            other = bounds[base]
            low = max(other.min, 1) if own.min else other.min
            high = other.max if own.max is None else own.max if other.max is None else min(own.max, other.max)
            try:
                bounds[base] = dim(low, high, multiple_of=other.multiple_of)
            except SpecError as error:
                if own.min == 0:
                    continue  # 0 is left
                raise SpecError(
                    f"{self.name}: dims={{{name!r}: {own}}} must be a multiple of {base!r}: {other}, but no size of "
                    f"{base!r} has one within these bounds ({error})"
                ) from None
        return {name: bound for name, bound in bounds.items() if name in self.dims or bound != Dim()}

    @property
    def dim_order(self) -> tuple[str, ...]:
        """Dims ordered so that ``multiple_of`` refers backwards; raises on a cycle."""
        order: list[str] = []
        pending = [name for name in self.dim_names if name not in self.batch_names]
        while pending:
            ready = [
                name
                for name in pending
                if not isinstance(bound := self.bound(name).multiple_of, str)
                or all(other in order for other in parse_expression(bound).names)
            ]
            if not ready:
                raise SpecError(f"{self.name}: the dims {pending} are multiples of each other in a circle")
            order.extend(ready)
            pending = [name for name in pending if name not in ready]
        return tuple(order)

    @property
    def sized(self) -> tuple[str, ...]:
        """The batches, whose size is their number of rows, and the dims in their order."""
        return (*self.batch_names, *self.dim_order)

    def _check_signatures(self) -> None:
        known = set(self.inputs)
        for role in ("fused", "reference"):
            parameters = parameters_of(getattr(self, role))
            if parameters is None:
                continue
            if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
                function = getattr(getattr(self, role), "__name__", role)
                for name in sorted(known - set(parameters)):
                    wrapped = f", or wrap it: reference=lambda {name}, ...: {function}(...)"
                    raise SpecError(
                        f"{self.name}: the {role} {function}({', '.join(parameters)}) does not take the input {name!r}"
                        f"{did_you_mean(name, parameters)}. Add {name!r} to its parameters"
                        f"{wrapped if role == 'reference' else ' or drop it from inputs='}"
                    )
            for name, p in parameters.items():
                required = p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
                is_mask = role == "reference" and self.random is not None and name == self.random.mask
                if required and name not in known and name not in self.fixtures and not is_mask:
                    raise SpecError(
                        f"{self.name}: the {role} needs {name!r}, which is neither an input nor a parameter of the "
                        f"test{did_you_mean(name, known | set(self.fixtures))}. Add it to inputs= or give it a default"
                    )

    def _check_policies(self) -> None:
        if self.tolerance != "auto" and not isinstance(self.tolerance, Tolerance):
            raise SpecError(f"{self.name}: tolerance={self.tolerance!r}; expected 'auto' or Tolerance(rtol=, atol=)")
        if not isinstance(self.deterministic, bool):
            given.varying(self.deterministic, self.name)
        if self.grad is True and not any(map(_may_have_gradient, self.inputs.values())):
            raise SpecError(
                f"{self.name}: grad=True, but no input is a floating tensor; leave it out (gradients of complex inputs "
                "are not compared: give their real and imaginary parts)"
            )
        if self.distribution and self.random is None:
            raise SpecError(
                f"{self.name}: distribution= needs rng=, the name of the input that seeds the kernel, to draw again"
            )
        if self.distribution and self.grad:
            raise SpecError(f"{self.name}: grad= does not apply to sampled outputs (distribution=); leave one out")
        if self.bench_limits and not self.bench:
            raise SpecError(
                f"{self.name}: bench_limits= bounds what bench= measures, and there is none; name the sizes, as in "
                "bench=[{'rows': 8192, 'hidden': 8192}]"
            )


def _bound_names(values: Any) -> tuple[str, ...]:
    if not isinstance(values, ValueProfile):
        return ()
    bounds = (bound for _, bound in values.params if isinstance(bound, str))
    names = [name for bound in bounds for name in parse_expression(bound, where=f"values.{values}").names]
    return (*names, *(name for choice in values.choices for name in _bound_names(choice)))


def _may_have_gradient(declared: Any) -> bool:
    """Whether an input may be a floating tensor; derived and drawn ones may be anything."""
    inner = unwrap(declared)
    if isinstance(inner, ConstantSpec):
        return bool(getattr(getattr(inner.value, "dtype", None), "is_floating_point", False))
    return not isinstance(inner, TensorSpec) or inner.may_float()


def parameters_of(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter] | None:
    """The parameters by name; ``None`` where there is no signature, as for torch's own functions."""
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return None


_NO_KEYWORDS = ("fused", "reference", "fixtures")
KEYWORDS: tuple[str, ...] = tuple(f.name for f in fields(FusionSpec) if f.name not in _NO_KEYWORDS)
