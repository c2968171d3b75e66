"""Check `device`, with a modelled GPU: queues of work in place of streams, and a current device that is a word."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from pytest_fusion.case.case_model import Case, TensorCase
from pytest_fusion.case.containers import map_tensors
from pytest_fusion.checks import device_check as device
from pytest_fusion.checks import registry
from pytest_fusion.checks.case_judge import judge_case
from pytest_fusion.checks.context import Context
from pytest_fusion.run.stress import streams
from pytest_fusion.spec.fusion_spec import FusionSpec
from pytest_fusion.spec.inputs import tensor
from pytest_fusion.spec.values import integers
from tests.checks.judged import hazards

T = torch.Tensor


class World:
    """What is queued on the current stream, which device is current, and who waited."""

    def __init__(self) -> None:
        self.pending: list[Callable[[], None]] = []
        self.current = "own"
        self.waited: list[streams.Wait] = []
        # The wait is in a line of the function under test.
        self.glue = False
        self.busy = False
        # Calls of behind_producer whose stream shares a queue with the kernel's own, so that its launch waits.
        self.shared: set[int] = set()
        self.calls = 0
        self.cycles: list[int] = []

    def launch(self) -> None:
        """Work on the current stream comes after what is queued there."""
        while self.pending:
            self.pending.pop(0)()

    def wait(self) -> None:
        self.launch()
        frame = sys._getframe(1 if self.glue else 0)
        code = frame.f_code
        self.waited.append(streams.Wait(code.co_filename, frame.f_lineno, code.co_name, code.co_firstlineno))

    def behind_producer(
        self, call: Any, arguments: Any, produce: Any, *, wait: bool = False, cycles: int = 1
    ) -> streams.Behind:
        self.cycles.append(cycles)
        self.pending, self.waited = [produce], []
        if wait:
            self.launch()
        self.calls += 1
        self.busy = not wait
        queued = self.calls in self.shared
        if queued:
            self.launch()
        result = call(**arguments)
        self.busy = False
        late = not wait and not self.waited and not queued
        copies = map_tensors((result, dict(arguments)), torch.Tensor.clone)
        self.launch()
        return streams.Behind(copies[0], copies[1], late)

    @contextlib.contextmanager
    def current_device(self, _: Any) -> Iterator[None]:
        self.current = "other"
        yield
        self.current = "own"

    @contextlib.contextmanager
    def waits(self) -> Iterator[list[streams.Wait]]:
        seen = self.waited = []
        yield seen


WITHOUT = {"honesty": "these tests replace functions of the package"}


def spec_of(fused: Callable[[T], T]) -> FusionSpec:
    """Of a doubled float32 matrix."""
    inputs = {"x": tensor("rows hidden")}
    return FusionSpec(fused=fused, reference=doubled, inputs=inputs, dtypes="float32", without=WITHOUT)


@pytest.fixture
def examine(examine: Any) -> Any:
    """All checks but the one that finds what this file replaces."""
    return lambda *args, **keywords: examine(*args, **{"without": WITHOUT, **keywords})


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    """A modelled device with one GPU; ``second`` adds another."""
    made = World()
    for name in ("behind_producer", "current_device", "waits"):
        monkeypatch.setattr(streams, name, getattr(made, name))
    monkeypatch.setattr(streams, "settle", lambda _: made.launch())
    monkeypatch.setattr(streams, "other_device", lambda _: None)
    monkeypatch.setattr(device, "missing", lambda spec, on: None)
    here = replace(device.CHECK, missing=lambda spec, on: None)
    monkeypatch.setattr(registry, "OURS", tuple(here if each is device.CHECK else each for each in registry.OURS))
    return made


@pytest.fixture
def second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "other_device", lambda _: torch.device("cpu"))


def doubled(x: T) -> T:
    return 2 * x


def test_a_kernel_on_the_current_stream_passes(examine: Any, world: World) -> None:
    """It is right behind the producer, which was still busy, and what one GPU cannot show is said."""

    def fused(x: T) -> T:
        world.launch()
        return x + x

    record = examine(fused, doubled)
    check = record.checks["device"]
    assert (record.verdict, check["verdict"]) == ("pass", "pass"), record.message
    assert check["reason"].startswith("streams, no waiting; one GPU")


def test_a_kernel_on_another_stream_is_found(examine: Any, world: World) -> None:
    """Work that does not queue behind the producer reads what lay there before."""
    record = examine(lambda x: x + x, doubled)
    assert (record.verdict, record.failed_check, record.cause) == ("fail", "device", "wrong-stream"), record.message
    assert "With the producer done before the call it is right" in record.message


def test_a_queue_shared_by_chance_does_not_hide_another_stream(examine: Any, world: World) -> None:
    """Where the launch had to wait for the producer for another reason, the call is made again on another stream."""
    world.shared = {1, 2, 5}
    record = examine(lambda x: x + x, doubled)
    assert (record.failed_check, record.cause) == ("device", "wrong-stream"), record.message


def test_a_busy_gpu_gives_no_evidence(examine: Any, world: World) -> None:
    """Where no launch could have overtaken the producer, a right result says nothing."""
    world.shared = set(range(1, 1000))
    record = examine(lambda x: x + x, doubled)
    check = record.checks["device"]
    assert (record.verdict, check["verdict"]) == ("pass", "unknown"), record.message
    assert "distinguished from one that ran too early" in check["reason"]
    assert world.cycles[:4] == [streams.CYCLES << turn for turn in range(4)]


def test_a_result_that_comes_too_late_is_found(examine: Any, world: World) -> None:
    """A consumer on the current stream does not find what another stream writes afterwards."""

    def fused(x: T) -> T:
        world.launch()
        out = torch.zeros_like(x)
        if world.busy:
            world.pending.append(lambda: out.copy_(x + x))
        else:
            out.copy_(x + x)
        return out

    record = examine(fused, doubled)
    assert (record.failed_check, record.cause) == ("device", "wrong-stream"), record.message


def test_without_a_difference_it_is_unknown(examine: Any, world: World) -> None:
    """Integers are left as they are and floats do not matter here, so running too early would not show."""
    inputs = {"x": tensor("rows hidden", dtype=torch.int32, values=integers(0, 9))}
    record = examine(lambda x: x + x, doubled, inputs)
    assert record.verdict == "pass", record.message
    assert record.checks["device"]["verdict"] == "unknown"
    assert "distinguished from one that ran too early" in record.checks["device"]["reason"]


def waiting(world: World) -> Any:
    def fused(x: T) -> T:
        world.wait()
        return x + x

    return fused


@pytest.mark.parametrize("glue", [False, True])
def test_a_hidden_wait_is_a_hazard_that_names_its_line(judge_one: Any, world: World, glue: bool) -> None:
    """A line of the function under test is told from one of what it calls; what comes after is judged."""
    world.glue = glue
    result = judge_one(waiting(world), doubled, again=True, without=WITHOUT)
    (hazard,) = hazards(result, "hidden-sync")
    line = "`world.wait()` in fused, the function under test itself" if glue else "in wait;"
    assert "waits for the device at test_device.py:" in hazard.reason
    assert line in hazard.reason
    assert 'allow={"hidden-sync": "reason"} or syncs=True' in hazard.reason
    assert result.failure is None


def test_a_wait_does_not_hide_another_device(judge_one: Any, world: World, second: None) -> None:
    """Both are found on one case."""

    def fused(x: T) -> T:
        world.wait()
        return x if world.current == "other" else x + x

    focus = Context(spec_of(fused), torch.device("cpu"), complete=True)
    result = judge_case(focus, Case({"rows": 5, "hidden": 7}, "float32", {"x": TensorCase("float32")}, seed=1))
    assert hazards(result, "hidden-sync")
    assert result.failure is not None
    assert result.failure.cause == "wrong-device"


def test_a_hidden_wait_may_be_declared(examine: Any, world: World) -> None:
    """With syncs=True nobody minds, and a call that waits for its inputs is in order with them."""
    declared = examine(waiting(world), doubled, syncs=True)
    assert declared.verdict == "pass", declared.message
    assert declared.checks["device"]["reason"].startswith("streams, waiting allowed by syncs=True")


def test_a_call_that_waits_proves_nothing_about_streams(examine: Any, world: World) -> None:
    """The producer was done by the time it was called, as far as anybody can tell, unless it says that it waits."""

    def fused(x: T) -> T:
        if world.busy:
            world.wait()
        return x + x

    record = examine(fused, doubled)
    assert record.verdict == "pass", record.message
    assert record.checks["device"]["verdict"] == "unknown"


def test_a_first_call_may_wait(examine: Any, world: World) -> None:
    """What a call does once, as it compiles or fills a cache, is not counted."""
    known: set[int] = set()

    def fused(x: T) -> T:
        world.launch()
        if x.data_ptr() not in known:
            known.add(x.data_ptr())
            world.wait()
        return x + x

    record = examine(fused, doubled)
    assert record.verdict == "pass", record.message


@pytest.mark.parametrize("raises", [True, False])
def test_a_kernel_on_the_current_device_instead_is_found(
    examine: Any, world: World, second: None, raises: bool
) -> None:
    """A launch that ignores where its tensors are raises or is wrong while another GPU is current."""

    def fused(x: T) -> T:
        world.launch()
        if world.current == "other":
            if raises:
                raise ValueError("Pointer argument (at 0) cannot be accessed from Triton (cpu tensor?)")
            return x
        return x + x

    record = examine(fused, doubled)
    assert (record.failed_check, record.cause) == ("device", "wrong-device"), record.message


def test_a_second_gpu_is_part_of_the_evidence(examine: Any, world: World, second: None) -> None:
    """With two GPUs and a kernel that minds its tensors nothing is left out; the other GPU is tried in the end."""

    def fused(x: T) -> T:
        world.launch()
        return x + x

    record = examine(fused, doubled)
    assert record.checks["device"] == {
        "verdict": "pass",
        "reason": "streams, no waiting, a second GPU",
        "cases": 3,
    }


def test_without_a_gpu_it_is_unknown(examine: Any) -> None:
    """The CPU lane has no streams, and says so."""
    record = examine(lambda x: x + x, doubled)
    assert record.checks["device"]["verdict"] == "unknown"
    assert record.checks["device"]["reason"].startswith("needs a GPU")


HERE = "test_waits_gives_back_what_it_replaced"


def test_a_warning_of_torch_is_placed_at_the_line_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other warnings are none, and how warnings are shown is as before."""
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda _: None)
    shown = warnings.showwarning
    with streams.waits() as seen:
        warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        warnings.warn("another one", stacklevel=1)
    assert ["warnings.warn" in str(wait) for wait in seen] == [True]
    assert warnings.showwarning is shown


def test_waits_gives_back_what_it_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Explicit waits are noted and done, and torch's own functions are back afterwards, also after an error."""
    done: list[str] = []
    modes: list[Any] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: done.append("all"))
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    mine, event = torch.cuda.synchronize, torch.cuda.Event.synchronize
    with pytest.raises(RuntimeError, match="planted"), streams.waits() as seen:  # noqa: PT012
        torch.cuda.synchronize()
        raise RuntimeError("planted")
    assert [(wait.function, "synchronize()" in str(wait)) for wait in seen] == [(HERE, True)]
    assert (done, modes) == (["all"], ["warn", 0])
    assert torch.cuda.synchronize is mine
    assert torch.cuda.Event.synchronize is event
