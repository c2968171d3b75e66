"""`canary`: one callable in front of two kernels, used like the one that is there today."""

from __future__ import annotations

import functools
import itertools
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch

from pytest_fusion.canary import background
from pytest_fusion.canary.call import devices_of, poisoned, versions_of
from pytest_fusion.canary.call import recorded as _recorded
from pytest_fusion.canary.compare import form, structure
from pytest_fusion.canary.copies import CannotCopyError, Copies, copies_of, names_of, tensors_in
from pytest_fusion.canary.events import Log
from pytest_fusion.canary.finds import Finds
from pytest_fusion.canary.generators import Generators
from pytest_fusion.canary.mode import OFF
from pytest_fusion.canary.policy import Policy
from pytest_fusion.canary.rule import FirstFaults, Judge, Observation
from pytest_fusion.canary.shadow import Comparisons
from pytest_fusion.canary.sharing import current, position, threshold
from pytest_fusion.canary.signature import bucket_of, signature_of
from pytest_fusion.canary.state import Control
from pytest_fusion.canary.tensor_files import need_safetensors
from pytest_fusion.canary.watchdog import CandidateHungError, Watchdog
from pytest_fusion.case import numbers
from pytest_fusion.errors import CanaryError, said
from pytest_fusion.spec.fusion_spec import FusionSpec

ARMS = ("incumbent", "candidate")
# Signatures whose results are known; past it every new one is served by the incumbent.
_MOST_SIGNATURES = 4096
# After the candidate found no memory in shadow, it is left alone for so many seconds.
_PAUSE_S = 600.0
# Outputs whose shapes depend on values: nothing can be said of them beforehand.
_VARYING = object()
_ONLY: ContextVar[str | None] = ContextVar("pytest_fusion_canary_only", default=None)


def canary(
    name: str,
    *,
    incumbent: Callable[..., Any],
    candidate: Callable[..., Any],
    policy: Policy | None = None,
    judge: Judge | None = None,
    publishers: Sequence[Callable[[Mapping[str, Any]], object]] = (),
    spec: FusionSpec | None = None,
) -> Canary:
    """A callable to put where ``incumbent`` stands; ``candidate`` takes the same arguments.

    ``judge`` is told of every run of the candidate and may send it back; by default it looks for faults alone.
    ``publishers`` are called with each event, in the background. Calls that the kernels disagree on are kept in
    ``policy.directory``, as replay files for the test of ``spec`` where one is given. Raises ``CanaryError``.
    """
    if not isinstance(name, str) or not name.strip() or any(sign in name for sign in ":#*\n"):
        raise CanaryError(f"canary({name!r}): expected a name without ':', '#', '*' or line ends, as 'rms_norm'")
    for role, function in (("incumbent", incumbent), ("candidate", candidate)):
        if not callable(function):
            raise CanaryError(f"canary({name!r}, {role}={function!r}): expected a function called like the kernel")
    if policy is not None and not isinstance(policy, Policy):
        raise CanaryError(f"canary({name!r}, policy={policy!r}): expected a Policy, as in Policy(state='shadow')")
    if spec is not None and not isinstance(spec, FusionSpec):
        raise CanaryError(f"canary({name!r}, spec={spec!r}): expected a FusionSpec, as that of the kernel's test")
    if policy is not None and policy.keep_tensors:
        need_safetensors(f"canary({name!r}, policy=Policy(keep_tensors=True))")
    made = Canary(name, incumbent, candidate, policy or Policy(), judge, publishers, spec)
    background.add(made)
    return made


