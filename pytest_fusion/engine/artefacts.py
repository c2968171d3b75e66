"""Files that a failure leaves: its replay file and its stand-alone script."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass
from pathlib import Path

import torch

from pytest_fusion.case.case_model import Case
from pytest_fusion.case.make import ImpossibleCase, InputFailed
from pytest_fusion.checks.verdict import Verdict
from pytest_fusion.diagnosis.repro import replay_file as replays
from pytest_fusion.diagnosis.repro import script as scripts
from pytest_fusion.engine.isolated import why_not_isolated
from pytest_fusion.engine.job import Job
from pytest_fusion.engine.tally import Failure
from pytest_fusion.errors import FusionError
from pytest_fusion.report import environment
from pytest_fusion.run.process.atomic_file import replace_whole
from pytest_fusion.run.process.fork import Channel, ChildError, Crash, run_isolated
from pytest_fusion.spec.wording import first_line

# The script makes the inputs again, and an interpreted reference may take minutes.
_SCRIPT_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Written:
    """Paths of a failure's files, relative to pytest's start folder; ``unwritten`` is why there is no replay file."""

    replay: str | None = None
    script: str | None = None
    script_line: str = ""
    unwritten: str | None = None


def write_artefacts(job: Job, failure: Failure, cause: str | None, *, pinned: str | None) -> Written:
    """Write the stand-alone script and, unless the case comes from a pinned one, the replay file."""
    request = job.request
    written = write_replay(job, failure, cause, pinned=pinned)
    if failure.case is None or written.replay is None:
        return written
    path, replay = written.replay, _replay(job, failure, failure.case, cause)
    try:
        file = replays.folder(request.root) / Path(replays.file_name(replay)).with_suffix(".py")
        shown = os.path.relpath(file, request.start)
        script = _script(job, replay, failure.verdict, shown)
        if isinstance(script, str):
            return Written(path, None, f"none could be written: {script}")
        replace_whole(file.with_suffix(".pt"), script.saved)
        replace_whole(file, script.text.encode())
    except OSError as error:
        return Written(path, None, f"none could be written: {first_line(error)}")
    lacks = "; ".join(f"{what}: {why}" for what, why in script.missing.items())
    return Written(path, shown, f"python {shlex.quote(shown)}{f' (not complete, {lacks})' if lacks else ''}")


def write_replay(job: Job, failure: Failure, cause: str | None, *, pinned: str | None) -> Written:
    """Write the replay file of one finding; ``pinned`` is the file that its case comes from."""
    request = job.request
    if failure.case is None or job.given is not None or pinned:
        return Written(pinned if failure.case is not None and job.given is None else None)
    try:
        path = replays.write(_replay(job, failure, failure.case, cause), request.root)
    except OSError as error:  # a read-only checkout must not hide the failure itself
        return Written(unwritten=f"none could be written ({first_line(error)}); run the test again for this case")
    return Written(os.path.relpath(path, request.start))


def _replay(job: Job, failure: Failure, case: Case, cause: str | None) -> replays.Replay:
    made = replays.made_here(environment.describe(job.request.device))
    return replays.Replay(job.request.nodeid, job.spec.name, failure.verdict.check, cause, case, made)


def _script(job: Job, replay: replays.Replay, verdict: Verdict, shown: str) -> scripts.Script | str:
    """The script, or why there is none. Makes the inputs again, in a child where the test had one."""
    request = job.request

    def work(_: Channel | None) -> scripts.Script:
        device = torch.device(request.device)
        return scripts.compose(
            job.spec, replay, verdict, device=device, extra=job.extra, root=request.root, shown=shown
        )

    if why_not_isolated(request) is None:
        outcome = run_isolated(work, time_limit_s=_SCRIPT_SECONDS, forward=False)
        if isinstance(outcome, Crash):
            return f"making the inputs again ended the process ({outcome.detail})"
        return f"{outcome.type_name}: {outcome.message}" if isinstance(outcome, ChildError) else outcome
    try:
        return work(None)
    except (FusionError, InputFailed, ImpossibleCase, RuntimeError, OSError) as error:
        return f"{type(error).__name__}: {error}"
