"""`canary`: one callable in front of two kernels, called like the one in production."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch

from pytest_fusion.canary.evidence.events import Log, location
from pytest_fusion.canary.evidence.evidence_counts import Evidence
from pytest_fusion.canary.evidence.ledger import Ledger
from pytest_fusion.canary.evidence.observation import FirstFaults, Judge, Observation
from pytest_fusion.canary.evidence.promotion_rules import RULES, Rules
from pytest_fusion.canary.evidence.rollout_judge import judge as weigh
from pytest_fusion.canary.live import background
from pytest_fusion.canary.live.calls.arguments import (
    Slot,
    Ticker,
    context_lost,
    devices_of,
    names_of,
    signature_of,
    versions_of,
)
from pytest_fusion.canary.live.calls.captures import beside_captures, recorded
from pytest_fusion.canary.live.calls.copies import CannotCopyError, Copies, Generators, copies_of
from pytest_fusion.canary.live.comparing.measures import Measures
from pytest_fusion.canary.live.comparing.pending import VARYING, Comparisons, Forms, form, structure
from pytest_fusion.canary.live.disagreements import Disagreements
from pytest_fusion.canary.live.policy import OFF, Policy
from pytest_fusion.canary.live.sharing import REQUEST, CallSampler
from pytest_fusion.canary.live.state import Control
from pytest_fusion.canary.live.watchdog import CandidateHungError, Watchdog
from pytest_fusion.canary.recording.recorded_file import need_safetensors
from pytest_fusion.case.containers import tensors_of
from pytest_fusion.errors import CanaryError
from pytest_fusion.spec.fusion_spec import FusionSpec
from pytest_fusion.spec.wording import brief, checks_words, out_of_memory

ARMS = ("incumbent", "candidate")
# Seconds without comparisons after the candidate ran out of memory in shadow.
_PAUSE_S = 600.0
# The other kernel returned no result.
_NOTHING = object()
_ONLY: ContextVar[str | None] = ContextVar("pytest_fusion_canary_only", default=None)


@checks_words(CanaryError)
def canary(
    name: str,
    *,
    incumbent: Callable[..., Any],
    candidate: Callable[..., Any],
    policy: Policy | None = None,
    judge: Judge | None = None,
    rules: Rules | None = None,
    spec: FusionSpec | None = None,
    publishers: Sequence[Callable[[Mapping[str, Any]], object]] = (),
) -> Canary:
    """A callable that replaces ``incumbent`` and routes calls between it and ``candidate``.

    ``judge`` sees every run of the candidate and may roll it back; the default one looks for faults only. With
    ``rules`` the evidence of this process is judged at each interval. With ``spec`` some calls measure both errors
    against its reference, and disagreements are written to ``policy.directory`` as replay files for its test.
    ``publishers`` are called with each event, in the background. Raises ``CanaryError``.
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
    made = Canary(name, incumbent, candidate, policy or Policy(), judge, publishers, rules=rules, spec=spec)
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
        *,
        rules: Rules | None = None,
        spec: FusionSpec | None = None,
    ) -> None:
        functools.update_wrapper(self, incumbent, updated=())
        self.name = name
        self.policy = policy
        self.interval_s = policy.interval_s
        self._incumbent = incumbent
        self._candidate = candidate
        self._names = names_of(incumbent)
        self._most_bytes = policy.memory_mib * 2**20
        folder = None if policy.directory is None else Path(policy.directory)
        self._log = Log(name, folder, int(policy.log_mib * 2**20), publishers)
        tensor_bytes = self._most_bytes if policy.keep_tensors else 0.0
        self._disagreements = Disagreements(name, incumbent, folder, spec, keep_bytes=tensor_bytes, log=self._log.add)
        self._control = Control(name, policy, lambda message: self._log.add("config", reason=message))
        self._watchdog = Watchdog(policy.timeout_s)
        self._comparisons = Comparisons(policy.tolerance, policy.writes, policy.scratch, policy.timeout_s)
        self._paused_until = 0.0
        self._forms = Forms()
        self._rules = rules
        self._ledger = Ledger(self._log, policy.rollout, rules or RULES)
        self._judge = judge or FirstFaults(policy.trip_after, policy.trip_window, self._ledger.unverified)
        kernels = incumbent, candidate
        self._measures = Measures(
            kernels, policy, spec, self._names, self._watchdog, self._comparisons, self._ledger, self._forms
        )
        self._lock = threading.RLock()
        self._tickets = Ticker()
        self._mode = OFF
        # What an active canary does with a call; None is the whole cost of a canary that is off.
        self._active: Callable[[tuple[Any, ...], dict[str, Any]], Any] | None = None
        self._control.look()
        self._apply()
        self._begun("start")
        self.refresh()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        active = self._active
        if active is None:
            return self._incumbent(*args, **kwargs)
        return active(args, kwargs)

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        """Binds like a function, so that a canary can replace a method."""
        return self if instance is None else functools.partial(self, instance)

    @property
    def state(self) -> str:
        """``"off"``, ``"shadow"``, ``"route 0.01"``, ``"full"`` or ``"tripped"``."""
        return "tripped" if self._control.tripped is not None else str(self._mode)

    def status(self) -> dict[str, Any]:
        """Counts so far, in JSON types. ``calls`` are those while the canary was neither off nor tripped."""
        with self._lock:
            return {
                "name": self.name,
                "rollout": self._control.rollout,
                "state": self.state,
                "tripped": self._control.tripped,
                "calls": self._tickets.read(),
                "counts": self._ledger.counts(),
                "waiting": len(self._comparisons),
                "finds": self._disagreements.written,
                "log": None if self._log.path is None else str(self._log.path),
                "lost_events": self._log.lost,
                "publish_errors": self._log.publish_errors,
            }

    def evidence(self) -> Evidence:
        """The evidence of this process for the current rollout, as the judge takes it."""
        return self._ledger.evidence()

    def set_state(self, state: str | None) -> str:
        """Sets ``"off"``, ``"shadow"``, ``"route 0.05"`` or ``"full"`` at once; ``None`` removes the setting. Raises
        ``CanaryError``. Returns the state that holds: environment, file and trip may be more restrictive."""
        self._control.call(state)
        self._apply()
        return self.state

    def trip(self, reason: str) -> None:
        """Switches back to the incumbent at once, until :meth:`rearm`."""
        if self._control.trip(reason):
            self._log.add("trip", rollout=self._control.rollout, reason=reason)
            self._apply()
            self._control.leave_mark()
            self._log.flush()

    def rearm(self, rollout: str) -> None:
        """Starts another rollout: clears a trip and continues the counts and the log. Raises ``CanaryError``."""
        self._control.rearm(rollout)
        self._ledger.rearm(rollout)
        self._measures.clear()
        if isinstance(self._judge, FirstFaults):
            self._judge.clear()
        self._begun("rearm")
        self._apply()

    @beside_captures()
    def refresh(self) -> None:
        """Reads environment, file and finished comparisons; a thread does this every ``interval_s``."""
        hung = self._watchdog.look()
        if hung:
            self.trip(f"hang: {hung} calls of the candidate ran for more than {self.policy.timeout_s:g} s")
        for observation in self._comparisons.ready():
            self._observe(observation)
        self._control.look()
        self._apply()
        self._measures.look()
        self._disagreements.tend()
        self._ledger.write()
        self._log.flush()
        if self._rules is not None and self._control.tripped is None:
            found = weigh(self._ledger.evidence(), self._rules, intervals=False)
            if found.decision == "rollback":
                self.trip(found.reasons[0])

    tend = refresh

    def at_exit(self) -> None:
        """Writes what is pending. Reads no state, because a file that does not answer would delay the exit."""
        self._disagreements.tend()
        self._ledger.write()
        self._log.flush()

    def after_fork(self) -> None:
        """Gives a forked child free locks, and counts and a log of its own."""
        self._lock = threading.RLock()
        self._control.after_fork()
        self._log.begin()
        self._disagreements.begin()
        self._comparisons.clear()
        self._watchdog.clear()
        self._ledger.begin(self._control.rollout)
        if isinstance(self._judge, FirstFaults):
            self._judge.clear()
        self._measures.clear()
        self._tickets = Ticker()
        self._draw()

    def close(self) -> None:
        """Routes all calls to the incumbent from now on, and stops the background work."""
        background.remove(self)
        self._control.call("off")
        self.refresh()

    @contextmanager
    def only(self, arm: str) -> Iterator[None]:
        """Sends the calls inside to one kernel, without comparing: to capture one CUDA graph for each. Off and tripped
        still mean the incumbent. Raises ``CanaryError`` for any other name."""
        if arm not in ARMS:
            raise CanaryError(f"only({arm!r}): expected 'incumbent' or 'candidate'")
        token = _ONLY.set(arm)
        try:
            yield
        finally:
            _ONLY.reset(token)

    def decide(self, key: object) -> str:
        """Which kernel serves the request ``key``, ``"incumbent"`` or ``"candidate"``: to choose between two graphs."""
        served = self._active is not None and self._sampler.serves(self._mode, str(key), 0)
        return "candidate" if served else "incumbent"

    def _draw(self) -> None:
        self._sampler = CallSampler(self.name, self._control.rollout, self.policy)
        self._measures.seed(self._sampler.sample)

    def _apply(self) -> None:
        with self._lock:
            mode = self._control.mode
            self._draw()
            if mode == self._mode:
                return
            was, self._mode = self._mode, mode
            self._active = {"off": None, "shadow": self._on_shadow}.get(mode.state, self._on_route)
            self._log.add("state", rollout=self._control.rollout, was=str(was), now=self.state)

    def _on_shadow(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        ticket = self._tickets.up()
        only = _ONLY.get()
        if only is not None or torch.compiler.is_compiling():
            return self._arm(only)(*args, **kwargs)
        looked = self._sampler.sampled(ticket, self.policy.shadow)
        why = self._measures.why_not(args, kwargs) if looked else ""
        if looked and not why:
            return self._shadowed(args, kwargs, self._ledger.traffic.slot("shadow", args, kwargs), ticket)
        try:
            return self._incumbent(*args, **kwargs)
        finally:
            # After the launch, so that the device does not wait for the counting (5 us on an H200's host).
            self._ledger.traffic.slot("shadow", args, kwargs)
            if why:
                self._ledger.skip(why)

    def _arm(self, arm: str | None) -> Callable[..., Any]:
        return self._candidate if arm == "candidate" else self._incumbent

    def _on_route(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        ticket = self._tickets.up()
        only = _ONLY.get()
        if only is not None:
            return self._arm(only)(*args, **kwargs)
        if recorded():
            return self._recorded(args, kwargs, ticket)
        slot = self._ledger.traffic.slot(self._mode.state, args, kwargs)
        if not self._sampler.serves(self._mode, REQUEST.get(), ticket):
            return self._incumbent(*args, **kwargs)
        known = self._forms.get(signature_of(args, kwargs))
        if known is None:
            if self._forms.full:
                self._ledger.count("not routed")
                return self._incumbent(*args, **kwargs)
            # The first call of its kind: the incumbent shows what it returns.
            return self._shadowed(args, kwargs, slot, ticket)
        verify = self._sampler.sampled(ticket, self.policy.verify) and self._measures.budget.open
        return self._routed(args, kwargs, slot, known, verify)

    def _recorded(self, args: tuple[Any, ...], kwargs: dict[str, Any], ticket: int) -> Any:
        if self._mode.state == "route" and self.policy.by != "process":
            raise CanaryError(
                f"canary {self.name!r} routes {self._mode.share:.3g} of its calls, and this call is being recorded (a "
                "CUDA graph or torch.compile): what is decided now would hold for every replay. Either decide for the "
                "process, Policy(by='process'), or record both, under kernel.only('incumbent') and under "
                "kernel.only('candidate'), and replay the one that kernel.decide(request_id) names"
            )
        return self._arm("candidate" if self._sampler.serves(self._mode, None, ticket) else None)(*args, **kwargs)

    def _shadowed(self, args: tuple[Any, ...], kwargs: dict[str, Any], slot: Slot, ticket: int) -> Any:
        """The incumbent's result; the candidate runs after it, on copies."""
        copies, before = self._prepared(args, kwargs, None)
        chosen = None if copies is None else self._measures.choose(ticket, args, kwargs, copies)
        result = self._incumbent(*args, **kwargs)
        try:
            self._forms.learn(signature_of(args, kwargs), form(result))
            if copies is not None and before is not None:
                with self._measures.spending(copies.args):
                    other = self._beside(result, copies, before, slot.bucket, copied="candidate")
                    if chosen is not None and other is not _NOTHING:
                        failed = self._measures.take(chosen, slot.bucket, (result, other), copies, before)
                        if failed is not None:
                            self._observe(failed)
        except Exception as error:  # noqa: BLE001 - the caller has its result; our error is counted, not raised
            self._ledger.skip(brief(error))
        return result

    @beside_captures()
    def _prepared(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], only: Sequence[str] | None
    ) -> tuple[Copies | None, Generators | None]:
        """Copies and generators for running the other kernel; ``None`` (and counted) where that is not possible now."""
        if only is None and (self._comparisons.full or time.monotonic() < self._paused_until):
            self._ledger.skip("the device is behind" if self._comparisons.full else "paused after it found no memory")
            return None, None
        try:
            copies = copies_of(args, kwargs, self._names, only=only, most_bytes=self._most_bytes)
            return copies, Generators(devices_of(args, kwargs))
        except Exception as error:  # noqa: BLE001 - a comparison that fails must not fail the call
            self._ledger.skip(str(error) if isinstance(error, CannotCopyError) else brief(error))
        return None, None

    @beside_captures()
    def _beside(self, result: Any, copies: Copies, before: Generators, bucket: str, *, copied: str) -> Any:
        """Runs the other kernel on the copies, as if it had been called instead; compares and returns its result."""
        after = Generators(devices_of(copies.args, copies.kwargs))
        call = self._disagreements.note(copies.args, copies.kwargs)
        try:
            before.put_back()
            with torch.no_grad():
                if copied == "candidate":
                    other = self._watchdog.run(self._candidate, copies.args, copies.kwargs)
                else:
                    other = self._incumbent(*copies.args, **copies.kwargs)
        except CandidateHungError:
            self._observe(Observation("hang", bucket, f"ran for over {self.policy.timeout_s:g} s in shadow", call=call))
            return _NOTHING
        except Exception as error:  # noqa: BLE001 - what the candidate raises is an observation
            if out_of_memory(error):
                self._paused_until = time.monotonic() + _PAUSE_S
                self._ledger.skip("no memory for it")
            elif copied == "incumbent":
                self._ledger.skip(f"the incumbent, run to verify, raised {brief(error)}")
            else:
                self._observe(Observation("error", bucket, brief(error), call=call))
            return _NOTHING
        finally:
            after.put_back()
        pair = (result, other) if copied == "candidate" else (other, result)
        found = self._comparisons.submit(*pair, copies, bucket, copied=copied, call=call)
        if found is not None:
            self._observe(found)
            return _NOTHING
        return other

    def _routed(self, args: tuple[Any, ...], kwargs: dict[str, Any], slot: Slot, known: object, verify: bool) -> Any:
        """The candidate's result, or where it fails the incumbent's on the original inputs."""
        writes = self.policy.writes
        copies, before = self._prepared(args, kwargs, None if verify else writes)
        if copies is None and verify:
            copies, before = self._prepared(args, kwargs, writes)
            verify = False
        if copies is None or before is None:
            self._ledger.count("not routed")
            return self._incumbent(*args, **kwargs)
        versions = versions_of(args, kwargs)
        failure: BaseException | None = None
        result: Any = None
        try:
            result = self._watchdog.run(self._candidate, args, kwargs)
        except (CandidateHungError, Exception) as error:  # noqa: BLE001 - the incumbent serves the call instead
            failure = error
        if failure is None and (known is VARYING or form(result) == known):
            self._ledger.count("served by the candidate")
            slot.candidate.up()
            if not verify:
                slot.unverified.up()
                return result
            try:
                with self._measures.spending(copies.args):
                    self._beside(result, copies, before, slot.bucket, copied="incumbent")
            except Exception as error:  # noqa: BLE001 - as in shadow
                self._ledger.skip(brief(error))
            return result
        if failure is not None and context_lost(args, kwargs):
            self.trip(f"error: the candidate destroyed the CUDA context: {brief(failure)}")
            raise failure
        named = self._names(args, kwargs).items()
        restored = {id(one) for one in tensors_of([v for name, v in named if writes is None or name in writes])}
        changed = [tensor for tensor, version in versions if tensor._version != version and id(tensor) not in restored]
        if changed:
            what = brief(failure) if failure is not None else f"it returned {structure(result)}"
            reason = (
                f"canary {self.name!r}: the candidate failed ({what}) after it had changed {len(changed)} arguments "
                f"that writes={self.policy.writes!r} does not name, so the incumbent cannot run on what came in. Name "
                "them, or leave writes=None"
            )
            self._observe(Observation("inputs", slot.bucket, reason))
            raise CanaryError(reason) from failure
        copies.restore()
        before.put_back()
        return self._fall_back(args, kwargs, slot.bucket, failure, result)

    def _fall_back(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], bucket: str, failure: BaseException | None, result: Any
    ) -> Any:
        """The incumbent's result, after the candidate failed or returned ``result`` in another form."""
        call = self._disagreements.note(args, kwargs)
        served = self._incumbent(*args, **kwargs)
        hung = isinstance(failure, CandidateHungError)
        self._ledger.fell_back("hang" if hung else "error" if failure is not None else "structure")
        if hung:
            self._observe(Observation("hang", bucket, f"ran for more than {self.policy.timeout_s:g} s", call=call))
        elif failure is not None:
            self._observe(Observation("error", bucket, brief(failure), call=call))
        elif form(served) == form(result):
            self._forms.learn(signature_of(args, kwargs), VARYING)
        else:
            reason = f"the incumbent returns {structure(served)}, the candidate {structure(result)}"
            self._observe(Observation("structure", bucket, reason, call=call))
        return served

    def _observe(self, seen: Observation) -> None:
        self._ledger.observe(seen)
        if seen.arm == "itself":
            return
        with self._lock:
            self._disagreements.add(seen)
            try:
                decision = self._judge.update(seen)
            except Exception as error:  # noqa: BLE001 - a judge that raises decides nothing; the log has it
                self._ledger.count("judge errors")
                self._log.add("judge-error", reason=brief(error))
                return
        if decision.verdict == "rollback":
            self.trip(decision.reason)

    def _begun(self, event: str) -> None:
        arms = {"incumbent": location(self._incumbent), "candidate": location(self._candidate)}
        rollout, tripped = self._control.rollout, self._control.tripped
        self._log.add(event, rollout=rollout, state=self.state, tripped=tripped, **arms)
