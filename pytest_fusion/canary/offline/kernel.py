"""`Kernel`: one of two compared kernels, judged and measured case by case; results are stored as bytes, not pickles."""

from __future__ import annotations

import hashlib
import inspect
import json
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from pytest_fusion.canary.offline.case_pairs import Ran, ran
from pytest_fusion.canary.offline.taken import Compiled, Spills, compiled, spills
from pytest_fusion.case.case_model import Case
from pytest_fusion.case.make import ImpossibleCase, InputFailed, make_inputs
from pytest_fusion.checks.case_judge import judge_case
from pytest_fusion.checks.context import Context, Progress, call, collect, reference_of, tensors_of
from pytest_fusion.errors import CanaryError
from pytest_fusion.oracle.reference import ReferenceFailed
from pytest_fusion.run.bits import as_bytes
from pytest_fusion.run.fused import ContextLost, bare
from pytest_fusion.run.measure import launches as counting
from pytest_fusion.run.measure.launches import Counts, Uncounted
from pytest_fusion.run.measure.resources.noting import Noted, noted
from pytest_fusion.run.measure.resources.specialisation import Specialisation
from pytest_fusion.run.memory import FILLS
from pytest_fusion.run.placing import place, rewrite
from pytest_fusion.run.pristine import synchronize
from pytest_fusion.spec.fusion_spec import FusionSpec, parameters_of
from pytest_fusion.spec.promises import Tolerance
from pytest_fusion.spec.wording import brief, out_of_memory

_LENGTH = struct.Struct(">I")
# The dtypes of results, by name; other names are invalid.
_DTYPES = {str(found): found for found in vars(torch).values() if isinstance(found, torch.dtype)}


def bytes_of(tensor: torch.Tensor) -> bytes:
    """The elements in order, as they are in memory."""
    return as_bytes(tensor.cpu()).numpy().tobytes()


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Names, dtypes and shapes as JSON, then the elements of each tensor in order. Raises ``OSError``."""
    parts, head = [], []
    for name, tensor in tensors.items():
        data = bytes_of(tensor)
        head.append([name, str(tensor.dtype), list(tensor.shape), len(data)])
        parts.append(data)
    text = json.dumps(head).encode()
    path.write_bytes(b"".join([_LENGTH.pack(len(text)), text, *parts]))


def read_tensors(path: Path, device: torch.device) -> dict[str, torch.Tensor]:
    """The tensors of a file that :func:`write_tensors` wrote. Raises ``CanaryError`` for any other file."""
    try:
        data = path.read_bytes()
        (length,) = _LENGTH.unpack_from(data)
        head = json.loads(data[_LENGTH.size : _LENGTH.size + length])
        at, found = _LENGTH.size + length, {}
        for name, dtype, shape, size in head:
            flat = torch.frombuffer(bytearray(data[at : at + size]), dtype=torch.uint8) if size else torch.empty(0)
            found[str(name)] = (
                (flat.view(_DTYPES[dtype]) if size else flat.to(_DTYPES[dtype])).reshape(shape).to(device)
            )
            at += size
    except (OSError, ValueError, KeyError, TypeError, struct.error, RuntimeError) as error:
        raise CanaryError(f"the results in {path} cannot be read ({type(error).__name__}: {error})") from None
    return found


_MOST_BYTES = 2 << 30
_AS_IT_IS = ("grad", "deterministic", "invariant", "mutates", "clobbers", "max_launches", "max_recompiles", "compile")


@dataclass(slots=True)
class Measured:
    """One call's outputs or ``problem``, digests of inputs and reference, and peak ``memory`` (bytes beyond inputs)."""

    inputs: str = ""
    reference: str = ""
    outputs: dict[str, torch.Tensor] = field(default_factory=dict)
    memory: int | None = None
    problem: str = ""


