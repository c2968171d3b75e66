"""`Measures`: latency and accuracy of both kernels, on a part of the calls that are compared anyway."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from pytest_fusion.canary.evidence.ledger import Ledger
from pytest_fusion.canary.evidence.observation import Observation
from pytest_fusion.canary.live.budget import Budget
from pytest_fusion.canary.live.calls.call import recorded
from pytest_fusion.canary.live.calls.captures import beside_captures
from pytest_fusion.canary.live.calls.copies import CannotCopyError, Copies, Names, copied_bytes, copies_of
from pytest_fusion.canary.live.calls.forms import Forms
from pytest_fusion.canary.live.calls.generators import Generators
from pytest_fusion.canary.live.calls.signature import signature_of
from pytest_fusion.canary.live.comparing.call_pairs import Pairs, Plan
from pytest_fusion.canary.live.comparing.pending import Comparisons
from pytest_fusion.canary.live.comparing.referee import Referee
from pytest_fusion.canary.live.comparing.stopwatch import Span, clock_of
from pytest_fusion.canary.live.policy import Policy
from pytest_fusion.canary.live.watchdog import CandidateHungError, Watchdog
from pytest_fusion.case.containers import tensors_of
from pytest_fusion.run.placing import write
from pytest_fusion.spec.fusion_spec import FusionSpec
from pytest_fusion.spec.wording import out_of_memory, said

Kernel = Callable[..., Any]
# How a kernel is run: called with it, its arguments and keywords.
Runner = Callable[[Kernel, tuple[Any, ...], dict[str, Any]], Any]


class Chosen(NamedTuple):
    """A call that is measured: how it is timed, if it is, and its arguments as they came."""

    plan: Plan | None
    spare: Copies


class Measures:
    """``choose`` and ``take`` are for any thread and wait for no device; ``look`` is for threads that may wait.

    ``kernels`` are the incumbent and the candidate, which is run by ``watched``. With a ``spec`` whose reference has
    one right answer their errors are measured too. ``budget`` is what all of it may take of a GPU.
    """

    def __init__(
        self,
        kernels: tuple[Kernel, Kernel],
        policy: Policy,
        spec: FusionSpec | None,
        names: Names,
        watched: Runner,
        comparisons: Comparisons,
        ledger: Ledger,
        forms: Forms,
    ) -> None:
        self._incumbent, self._candidate = kernels
        self._watched = watched
        # The incumbent is run as the candidate is, by a watchdog that never looks: what Python does just before a call
        # of some 20 us was worth 2.6 % of it.
        self._alike = Watchdog(math.inf).run
        self._comparisons = comparisons
        self._ledger = ledger
        self._forms = forms
        self._names = names
        self._most_bytes = policy.memory_mib * 2**20
        # Kernels that write no argument can run on the same copies again and again.
        self._pure = policy.writes == ()
        self.budget = Budget(policy.gpu_share)
        self._pairs = Pairs(policy.timed)
        self._referee = None if spec is None or spec.random is not None else Referee(spec, names)
        self.clear()

    def seed(self, seed: int) -> None:
        """What the draws depend on beside the number of a call."""
        self._pairs.seed(seed)

    def clear(self) -> None:
        """Nothing is under way: another rollout, or a forked child."""
        self._reading = threading.Lock()
        # Spans that nobody reads, of a device that hangs, are not kept for ever.
        self._spent: deque[Span] = deque(maxlen=4096)
        self._pairs.clear()
        if self._referee is not None:
            self._referee.clear()

    def barred(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """Why a call whose turn it is cannot be looked at; empty where it can. Asked while its caller waits: of the
        likely reasons, the cheapest first."""
        if not self.budget.open:
            return "over its share of GPU time"
        if recorded():
            return "recorded into a graph"
        return "too large to copy" if copied_bytes(args, kwargs) > self._most_bytes else ""

    def choose(self, ticket: int, args: tuple[Any, ...], kwargs: dict[str, Any], copies: Copies) -> Chosen | None:
        """Whether and how this call is measured: never where its signature is new, for both kernels compile and tune
        then. Raises nothing."""
        try:
            plan = self._pairs.plan(ticket)
            wanted = plan is not None or (self._referee is not None and self._referee.wants)
            if not wanted or self._forms.get(signature_of(args, kwargs)) is None:
                return None
            if self._pure:
                return Chosen(plan, copies)
            return Chosen(plan, copies_of(args, kwargs, self._names, most_bytes=self._most_bytes))
        except Exception as error:  # noqa: BLE001 - whatever keeps us from measuring keeps nobody from being served
            small = not isinstance(error, CannotCopyError)
            self._ledger.count(f"not timed: {said(error) if small else 'too large to copy twice'}"[:100])
            return None

    def take(
        self, chosen: Chosen, bucket: str, results: tuple[object, object], copies: Copies, before: Generators
    ) -> Observation | None:
        """Runs and times the pair, and shows both ``results``, the incumbent's and the candidate's, to the referee.

        An observation where the candidate, run again, failed.
        """
        if self._referee is not None:
            why = self._referee.offer(bucket, chosen.spare, *results)
            if why:
                self._ledger.count(why)
        if chosen.plan is None:
            return None
        devices = {tensor.device for tensor in tensors_of([copies.args, copies.kwargs])}
        try:
            device = clock_of(devices)
        except ValueError:
            self._ledger.count("not timed: on several devices")
            return None
        spans = Span(device), Span(device)
        after = Generators(devices)
        try:
            for second in (chosen.plan.first, not chosen.plan.first):
                self._equal(copies, chosen.spare)
                before.put_back()
                with torch.no_grad():
                    if second and chosen.plan.arm == "candidate":
                        failed = self._run_candidate(spans[1], bucket, copies)
                        if failed is not None:
                            return failed
                    else:
                        timed = spans[second].around(self._incumbent)
                        again = self._alike(timed, copies.args, copies.kwargs)
        except Exception as error:  # noqa: BLE001 - the caller has its result; ours is to be noted, not to be raised
            self._ledger.count(f"not timed: {'no memory for it' if out_of_memory(error) else said(error)}"[:100])
            return None
        finally:
            after.put_back()
        self._pairs.add(bucket, chosen.plan, *spans)
        if chosen.plan.arm == "candidate":
            return None
        return self._comparisons.submit(results[0], again, copies, bucket, copied="candidate", arm="itself")

    def _equal(self, copies: Copies, spare: Copies) -> None:
        """Both kernels find the same bytes, where the other found them, just written: no cache is warmer for one."""
        for pair, kept in zip(copies.pairs, spare.pairs, strict=True):
            if pair.copy is not kept.copy:
                write(pair.copy, kept.copy)

    def _run_candidate(self, span: Span, bucket: str, copies: Copies) -> Observation | None:
        try:
            self._watched(span.around(self._candidate), copies.args, copies.kwargs)
        except CandidateHungError:
            return Observation("hang", bucket, "it ran for too long when it was run again to be timed")
        except Exception as error:
            # Of whatever else the candidate raises: that is what we are here to see.
            if out_of_memory(error):
                raise
            return Observation("error", bucket, f"{said(error)}, when it was run again to be timed")
        return None

    @contextmanager
    def spending(self, tensors: object) -> Iterator[None]:
        """What is inside is work that would not be there without the canary."""
        devices = {tensor.device for tensor in tensors_of(tensors) if tensor.device.type == "cuda"}
        with beside_captures():
            if len(devices) != 1:
                yield
                return
            span = Span(devices.pop())
            span.begin()
            try:
                yield
            finally:
                span.end()
                self._spent.append(span)

    def look(self) -> None:
        """Hands what is known by now to the ledger, once: `refresh` and the canaries' thread may both be here."""
        with self._reading:
            total = 0.0
            while self._spent:
                seconds = self._spent[0].seconds()
                if seconds is None:
                    break
                self._spent.popleft()
                total += seconds
            self._ledger.spend(total)
            self.budget.spend(total)
            for block in self._pairs.ready():
                self._ledger.ratio("latency_ratio", block.bucket, block.ratio, block.arm)
            found = None if self._referee is None else self._referee.look()
            if isinstance(found, str):
                self._ledger.count(found)
            elif found is not None:
                self._ledger.ratio("error_ratio", *found)
