"""The custom operators that a call uses, their results, what opcheck finds, and the launches outside of them."""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from pytest_fusion import interpreter
from pytest_fusion.case.containers import leaves, map_tensors, tensors_of
from pytest_fusion.case.strided import expanded
from pytest_fusion.interpreter.bridge.dispatch import TORCH_NAMESPACES, OperatorMode
from pytest_fusion.interpreter.launch import Launch
from pytest_fusion.run.compiled import observe_compiled
from pytest_fusion.run.fused import bare
from pytest_fusion.spec.wording import brief, first_line

# Namespaces of torch's own operators, which are not under test.
_TORCH: Final = TORCH_NAMESPACES | frozenset(
    "rngprims debugprims quantized mkldnn mkl onednn xnnpack c10d _c10d_functional c10d_functional symm_mem _quantized "
    "sparse streams bundled image_utils torch".split()
)


# Of one operator in one call: a loop over layers of different widths calls it in as many forms.
_MOST_FORMS: Final = 4


@dataclass(frozen=True, slots=True)
class Made:
    """The form of one tensor that an operator returned; strides in elements."""

    path: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    strides: tuple[int, ...]
    device: str

    @classmethod
    def of(cls, result: Any) -> list[Made]:
        return [
            cls(leaf.path, tuple(leaf.value.shape), leaf.value.dtype, leaf.value.stride(), leaf.value.device.type)
            for leaf in leaves(result)
            if leaf.is_tensor and leaf.value.layout is torch.strided
        ]


# An operator, and the shapes, dtypes and strides of its tensor arguments.
Form = tuple[str, tuple[Made, ...]]


@dataclass(frozen=True, slots=True)
class OperatorCall:
    """One call: the overload, its arguments with their values before it, and the form of its result. An argument
    requires grad only if autograd would have recorded the call."""

    operator: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    before: list[torch.Tensor]
    made: list[Made]

    @property
    def name(self) -> str:
        return str(self.operator.name())

    @property
    def decomposes(self) -> bool:
        """Whether compilers see inside it, as into ``torch.library.triton_op``."""
        return self.name in getattr(sys.modules.get("torch._library.triton"), "triton_ops_to_kernels", {})

    def restore(self) -> None:
        """Restore the arguments' values: a second call that writes the same again changes nothing."""
        with torch.no_grad():
            for argument, value in zip(tensors_of((self.args, self.kwargs)), self.before, strict=True):
                if not expanded(argument.shape, argument.stride()) and argument.untyped_storage().nbytes():
                    argument.copy_(value)

    def fake(self) -> list[Made]:
        """The form of the operator's result for fake tensors; raises what its fake implementation raises."""
        from torch._subclasses.fake_tensor import FakeTensorMode

        with FakeTensorMode() as mode:
            args, kwargs = map_tensors((self.args, dict(self.kwargs)), mode.from_tensor)
            return Made.of(self.operator(*args, **kwargs))


@dataclass(slots=True)
class Log:
    """The first call of each operator in each form of its tensors, and the launches outside of any operator."""

    calls: dict[Form, OperatorCall] = field(default_factory=dict)
    outside: list[Launch] = field(default_factory=list)
    inside: int = 0

    def note(self, launch: Launch) -> None:
        if not self.inside:
            self.outside.append(launch)


class _Mode(OperatorMode):
    def __init__(self, log: Log) -> None:
        super().__init__()
        self._log = log

    def on_operator(self, func: Any, types: Sequence[type], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:  # noqa: ARG002
        log = self._log
        if func.namespace in _TORCH:
            return func(*args, **kwargs)
        form = (str(func), tuple(Made.of((list(args), dict(kwargs)))))
        new = form not in log.calls and sum(name == form[0] for name, _ in log.calls) < _MOST_FORMS
        # Copied before the call, which may write them: the later calls use its own memory, with these values.
        before = [t.detach().clone() for t in tensors_of((args, kwargs))] if new else []
        recorded = torch.is_grad_enabled()
        log.inside += 1
        try:
            result = func(*args, **kwargs)
        finally:
            log.inside -= 1
        if new:
            given = (tuple(args), dict(kwargs))
            args, kwargs = given if recorded else map_tensors(given, torch.Tensor.detach)
            log.calls[form] = OperatorCall(func, tuple(args), kwargs, before, Made.of(result))
        return result


@contextmanager
def logged() -> Iterator[Log]:
    """Log the custom operators and launches of the body. Nested operators belong to the outer one."""
    log = Log()
    with _Mode(log), interpreter.observe(log.note), observe_compiled(log.note):
        yield log


TESTS = ("test_schema", "test_autograd_registration", "test_faketensor")


def opcheck(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[dict[str, str], list[str]]:
    """The tests that the operator fails and those that opcheck cannot run, each with the first line of the reason.
    opcheck copies and compares arguments with operators that lack some dtypes (float8 has no arithmetic) and fails on
    some empty tensors (strides (57, 19, 1) of shape (0, 0, 16)): an operator that does almost nothing shows these."""
    failed: dict[str, str] = {}
    left: list[str] = []
    for test, reason in _failures(operator, args, kwargs, TESTS).items():
        tensors = tensors_of((args, kwargs))
        bare_of = next((t for t in tensors if _failures(_nothing(), (t.detach(),), {}, (test,)).get(test)), None)
        if bare_of is None:
            failed[test] = reason
        else:
            form = f"{str(bare_of.dtype).removeprefix('torch.')} {list(bare_of.shape)}"
            left.append(f"torch.library.opcheck cannot try a tensor {form} ({test}: {reason})")
    return failed, left


def _failures(
    operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], tests: tuple[str, ...]
) -> dict[str, str]:
    with bare(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = torch.library.opcheck(operator, args, dict(kwargs), test_utils=tests, raise_exception=False)
    return {
        test: brief(result)[:300] if isinstance(result, BaseException) else first_line(result)
        for test, result in results.items()
        if result != "SUCCESS"
    }


@functools.cache
def _nothing() -> Any:
    """A correct operator that returns zeros of its argument's shape."""

    def zeros(x: torch.Tensor) -> torch.Tensor:
        return torch.zeros(x.shape, dtype=x.dtype, device=x.device)

    operator = torch.library.custom_op("pytest_fusion::zeros_of", zeros, mutates_args=())
    operator.register_fake(zeros)
    return operator
