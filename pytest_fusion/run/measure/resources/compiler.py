"""One `Specialisation` compiled for one target, in a process in which Triton does not interpret.

The kernel's own ``run`` compiles, as in ``kernel.warmup``; only its binder is replaced, by one that returns the
specialisation. Touches ``create_binder``, ``device_caches``, ``pre_run_hooks`` and ``run`` of ``JITFunction``, and
``knobs.compilation.listener``: the same in 3.6.0, 3.7.1 and 3.9.0.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any, TypeVar

from pytest_fusion.interpreter.scoped import holding
from pytest_fusion.run.autotuned import causes
from pytest_fusion.run.measure.resources import cubin
from pytest_fusion.run.measure.resources.noting import Noted
from pytest_fusion.run.measure.resources.specialisation import Specialisation
from pytest_fusion.run.measure.resources.specialiser import Live, unwrapped
from pytest_fusion.run.measure.resources.targets import Resources, Target, excess, occupancy
from pytest_fusion.spec.wording import first_line

T = TypeVar("T")

_MICRO = 1e-6
_DELIBERATE = "not for this target"
# Triton's messages for a type or an option of newer hardware: kernels are written for some targets, not for all.
_LACKS = re.compile(r"not supported (?:in|on) this architecture|requires NVIDIA SM|requires compute capability")
_ASSERTION = re.compile(r"^AssertionError\((['\"])(.*)\1\)$")


def compiled(noted: Noted, target: Target) -> Resources:
    """The resources of ``target`` that a launched kernel takes; an autotuner passes over a config that does not fit."""
    if noted.specialisation is None or noted.live is None:
        return Resources(noted.kernel, target.name, "unknown", noted.reason)
    first = _compiled(noted.specialisation, noted.live, target)
    if not noted.others:
        return first
    total = len(noted.others) + 1
    chance = f"autotuned: one of {total} configs was compiled, a GPU may choose another"
    if first.status == "compiled":
        return replace(first, note=chance)
    if first.status == "unknown" and first.note != _DELIBERATE:
        return first
    for other, live in zip(noted.others, noted.live_others, strict=True):
        again = _compiled(other, live, target)
        if again.status == "compiled":
            return replace(again, note=f"{chance} (the first one does not fit)")
    return replace(first, note=f"none of {total} configs of its autotuner compiles")


def _compiled(specialisation: Specialisation, live: Live, target: Target) -> Resources:
    result = tried(live, target, run_compiler)
    if isinstance(result, Resources):
        advice = f"; if the kernel is not meant for {target.name}, leave that target out"
        reason = (
            f"Triton's compiler rejects it: {result.reason}{advice}" if result.status == "refused" else result.reason
        )
        return replace(result, reason=reason, constants=specialisation.constants)
    return _measured(specialisation, target, *result)


def tried(live: Live, target: Target, attempt: Callable[[Live], T]) -> T | Resources:
    """The result of ``attempt``, or why there is none: the compiler rejects the kernel, or cannot run here."""
    file, line = _defined(live.kernel)

    def failed(status: Any, reason: str, note: str = "") -> Resources:
        return Resources(str(live.kernel.__name__), target.name, status, reason, file=file, line=line, note=note)

    try:
        return attempt(live)
    except MemoryError:
        return failed("unknown", "the compiler ran out of memory")
    except Exception as error:  # noqa: BLE001 - whatever the compiler raises is its verdict on the kernel
        if _caused_by(error, "CompileTimeAssertionFailure"):
            reason = f"a static_assert of the kernel refuses {target.name}: {_message(error)}"
            return failed("unknown", reason, note=_DELIBERATE)
        if _LACKS.search(_message(error)):
            return failed("unknown", f"{target.name} lacks what the kernel uses: {_message(error)}", note=_DELIBERATE)
        broken = _toolchain_fails(error, attempt)
        if broken:
            return failed("unknown", f"Triton here compiles nothing for {target.name}: {broken}")
        file, line = _where(error, live.kernel)
        return failed("refused", _message(error))


def run_compiler(live: Live, *, front_end: bool = False) -> tuple[Any, float | None]:
    """The compiled kernel for the modelled device, and the seconds that took; ``None`` if it was in the cache.
    ``front_end`` stops at Triton's own IR, without a kernel. Raises what Triton raises."""
    kernel = live.kernel
    memory, keys, target, backend, _ = kernel.create_binder()
    answer = live.bound, live.specialised
    kernel.device_caches[0] = (memory, keys, target, backend, lambda *_, **__: (*answer, dict(live.options)))
    kernel.pre_run_hooks = []
    if front_end:
        kernel.compile = _to_ir
    seconds: list[float] = []

    def listen(*, times: Any, cache_hit: bool, **_: Any) -> None:
        if not cache_hit:
            seconds.append(_MICRO * float(times.total))

    from triton import knobs

    # With warnings as errors, one of Triton's own, such as that of `make_block_ptr`, is no refusal.
    with holding(knobs.compilation, listener=listen), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = kernel.run(grid=None, warmup=True, **live.options)
    return result, seconds[0] if seconds else None