class Canary:
    """What :func:`canary` makes. Every method may be called from any thread."""

    def __init__(
        self,
        name: str,
        incumbent: Callable[..., Any],
        candidate: Callable[..., Any],
        policy: Policy,
        judge: Judge | None,
        publishers: Sequence[Callable[[Mapping[str, Any]], object]],
        spec: FusionSpec | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        functools.update_wrapper(self, incumbent, updated=())
        self.name = name
        self.policy = policy
        self._incumbent = incumbent
        self._candidate = candidate
        self._names = names_of(incumbent)
        self._judge = judge or FirstFaults(policy.trip_after, policy.trip_window)
        self._clock = clock
        self._most_bytes = policy.memory_mib * 2**20
        folder = None if policy.directory is None else Path(policy.directory)
        self._log = Log(name, folder, int(policy.log_mib * 2**20), publishers)
        kept = self._most_bytes if policy.keep_tensors else 0.0
        self._finds = Finds(name, incumbent, folder, spec, keep_bytes=kept, tell=self._log.add)
        self._control = Control(name, policy, self._config_event)
        self._watchdog = Watchdog(policy.timeout_s)
        self._comparisons = Comparisons(policy.tolerance, policy.writes, policy.scratch, policy.timeout_s)
        self._paused_until = 0.0
        self._structures: dict[object, object] = {}
        self._counts: Counter[str] = Counter()
        self._block: dict[str, list[float]] = {}
        self._lock = threading.RLock()
        self._tickets = itertools.count()
        self._peeks = 0
        self._mode = OFF
        # What an active canary does with a call; None is the whole cost of a canary that is off.
        self._active: Callable[[tuple[Any, ...], dict[str, Any]], Any] | None = None
        self._control.look()
        self._apply()
        self._log.add("start", rollout=policy.rollout, state=self.state, tripped=self._control.tripped)
        self.refresh()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        active = self._active
        if active is None:
            return self._incumbent(*args, **kwargs)
        return active(args, kwargs)

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        """Bound like a function, where it stands for a method."""
        return self if instance is None else functools.partial(self, instance)

    @property
    def interval_s(self) -> float:
        return self.policy.interval_s

    @property
    def state(self) -> str:
        """``"off"``, ``"shadow"``, ``"route 0.01"``, ``"full"`` or ``"tripped"``."""
        return "tripped" if self._control.tripped is not None else str(self._mode)

    def status(self) -> dict[str, Any]:
        """What happened so far, in JSON types. ``calls`` are those while the canary was not off."""
        with self._lock:
            calls = next(self._tickets) - self._peeks
            self._peeks += 1
            return {
                "name": self.name,
                "rollout": self._control.rollout,
                "state": self.state,
                "tripped": self._control.tripped,
                "calls": calls,
                "counts": dict(sorted(self._counts.items())),
                "waiting": len(self._comparisons),
                "finds": self._finds.written,
                "log": None if self._log.path is None else str(self._log.path),
                "lost_events": self._log.lost,
                "publish_errors": self._log.publish_errors,
            }

    def set_state(self, state: str | None) -> None:
        """``"off"``, ``"shadow"``, ``"route 0.05"``, ``"full"``; ``None`` takes back what was said. Holds at once.

        What the environment or the file says still holds it back, and so does a trip. Raises ``CanaryError``.
        """
        self._control.call(state)
        self._apply()

    def trip(self, reason: str) -> None:
        """Back to the incumbent at once, until :meth:`rearm`."""
        if self._control.trip(reason):
            self._log.add("trip", rollout=self._control.rollout, reason=reason)
            self._apply()
            self._control.leave_mark()
            self._log.flush()

    def rearm(self, rollout: str) -> None:
        """Begins another rollout: a trip is forgotten, the counts and the log go on. Raises ``CanaryError``."""
        self._control.rearm(rollout)
        if isinstance(self._judge, FirstFaults):
            self._judge = FirstFaults(self.policy.trip_after, self.policy.trip_window)
        self._log.add("rearm", rollout=rollout)
        self._apply()

    def refresh(self) -> None:
        """Reads environment, file and finished comparisons now; a thread does so every ``interval_s``."""
        hung = self._watchdog.look()
        if hung:
            self.trip(f"hang: {hung} calls of the candidate ran for more than {self.policy.timeout_s:g} s")
        for observation in self._comparisons.ready():
            self._observe(observation)
        self._control.look()
        self._apply()
        self._finds.tend()
        self._write_block()
        self._log.flush()

    tend = refresh

    def at_exit(self) -> None:
        """Writes what waits; no state is read any more, for a file that does not answer would hold up the exit."""
        self._finds.tend()
        self._write_block()
        self._log.flush()

    def after_fork(self) -> None:
        """In a forked child: locks that nobody holds, counts and a log of its own."""
        self._lock = threading.RLock()
        self._control.after_fork()
        self._log.begin()
        self._finds.begin()
        self._comparisons.clear()
        self._watchdog = Watchdog(self.policy.timeout_s)
        self._counts, self._block = Counter(), {}
        self._tickets, self._peeks = itertools.count(), 0
        self._reseed()

    def close(self) -> None:
        """The incumbent from now on, and nobody looks after it any more."""
        background.remove(self)
        self._control.call("off")
        self.refresh()

    @contextmanager
    def only(self, arm: str) -> Iterator[None]:
        """Calls inside go to one kernel as it is, uncompared: to capture one CUDA graph for each.

        Off and tripped still mean the incumbent. Raises ``CanaryError`` for what is neither kernel.
        """
        if arm not in ARMS:
            raise CanaryError(f"only({arm!r}): expected 'incumbent' or 'candidate'")
        token = _ONLY.set(arm)
        try:
            yield
        finally:
            _ONLY.reset(token)

    def decide(self, key: object) -> str:
        """Which kernel serves the request ``key``, ``"incumbent"`` or ``"candidate"``: to choose among two graphs."""
        return "candidate" if self._active is not None and self._serves(str(key), 0) else "incumbent"

    def _serves(self, key: str | None, ticket: int) -> bool:
        """Whether the candidate's result is what this call returns."""
        mode = self._mode
        if mode.state == "full":
            return True
        if mode.state != "route":
            return False
        if self.policy.by == "process":
            key = self._replica
        where = position(self._seed, key) if key is not None else numbers.element(self._ticket_seed, ticket)
        return where < threshold(mode.share)

    def _reseed(self) -> None:
        self._seed = f"{self.policy.salt}\0{self.name}\0{self._control.rollout}"
        self._sample_seed = position(self._seed, "sample")
        process = f"{socket.gethostname()}:{os.getpid()}"
        self._replica = self.policy.replica or process
        self._ticket_seed = position(self._seed, process)

    def _sampled(self, ticket: int, share: float) -> bool:
        return numbers.element(self._sample_seed, ticket) < threshold(share)

    def _apply(self) -> None:
        with self._lock:
            mode = self._control.mode
            self._reseed()
            if mode == self._mode:
                return
            was, self._mode = self._mode, mode
            self._active = {"off": None, "shadow": self._on_shadow}.get(mode.state, self._on_route)
            self._log.add("state", rollout=self._control.rollout, was=str(was), now=self.state)

    def _on_shadow(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        ticket = next(self._tickets)
        if _ONLY.get() is not None or not self._sampled(ticket, self.policy.shadow):
            return self._arm(_ONLY.get())(*args, **kwargs)
        if _recorded():
            self._count("skipped: recorded into a graph")
            return self._incumbent(*args, **kwargs)
        return self._shadowed(args, kwargs)

    def _arm(self, arm: str | None) -> Callable[..., Any]:
        return self._candidate if arm == "candidate" else self._incumbent

    def _on_route(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        ticket = next(self._tickets)
        only = _ONLY.get()
        if only is not None:
            return self._arm(only)(*args, **kwargs)
        if _recorded():
            return self._recorded(args, kwargs, ticket)
        if not self._serves(current(), ticket):
            return self._incumbent(*args, **kwargs)
        signature = signature_of(args, kwargs)
        known = self._structures.get(signature)
        if known is None:
            if len(self._structures) >= _MOST_SIGNATURES:
                self._count("not routed")
                return self._incumbent(*args, **kwargs)
            # Nobody knows yet what such a call returns: the incumbent says it.
            return self._shadowed(args, kwargs)
        return self._routed(args, kwargs, known, self._sampled(ticket, self.policy.verify))

    def _recorded(self, args: tuple[Any, ...], kwargs: dict[str, Any], ticket: int) -> Any:
        if self._mode.state == "route" and self.policy.by != "process":
            raise CanaryError(
                f"canary {self.name!r} routes {self._mode.share:.3g} of its calls, and this call is being recorded (a "
                "CUDA graph or torch.compile): what is decided now would hold for every replay. Either decide for the "
                "process, Policy(by='process'), or record both, under kernel.only('incumbent') and under "
                "kernel.only('candidate'), and replay the one that kernel.decide(request_id) names"
            )
        return self._arm("candidate" if self._serves(None, ticket) else None)(*args, **kwargs)

    def _shadowed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The incumbent's result; the candidate runs after it, on copies."""
        copies, before = self._prepared(args, kwargs, None)
        result = self._incumbent(*args, **kwargs)
        try:
            self._learn(signature_of(args, kwargs), form(result))
            if copies is not None and before is not None:
                self._beside(result, copies, before, bucket_of(args, kwargs), copied="candidate")
        except Exception as error:  # noqa: BLE001 - the caller has its result; ours is to be noted, not to be raised
            self._skip(said(error))
        return result

    def _prepared(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], only: Sequence[str] | None
    ) -> tuple[Copies | None, Generators | None]:
        """Copies and generators to run another kernel with; ``None`` where that is not possible now, which is noted."""
        if only is None and (self._comparisons.full or self._clock() < self._paused_until):
            self._skip("the device is behind" if self._comparisons.full else "paused after it found no memory")
            return None, None
        try:
            copies = copies_of(args, kwargs, self._names, only=only, most_bytes=self._most_bytes)
            return copies, Generators(devices_of(args, kwargs))
        except CannotCopyError as error:
            self._skip(str(error))
        except Exception as error:  # noqa: BLE001 - whatever keeps us from looking keeps nobody from being served
            self._skip(said(error))
        return None, None

    def _beside(self, result: Any, copies: Copies, before: Generators, bucket: str, *, copied: str) -> None:
        """Runs the other kernel on the copies, as if it had been called instead, and compares."""
        after = Generators(devices_of(copies.args, copies.kwargs))
        call = self._finds.look(copies.args, copies.kwargs)
        try:
            before.put_back()
            with torch.no_grad():
                if copied == "candidate":
                    other = self._watchdog.run(self._candidate, copies.args, copies.kwargs)
                else:
                    other = self._incumbent(*copies.args, **copies.kwargs)
        except CandidateHungError:
            reason = f"ran for more than {self.policy.timeout_s:g} s in shadow"
            self._observe(Observation("hang", bucket, reason, call=call))
            return
        except torch.OutOfMemoryError:
            self._paused_until = self._clock() + _PAUSE_S
            self._skip("no memory for it")
            return
        except Exception as error:  # noqa: BLE001 - what the candidate raises is what we are here to see
            if copied == "incumbent":
                self._skip(f"the incumbent, run to verify, raised {said(error)}")
            else:
                self._observe(Observation("error", bucket, said(error), call=call))
            return
        finally:
            after.put_back()
        pair = (result, other) if copied == "candidate" else (other, result)
        found = self._comparisons.submit(*pair, copies, bucket, copied=copied, call=call)
        if found is not None:
            self._observe(found)

    def _routed(self, args: tuple[Any, ...], kwargs: dict[str, Any], known: object, verify: bool) -> Any:
        """The candidate's result, or the incumbent's on the inputs as they came."""
        writes = self.policy.writes
        copies, before = self._prepared(args, kwargs, None if verify else writes)
        if copies is None and verify:
            copies, before = self._prepared(args, kwargs, writes)
            verify = False
        if copies is None or before is None:
            self._count("not routed")
            return self._incumbent(*args, **kwargs)
        versions = versions_of(args, kwargs)
        failure: BaseException | None = None
        result: Any = None
        try:
            result = self._watchdog.run(self._candidate, args, kwargs)
        except (CandidateHungError, Exception) as error:  # noqa: BLE001 - whatever it is, there is the incumbent
            failure = error
        if failure is None and (known is _VARYING or form(result) == known):
            self._count("served by the candidate")
            if verify:
                try:
                    self._beside(result, copies, before, bucket_of(args, kwargs), copied="incumbent")
                except Exception as error:  # noqa: BLE001 - as in shadow
                    self._skip(said(error))
            return result
        if failure is not None and poisoned(args, kwargs):
            self.trip(f"error: the candidate destroyed the CUDA context: {said(failure)}")
            raise failure
        return self._fallen_back(args, kwargs, copies, before, versions, failure, result)

    def _fallen_back(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        copies: Copies,
        before: Generators,
        versions: list[tuple[torch.Tensor, int]],
        failure: BaseException | None,
        result: Any,
    ) -> Any:
        bucket = bucket_of(args, kwargs)
        kept = {id(tensor) for tensor in tensors_in([self._kept(args, kwargs)])}
        changed = [tensor for tensor, version in versions if tensor._version != version and id(tensor) not in kept]
        if changed:
            what = said(failure) if failure is not None else f"it returned {structure(result)}"
            reason = (
                f"canary {self.name!r}: the candidate failed ({what}) after it had changed {len(changed)} arguments "
                f"that writes={self.policy.writes!r} does not name, so the incumbent cannot run on what came in. Name "
                "them, or leave writes=None"
            )
            self._observe(Observation("inputs", bucket, reason))
            raise CanaryError(reason) from failure
        copies.restore()
        before.put_back()
        call = self._finds.look(args, kwargs)
        served = self._incumbent(*args, **kwargs)
        self._count("fallbacks")
        if isinstance(failure, CandidateHungError):
            self._observe(Observation("hang", bucket, f"ran for more than {self.policy.timeout_s:g} s", call=call))
        elif failure is not None:
            self._observe(Observation("error", bucket, said(failure), call=call))
        elif form(served) == form(result):
            self._structures[signature_of(args, kwargs)] = _VARYING
        else:
            reason = f"the incumbent returns {structure(served)}, the candidate {structure(result)}"
            self._observe(Observation("structure", bucket, reason, call=call))
        return served

    def _kept(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        writes = self.policy.writes
        return [value for name, value in self._names(args, kwargs).items() if writes is None or name in writes]

    def _learn(self, signature: object, found: object) -> None:
        known = self._structures.get(signature)
        if known is None:
            if len(self._structures) < _MOST_SIGNATURES:
                self._structures[signature] = found
        elif known != found:
            self._structures[signature] = _VARYING

    def _observe(self, seen: Observation) -> None:
        with self._lock:
            self._counts[f"compared: {seen.result}"] += 1
            block = self._block.setdefault(seen.bucket, [0.0] * 5)
            for i, value in enumerate(
                (1, seen.result != "ok", seen.elements, seen.squared_difference, seen.squared_incumbent)
            ):
                block[i] += value
            if seen.result != "ok":
                self._log.add("failure", result=seen.result, bucket=seen.bucket, reason=seen.reason, worst=seen.worst)
            self._finds.add(seen)
            try:
                decision = self._judge.update(seen)
            except Exception as error:  # noqa: BLE001 - a judge that breaks decides nothing, and is heard
                self._counts["judge errors"] += 1
                self._log.add("judge-error", reason=said(error))
                return
        if decision.verdict == "rollback":
            self.trip(decision.reason)

    def _write_block(self) -> None:
        with self._lock:
            blocks, self._block = self._block, {}
            if not blocks:
                return
            names = ("comparisons", "failures", "elements", "squared_difference", "squared_incumbent")
            buckets = {bucket: dict(zip(names, sums, strict=True)) for bucket, sums in blocks.items()}
            self._log.add("block", rollout=self._control.rollout, buckets=buckets, counts=dict(self._counts))

    def _skip(self, reason: str) -> None:
        # Numbers in reasons (MiB) would make a count of each.
        self._count(f"skipped: {'too large to copy' if reason.startswith('the copies would') else reason[:80]}")

    def _count(self, what: str) -> None:
        with self._lock:
            self._counts[what if what in self._counts or len(self._counts) < 100 else "others"] += 1

    def _config_event(self, message: str) -> None:
        self._log.add("config", reason=message)
