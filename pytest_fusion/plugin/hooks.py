"""The pytest plugin: hooks as thin adapters. Loading it imports neither torch, triton nor Hypothesis."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import pytest

from pytest_fusion.errors import FusionError, FusionFailure
from pytest_fusion.plugin import active, extensions, hookspec, keys
from pytest_fusion.plugin.fixtures import fusion, fusion_bench, fusion_device
from pytest_fusion.plugin.options import SERVES, Options, add_options, file_named_by, resolve
from pytest_fusion.report.record import TestRecord
from pytest_fusion.run import device_choice

if TYPE_CHECKING:
    from pytest_fusion.bench.bench_request import BenchRequest
    from pytest_fusion.engine.modes import Mode
    from pytest_fusion.engine.request import Pinned, Request
    from pytest_fusion.run.measure.tools.again import Again

__all__ = ["fusion", "fusion_bench", "fusion_device"]


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    pluginmanager.add_hookspecs(hookspec)


def pytest_addoption(parser: pytest.Parser) -> None:
    add_options(parser)


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Before any conftest imports Triton: its interpreter cannot be switched on afterwards."""
    known = early_config.known_args_namespace
    wanted = getattr(known, "fusion_device", None) or early_config.getini("fusion_device") or "auto"
    try:
        device_choice.prepare(device_choice.choose(str(wanted)))
    except FusionError as error:
        raise pytest.UsageError(str(error)) from None


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    try:
        options = resolve(config)
        config.stash[keys.device] = device_choice.choose(options.device)
        if not _is_worker(config):
            _check_paths(config, options)
        if options.replay is not None:
            from pytest_fusion.diagnosis.repro.replay_file import owner

            owner(options.replay)  # refused now rather than after collection, and by the controller of pytest-xdist
        if options.canary:
            from pytest_fusion.plugin.incumbent_option import rival

            config.stash[keys.rival] = rival(config, options, config.stash[keys.device])
    except FusionError as error:
        raise pytest.UsageError(str(error)) from None
    device_choice.prepare(config.stash[keys.device])
    if options.executor == "serial":
        os.environ["PYTEST_FUSION_EXECUTOR"] = "serial"
    if options.undefined == "zero":
        os.environ["PYTEST_FUSION_UNDEFINED"] = "zero"
    config.stash[keys.options] = options
    config.stash[keys.records] = []
    config.stash[keys.orphans] = []
    config.pluginmanager.register(_Collector(config.stash[keys.records]), "fusion-records")
    if options.bench:
        from pytest_fusion.plugin.benchmark import Benchmarks

        config.pluginmanager.register(Benchmarks(config, config.stash[keys.device]), "fusion-benchmark")


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """What plugins add is known before a test module states a spec."""
    try:
        extensions.install(session.config)
    except FusionError as error:
        raise pytest.UsageError(str(error)) from None


class _Collector:
    """Gathers the records that reports bring, from this process and from workers; reports carry no config."""

    def __init__(self, records: list[TestRecord]) -> None:
        self._records = records

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._records.extend(TestRecord.from_json(data) for data in getattr(report, "fusion", ()))

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Pinned replays are looked up once, before -k and -m take tests away."""
        _find_pins(config, [item for item in items if _is_fused(item)])

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Take over what a worker of pytest-xdist found."""
        found = getattr(node, "workeroutput", {}).get("fusion_orphans", [])
        known = node.config.stash[keys.orphans]
        known += [line for line in found if line not in known]


def _find_pins(config: pytest.Config, tests: list[pytest.Item]) -> None:
    """Raises ``UsageError`` for a file in a folder of pinned replays that is none."""
    config.stash[keys.pins] = []
    if not tests or config.stash[keys.options].replay is not None:
        return
    from pytest_fusion.plugin.pinned import described, find, orphans, shown_orphans

    try:
        pins = config.stash[keys.pins] = find([item.path.parent for item in tests], config.rootpath)
    except FusionError as error:
        raise pytest.UsageError(str(error)) from None
    if any("::" in argument for argument in config.args):
        return  # parts of files were asked for, so what is missing may well be there
    lost = orphans(pins, described(tests), config.rootpath)
    config.stash[keys.orphans] += shown_orphans(lost, config.invocation_params.dir)
    if _is_worker(config):
        config.workeroutput["fusion_orphans"] = config.stash[keys.orphans]  # type: ignore[attr-defined]


