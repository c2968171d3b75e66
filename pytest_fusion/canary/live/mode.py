"""`Mode`: off, shadow, a share of the calls, or all of them."""

from __future__ import annotations

from dataclasses import dataclass

from pytest_fusion.errors import CanaryError
from pytest_fusion.spec.wording import did_you_mean

STATES = ("off", "shadow", "route", "full")


@dataclass(frozen=True, slots=True)
class Mode:
    """How far the candidate may go; ``share`` of the calls (0 to 1) is what ``route`` gives it."""

    state: str
    share: float = 0.0

    @classmethod
    def parse(cls, text: str, share: float) -> Mode:
        """``"off"``, ``"shadow"``, ``"route"``, ``"route 0.05"`` or ``"full"``; ``share`` where the text has none.

        Raises ``CanaryError``.
        """
        word, _, rest = str(text).strip().lower().replace(":", " ").replace("=", " ").partition(" ")
        rest = rest.strip()
        if word not in STATES:
            raise CanaryError(f"unknown canary state {str(text)!r}{did_you_mean(word, STATES)}")
        if rest and word != "route":
            raise CanaryError(f"canary state {str(text)!r}: only route takes a share, as in 'route 0.05'")
        if word != "route":
            return cls(word, 1.0 if word == "full" else 0.0)
        try:
            part = float(rest) if rest else share
        except ValueError:
            part = -1.0
        if not 0 <= part <= 1:
            raise CanaryError(f"canary state {str(text)!r}: the share must be from 0 to 1, as in 'route 0.05'")
        return cls(word, part)

    @property
    def reach(self) -> tuple[int, float]:
        """A key to compare modes by: the most cautious one has the smallest."""
        return STATES.index(self.state), self.share

    def __str__(self) -> str:
        return f"route {self.share:g}" if self.state == "route" else self.state


OFF = Mode("off")
