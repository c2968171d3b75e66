"""The pytest plugin: hooks as thin adapters, and fixtures. Loading it imports neither torch, triton nor Hypothesis."""

from __future__ import annotations

import gc
import math
import os
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import pluggy
import pytest

from pytest_fusion.errors import FusionError, FusionFailure
from pytest_fusion.plugin import active, hookspec, keys, outputs
from pytest_fusion.plugin.options import add_options, file_named_by, resolve
from pytest_fusion.report.record import TestRecord
from pytest_fusion.run import device_choice

if TYPE_CHECKING:
    from pytest_fusion.plugin.measuring import FusionBench


@contextmanager
def _errors_of_use() -> Iterator[None]:
    """Lets pytest print the message of a ``FusionError`` alone."""
    try:
        yield
    except FusionError as error:
        raise pytest.UsageError(str(error)) from None


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    pluginmanager.add_hookspecs(hookspec)


def pytest_addoption(parser: pytest.Parser) -> None:
    add_options(parser)


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Before any conftest imports Triton: its interpreter cannot be switched on afterwards."""
    wanted = _wanted_device(early_config, early_config.known_args_namespace)
    with _errors_of_use():
        device_choice.take_own(wanted, os.environ.get("PYTEST_XDIST_WORKER", ""))
        device_choice.prepare(device_choice.choose(wanted))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """One worker for each GPU where kernels run on GPUs; elsewhere pytest-xdist counts cores."""
    wanted = _wanted_device(config, config.option)
    if wanted not in ("auto", "cuda"):
        return None
    return device_choice.cuda_devices() or None


def _wanted_device(config: pytest.Config, given: object) -> str:
    return str(getattr(given, "fusion_device", None) or config.getini("fusion_device") or "auto")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    with _errors_of_use():
        options = resolve(config)
        config.stash[keys.device] = device_choice.choose(options.device)
        if not keys.is_worker(config):
            outputs.check_paths(config, options)
        if options.replay is not None:
            from pytest_fusion.diagnosis.repro.replay_file import owner

            owner(options.replay)  # raises now rather than after collection, and in the controller of pytest-xdist
        if options.canary:
            from pytest_fusion.plugin.incumbent_option import rival

            config.stash[keys.rival] = rival(config, options, config.stash[keys.device])
    device_choice.prepare(config.stash[keys.device])
    if options.executor == "serial":
        os.environ["PYTEST_FUSION_EXECUTOR"] = "serial"
    config.stash[keys.options] = options
    config.stash[keys.records] = []
    config.stash[keys.orphans] = []
    config.pluginmanager.register(_Collector(config), "fusion-records")
    if options.bench:
        from pytest_fusion.plugin.benchmark import Benchmarks

        config.pluginmanager.register(Benchmarks(config, config.stash[keys.device]), "fusion-benchmark")


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Installs additions of plugins before a test module states a spec; the incumbent's process starts meanwhile.

    What collecting allocates stays: looking through it for garbage, then and at the end, took 0.5 of 6 s of one test.
    """
    config = session.config
    with _errors_of_use():
        hookspec.install(config)
        spreads = config.getoption("dist", "no") != "no"  # pytest-xdist's controller runs no test
        if keys.rival in config.stash and not (config.option.collectonly or spreads):
            config.stash[keys.rival].begin()
    collecting = gc.isenabled()
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        if collecting:
            gc.enable()