def _to_ir(source: Any, *, target: Any, options: dict[str, Any]) -> None:
    from triton._C.libtriton import ir
    from triton.compiler.compiler import make_backend

    backend = make_backend(target)
    given, context = backend.parse_options(options), ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    source.make_ir(target, given, backend.get_codegen_implementation(given), backend.get_module_map(), context)


def _measured(specialisation: Specialisation, target: Target, result: Any, seconds: float | None) -> Resources:
    from triton import knobs

    metadata = result.metadata
    made = Resources(
        specialisation.kernel,
        target.name,
        file=specialisation.place.file,
        constants=specialisation.constants,
        shared_dynamic=int(metadata.shared),
        tensor_columns=int(getattr(metadata, "tmem_size", None) or 0),
        warps=int(metadata.num_warps),
        seconds=seconds,
    )
    try:
        usage = cubin.read(result.asm["cubin"], str(knobs.nvidia.cuobjdump.path))
    except (cubin.NoToolError, RuntimeError) as error:
        return replace(made, status="unknown", reason=f"it compiles, but its binary cannot be read: {error}")
    static = target.static(usage.shared_static)
    made = replace(made, **{**asdict(usage), "shared_static": static})
    beyond = excess(target, made)
    if beyond:
        return replace(made, status="refused", reason=beyond, line=specialisation.place.line)
    return replace(made, occupancy=occupancy(target, made))


def _caused_by(error: BaseException, name: str) -> bool:
    return any(type(cause).__name__ == name for cause in causes(error))


def _message(error: BaseException) -> str:
    """The text of the innermost compilation error, without the quoted source."""
    message = ""
    for cause in causes(error):
        text = getattr(cause, "error_message", None)
        message = str(text) if text else message
    if not message:
        message = "; ".join(line.strip() for line in str(error).strip().splitlines()[:3])
    # Assertions of the compiler arrive as their ``repr``.
    message = _ASSERTION.sub(r"\2", message.strip().replace("\n", " "))
    return (message or type(error).__name__)[:400]


def _defined(kernel: Any) -> tuple[str, int]:
    """File and line of a kernel."""
    code = unwrapped(kernel).__code__
    return code.co_filename, code.co_firstlineno


def _where(error: BaseException, kernel: Any) -> tuple[str, int]:
    """File and line of the innermost compilation error, else of the kernel."""
    place = _defined(kernel)
    for cause in causes(error):
        node, source = getattr(cause, "node", None), getattr(cause, "src", None)
        owner = _owner(source, kernel) if source else None
        if owner is not None and hasattr(node, "lineno"):
            place = _defined(owner)[0], _first_line(owner) + int(node.lineno) - 1  # type: ignore[union-attr]
    return place


def _owner(source: str, kernel: Any) -> Any:
    """The kernel, or the function called by it, whose source Triton compiled."""
    registered = getattr(sys.modules.get("triton.runtime.jit"), "_triton_jit_function_registry", {})
    return next((known for known in (kernel, *registered.values()) if known.src == source), None)


def _first_line(kernel: Any) -> int:
    """The line of the ``def`` in its file."""
    above = (index for index, line in enumerate(kernel.raw_src) if line.strip().startswith("def "))
    return int(kernel.starting_line_number) + next(above, 0)


def _toolchain_fails(error: BaseException, attempt: Callable[[Live], object]) -> str:
    """The error of an empty kernel, if the toolchain may be at fault; empty if that kernel compiles."""
    if _caused_by(error, "CompilationError"):
        return ""
    import triton

    @triton.jit
    def nothing(pointer):  # type: ignore[no-untyped-def]
        pass

    try:
        attempt(Live(nothing, {"pointer": None}, [("*fp32", "D")], {}))
    except Exception as again:  # noqa: BLE001 - every failure means the same
        return first_line(again) or type(again).__name__
    return ""
