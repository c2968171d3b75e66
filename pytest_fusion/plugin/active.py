"""The running test: its request and mode, and its records."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

from pytest_fusion.errors import FusionError, FusionFailure
from pytest_fusion.plugin import keys
from pytest_fusion.plugin.options import SERVES, file_named_by, project
from pytest_fusion.report.record import TestRecord
from pytest_fusion.spec.wording import brief, words

if TYPE_CHECKING:
    from pytest_fusion.bench.bench_request import BenchRequest
    from pytest_fusion.engine.modes import Mode
    from pytest_fusion.engine.request import Pinned, Request


@dataclass(slots=True)
class Active:
    """One running test. A spec makes request and mode when it needs them, since they import torch."""

    item: pytest.Item
    records: list[TestRecord] = field(default_factory=list)

    def note_error(self, error: Exception) -> None:
        """Records a test that an error of its spec or of this package ended, without a verdict."""
        ours = isinstance(error, FusionError)
        if not isinstance(error, FusionFailure) and (ours or keys.is_fused(self.item)):
            text = words(error) if ours else brief(error)
            self.records.append(TestRecord(self.item.nodeid, "unknown", message=text, raised=True))

    def make_request(self) -> Request:
        from pytest_fusion.engine.request import Request

        config = self.item.config
        options = config.stash[keys.options]
        debugging = config.getoption("usepdb", False) or config.getoption("trace", False)
        return Request(
            nodeid=self.item.nodeid,
            device=config.stash[keys.device],
            profile=options.profile,
            isolate="off" if debugging else options.isolate,
            root=project(config),
            start=config.invocation_params.dir,
            pinned=_pinned(self.item),
            shown=keys.from_start(config, self.item.nodeid),
            first=options.first,
            strict=options.strict,
            sanitize=options.sanitize,
            bench=_bench_request(self.item) if options.bench else None,
        )

    def choose_mode(self) -> Mode:
        """The mode of this run. A process that a tool or a comparison started has its own mode."""
        from pytest_fusion.engine import modes, sanitize

        stash = self.item.config.stash
        if (file := file_named_by(sanitize.VARIABLE)) is not None:
            return sanitize.Sanitized(file)
        if (file := file_named_by("PYTEST_FUSION_PROFILED")) is not None:
            return modes.Profiled(file)
        if file_named_by(SERVES) is not None:
            from pytest_fusion.canary.offline.incumbent.serving import Serve

            return Serve()
        if (incumbent := stash.get(keys.rival, None)) is not None:
            from pytest_fusion.canary.offline.comparison_mode import Compare

            return Compare(incumbent)
        if (replay := stash.get(keys.replay, None)) is not None:
            return modes.Replay(replay.case, replay.made, replay.check, replay.cause)
        return modes.Judge()


# Several where a test runs pytest in its own process.
stack: list[Active] = []


def current() -> Active | None:
    """The running test, or ``None`` outside pytest."""
    return stack[-1] if stack else None


def _pinned(item: pytest.Item) -> tuple[Pinned, ...]:
    pins = item.config.stash.get(keys.pins, [])
    if not pins or not keys.is_fused(item):
        return ()
    from pytest_fusion.plugin.pinned import load

    spec = item.obj.fusion_spec  # type: ignore[attr-defined]
    own = [pin for pin in pins if pin.belongs_to(item.nodeid, spec.name, item.path.parent, item.config.rootpath)]
    return tuple(load(pin, spec, keys.shown(item.config, pin.path)) for pin in own)


def _bench_request(item: pytest.Item) -> BenchRequest:
    from pytest_fusion.bench.bench_request import BenchRequest
    from pytest_fusion.run.measure.tools.again import Again

    config = item.config
    options = config.stash[keys.options]
    if keys.family not in config.stash:
        config.stash[keys.family] = sum(map(_entries, item.session.items))
    start = config.invocation_params.dir
    again = Again(keys.from_start(config, item.nodeid), start, config.stash[keys.device]) if options.counters else None
    ci = bool(os.environ.get("CI"))
    return BenchRequest(options.targets, options.baseline, options.update, ci, config.stash[keys.family], again)


def _entries(item: pytest.Item) -> int:
    """The number of measured cases of a test: under pytest-xdist each worker knows all tests."""
    if keys.is_fused(item):
        return len(item.obj.fusion_spec.bench)  # type: ignore[attr-defined]
    return int("fusion_bench" in getattr(item, "fixturenames", ()))