class _Collector:
    """Gathers the records in reports, from this process and from workers; reports have no config."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the records, and write a line for each that fails: the run may go on for minutes."""
        found = [TestRecord(**data) for data in getattr(report, "fusion", ())]
        self._config.stash[keys.records].extend(found)
        terminal = self._config.pluginmanager.get_plugin("terminalreporter")
        if terminal is not None and terminal.verbosity >= 0 and not keys.is_worker(self._config):
            from pytest_fusion.report.terminal import progress

            for text, markup in progress(found):
                terminal.ensure_newline()
                terminal.write_line(text, **markup)

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Looks up pinned replays once, before -k and -m remove tests. Raises ``UsageError`` for an invalid file."""
        tests = [item for item in items if keys.is_fused(item)]
        config.stash[keys.pins] = []
        if not tests or config.stash[keys.options].replay is not None:
            return
        from pytest_fusion.plugin.pinned import find, orphans

        with _errors_of_use():
            pins = config.stash[keys.pins] = find([item.path.parent for item in tests], config.rootpath)
        if any("::" in argument for argument in config.args):
            return  # only parts of files are requested, so missing tests may exist
        config.stash[keys.orphans] += orphans(pins, tests, config)
        if keys.is_worker(config):
            config.workeroutput["fusion_orphans"] = config.stash[keys.orphans]  # type: ignore[attr-defined]

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Adds the findings of a worker of pytest-xdist."""
        found = getattr(node, "workeroutput", {}).get("fusion_orphans", [])
        known = node.config.stash[keys.orphans]
        known += [line for line in found if line not in known]


def pytest_report_header(config: pytest.Config) -> str | None:
    options = config.stash[keys.options]
    device = config.stash[keys.device]
    from pytest_fusion.report.environment import describe

    found = describe(device)
    where = "cpu (Triton interpreter)" if device == "cpu" else f"{device} ({found['device_name'] or 'unnamed'})"
    versions = ", ".join(f"{name} {found[name]}" if found[name] else f"no {name}" for name in ("torch", "triton"))
    seconds, compiled = options.profile.budget_on(device)
    more = f" ({seconds:g} with compiling)" if compiled < seconds else ""
    budget = f", {compiled:g} s of CPU time for each test{more}" if seconds < math.inf else ""
    return f"fusion: {where}, {versions}, profile {options.profile.name}{budget}"


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(obj: object) -> None:
    """Checks an ``@example`` after all decorators: it may be above ours."""
    if hasattr(obj, "fusion_spec") and callable(obj):
        from pytest_fusion.plugin.decorator import check_examples

        check_examples(obj)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Shortens the traceback of a spec's error to the user's own lines."""
    report = yield
    call: pytest.CallInfo[object] | None = getattr(report, "call", None)
    excinfo = call.excinfo if call is not None else None
    if excinfo is None or not isinstance(excinfo.value, FusionError) or collector.config.getoption("fulltrace", False):
        return report
    error = excinfo.value.with_traceback(_without_ours(excinfo.value.__traceback__))
    report.longrepr = collector.repr_failure(pytest.ExceptionInfo.from_exception(error))
    return report


def _without_ours(found: TracebackType | None) -> TracebackType | None:
    """The traceback without frames of this package. A filter would not suffice: pytest cuts the raw traceback again."""
    if found is None:
        return None
    rest = _without_ours(found.tb_next)
    # "<string>" is the file of a dataclass's __init__; pluggy calls our hook.
    ours = (f"{Path(__file__).parents[1]}{os.sep}", f"{Path(pluggy.__file__).parent}{os.sep}", "<string>")
    if found.tb_frame.f_code.co_filename.startswith(ours):
        return rest
    return TracebackType(rest, found.tb_frame, found.tb_lasti, found.tb_lineno)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With --fusion-replay, selects the test that the file names; with --fusion-canary, finds the incumbent."""
    if keys.rival in config.stash:
        from pytest_fusion.plugin.incumbent_option import meet

        meet(config.stash[keys.rival], [item.nodeid for item in items if keys.is_fused(item)])
    path = config.stash[keys.options].replay
    if path is None:
        return
    from pytest_fusion.diagnosis.repro.replay_file import read
    from pytest_fusion.plugin.pinned import tests_of

    with _errors_of_use():
        replay = config.stash[keys.replay] = read(path)
    chosen = tests_of(replay, items)
    if not chosen:
        raise pytest.UsageError(
            f"the replay file {path} belongs to {replay.nodeid}, which was not collected; "
            "name the file of the test too, or run: pytest-fusion replay FILE"
        )
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = chosen


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if keys.is_fused(item):
        from pytest_fusion.case.choosing.search import tolerate_fixtures

        obj: Any = item.obj  # type: ignore[attr-defined]
        tolerate_fixtures(getattr(obj, "__func__", obj))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    __tracebackhide__ = True
    running = active.Active(item)
    active.stack.append(running)
    try:
        return (yield)
    except Exception as error:
        running.note_error(error)
        raise
    finally:
        active.stack.pop()
        item.stash[keys.own_records] = running.records
        if running.records:
            _note_properties(item, running.records)


