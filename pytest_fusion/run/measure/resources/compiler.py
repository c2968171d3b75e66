"""One `Specialisation` compiled for one target, in a process in which Triton does not interpret.

The kernel's own ``run`` does it, as in ``kernel.warmup``: only the binder is replaced, by one that answers with the
specialisation. Of ``JITFunction`` this touches ``create_binder``, ``device_caches``, ``pre_run_hooks`` and ``run``, and
``knobs.compilation.listener``: the same in 3.6.0, 3.7.1 and 3.9.0.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pytest_fusion.interpreter.scoped import holding
from pytest_fusion.run.autotuned import causes
from pytest_fusion.run.measure.resources import cubin
from pytest_fusion.run.measure.resources.function_places import NotFoundError, decode, found, kernel_of, unwrapped
from pytest_fusion.run.measure.resources.noting import Noted
from pytest_fusion.run.measure.resources.specialisation import Json, Specialisation, shown
from pytest_fusion.run.measure.resources.specialiser import Live, read_globals
from pytest_fusion.run.measure.resources.targets import Resources, Target, excess, occupancy
from pytest_fusion.spec.wording import first_line

_MICRO = 1e-6
_DELIBERATE = "not for this target"
# Triton's words for a type or an option of newer hardware: kernels are written for some targets, not for all.
_LACKS = re.compile(r"not supported (?:in|on) this architecture|requires NVIDIA SM|requires compute capability")


def compiled(noted: Noted, target: Target) -> Resources:
    """The resources of ``target`` that a launched kernel takes; an autotuner passes over a config that does not fit.

    A kernel that is not of this process (``noted.live``) is imported.
    """
    if noted.specialisation is None:
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
    lives: Sequence[Live | None] = noted.live_others or [None] * len(noted.others)
    for other, live in zip(noted.others, lives, strict=True):
        again = _compiled(other, live, target)
        if again.status == "compiled":
            return replace(again, note=f"{chance} (the first one does not fit)")
    return replace(first, note=f"none of {total} configs of its autotuner compiles")


def _compiled(specialisation: Specialisation, live: Live | None, target: Target) -> Resources:
    def failed(status: Any, reason: str, line: int = 0, file: str = "", note: str = "") -> Resources:
        return Resources(
            specialisation.kernel,
            target.name,
            status,
            reason,
            file=file or specialisation.place.file,
            line=line,
            constants=specialisation.constants,
            note=note,
        )

    try:
        live = live or _imported(specialisation)
    except NotFoundError as error:
        return failed("unknown", str(error))
    try:
        result, seconds = run_compiler(live)
    except MemoryError:
        return failed("unknown", "the compiler ran out of memory")
    except Exception as error:  # noqa: BLE001 - whatever the compiler raises is its verdict on the kernel
        if type(error).__name__ == "CompileTimeAssertionFailure" or _caused_by(error, "CompileTimeAssertionFailure"):
            reason = f"a static_assert of the kernel refuses {target.name}: {_message(error)}"
            return failed("unknown", reason, note=_DELIBERATE)
        if _LACKS.search(_message(error)):
            return failed("unknown", f"{target.name} lacks what the kernel uses: {_message(error)}", note=_DELIBERATE)
        broken = _toolchain_fails(error)
        if broken:
            return failed("unknown", f"Triton here compiles nothing for {target.name}: {broken}")
        file, line = _where(error, live.kernel)
        advice = f"if the kernel is not meant for {target.name}, leave that target out"
        return failed("refused", f"Triton's compiler rejects it: {_message(error)}; {advice}", line, file)
    return _measured(specialisation, target, result, seconds)


def _kernel(specialisation: Specialisation) -> Any:
    """The kernel, imported here; raises ``NotFoundError`` where it is not the one that was launched."""
    kernel = kernel_of(found(specialisation.place))
    if not hasattr(kernel, "create_binder"):
        raise NotFoundError(f"{specialisation.place.path} is no kernel when it is imported outside of the interpreter")
    here = read_globals(unwrapped(kernel))
    for name, value in specialisation.globals.items():
        if here.get(name) != value:
            raise NotFoundError(
                f"{name}, which the kernel reads, was {shown(value)} in the test and is {shown(here.get(name))} where "
                "its module is imported outside of the interpreter; pass it as a tl.constexpr argument"
            )
    return kernel


def _imported(specialisation: Specialisation) -> Live:
    """The kernel with what its binder answered; raises ``NotFoundError``."""
    kernel = _kernel(specialisation)
    bound: dict[str, Any] = {}
    specialised: list[tuple[Any, Any]] = []
    for argument in specialisation.arguments:
        value = bound[argument.name] = decode(argument.value)
        constant = argument.type == "constexpr"
        specialised.append(("constexpr", value) if constant else (decode(argument.type), decode(argument.hint)))
    options = {name: decode(value) for name, value in specialisation.options.items()}
    return Live(kernel, bound, specialised, options)


def run_compiler(live: Live) -> tuple[Any, float | None]:
    """The compiled kernel for the modelled device, and the seconds it took; ``None`` where it was in the cache.

    Raises what Triton raises.
    """
    kernel = live.kernel
    memory, keys, target, backend, _ = kernel.create_binder()
    answer = live.bound, live.specialised
    kernel.device_caches[0] = (memory, keys, target, backend, lambda *_, **__: (*answer, dict(live.options)))
    kernel.pre_run_hooks = []
    seconds: list[float] = []

    def listen(*, times: Any, cache_hit: bool, **_: Any) -> None:
        if not cache_hit:
            seconds.append(_MICRO * float(times.total))

    from triton import knobs

    with holding(knobs.compilation, listener=listen):
        result = kernel.run(grid=None, warmup=True, **live.options)
    return result, seconds[0] if seconds else None


def _measured(specialisation: Specialisation, target: Target, result: Any, seconds: float | None) -> Resources:
    from triton import knobs

    metadata = result.metadata
    common: dict[str, Json] = {
        "kernel": specialisation.kernel,
        "target": target.name,
        "file": specialisation.place.file,
        "constants": specialisation.constants,
        "shared_dynamic": int(metadata.shared),
        "tensor_columns": int(getattr(metadata, "tmem_size", None) or 0),
        "warps": int(metadata.num_warps),
        "seconds": seconds,
    }
    try:
        usage = cubin.read(result.asm["cubin"], str(knobs.nvidia.cuobjdump.path))
    except (cubin.NoToolError, RuntimeError) as error:
        return Resources(**common, status="unknown", reason=f"it compiles, but its binary cannot be read: {error}")
    static = target.static(usage.shared_static)
    common |= {
        "registers": usage.registers,
        "local_bytes": usage.local_bytes,
        "shared_static": static,
        "instructions": usage.instructions,
    }
    shared, warps = static + int(metadata.shared), int(metadata.num_warps)
    beyond = excess(
        target, registers=usage.registers, shared=shared, warps=warps, tensor_columns=common["tensor_columns"]
    )
    if beyond:
        return Resources(**common, status="refused", reason=beyond, line=specialisation.place.line, exceeds=True)
    held = occupancy(target, warps=warps, registers=usage.registers, shared=shared)
    return Resources(**common, occupancy=held)


def _caused_by(error: BaseException, name: str) -> bool:
    return any(type(cause).__name__ == name for cause in causes(error))


def _message(error: BaseException) -> str:
    """The text of the innermost compilation error, without the source that it quotes."""
    message = ""
    for cause in causes(error):
        text = getattr(cause, "error_message", None)
        message = str(text) if text else message
    if not message:
        message = "; ".join(line.strip() for line in str(error).strip().splitlines()[:3])
    return (message.strip().replace("\n", " ") or type(error).__name__)[:400]


def _where(error: BaseException, kernel: Any) -> tuple[str, int]:
    """File and line that the innermost compilation error points at; the kernel's own where it points nowhere."""
    function = unwrapped(kernel)
    place = function.__code__.co_filename, function.__code__.co_firstlineno
    for cause in causes(error):
        node, source = getattr(cause, "node", None), getattr(cause, "src", None)
        owner = _owner(source, kernel) if source else None
        if owner is not None and hasattr(node, "lineno"):
            place = unwrapped(owner).__code__.co_filename, _first_line(owner) + int(node.lineno) - 1  # type: ignore[union-attr]
    return place


def _owner(source: str, kernel: Any) -> Any:
    """The kernel or the function called by it whose source Triton compiled."""
    if kernel.src == source:
        return kernel
    for module in tuple(sys.modules.values()):
        for value in tuple(getattr(module, "__dict__", {}).values()):
            if type(value).__name__ == "JITFunction" and getattr(value, "src", None) == source:
                return value
    return None


def _first_line(kernel: Any) -> int:
    """The line of the file in which the ``def`` stands."""
    for index, line in enumerate(kernel.raw_src):
        if line.strip().startswith("def "):
            return int(kernel.starting_line_number) + index
    return int(kernel.starting_line_number)


def _toolchain_fails(error: BaseException) -> str:
    """The error of a kernel that does nothing, where an error may be the toolchain's fault; empty if it compiles."""
    if _caused_by(error, "CompilationError"):
        return ""
    import triton

    @triton.jit
    def nothing(pointer):  # type: ignore[no-untyped-def]
        pass

    try:
        run_compiler(Live(nothing, {"pointer": None}, [("*fp32", "D")], {}))
    except Exception as again:  # noqa: BLE001 - any failure says the same
        return first_line(again) or type(again).__name__
    return ""
