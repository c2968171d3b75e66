"""`Chain`: the evidence of one process, put together from the blocks and totals that are left of its log."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pytest_fusion.canary.evidence.evidence_counts import Evidence


class Chain:
    """Pieces may come in any order and more than once; each counts once."""

    def __init__(self, rollout: str) -> None:
        self._rollout = rollout
        # Blocks since and up to -> parts, and how many there are of them.
        self._pieces: dict[tuple[int, int], tuple[int, dict[int, Evidence]]] = {}
        self._last = 0

    def add(self, event: Mapping[str, Any]) -> None:
        """A ``block`` or ``total`` event. One that cannot be read is missing from :meth:`evidence`, which says so."""
        block = event.get("block")
        if type(block) is not int:
            return
        self._last = max(self._last, block)
        try:
            since, part, parts = int(event["since"]), int(event["part"]), int(event["parts"])
            evidence = Evidence.from_json(event["evidence"])
        except (KeyError, TypeError, ValueError, AttributeError):
            return
        if evidence.rollout == self._rollout and 1 <= since <= block and 1 <= part <= parts:
            self._pieces.setdefault((since, block), (parts, {}))[1][part] = evidence

    def evidence(self) -> tuple[Evidence, list[tuple[int, int]]]:
        """All of it, and which blocks, first and last, are missing."""
        whole = {span: list(found.values()) for span, (parts, found) in self._pieces.items() if len(found) == parts}
        total, at = Evidence(self._rollout), 0
        missing: list[tuple[int, int]] = []
        while at < self._last:
            ends = [end for start, end in whole if start == at + 1]
            if ends:
                for piece in whole[at + 1, max(ends)]:
                    total += piece
                at = max(ends)
                continue
            following = min((start for start, _ in whole if start > at + 1), default=self._last + 1)
            missing.append((at + 1, following - 1))
            at = following - 1
        return total, missing