def _note_properties(item: pytest.Item, records: list[TestRecord]) -> None:
    """For JUnit, which reads them from the teardown report; a repeated test replaces its properties."""
    from pytest_fusion.report.ci.junit import properties

    others = [pair for pair in item.user_properties if not pair[0].startswith(("fusion_", "fusion.bench."))]
    item.user_properties[:] = [*others, *(pair for record in records for pair in properties(record))]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if call.when != "call":
        return report
    excinfo = call.excinfo
    # The message is complete; frames of ours would be above it.
    ours = excinfo is not None and report.failed and excinfo.errisinstance((FusionFailure, FusionError))
    if excinfo is not None and ours and not item.config.getoption("fulltrace", False):
        report.longrepr = excinfo.getrepr(style="value", chain=False)
        if isinstance(excinfo.value, FusionFailure) and report.longrepr.reprcrash is not None:
            # The short form for pytest's summary, in place of the exception's import path.
            reason = " ".join(str(excinfo.value).splitlines()[1:2]).strip()
            report.longrepr.reprcrash.message = f"{excinfo.value.check} ({excinfo.value.cause}): {reason}"
    records = item.stash.get(keys.own_records, [])
    if records:
        from pytest_fusion.report.json_file import plain

        # A failure that the test itself catches is expected, like one under xfail.
        expected = hasattr(report, "wasxfail") or report.passed
        found = [plain({**record.as_json(), "expected": expected}) for record in records]
        report.fusion = found  # type: ignore[attr-defined]
        if report.skipped and records[-1].verdict == "unknown" and isinstance(report.longrepr, tuple):
            path, line = item.reportinfo()[:2]
            report.longrepr = (os.fspath(path), (line or 0) + 1, report.longrepr[2])
    return report


def pytest_unconfigure(config: pytest.Config) -> None:
    """Removes the incumbent's process and checkout, after Ctrl-C too."""
    if keys.rival in config.stash:
        config.stash[keys.rival].end()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Writes baselines and reports, after Ctrl-C too."""
    config = session.config
    if keys.is_worker(config) or config.option.collectonly:
        return
    try:
        outputs.write(config)
    except FusionError as error:
        session.exitstatus = session.exitstatus or pytest.ExitCode.INTERNAL_ERROR
        config.stash[keys.unwritten] = str(error)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    from pytest_fusion.report.terminal import TITLE

    lines = outputs.summary_lines(config)
    if not lines:
        return
    terminalreporter.section(TITLE)
    for text, markup in lines:
        terminalreporter.write_line(text, **markup)


@pytest.fixture
def fusion() -> Callable[..., TestRecord]:
    """Judge one concrete call inside a test: ``fusion(fused, reference, *args, **kwargs)``."""
    from pytest_fusion.plugin.check import check_equivalent

    return check_equivalent


@pytest.fixture
def fusion_bench(request: pytest.FixtureRequest) -> FusionBench:
    """Call ``fused`` and, with --fusion-bench, measure it: ``fusion_bench(fused, reference, *args, **kwargs)``."""
    from pytest_fusion.plugin.measuring import FusionBench

    measured = request.config.stash[keys.options].bench
    return FusionBench(measured=measured, profiled=file_named_by("PYTEST_FUSION_PROFILED"))


@pytest.fixture(scope="session")
def fusion_device(request: pytest.FixtureRequest) -> str:
    """The device that kernels are judged on: ``"cpu"`` or ``"cuda:N"``."""
    return request.config.stash[keys.device]
