"""The incumbent of ``--fusion-canary``, made from the options of a pytest run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from pytest_fusion.canary.offline.incumbent.incumbents import Incumbent, Setting, parse
from pytest_fusion.errors import FusionError
from pytest_fusion.plugin.options import Options

# Arguments of pytest that decide how tests are imported; others decide which tests, or how they are reported.
_PASSED_ON = ("-p", "-o", "-W", "--override-ini", "--import-mode", "--pythonwarnings")
_WHOLE = tuple(f"{name}=" for name in _PASSED_ON if name.startswith("--"))


def rival(config: pytest.Config, options: Options, device: str) -> Incumbent:
    """The incumbent, not yet started. Raises ``CanaryError`` for a name of nothing."""
    start = config.invocation_params.dir
    arguments = tuple(_passed_on(config.invocation_params.args))
    setting = Setting(config.rootpath, start, device, arguments=arguments, inifile=config.inipath)
    return Incumbent(parse(options.canary, start), setting, without=options.canary_without)


def meet(rival: Incumbent, nodeids: Sequence[str]) -> None:
    """Gives the incumbent its test files, once they are known, and finds its function. Raises ``UsageError``."""
    files = tuple(dict.fromkeys(nodeid.partition("::")[0] for nodeid in nodeids))
    rival.setting = replace(rival.setting, files=files)
    if not files:
        return
    try:
        rival.find()
    except FusionError as error:
        raise pytest.UsageError(f"--fusion-canary: {error}") from None


def _passed_on(arguments: Sequence[object]) -> Iterator[str]:
    words = iter(map(str, arguments))
    for word in words:
        if word in _PASSED_ON:
            yield word
            yield next(words, "")
        elif word.startswith(_WHOLE) or (word[:2] in _PASSED_ON and word[1:2] != "-" and len(word) > 2):
            yield word