def _check_paths(config: pytest.Config, options: Options) -> None:
    if options.report is None and options.json is None:
        return
    from pytest_fusion.report.report_paths import check_writable

    for option, path in (("--fusion-report", options.report), ("--fusion-json", options.json)):
        if path is not None:
            check_writable(_shown(config, path), option)


def _is_worker(config: pytest.Config) -> bool:
    return hasattr(config, "workerinput")


def _is_fused(item: pytest.Item) -> bool:
    return hasattr(getattr(item, "obj", None), "fusion_spec")


def pytest_report_header(config: pytest.Config) -> str | None:
    options = config.stash[keys.options]
    device = config.stash[keys.device]
    from pytest_fusion.report.environment import describe

    found = describe(device)
    where = "cpu (Triton interpreter)" if device == "cpu" else f"{device} ({found['device_name'] or 'unnamed'})"
    versions = ", ".join(f"{name} {found[name]}" if found[name] else f"no {name}" for name in ("torch", "triton"))
    return f"fusion: {where}, {versions}, profile {options.profile.name}"


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Shorten the traceback of a spec's error to the user's own lines."""
    report = yield
    call: pytest.CallInfo[object] | None = getattr(report, "call", None)
    excinfo = call.excinfo if call is not None else None
    if excinfo is None or not isinstance(excinfo.value, FusionError) or collector.config.getoption("fulltrace", False):
        return report
    error = excinfo.value.with_traceback(_without_ours(excinfo.value.__traceback__))
    report.longrepr = collector.repr_failure(pytest.ExceptionInfo.from_exception(error))
    return report


def _without_ours(found: TracebackType | None) -> TracebackType | None:
    """The traceback without frames of this package. A filter would not do: pytest cuts the raw one anew."""
    if found is None:
        return None
    rest = _without_ours(found.tb_next)
    # "<string>" is where the __init__ of a dataclass stands.
    if found.tb_frame.f_code.co_filename.startswith((f"{Path(__file__).parents[1]}{os.sep}", "<string>")):
        return rest
    return TracebackType(rest, found.tb_frame, found.tb_lasti, found.tb_lineno)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With --fusion-replay, only the test that the file names; with --fusion-canary, the incumbent looked for."""
    if keys.rival in config.stash:
        from pytest_fusion.plugin.incumbent_option import meet

        meet(config.stash[keys.rival], [item.nodeid for item in items if _is_fused(item)])
    path = config.stash[keys.options].replay
    if path is None:
        return
    from pytest_fusion.diagnosis.repro.replay_file import read
    from pytest_fusion.plugin.pinned import names_only_spec, same_test

    try:
        replay = config.stash[keys.replay] = read(path)
    except FusionError as error:
        raise pytest.UsageError(str(error)) from None
    chosen = [item for item in items if same_test(item.nodeid, replay.nodeid)]
    if names_only_spec(replay.nodeid):
        chosen = [item for item in items if _is_fused(item) and item.obj.fusion_spec.name == replay.spec]  # type: ignore[attr-defined]
    if not chosen:
        raise pytest.UsageError(
            f"the replay file {path} belongs to {replay.nodeid}, which was not collected; "
            "name the file of the test too, or run: pytest-fusion replay FILE"
        )
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = chosen


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if _is_fused(item):
        from pytest_fusion.case.choosing.search import tolerate_fixtures

        obj: Any = item.obj  # type: ignore[attr-defined]
        tolerate_fixtures(getattr(obj, "__func__", obj))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    __tracebackhide__ = True
    running = active.Active(lambda: _request(item), lambda: _mode(item.config))
    active.push(running)
    try:
        return (yield)
    finally:
        active.pop()
        item.stash[keys.own_records] = running.records
        if running.records:
            _note_properties(item, running.records)


