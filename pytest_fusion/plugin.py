"""The pytest plugin: hooks as thin adapters. Loading it imports neither torch, triton nor Hypothesis."""

from __future__ import annotations

import os
import time
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_fusion import active, keys, lane
from pytest_fusion.errors import FusionError, FusionFailure
from pytest_fusion.fixtures import fusion, fusion_device
from pytest_fusion.options import Options, add_options, resolve
from pytest_fusion.report.record import TestRecord

if TYPE_CHECKING:
    from pytest_fusion.examine import Request

__all__ = ["fusion", "fusion_device"]


def pytest_addoption(parser: pytest.Parser) -> None:
    add_options(parser)


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Before any conftest imports Triton: its interpreter cannot be switched on afterwards."""
    known = early_config.known_args_namespace
    wanted = getattr(known, "fusion_device", None) or early_config.getini("fusion_device") or "auto"
    try:
        lane.prepare(lane.choose(str(wanted)))
    except FusionError as error:
        raise pytest.UsageError(str(error)) from None


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    options = resolve(config)
    try:
        config.stash[keys.device] = lane.choose(options.device)
        if options.report is not None or options.json is not None:
            _check_paths(options)
    except FusionError as error:
        raise pytest.UsageError(str(error)) from None
    lane.prepare(config.stash[keys.device])
    config.stash[keys.options] = options
    config.stash[keys.records] = []


def _check_paths(options: Options) -> None:
    from pytest_fusion.report.paths import check_writable

    for option, path in (("--fusion-report", options.report), ("--fusion-json", options.json)):
        if path is not None:
            check_writable(path, option)


def _is_worker(config: pytest.Config) -> bool:
    return hasattr(config, "workerinput")


def _is_fused(item: pytest.Item) -> bool:
    return hasattr(getattr(item, "obj", None), "fusion_spec")


def pytest_report_header(config: pytest.Config) -> str | None:
    options = config.stash[keys.options]
    device = config.stash[keys.device]
    from pytest_fusion.report.environment import describe

    found = describe(device)
    where = found["device_name"] if device != "cpu" else "cpu (Triton interpreter)"
    return f"fusion: {where}, torch {found['torch']}, triton {found['triton']}, profile {options.profile.name}"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With --fusion-replay, only the test that the file names."""
    path = config.stash[keys.options].replay
    if path is None:
        return
    from pytest_fusion.diagnosis.replay import read

    try:
        nodeid = read(path).nodeid
    except FusionError as error:
        raise pytest.UsageError(str(error)) from None
    chosen = [item for item in items if _same_test(item.nodeid, nodeid)]
    if not chosen:
        raise pytest.UsageError(f"the replay file {path} belongs to {nodeid}, which was not collected; name it: pytest {nodeid!r} ...")
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = chosen


def _same_test(a: str, b: str) -> bool:
    """Equal node ids; their paths may start at different folders when the root differs."""
    (file_a, _, name_a), (file_b, _, name_b) = a.partition("::"), b.partition("::")
    return name_a == name_b and (file_a.endswith(file_b) or file_b.endswith(file_a))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if _is_fused(item):
        from pytest_fusion.case.search import tolerate_fixtures

        obj: Any = item.obj  # type: ignore[attr-defined]
        tolerate_fixtures(getattr(obj, "__func__", obj))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    __tracebackhide__ = True
    running = active.Active(lambda: _request(item))
    active.push(running)
    try:
        return (yield)
    finally:
        active.pop()
        item.stash[keys.own_records] = running.records


def _request(item: pytest.Item) -> Request:
    from pytest_fusion.diagnosis.replay import read
    from pytest_fusion.examine import Request

    options = item.config.stash[keys.options]
    return Request(
        nodeid=item.nodeid,
        device=item.config.stash[keys.device],
        profile=options.profile,
        isolate="off" if item.config.getoption("usepdb", False) else options.isolate,
        root=item.config.rootpath,
        replay=None if options.replay is None else read(options.replay).case,
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if call.when == "call" and call.excinfo is not None and report.failed and call.excinfo.errisinstance(FusionFailure):
        # The message says it all; frames of ours would stand above it.
        if not item.config.getoption("fulltrace", False):
            report.longrepr = call.excinfo.getrepr(style="value")
    records = item.stash.get(keys.own_records, [])
    if call.when == "call" and records:
        from pytest_fusion.report.junit import properties
        from pytest_fusion.report.plain import plain

        expected = hasattr(report, "wasxfail")
        report.fusion = [plain({**record.as_json(), "expected": expected}) for record in records]  # type: ignore[attr-defined]
        report.user_properties.extend(pair for record in records for pair in properties(record))
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    for data in getattr(report, "fusion", ()):
        _collected.append(TestRecord.from_json(data))


# Reports carry no config; the list is emptied when a session starts.
_collected: list[TestRecord] = []


def pytest_sessionstart(session: pytest.Session) -> None:
    _collected.clear()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Runs after Ctrl-C too, so what was done is on disk."""
    config = session.config
    if _is_worker(config):
        return
    config.stash[keys.records] = list(_collected)
    options = config.stash[keys.options]
    if options.json is None and options.report is None and not os.environ.get("GITHUB_STEP_SUMMARY"):
        return
    from pytest_fusion.report.environment import describe

    environment = describe(config.stash[keys.device], profile=options.profile.name)
    if options.json is not None:
        from pytest_fusion.report.json_file import write_json

        write_json(options.json.absolute(), _collected, environment)
    if options.report is not None:
        from pytest_fusion.report.html import write_html

        write_html(options.report.absolute(), _collected, environment, finished=time.strftime("%Y-%m-%d %H:%M:%S"))
    summary = os.environ.get("GITHUB_STEP_SUMMARY")
    if summary and _collected:
        from pytest_fusion.report.github import append_summary

        append_summary(Path(summary), _collected, environment)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    from pytest_fusion.report.terminal import TITLE, summary

    options = config.stash[keys.options]
    paths = {"html": options.report, "json": options.json}
    written = {kind: str(path) for kind, path in paths.items() if path is not None and path.exists()}
    lines = summary(config.stash[keys.records], verbosity=config.get_verbosity(), written=written)
    if not lines:
        return
    terminalreporter.section(TITLE)
    for text, markup in lines:
        terminalreporter.write_line(text, **markup)
