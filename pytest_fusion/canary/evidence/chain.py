"""`Chain`: the evidence of one process, from the blocks and totals in what remains of its log."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pytest_fusion.canary.evidence.evidence_counts import Evidence


class Chain:
    """Adds up pieces of evidence, which may come in any order; a repeated piece counts once."""

    def __init__(self, rollout: str) -> None:
        self._rollout = rollout
        # Blocks since and up to -> parts, and how many there are of them.
        self._pieces: dict[tuple[int, int], tuple[int, dict[int, Evidence]]] = {}
        self._last = 0

    def add(self, event: Mapping[str, Any]) -> None:
        """Adds a ``block`` or ``total`` event; :meth:`evidence` reports an unreadable one as missing."""
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
        """The sum of all pieces, and the ranges (first, last) of missing blocks."""
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