def _note_properties(item: pytest.Item, records: list[TestRecord]) -> None:
    """For JUnit, which reads them from the report of the teardown; those of an earlier try are replaced."""
    from pytest_fusion.report.ci.junit import properties

    others = [pair for pair in item.user_properties if not pair[0].startswith(("fusion_", "fusion.bench."))]
    item.user_properties[:] = [*others, *(pair for record in records for pair in properties(record))]


def _request(item: pytest.Item) -> Request:
    from pytest_fusion.engine.request import Request

    config = item.config
    options = config.stash[keys.options]
    debugging = config.getoption("usepdb", False) or config.getoption("trace", False)
    return Request(
        nodeid=item.nodeid,
        device=config.stash[keys.device],
        profile=options.profile,
        isolate="off" if debugging else options.isolate,
        root=config.rootpath,
        start=config.invocation_params.dir,
        pinned=_pinned(item),
        shown=_from_start(config, item.nodeid),
        sanitize=options.sanitize,
        bench=_bench_request(item, options) if options.bench else None,
    )


def _mode(config: pytest.Config) -> Mode:
    """The mode of this run; a process that a tool or a comparison started has a mode of its own."""
    from pytest_fusion.engine import modes, sanitize

    if (file := file_named_by(sanitize.VARIABLE)) is not None:
        return sanitize.Sanitized(file)
    if (file := file_named_by("PYTEST_FUSION_PROFILED")) is not None:
        return modes.Profiled(file)
    if file_named_by(SERVES) is not None:
        from pytest_fusion.canary.offline.incumbent.serving import Serve

        return Serve()
    if (incumbent := config.stash.get(keys.rival, None)) is not None:
        from pytest_fusion.canary.offline.comparison_test import Compare

        return Compare(incumbent)
    if (replay := config.stash.get(keys.replay, None)) is not None:
        return modes.Replay(replay.case, replay.made, replay.cause)
    return modes.Judge()


def _bench_request(item: pytest.Item, options: Options) -> BenchRequest:
    from pytest_fusion.bench.bench_request import BenchRequest

    ci = bool(os.environ.get("CI"))
    if keys.family not in item.config.stash:
        item.config.stash[keys.family] = sum(map(_entries, item.session.items))
    family = item.config.stash[keys.family]
    return BenchRequest(options.targets, options.baseline, options.update, ci, family, _again(item, options))


def _again(item: pytest.Item, options: Options) -> Again | None:
    if not options.counters:
        return None
    from pytest_fusion.run.measure.tools.again import Again

    config = item.config
    return Again(_from_start(config, item.nodeid), config.invocation_params.dir, config.stash[keys.device])


def _entries(item: pytest.Item) -> int:
    """How many cases of a test are measured: under pytest-xdist each worker knows all tests."""
    if _is_fused(item):
        return len(item.obj.fusion_spec.bench)  # type: ignore[attr-defined]
    return int("fusion_bench" in getattr(item, "fixturenames", ()))


def _pinned(item: pytest.Item) -> tuple[Pinned, ...]:
    pins = item.config.stash.get(keys.pins, [])
    if not pins or not _is_fused(item):
        return ()
    from pytest_fusion.plugin.pinned import load

    spec = item.obj.fusion_spec  # type: ignore[attr-defined]
    own = [pin for pin in pins if pin.belongs_to(item.nodeid, spec.name, item.path.parent, item.config.rootpath)]
    return tuple(load(pin, spec, _shown(item.config, pin.path)) for pin in own)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if call.when != "call":
        return report
    excinfo = call.excinfo
    # The message says it all; frames of ours would stand above it.
    ours = excinfo is not None and report.failed and excinfo.errisinstance((FusionFailure, FusionError))
    if excinfo is not None and ours and not item.config.getoption("fulltrace", False):
        report.longrepr = excinfo.getrepr(style="value", chain=False)
    records = item.stash.get(keys.own_records, [])
    if records:
        from pytest_fusion.report.plain_json import plain

        # A failure that the test itself catches is expected, as one under xfail.
        expected = hasattr(report, "wasxfail") or report.passed
        found = [plain({**record.as_json(), "expected": expected}) for record in records]
        report.fusion = found  # type: ignore[attr-defined]
        if report.skipped and records[-1].verdict == "unknown" and isinstance(report.longrepr, tuple):
            path, line = item.reportinfo()[:2]
            report.longrepr = (os.fspath(path), (line or 0) + 1, report.longrepr[2])
    return report


