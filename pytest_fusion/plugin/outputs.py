"""Outputs of a run: baselines, reports, and lines in pytest's summary."""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest

from pytest_fusion.plugin import hookspec, keys
from pytest_fusion.plugin.options import Options


def check_paths(config: pytest.Config, options: Options) -> None:
    """Raises ``FusionError`` if a report cannot be written."""
    for option, path in (("--fusion-report", options.report), ("--fusion-json", options.json)):
        if path is not None:
            from pytest_fusion.report.report_paths import check_writable

            check_writable(keys.shown(config, path), option)


def write(config: pytest.Config) -> None:
    """Write the baselines and every report of the run. Raises ``FusionError``."""
    options, records = config.stash[keys.options], config.stash[keys.records]
    if options.bench and options.update != "none":
        from pytest_fusion.bench.baseline.update import write_measured

        measured = [record.bench for record in records if record.bench]
        config.stash[keys.baselines] = write_measured(options.baseline, measured, options.update)
    summary, added = os.environ.get("GITHUB_STEP_SUMMARY"), hookspec.reports(config)
    if options.json is None and options.report is None and not summary and not added:
        return
    from pytest_fusion.report.environment import describe

    environment = describe(config.stash[keys.device], profile=options.profile.name)
    if options.json is not None:
        from pytest_fusion.report.json_file import write_json

        write_json(options.json, records, environment)
    if options.report is not None:
        from pytest_fusion.report.html.page import write_page

        write_page(options.report, records, environment, finished=time.strftime("%Y-%m-%d %H:%M:%S"))
    if summary and records:
        from pytest_fusion.report.ci.github import append_summary

        append_summary(Path(summary), records, environment)
    hookspec.write(added, records, environment)


def summary_lines(config: pytest.Config) -> list[tuple[str, dict[str, bool]]]:
    """The lines of the section ``fusion``, each with its markup; empty if there is nothing to report."""
    from pytest_fusion.report.bench_table import bench_lines
    from pytest_fusion.report.canary_table import canary_lines
    from pytest_fusion.report.terminal import summary

    options = config.stash[keys.options]
    paths = {"html": options.report, "json": options.json}
    failed = config.stash.get(keys.unwritten, None)
    written = {} if failed or config.option.collectonly else {k: keys.shown(config, p) for k, p in paths.items() if p}
    # Relative to the folder that pytest was started in, so that the printed commands run there.
    records = [replace(r, nodeid=keys.from_start(config, r.nodeid)) for r in config.stash[keys.records]]
    lines: list[tuple[str, dict[str, bool]]] = []
    lines += [(text, {}) for text in bench_lines(records, shutil.get_terminal_size().columns)]
    lines += [(text, dict(markup)) for text, markup in canary_lines(records)]
    lines += [(text, {"yellow": True}) for text in config.stash[keys.orphans]]
    lines += summary(records, verbosity=config.get_verbosity(), written=written)
    lines += [(f"baseline written: {keys.shown(config, path)}", {}) for path in config.stash.get(keys.baselines, [])]
    if options.update != "none" and not options.bench:
        text = f"--fusion-update {options.update} wrote nothing: only --fusion-bench measures"
        lines.append((text, {"yellow": True}))
    if failed is not None:
        lines.append((failed, {"red": True, "bold": True}))
    return lines
