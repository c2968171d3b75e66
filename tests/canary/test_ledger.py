"""What a process saw, in blocks: they add up to all of it, whichever way the log lost some."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from pathlib import Path
from typing import Any

import torch

from pytest_fusion.canary.evidence.events import Log, read
from pytest_fusion.canary.evidence.evidence_counts import Evidence
from pytest_fusion.canary.evidence.ledger import BLOCKS_PER_TOTAL, Ledger
from pytest_fusion.canary.evidence.observation import Observation
from pytest_fusion.canary.evidence.promotion_rules import RULES, Metric, Rules
from tests.canary.kernels import Patient, added, double, made


def _ledger(folder: Path | None = None, **options: Any) -> tuple[Ledger, Log, list[Mapping[str, Any]]]:
    heard: list[Mapping[str, Any]] = []
    log = Log("k", folder, 1 << 24, [heard.append])
    return Ledger(log, "r1", options.get("rules", RULES)), log, heard


def test_blocks_add_up_to_what_was_seen() -> None:
    """Each block has what came after the one before, and nothing is written where nothing came."""
    ledger, log, heard = _ledger()
    for number in range(20):
        for width in (8, 3 * number + 1):
            ledger.traffic.slot("shadow", (torch.empty(width),), {})
            ledger.observe(Observation("ok" if number % 7 else "violation", f"float32[{width}]"))
            ledger.ratio("latency_ratio", "b", number / 100)
        ledger.write()
        ledger.write()
    log.flush()

    blocks = [event for event in heard if event["event"] == "block"]
    evidence = [Evidence.from_json(block["evidence"]) for block in blocks]
    assert [block["block"] for block in blocks] == list(range(1, 21))
    assert reduce(Evidence.__add__, evidence) == ledger.evidence()
    assert sum(block["new"].get("compared: violation", 0) for block in blocks) == 6
    assert {tuple(block["served"][0]) for block in blocks} == {("shadow", "incumbent", 2)}


def test_a_total_has_all_blocks_before_it() -> None:
    """Now and then everything since the first block is written again, for readers who miss some."""
    ledger, log, heard = _ledger()
    for _ in range(BLOCKS_PER_TOTAL + 1):
        ledger.observe(Observation("ok", "b"))
        ledger.write()
        log.flush()

    (total,) = [event for event in heard if event["event"] == "total"]
    assert (total["since"], total["block"]) == (1, BLOCKS_PER_TOTAL)
    assert Evidence.from_json(total["evidence"]).pooled("violation").counts == {0: BLOCKS_PER_TOTAL}


def test_much_evidence_is_written_in_lines_that_a_log_takes(tmp_path: Path) -> None:
    """As many buckets as there may be, with every ratio there is, are read back whole."""
    ledger, log, _ = _ledger(tmp_path)
    for bucket in range(64):
        for step in range(-250, 251, 3):
            ledger.ratio("latency_ratio", f"float16[2^{bucket},2^12] float16[2^12]", step / 1000)
    ledger.write()
    log.flush()

    assert log.path is not None
    parts = [event for event in read(log.path) if event["event"] == "block"]
    assert len(parts) == parts[0]["parts"] > 1
    assert reduce(Evidence.__add__, [Evidence.from_json(part["evidence"]) for part in parts]) == ledger.evidence()


def test_a_served_call_that_nobody_verified_did_not_raise() -> None:
    """The rate of exceptions is of all calls that the candidate was given, not of those that were compared."""
    kernel = made(double, added, Patient(), state="full", verify=0.1)
    for _ in range(200):
        kernel(torch.ones(4))
    kernel.refresh()

    compared = kernel.status()["counts"]["compared: ok"]
    assert compared < 60
    assert kernel.evidence().pooled("exception").counts == {0: 200}
    assert kernel.evidence().pooled("violation").counts == {0: compared}


def test_another_rollout_has_its_own_evidence() -> None:
    """After a new rollout begins, nothing that the old one's candidate did is held for or against the new one."""
    kernel = made(double, added, Patient(), shadow=1.0)
    kernel(torch.ones(4))
    kernel.refresh()
    kernel.rearm("2")
    kernel(torch.ones(4, 4))
    kernel.refresh()

    assert kernel.evidence().rollout == "2"
    assert kernel.evidence().calls == {"float32[2^2,2^2]": 1}


def test_metrics_that_the_rules_do_not_know_are_not_counted() -> None:
    """Rules of one metric get evidence of that one."""
    fault = Metric("fault", RULES.metrics[0].scale, "critical", 0.0, 1e-4, 0.02, 300, 300)
    ledger, _, _ = _ledger(rules=Rules(metrics=(fault,)))
    ledger.observe(Observation("ok", "b"))
    ledger.ratio("error_ratio", "b", 0.5)

    assert {cell.metric for cell in ledger.evidence().tallies} == {"fault"}


def test_the_incumbent_beside_itself_is_no_run_of_the_candidate() -> None:
    """It counts for the other arm alone: in no block of sums, and in no failure."""
    ledger, log, heard = _ledger()
    ledger.observe(Observation("violation", "b", arm="itself"))
    ledger.write()
    log.flush()

    assert ledger.evidence().pooled("violation").seen == 0
    assert ledger.evidence().pooled("violation", "itself").counts == {1: 1}
    assert [event["event"] for event in heard] == ["block"]
    assert ledger.counts() == {"itself: violation": 1}