def pytest_unconfigure(config: pytest.Config) -> None:
    """After Ctrl-C too: no process of an incumbent is left, and no checkout."""
    if keys.rival in config.stash:
        config.stash[keys.rival].end()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Runs after Ctrl-C too, so what was done is on disk."""
    config = session.config
    options = config.stash[keys.options]
    if _is_worker(config) or config.option.collectonly:
        return
    try:
        config.stash[keys.baselines] = _write_baselines(options, config.stash[keys.records])
        _write_reports(config, options, config.stash[keys.records])
    except FusionError as error:
        session.exitstatus = session.exitstatus or pytest.ExitCode.INTERNAL_ERROR
        config.stash[keys.unwritten] = str(error)


def _write_baselines(options: Options, records: list[TestRecord]) -> list[Path]:
    if not options.bench or options.update == "none":
        return []
    from pytest_fusion.bench.baseline.update import write_measured

    return write_measured(options.baseline, [record.bench for record in records if record.bench], options.update)


def _write_reports(config: pytest.Config, options: Options, records: list[TestRecord]) -> None:
    summary, added = os.environ.get("GITHUB_STEP_SUMMARY"), extensions.reports(config)
    if options.json is None and options.report is None and not summary and not added:
        return
    from pytest_fusion.report.environment import describe

    environment = describe(config.stash[keys.device], profile=options.profile.name)
    if options.json is not None:
        from pytest_fusion.report.json_file import write_json

        write_json(options.json, records, environment)
    if options.report is not None:
        from pytest_fusion.report.html.page import write_html

        write_html(options.report, records, environment, finished=time.strftime("%Y-%m-%d %H:%M:%S"))
    if summary and records:
        from pytest_fusion.report.ci.github import append_summary

        append_summary(Path(summary), records, environment)
    extensions.write(added, records, environment)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    from pytest_fusion.report.bench_table import bench_lines
    from pytest_fusion.report.canary_table import canary_lines
    from pytest_fusion.report.terminal import TITLE, summary

    options = config.stash[keys.options]
    paths = {"html": options.report, "json": options.json}
    failed = config.stash.get(keys.unwritten, None)
    written = {} if failed or config.option.collectonly else {k: _shown(config, p) for k, p in paths.items() if p}
    # As seen from where pytest was started, so that the printed commands run there.
    records = [replace(r, nodeid=_from_start(config, r.nodeid)) for r in config.stash[keys.records]]
    lines = summary(records, verbosity=config.get_verbosity(), written=written)
    lines = [*((line, {"yellow": True}) for line in config.stash[keys.orphans]), *lines]
    width = shutil.get_terminal_size().columns
    compared = [(text, dict(markup)) for text, markup in canary_lines(records)]
    lines = [*((text, {}) for text in bench_lines(records, width)), *compared, *lines]
    lines += [(f"baseline written: {_shown(config, path)}", {}) for path in config.stash.get(keys.baselines, [])]
    if options.update != "none" and not options.bench:
        lines.append(
            (f"--fusion-update {options.update} wrote nothing: only --fusion-bench measures", {"yellow": True})
        )
    if failed is not None:
        lines.append((failed, {"red": True, "bold": True}))
    if not lines:
        return
    terminalreporter.section(TITLE)
    for text, markup in lines:
        terminalreporter.write_line(text, **markup)


def _from_start(config: pytest.Config, nodeid: str) -> str:
    """A node id as a command line takes it in the folder that pytest was started in."""
    path, colons, name = nodeid.partition("::")
    return f"{_shown(config, config.rootpath / path)}{colons}{name}"


def _shown(config: pytest.Config, path: Path) -> str:
    return os.path.relpath(path, config.invocation_params.dir)
