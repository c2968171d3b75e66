"""The incumbent's process: tests of another revision or environment, whose kernels run when they are asked for."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
from collections.abc import Mapping
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_fusion.errors import FusionError
from pytest_fusion.spec.wording import first_line

if TYPE_CHECKING:
    from pytest_fusion.canary.offline.kernel import Kernel
    from pytest_fusion.engine.request import Request
    from pytest_fusion.report.record import TestRecord
    from pytest_fusion.spec.fusion_spec import FusionSpec

_PLUGIN = "pytest_fusion.plugin.hooks"
_SHOWN = 600
# Of this package, which had to be here before pytest; an error where the project makes errors of warnings.
_IMPORTED = "ignore:Module already imported so cannot be rewritten:pytest.PytestAssertRewriteWarning"


class _Link:
    """The pipe to the process that asks, and the question that waits for its answer."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.settings = settings
        self._requests, self._replies = int(settings["requests"]), int(settings["replies"])
        self._number = ""
        # The question that opened the test that runs now, and whether the test has come to its kernel.
        self.opened: Mapping[str, Any] = {}
        self.reached = False

    def next(self) -> dict[str, Any]:
        """Raises ``Gone`` when nobody asks any more."""
        from pytest_fusion.canary.offline.incumbent.wire import receive

        message = receive(self._requests)
        self._number = str(message["id"])
        return message

    def answer(self, **what: Any) -> None:
        from pytest_fusion.canary.offline.incumbent.wire import send

        send(self._replies, {"id": self._number, **what})


_links: list[_Link] = []


def main(file: str) -> None:
    """Serve whoever wrote ``file``, until its end of the pipe is closed."""
    settings = json.loads(Path(file).read_text())
    _links.append(_Link(settings))
    if settings.get("checkout"):
        from pytest_fusion.canary.offline.incumbent.import_paths import redirect

        redirect(Path(settings["top"]), Path(settings["checkout"]))
    try:
        if settings["spec"]:
            _serve_specs(_links[0])
        else:
            pytest.main(_arguments(settings), plugins=[_Serving(_links[0])])
    finally:
        sys.stdout.flush()
        # Whoever asked may have been killed, and has left the folder to nobody else.
        if os.getppid() != settings["asker"]:
            shutil.rmtree(settings["folder"], ignore_errors=True)


def _arguments(settings: Mapping[str, Any]) -> list[str]:
    words = [*settings["arguments"], "-p", "no:cacheprovider", "--continue-on-collection-errors", "-W", _IMPORTED]
    words += ["-m", "", "-k", ""]
    words += [f"--junit-xml={settings['folder']}/junit.xml", f"--fusion-device={settings['device']}"]
    if find_spec("xdist") is not None:
        words += ["-n", "0"]
    names = {entry.value for entry in metadata.entry_points(group="pytest11")}
    if _PLUGIN not in names or os.environ.get("PYTEST_DISABLE_PLUGIN_AUTOLOAD"):
        words += ["-p", _PLUGIN]
    return [*words, *settings["files"]]