class Kernel:
    """A kernel in this process."""

    def __init__(self, context: Context) -> None:
        self.context, self.spec = context, context.spec
        # The launches of each measured case, by its key.
        self._launches: dict[str, list[Specialisation]] = {}

    def judge(self, case: Case, *, again: bool, alone: bool = False) -> Ran:
        """The verdict of all checks; ``alone`` runs every check on this case, regardless of the cost so far."""
        context = self.context
        if alone:
            new = Context(context.spec, context.device, context.extra, programs=context.programs, deep=context.deep)
            context = replace(new, complete=True, progress=Progress(context.clock))
        found = ran(judge_case(context, case, again=again), context.progress.refusals, context.spec.allow)
        release_memory(context.device)
        return found

    def measure(self, case: Case) -> Measured:
        """Calls the kernel once more, on new inputs. An exception here is a ``problem``, not a verdict."""
        context, spec = self.context, self.spec
        try:
            logical = make_inputs(spec, case, context.device)
        except (ImpossibleCase, InputFailed, MemoryError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and not out_of_memory(error):
                raise
            return Measured(problem=f"its inputs cannot be made: {error}")
        found = Measured(inputs=digest(tensors_of(logical)))
        if spec.random is None:
            try:
                reference, _ = reference_of(context, case, logical, priced=False)
            except ReferenceFailed as error:
                found.problem = f"the reference raises: {error}"
                return found
            found.reference = digest({str(i): t for i, t in enumerate(reference.native)})
        launches: list[Noted] = []
        with noted(launches):
            outcome, placed = call(context, case, logical, FILLS[0])
        self._launches[case.key()] = [stood for one in launches if (stood := _representative(one)) is not None]
        if outcome.error is not None:
            found.problem = f"called once more, it raised {brief(outcome.error)[:200]}"
            return found
        if spec.random is not None:
            found.problem = "the kernel draws random numbers, so that one result says little of its error"
            return found
        found.outputs = collect(outcome.result, placed.arguments, spec.mutates).tensors
        if context.device.type == "cuda":
            found.memory = self._peak(case, logical)
        return found

    def count(self, case: Case) -> Counts | Uncounted:
        """The number of kernels that a call launches."""
        context, spec = self.context, self.spec
        try:
            logical = make_inputs(spec, case, context.device)
            placed = place(logical, case, context.device, FILLS[0])

            def once() -> object:
                return spec.fused(**placed.arguments, **context.extra)

            def back() -> None:
                rewrite(placed, logical)

            if context.device.type == "cuda":
                # The profiler as a cross-check takes seconds a call.
                capture = not spec.syncs
                arguments = placed.arguments
                return counting.count(once, arguments, context.device, prepare=back, capture=capture, cross_check=False)
            with bare():
                found = counting.modelled(once, placed.arguments, prepare=back)
            return found.counts if found.bounds else Uncounted("; ".join(found.counts.doubts))
        except ContextLost:
            raise
        except Exception as error:  # noqa: BLE001 - the checks have judged the kernel; here it is a number or none
            return Uncounted(f"called to be counted, it raised {brief(error)[:200]}")

    def compiled(self, keys: Sequence[str]) -> Compiled:
        """How often the measured cases with these keys made Triton compile again."""
        return compiled(self._launches, keys)

    def spills(self, sized: Sequence[tuple[str, Case]]) -> Spills:
        return spills(self.spec, sized, self.context.device, self.context.extra)

    def _peak(self, case: Case, logical: Mapping[str, Any]) -> int | None:
        device = self.context.device
        placed = place(logical, case, device, FILLS[0])
        try:
            with bare():
                synchronize(device)
                before = torch.cuda.memory_allocated(device)
                torch.cuda.reset_peak_memory_stats(device)
                self.spec.fused(**placed.arguments, **self.context.extra)
                synchronize(device)
                return torch.cuda.max_memory_allocated(device) - before
        except Exception:  # noqa: BLE001 - no number for a call that failed
            return None


def _representative(launch: Noted) -> Specialisation | None:
    """The specialisation of a launch; for an autotuned one that of a fixed config, whichever config won."""
    if launch.specialisation is None:
        return None
    return min((launch.specialisation, *launch.others), key=Specialisation.key)


def release_memory(device: torch.device) -> None:
    """Frees a GPU allocator's cache if it is large: the other process may need the memory for the same case."""
    if device.type == "cuda" and torch.cuda.memory_reserved(device) > _MOST_BYTES:
        torch.cuda.empty_cache()


def without_fixtures(fused: Callable[..., Any], extra: tuple[str, ...]) -> Callable[..., Any]:
    """``fused`` as a function that ignores the fixtures in ``extra`` that it does not take."""
    parameters = parameters_of(fused)
    if parameters is None or any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return fused
    dropped = [name for name in extra if name not in parameters]
    if not dropped:
        return fused

    def call(**given: Any) -> Any:
        return fused(**{name: value for name, value in given.items() if name not in dropped})

    # Keyword arguments only, like all calls of a kernel; the check `honesty` looks at the code of ``stands_for``.
    keywords = [p.replace(kind=p.KEYWORD_ONLY) for p in parameters.values() if p.kind is not p.VAR_POSITIONAL]
    keywords += [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in dropped]
    call.__signature__ = inspect.Signature(keywords)  # type: ignore[attr-defined]
    call.stands_for = fused  # type: ignore[attr-defined]
    return call


def digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """A digest of tensors: sixteen digits, equal for equal names, dtypes, shapes and bits."""
    found = hashlib.sha256()
    for name, tensor in tensors.items():
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode() + bytes_of(tensor))
    return found.hexdigest()[:16]


def kernel_beside(spec: FusionSpec, context: Context, fused: Callable[..., Any]) -> Kernel:
    """Another kernel for the same spec, in this process. Raises ``SpecError`` if it does not take the inputs."""
    other = spec.with_(fused=without_fixtures(fused, spec.fixtures), name=spec.name)
    return Kernel(Context(other, context.device, context.extra, programs=context.programs, deep=context.deep))


def contract(spec: FusionSpec) -> dict[str, Any]:
    """The promises of a spec in JSON types. Both kernels have these, whatever the incumbent's spec says."""
    found: dict[str, Any] = {name: getattr(spec, name) for name in _AS_IT_IS}
    found["tolerance"] = asdict(spec.tolerance) if isinstance(spec.tolerance, Tolerance) else spec.tolerance
    found["without"] = dict(spec.without)
    return found


def held_to(spec: FusionSpec, promises: Mapping[str, Any]) -> FusionSpec:
    """``spec`` with the promises of another one. Raises ``SpecError`` if they do not fit it."""
    changes = dict(promises)
    if isinstance(changes["tolerance"], Mapping):
        changes["tolerance"] = Tolerance(**changes["tolerance"])
    for name in _AS_IT_IS:
        if isinstance(changes[name], list):
            changes[name] = tuple(changes[name])
    return spec.with_(**changes)
