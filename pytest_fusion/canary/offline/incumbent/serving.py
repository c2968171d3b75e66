"""The incumbent's own process: runs kernels of another revision or environment on request.

A revision's process imports from its checkout, and reports imports that were not redirected.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_fusion.errors import FusionError
from pytest_fusion.run.process.worker import Requests, WorkerLost
from pytest_fusion.spec.wording import brief, first_line

if TYPE_CHECKING:
    from pytest_fusion.engine.job import Job
    from pytest_fusion.report.record import TestRecord
    from pytest_fusion.spec.fusion_spec import FusionSpec

_PLUGIN = "pytest_fusion.plugin.hooks"
_SHOWN = 600
# Our package is imported before pytest; the warning would be an error in projects that make errors of warnings.
_IMPORTED = "ignore:Module already imported so cannot be rewritten:pytest.PytestAssertRewriteWarning"


class _Link(Requests):
    """The requests of the comparing process, and the request that opened the running test."""

    def __init__(self, settings: Mapping[str, Any], incoming: int, outgoing: int) -> None:
        super().__init__(incoming, outgoing)
        self.settings = settings
        self.opened: Mapping[str, Any] = {}
        # Whether the open test has reached its kernel.
        self.reached = False


_links: list[_Link] = []


def main(file: str, requests: str, replies: str) -> None:
    """Serves the process that wrote ``file``, until it closes its end of the pipes."""
    settings = json.loads(Path(file).read_text())
    _links.append(_Link(settings, int(requests), int(replies)))
    if settings.get("checkout"):
        redirect(Path(settings["top"]), Path(settings["checkout"]))
    try:
        if settings["spec"]:
            _serve_specs(_links[0])
        else:
            with contextlib.suppress(WorkerLost):
                pytest.main([*_arguments(settings), *_files(_links[0])], plugins=[_Serving(_links[0])])
    finally:
        sys.stdout.flush()
        # If the comparing process was killed, this one removes the folder.
        if os.getppid() != settings["asker"]:
            shutil.rmtree(settings["folder"], ignore_errors=True)


def _files(link: _Link) -> list[str]:
    """The test files, which the comparing process knows once it has collected its own: torch is imported meanwhile."""
    for name in ("torch", "triton"):
        with contextlib.suppress(ImportError):
            import_module(name)
    files: list[str] = link.next()["files"]
    link.answer()
    return files


def _arguments(settings: Mapping[str, Any]) -> list[str]:
    words = [*settings["arguments"], "-p", "no:cacheprovider", "--continue-on-collection-errors", "-W", _IMPORTED]
    words += ["-m", "", "-k", ""]
    words += [f"--junit-xml={settings['folder']}/junit.xml", f"--fusion-device={settings['device']}"]
    if find_spec("xdist") is not None:
        words += ["-n", "0"]
    names = {entry.value for entry in metadata.entry_points(group="pytest11")}
    if _PLUGIN not in names or os.environ.get("PYTEST_DISABLE_PLUGIN_AUTOLOAD"):
        words += ["-p", _PLUGIN]
    return words


class _Serving:
    """Runs only the requested test, which then answers requests until it is closed."""

    def __init__(self, link: _Link) -> None:
        self._link = link
        self._uncollected: dict[str, str] = {}
        self._outcome = ""

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._uncollected[report.nodeid] = report.longreprtext.strip()[-_SHOWN:]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.passed:
            text = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext.strip()
            self._outcome = f"{report.when} {report.outcome}: {str(text)[-_SHOWN:]}"

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        link, items = self._link, {item.nodeid: item for item in session.items}
        with contextlib.suppress(WorkerLost):
            while True:
                message = link.next()
                item = items.get(message.get("nodeid", ""))
                if message["op"] != "open":
                    link.answer(error=f"no test is open for {message['op']!r}")
                elif item is None:
                    link.answer(missing=self._why_missing(message["nodeid"]))
                else:
                    link.opened, link.reached, self._outcome = message, False, ""
                    item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
                    if not link.reached:
                        link.answer(missing=f"it could not be run there: {self._outcome or 'it judges no kernel'}")
        return True

    def _why_missing(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        reason = self._uncollected.get(file) or next(iter(self._uncollected.values()), "")
        return f"{file} could not be collected there: {reason}" if reason else "that test does not exist there"


@dataclass(frozen=True, slots=True)
class Serve:
    """The mode inside the incumbent's process: answers requests for the test's kernel."""

    def run(self, job: Job) -> TestRecord:
        """Answers until the other process ends; then raises ``WorkerLost``."""
        from pytest_fusion.report.record import TestRecord

        _answer_all(_links[0], job.spec, job.request.device, job.extra)
        return TestRecord(job.request.nodeid, "pass")


def _serve_specs(link: _Link) -> None:
    """Answers requests for specs by name, without tests."""
    from pytest_fusion.run import device_choice
    from pytest_fusion.spec.importable import named_spec

    device = str(link.settings["device"])
    device_choice.prepare(device)
    with contextlib.suppress(WorkerLost):
        while True:
            link.opened = link.next()
            try:
                spec = named_spec(str(link.opened["nodeid"]))
            except FusionError as error:
                link.answer(missing=str(error))
                continue
            _answer_all(link, spec, device, {})


def _answer_all(link: _Link, spec: FusionSpec, device: str, extra: Mapping[str, Any]) -> None:
    """Answers the requests for the kernel of one spec, until it is closed."""
    from pytest_fusion.canary.offline.incumbent.served_kernel import ServedKernel
    from pytest_fusion.run.clock import Clock
    from pytest_fusion.run.fused import ContextLost

    link.reached = True
    try:
        served = ServedKernel(spec, link.opened, device, extra)
    except FusionError as error:
        link.answer(missing=f"its spec there does not fit the promises of today's: {error}")
        return
    served.kernel.context.progress.clock = Clock(lambda: link.answer(pulse=True))
    link.answer()
    while True:
        message = link.next()
        if message["op"] == "close":
            # Files of the work tree that were imported: foreign to a revision, shared by two environments.
            checkout = [Path(folder)] if (folder := link.settings.get("checkout")) else []
            ours = Path(__file__).resolve().parents[3]
            found = imported_from(Path(link.settings["top"]), (ours, *caches(), *checkout))
            link.answer(**{"foreign" if checkout else "shared": found})
            return
        try:
            link.answer(found=served.answer(message))
        except ContextLost as lost:
            link.answer(gone=str(lost))
            os._exit(1)  # no later result on this context means anything
        except FusionError as error:
            link.answer(error=first_line(error))
        except Exception as error:  # noqa: BLE001 - not a failure of a kernel: those are verdicts
            link.answer(error=f"{message['op']}: {brief(error)}")


# Folders of installed packages, which may be inside a work tree.
_INSTALLED = frozenset({"site-packages", "dist-packages"})


def moved(path: str, top: Path, checkout: Path) -> str:
    """``path`` moved from the work tree ``top`` to ``checkout``; unchanged outside it and for installed packages."""
    real = Path(os.path.realpath(path))
    if not real.is_relative_to(top) or real.is_relative_to(checkout) or _INSTALLED & set(real.parts):
        return path
    return os.fspath(checkout / real.relative_to(top))


def redirect(top: Path, checkout: Path) -> None:
    """Makes this process import from ``checkout`` instead of ``top``: ``sys.path`` has ``PYTHONPATH`` and editable
    installs; finders of setuptools' editable installs have their own mapping."""
    sys.path[:] = [moved(path, top, checkout) if path else path for path in sys.path]
    for name, module in list(sys.modules.items()):
        if not name.startswith("__editable__"):
            continue
        mapping: Any = getattr(module, "MAPPING", {})
        mapping.update({package: moved(path, top, checkout) for package, path in mapping.items()})
        spaces: Any = getattr(module, "NAMESPACES", {})
        spaces.update({package: [moved(path, top, checkout) for path in paths] for package, paths in spaces.items()})


def caches() -> list[Path]:
    """The caches of Triton and Inductor, which all processes share by the hash of the source."""
    given = [os.environ.get(name) for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")]
    own = Path(os.environ.get("TRITON_HOME") or Path.home(), ".triton")
    return [own.resolve(), *(Path(path).resolve() for path in given if path)]


def imported_from(top: Path, without: Iterable[Path]) -> list[str]:
    """Files below ``top`` from which this process imported modules, except installed ones and those ``without``."""
    others = tuple(without)
    found = set()
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if not isinstance(file, str):
            continue
        real = Path(os.path.realpath(file))
        inside = real.is_relative_to(top) and not _INSTALLED & set(real.parts)
        if inside and not any(real.is_relative_to(other) for other in others):
            found.add(os.fspath(real))
    return sorted(found)