class _Serving:
    """In place of running all tests: runs the one that is asked for, which then answers until it is let go."""

    def __init__(self, link: _Link) -> None:
        self._link = link
        self._uncollected: dict[str, str] = {}
        self._said = ""

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._uncollected[report.nodeid] = report.longreprtext.strip()[-_SHOWN:]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.passed:
            said = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext.strip()
            self._said = f"{report.when} {report.outcome}: {str(said)[-_SHOWN:]}"

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        from pytest_fusion.canary.offline.incumbent.wire import Gone

        link, items = self._link, {item.nodeid: item for item in session.items}
        with contextlib.suppress(Gone):
            while True:
                message = link.next()
                item = items.get(message.get("nodeid", ""))
                if message["op"] != "open":
                    link.answer(error=f"no test is open for {message['op']!r}")
                elif item is None:
                    link.answer(missing=self._why_missing(message["nodeid"]))
                else:
                    link.opened, link.reached, self._said = message, False, ""
                    item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
                    if not link.reached:
                        link.answer(missing=f"it could not be run there: {self._said or 'it judges no kernel'}")
        return True

    def _why_missing(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        said = self._uncollected.get(file) or next(iter(self._uncollected.values()), "")
        return f"{file} could not be collected there: {said}" if said else "there is no such test there"


def serve(spec: FusionSpec, request: Request, extra: Mapping[str, Any]) -> TestRecord:
    """Inside of a test: answer what is asked of its kernel. Raises ``Gone`` when nobody asks any more."""
    from pytest_fusion.report.record import TestRecord

    _answer_all(_links[0], spec, request.device, extra)
    return TestRecord(request.nodeid, "pass")


def _serve_specs(link: _Link) -> None:
    """Specs by their names, without tests."""
    from pytest_fusion.canary.offline.incumbent.wire import Gone
    from pytest_fusion.run import device_choice
    from pytest_fusion.spec.importable import named_spec

    device = str(link.settings["device"])
    device_choice.prepare(device)
    with contextlib.suppress(Gone):
        while True:
            link.opened = link.next()
            try:
                spec = named_spec(str(link.opened["nodeid"]))
            except FusionError as error:
                link.answer(missing=str(error))
                continue
            _answer_all(link, spec, device, {})


def _answer_all(link: _Link, spec: FusionSpec, device: str, extra: Mapping[str, Any]) -> None:
    import torch

    from pytest_fusion.canary.offline.incumbent.shared_promises import held_to
    from pytest_fusion.canary.offline.kernel import Kernel
    from pytest_fusion.checks.context import Context, Progress
    from pytest_fusion.run.clock import Clock
    from pytest_fusion.run.fused import ContextLost
    from pytest_fusion.spec.wording import said

    asked, link.reached = link.opened, True
    try:
        spec = held_to(spec, asked["contract"])
    except FusionError as error:
        link.answer(missing=f"its spec there cannot be held to what is asked today: {error}")
        return
    programs, deep = int(asked["programs"]), bool(asked["deep"])
    progress = Progress(Clock(lambda: link.answer(pulse=True)))
    bench = Context(spec, torch.device(device), extra, programs=programs, deep=deep, progress=progress)
    kernel, stopwatch = Kernel(bench), _Stopwatch()
    link.answer(torch=torch.__version__)
    while True:
        message = link.next()
        if message["op"] == "close":
            link.answer(foreign=_foreign(link.settings), shared=_shared(link.settings))
            return
        try:
            link.answer(**(stopwatch.answered(kernel, message) or _answered(kernel, message)))
        except ContextLost as lost:
            link.answer(gone=str(lost))
            os._exit(1)  # nothing that runs on this context from now on means anything
        except FusionError as error:
            link.answer(error=first_line(error))
        except Exception as error:  # noqa: BLE001 - whatever it is, it is no failure of a kernel: those are verdicts
            link.answer(error=f"{message['op']}: {said(error)}")


class _Stopwatch:
    """The one batch of calls that is timed here, by the pairs of whoever asks."""

    def __init__(self) -> None:
        self._timer: Any = None

    def answered(self, kernel: Kernel, message: Mapping[str, Any]) -> dict[str, Any]:
        """Nothing for what is no question about time. Raises ``CanaryError`` where the call cannot be timed."""
        if message["op"] not in ("time", "sample", "untime"):
            return {}
        import torch

        from pytest_fusion.errors import CanaryError
        from pytest_fusion.spec.wording import said

        if message["op"] == "untime":
            self._timer = None
            torch.cuda.empty_cache()
            return {"untimed": True}
        try:
            if message["op"] == "time":
                return {"source": self._begin(kernel, message)}
            return {"seconds": self._timer.seconds()}
        except Exception as error:  # noqa: BLE001 - the checks have judged it; here it is a number or none
            raise CanaryError(f"called there to be timed, it raised {said(error)[:200]}") from None

    def _begin(self, kernel: Kernel, message: Mapping[str, Any]) -> str:
        import torch

        from pytest_fusion.bench import latency
        from pytest_fusion.bench.on_device import opened
        from pytest_fusion.canary.offline.paired_latency import timer
        from pytest_fusion.case.case_model import Case

        device = torch.device("cuda", kernel.bench.device.index or 0)
        case, what = Case.from_json(message["case"]), message["what"]
        self._timer = timer(kernel.bench, case, what, device, opened(device).cache)
        return latency.digest(kernel.spec.fused if what == "fused" else kernel.spec.reference)


def _answered(kernel: Kernel, message: Mapping[str, Any]) -> dict[str, Any]:
    from pytest_fusion.canary.offline.incumbent.wire import write_tensors
    from pytest_fusion.canary.offline.ran import FOREIGN, Ran
    from pytest_fusion.case.case_model import Case
    from pytest_fusion.case.misfit import misfit
    from pytest_fusion.run.measure.launches import Uncounted

    if message["op"] == "compiled":
        return kernel.compiled(message["keys"]).as_json()
    if message["op"] == "spills":
        return kernel.spills([(text, Case.from_json(case)) for text, case in message["sized"]]).as_json()
    case = Case.from_json(message["case"])
    if message["op"] == "judge":
        wrong = misfit(kernel.spec, case)
        if wrong is not None:
            return {"ran": Ran("rejected", FOREIGN, f"its spec there has no such case: {wrong}").as_json()}
        return {"ran": kernel.judge(case, again=message["again"], alone=message["alone"]).as_json()}
    if message["op"] == "measure":
        found = kernel.measure(case)
        if found.outputs:
            write_tensors(Path(message["file"]), found.outputs)
        return {
            "inputs": found.inputs,
            "reference": found.reference,
            "memory": found.memory,
            "problem": found.problem,
            "results": bool(found.outputs),
        }
    counts = kernel.count(case)
    return {"reason": counts.reason} if isinstance(counts, Uncounted) else {"counts": counts.as_json()}


def _foreign(settings: Mapping[str, Any]) -> list[str]:
    """Files of the work tree that were imported though a revision was asked for."""
    if not settings.get("checkout"):
        return []
    return _imported(settings, Path(settings["checkout"]))


def _shared(settings: Mapping[str, Any]) -> list[str]:
    """Files of the work tree that both environments import: tests, and perhaps what was to be compared."""
    return [] if settings.get("checkout") else _imported(settings)


def _imported(settings: Mapping[str, Any], *without: Path) -> list[str]:
    from pytest_fusion.canary.offline.incumbent.import_paths import caches, imported_from

    ours = Path(import_module("pytest_fusion").__path__[0])
    return imported_from(Path(settings["top"]), (ours, *caches(), *without))
