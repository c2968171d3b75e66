"""The `--fusion-*` options and their ini twins, resolved once into one frozen record."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from pytest_fusion.engine.profiles import PROFILES, Profile, profile
from pytest_fusion.errors import FusionError
from pytest_fusion.run import device_choice
from pytest_fusion.run.measure.resources.targets import parse_targets
from pytest_fusion.spec.wording import did_you_mean


@dataclass(frozen=True, slots=True)
class Options:
    """The checked options of command line and ini file. ``device`` is ``"auto"``, ``"cpu"`` or ``"cuda:N"``."""

    device: str
    profile: Profile
    isolate: str
    executor: str
    report: Path | None
    json: Path | None
    replay: Path | None
    sanitize: bool
    bench: bool
    update: str
    baseline: Path
    targets: str
    counters: bool = False
    strict: bool = False
    first: bool = False
    canary: str = ""
    canary_without: tuple[str, ...] = ()


# A variable in the environment of an incumbent's process only.
SERVES = "PYTEST_FUSION_SERVES"

_CHOICES: dict[str, tuple[str, ...]] = {
    "profile": tuple(PROFILES),
    "bench-profile": ("", *PROFILES),
    "isolate": ("auto", "on", "off"),
    "executor": ("batched", "serial"),
    "update": ("none", "new", "regressed", "all"),
}
# name, help, default
_OPTIONS = (
    ("device", "Where kernels run: auto, cpu or cuda[:N]", "auto"),
    ("profile", "How much to spend on each test", "dev"),
    ("seconds", "Seconds of the processor for the cases of each test, none, or those of the profile", "profile"),
    ("bench-profile", "The profile of a run with --fusion-bench that is given none by --fusion-profile", ""),
    ("isolate", "Run each test in a child process, so that a crash fails that test alone", "auto"),
    ("executor", "Run interpreted kernels with all programs of a launch at once, or one after the other", "batched"),
    ("update", "Which baselines --fusion-bench writes", "none"),
    ("baseline", "The folder of the baselines of --fusion-bench", ".fusion/baselines"),
    (
        "targets",
        "Compute capabilities that --fusion-bench compiles kernels for, such as sm_80,sm_90; none compiles nothing",
        "sm_90",
    ),
    ("canary", "Compare with this incumbent instead: git:REVISION, python:/path/to/python or module:function", ""),
    (
        "canary-without",
        "What --fusion-canary leaves out, such as latency,memory; only what was compared is promoted",
        "",
    ),
    ("report", "Write an HTML report to this file", ""),
    ("json", "Write the results as JSON to this file", ""),
)
# name, help
_SWITCHES = (
    ("strict", "Hazards fail a test, not only wrong results"),
    ("first", "End a test at its first failure, without looking for others"),
    ("sanitize", "On a GPU, run the smallest cases of each test under compute-sanitizer too"),
    ("bench", "Measure the sizes in bench= of each test that passes, and compare with the baselines"),
    ("counters", "With --fusion-bench on a GPU, call each case once more under NVIDIA's ncu, for DRAM bytes and more"),
)


def add_options(parser: pytest.Parser) -> None:
    """Declares every option in the group `fusion`, each with an ini twin of the same stem."""
    group = parser.getgroup("fusion", "fused kernels against their references")
    for name, text, default in _OPTIONS:
        group.addoption(
            f"--fusion-{name}",
            dest=f"fusion_{name.replace('-', '_')}",
            default=None,
            choices=_CHOICES.get(name),
            help=f"{text} (default: {default or 'none'})",
        )
        parser.addini(f"fusion_{name.replace('-', '_')}", f"{text}; as --fusion-{name}", default=default)
    for name, text in _SWITCHES:
        group.addoption(f"--fusion-{name}", dest=f"fusion_{name}", action="store_true", default=None, help=text)
        parser.addini(f"fusion_{name}", f"{text}; as --fusion-{name}", type="bool", default=False)
    replay = "Run only the case stored in this file"
    group.addoption("--fusion-replay", dest="fusion_replay", default=None, metavar="FILE", help=replay)
    parser.addini("fusion_replay", f"{replay}; as --fusion-replay", default="")


def _value(config: pytest.Config, name: str) -> str:
    given = config.getoption(f"fusion_{name}", None)
    return str(given if given is not None else config.getini(f"fusion_{name}") or "")


def _switch(config: pytest.Config, name: str) -> bool:
    return bool(config.getoption(f"fusion_{name}", None) or config.getini(f"fusion_{name}"))


def file_named_by(variable: str) -> Path | None:
    """The file in an environment variable that a parent process sets; ``None`` without one."""
    name = os.environ.get(variable)
    return Path(name) if name else None


def resolve(config: pytest.Config) -> Options:
    """Read and check all options; raises ``FusionError``."""
    bench = _switch(config, "bench")
    counters = config.getoption("fusion_counters", None)
    if counters and not bench:
        raise FusionError("--fusion-counters adds to what --fusion-bench measures; give both")
    canary = _value(config, "canary")
    if canary and config.getoption("fusion_replay", None):
        raise FusionError("--fusion-canary compares on many cases, and --fusion-replay is one; give one of them")
    found = Options(
        device=device_choice.checked(_value(config, "device") or "auto"),
        profile=_profile(config, bench),
        isolate=_chosen(config, "isolate", "auto"),
        executor=_chosen(config, "executor", "batched"),
        report=_path(config, "report"),
        json=_path(config, "json"),
        replay=_path(config, "replay"),
        sanitize=_switch(config, "sanitize"),
        strict=_switch(config, "strict"),
        first=_switch(config, "first"),
        bench=bench,
        counters=bench and bool(counters or config.getini("fusion_counters")),
        update=_chosen(config, "update", "none"),
        baseline=_path(config, "baseline") or project(config) / ".fusion" / "baselines",
        targets=_targets(_value(config, "targets")),
        canary=canary,
        canary_without=_without(_value(config, "canary_without")),
    )
    if file_named_by(SERVES) is not None:
        # The other run, which an incumbent's process serves, writes the reports.
        return replace(found, report=None, json=None, replay=None, sanitize=False, bench=False, canary="")
    return replace(found, sanitize=False, bench=False, counters=False) if canary else found


def project(config: pytest.Config) -> Path:
    """The folder with ``.fusion``: pytest's root, unless an option's path moved that up.

    Before it knows our options, pytest takes ``--fusion-json FILE`` for a test, and without an ini file its root is the
    folder that all tests share, maybe ``/``.
    """
    root, start = config.rootpath, config.invocation_params.dir
    if config.inipath is not None or config.getoption("rootdir", None) or (root / "setup.py").is_file():
        return root
    tests = [os.path.normpath(start / argument.partition("::")[0]) for argument in config.args]
    own = Path(os.path.commonpath([start, *tests]))
    own = start if own == own.parent else own
    return own if own.is_relative_to(root) else root


def _profile(config: pytest.Config, bench: bool) -> Profile:
    """A profile that the command line gives wins over one for runs that measure; with the budget that is given."""
    name = _value(config, "profile") or "dev"
    if bench and config.getoption("fusion_profile", None) is None:
        name = _value(config, "bench_profile") or name
    text = _value(config, "seconds") or "profile"
    if text == "profile":
        return profile(name)
    try:
        seconds = math.inf if text == "none" else float(text)
    except ValueError:
        seconds = math.nan
    if not seconds > 0:
        raise FusionError(f"--fusion-seconds {text!r}: give a number of seconds, none, or profile")
    return profile(name).within(seconds)


def _without(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if names:
        from pytest_fusion.canary.offline.comparison_verdict import check_without

        check_without(names)
    return names


def _path(config: pytest.Config, name: str) -> Path | None:
    """An absolute path, because tests change folders: an option's from the start folder, an ini file's from its own."""
    given = config.getoption(f"fusion_{name}", None)
    if given is not None:
        if not str(given).strip():
            raise FusionError(f"--fusion-{name} was given an empty path; name a file")
        return config.invocation_params.dir / Path(given).expanduser()
    text = str(config.getini(f"fusion_{name}") or "")
    folder = config.inipath.parent if config.inipath is not None else config.rootpath
    return folder / Path(text).expanduser() if text else None


def _targets(text: str) -> str:
    """The valid targets; empty for ``none``."""
    if text.strip() == "none":
        return ""
    parse_targets(text)
    return text


def _chosen(config: pytest.Config, name: str, default: str) -> str:
    text = _value(config, name) or default
    if text not in _CHOICES[name]:
        raise FusionError(f"fusion_{name}={text!r}{did_you_mean(text, _CHOICES[name])}")
    return text
