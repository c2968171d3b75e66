"""A lower bound of the launches of a call on a GPU, without a GPU: interpreted launches and torch operators.

Not counted: autotune trials, which the interpreter has none of; work on tensors that a GPU program has on the host
(``places``); operators that a user registers, except for what they launch inside. Functions of torch that are one
kernel on a GPU and several operators on the CPU count once, by their own name.

C++ kernels of ``torch.compile`` for the CPU count as they are called. They bound nothing on a GPU, where Inductor joins
and splits loops by other rules.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode

from pytest_fusion import interpreter
from pytest_fusion.case.containers import tensors_of
from pytest_fusion.interpreter.bridge.dispatch import TORCH_NAMESPACES, InnerMode, has_kernel, shares_memory, written_by
from pytest_fusion.interpreter.launch import Launch
from pytest_fusion.interpreter.memory.regions import described_by
from pytest_fusion.interpreter.scoped import holding
from pytest_fusion.run.compiled import observe_compiled
from pytest_fusion.run.measure.launches.gpu_tensors import Places
from pytest_fusion.run.measure.launches.launch_count import Counts, named
from pytest_fusion.run.measure.launches.operator_launches import Work, caller, work_of
from pytest_fusion.run.memory.watch import unwatched

_NOT_A_GPU = "these are Inductor's kernels for the CPU; a GPU gets others"
_TOO_LATE = "code was compiled during the call that was counted, and its kernels were not seen"


@dataclass(slots=True)
class Compiled:
    """The kernels by name, and why they prove little."""

    kernels: Counter[str] = field(default_factory=Counter)
    doubts: list[str] = field(default_factory=list)


@contextlib.contextmanager
def counted() -> Iterator[Compiled]:
    """Count the calls of kernels compiled before the body; does nothing before Inductor is imported. Touches the
    modules in ``torch._inductor.codecache.PyCodeCache`` (torch 2.11 and 2.13), whose functions ``cpp_fused_...`` are
    one kernel each."""
    found, before = Compiled(), _compiled_modules()
    with contextlib.ExitStack() as stack:
        for module in before:
            for name, kernel in list(vars(module).items()):
                if name.startswith("cpp_") and callable(kernel):
                    stack.enter_context(holding(module, **{name: _noting(found.kernels, name, kernel)}))
        yield found
    if found.kernels:
        found.doubts.append(_NOT_A_GPU)
    if len(_compiled_modules()) > len(before):
        found.doubts.append(_TOO_LATE)


def _compiled_modules() -> list[Any]:
    cache = getattr(sys.modules.get("torch._inductor.codecache"), "PyCodeCache", None)
    return list(getattr(cache, "modules", ()))


def _noting(kernels: Counter[str], name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        kernels[name] += 1
        return kernel(*args)

    return call


# For some or all inputs ATen has one CUDA kernel for these and several on the CPU (`is_cuda` in Dropout.cpp,
# SoftMax.cpp, layer_norm.cpp, RNN.cpp, attention.cpp).
_ONE_KERNEL: Final = frozenset(
    "dropout dropout_ softmax log_softmax rms_norm scaled_dot_product_attention multi_head_attention_forward lstm gru "
    "rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell batch_norm instance_norm layer_norm group_norm "
    "special_softmax special_log_softmax grid_sample ctc_loss grouped_mm scaled_grouped_mm scaled_mm "
    "embedding_bag".split()
)
# Operators whose tensors may be on different devices; those of the others share one, except for scalars.
_MIXED: Final = frozenset({"copy_", "_to_copy", "copy"})
# Operators whose indices may be on the host.
_INDEXED: Final = frozenset({"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"})


@dataclass(slots=True)
class Modelled:
    """The counts, and each counted kernel, in order. ``bounds``: a GPU launches at least as many."""

    counts: Counts
    work: list[Work]
    bounds: bool


@dataclass(slots=True)
class _Log:
    places: Places
    launched: list[Work] = field(default_factory=list)
    # The user's operators whose effect is not seen.
    opaque: dict[str, None] = field(default_factory=dict)
    # The user's operators that have a CPU kernel only, which ran.
    other: dict[str, None] = field(default_factory=dict)
    # The active function of torch that is one kernel, and whether it is counted.
    within: str = ""
    counted: bool = False
    # How many Python functions of torch are active.
    depth: int = 0
    # Launches and operators that do something, on the device or not.
    events: int = 0


def modelled(call: Callable[[], Any], arguments: Any, *, prepare: Callable[[], None] | None = None) -> Modelled:
    """Count one call on tensors of the CPU or of a GPU. Raises what the call raises. ``arguments``: its tensors, nested
    in any way, all on the device. ``prepare`` restores what it writes. Call it once before: tuning inside the counted
    call counts too. A call that compiles counts again. A backward uses CPU formulas."""
    found, late = _once(call, arguments)
    if late:
        if prepare is not None:
            prepare()
        found, _ = _once(call, arguments)
    return found


def _once(call: Callable[[], Any], arguments: Any) -> tuple[Modelled, bool]:
    """One call counted, and whether it compiled something."""
    given = tensors_of(arguments)
    log = _Log(Places(known=any(t.device.type == "cuda" for t in given)))
    log.places.proved(given)
    before = _versions(given)
    with _counting(log) as compiled:
        result = call()
    returned = tensors_of(result)
    log.places.proved(returned)
    work = [*log.launched, *log.places.work()]
    work += [Work("kernel", name) for name, count in compiled.kernels.items() for _ in range(count)]
    doubts = [f"operator {name} ran code that launches nothing here" for name in log.opaque]
    doubts += [f"operator {name} has code of its own for the CPU, and that is what ran" for name in log.other]
    doubts += [f"torch.compile: {reason}" for reason in compiled.doubts]
    idle = _versions(given) == before and not any(t.numel() and not shares_memory(t, given) for t in returned)
    if not (log.events or idle or doubts):
        doubts.append("no launch and no operator of torch was seen, and yet there is a result")
    kernels = [one.name for one in work if one.kind == "kernel"]
    memcpy = sum(one.kind == "memcpy" for one in work)
    counts = Counts(len(kernels), memcpy, 0, named(kernels), "modelled", doubts=tuple(doubts))
    bounds = not (compiled.doubts or log.other)
    return Modelled(counts, work, bounds), _TOO_LATE in compiled.doubts


@contextlib.contextmanager
def _counting(log: _Log) -> Iterator[Compiled]:
    def launched(launch: Launch) -> None:
        log.events += 1
        if launch.programs > 0:
            log.launched.append(Work("kernel", launch.kernel, f"grid {launch.grid}", caller()))

    mode, functions = _Operators(log), _Functions(log)
    mode.functions = functions
    with (
        counted() as compiled,
        interpreter.observe(launched),
        observe_compiled(launched),
        described_by(log.places.proved_at),
        functions,
        mode,
    ):
        yield compiled


class _Operators(InnerMode):
    """Records each operator's work on the device, also inside a user's operators."""

    functions: _Functions

    def __init__(self, log: _Log) -> None:
        super().__init__()
        self._log = log

    def on_operator(self, func: Any, types: Sequence[type], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if func.namespace not in TORCH_NAMESPACES:
            return self._of_user(func, types, args, kwargs)
        result = func(*args, **kwargs)
        if func.namespace == "aten":
            self._note(func, args, kwargs, result)
        return result

    def _of_user(self, func: Any, types: Sequence[type], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        log = self._log
        before, launches = log.events, len(log.launched)
        depth, log.depth = log.depth, 0
        try:
            result = self.inside(func, types, args, kwargs, self.functions)
        finally:
            log.depth = depth
        made = [t for t in tensors_of(result) if t.numel() and not shares_memory(t, tensors_of((args, kwargs)))]
        if log.events == before and (made or any(t.numel() for t in written_by(func, args, kwargs))):
            log.opaque[str(func.name())] = None
        elif len(log.launched) == launches and has_kernel(func, "CPU") and not log.places.known:
            log.other[str(func.name())] = None
        log.places.note(tensors_of((args, kwargs)), tensors_of(result), [], mixed=True)
        log.places.proved(tensors_of(result))
        return result

    def _note(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        log, name = self._log, func.overloadpacket.__name__
        work = work_of(func, args, kwargs, result)
        if work:
            log.events += 1
        if log.within and any(one.kind == "kernel" for one in work):
            work = [] if log.counted else [Work("kernel", f"torch.{log.within}", work[0].detail)]
            log.counted = True
        if work:
            where = caller()
            work = [replace(one, where=where) for one in work]
        given = tensors_of(args[:1] if name in _INDEXED else (args, kwargs))
        outputs = written_by(func, args, kwargs) + tensors_of(result)
        across = name in _MIXED and (name != "_to_copy" or kwargs.get("device") is not None)
        log.places.note(given, outputs, work, mixed=across)
        if name == "lift_fresh" and not log.depth:  # torch.from_numpy, which function modes do not see
            log.places.on_host(result)


class _Functions(TorchFunctionMode):
    """Observes what operators do not show: where a program puts a tensor, and functions that are one kernel."""

    def __init__(self, log: _Log) -> None:
        super().__init__()
        self._log = log

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        log, name = self._log, getattr(func, "__name__", "")
        outermost = name in _ONE_KERNEL and not log.within
        if outermost:
            log.within, log.counted = name, False
        log.depth += 1
        try:
            result = func(*args, **kwargs)
        finally:
            log.depth -= 1
            if outermost:
                log.within = ""
        if not isinstance(result, torch.Tensor):
            return result
        given = tensors_of((args, kwargs))
        target = _target(name, args, kwargs)
        if target == "host" and given:
            return self._brought_to_host(given[0], result)
        if target == "device" and given:
            log.places.to_device(result)
        elif not given and target != "device":
            log.places.on_host(result)
        return result

    def _brought_to_host(self, source: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
        """A copy, as ``x.cpu()`` gives on a GPU; the CPU gives ``x`` itself."""
        places = self._log.places
        if places.is_host(source):
            return result
        self._log.events += 1
        places.note([], [source], [Work("memcpy", "aten::_to_copy", where=caller())], mixed=True)
        if shares_memory(result, [source]):
            with unwatched():
                result = result.clone()
        places.on_host(result)
        return result


def _target(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """``"host"`` or ``"device"`` if the call names one, else empty. A device object may be some tensor's own."""
    if name == "cpu":
        return "host"
    if name == "cuda":
        return "device"
    for value in (kwargs.get("device"), *(args[1:2] if name == "to" else ())):
        if isinstance(value, str):
            return "host" if value.startswith("cpu") else "device"
        if isinstance(value, (torch.device, torch.Tensor)):
            return "device"
    return ""


def _versions(given: list[torch.Tensor]) -> list[int]:
    """How often torch has written each non-empty tensor; tensors of inference mode do not count that."""
    return [0 if t.is_inference() else t._version for t in given if t.numel()]
