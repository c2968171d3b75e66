"""`Forms`: what calls of each signature return, as the incumbent showed it."""

from __future__ import annotations

# Outputs whose shapes depend on values: nothing can be said of them beforehand.
VARYING = object()
_MOST_SIGNATURES = 4096


class Forms:
    """The form (`compare.form`) of each signature's results, ``VARYING`` where they had several; a bounded number."""

    def __init__(self) -> None:
        self._known: dict[object, object] = {}

    @property
    def full(self) -> bool:
        """Whether no further signature is learned."""
        return len(self._known) >= _MOST_SIGNATURES

    def get(self, signature: object) -> object | None:
        """``None`` where no such call was seen."""
        return self._known.get(signature)

    def learn(self, signature: object, found: object) -> None:
        known = self._known.get(signature)
        if known is None:
            if not self.full:
                self._known[signature] = found
        elif known != found:
            self._known[signature] = VARYING
