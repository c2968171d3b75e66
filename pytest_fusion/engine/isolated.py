"""A job in a forked child: what a death or a timeout there means, and why it may have to run in this process."""

from __future__ import annotations

from pytest_fusion.engine import crash
from pytest_fusion.engine.job import Job
from pytest_fusion.engine.request import Request
from pytest_fusion.engine.second_opinion import with_first_call, with_second_opinion
from pytest_fusion.engine.tally import Tally
from pytest_fusion.errors import FusionError
from pytest_fusion.run.process import preload
from pytest_fusion.run.process.fork import can_fork


def tally_in_child(job: Job) -> Tally:
    """The tally of a job whose cases run in a forked child; a crash or a hang there is a failure like any other."""
    late = crash.Late(job)
    preload.inherit(
        gradients=bool(job.spec.grad),
        compiles=job.request.device != "cpu",
        searches=job.only is None and job.request.profile.search > 0,
    )
    with job.compiling_ahead() as start:
        outcome = job.in_child(late.first_s, on_compilation=start, on_late=late)
    notes = late.notes if isinstance(outcome, Tally) else []
    tally = with_first_call(job, outcome if isinstance(outcome, Tally) else crash.tally_of(job, outcome, late.found))
    tally = with_second_opinion(job, tally)
    preload.learn(tally.imported)
    tally.notes += notes
    return tally


def why_not_isolated(request: Request) -> str | None:
    """Why the cases of a test run in this process; ``None`` where a child can be forked for them."""
    if request.isolate == "off":
        return "--fusion-isolate off"
    reason = can_fork()
    if reason is not None and request.isolate == "on":
        raise FusionError(
            f"--fusion-isolate on, but this process cannot fork a child: {reason}. Keep CUDA out of module level and "
            "fixtures, or use --fusion-isolate auto"
        )
    return reason
