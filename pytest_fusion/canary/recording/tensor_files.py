"""`TensorFiles`: recorded tensors as safetensors files, named by content, private, and bounded in bytes."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Collection, Mapping
from pathlib import Path

from torch import Tensor

from pytest_fusion.case.recorded_values import digest
from pytest_fusion.errors import CanaryError
from pytest_fusion.run.process.atomic_file import replace_whole

PRIVATE = 0o600


def need_safetensors(who: str) -> None:
    """Raises ``CanaryError`` if safetensors, which writing tensors needs, is not installed."""
    if importlib.util.find_spec("safetensors") is None:
        raise CanaryError(f"{who}: writing tensors needs safetensors; pip install 'pytest-fusion[record]'")


class TensorFiles:
    """A folder of tensor files of one process, with at most ``most_bytes`` in all."""

    def __init__(self, folder: Path, most_bytes: float) -> None:
        self.folder = folder
        self._most_bytes = most_bytes
        self._sizes: dict[str, int] = {}

    def keep(self, tensors: Mapping[str, Tensor]) -> str | None:
        """Writes tensors to a file, if it is new, and returns its name; ``None`` where there is no room for it.

        Raises ``OSError``.
        """
        from safetensors.torch import save

        data = save(dict(tensors))
        name = f"{digest(data)}.safetensors"
        if name in self._sizes:
            return name
        if sum(self._sizes.values()) + len(data) > self._most_bytes:
            return None
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace_whole(self.folder / name, data, PRIVATE)
        self._sizes[name] = len(data)
        return name

    def forget_all_but(self, names: Collection[str]) -> None:
        """Deletes the files that are not among ``names``. Raises nothing."""
        for name in [name for name in self._sizes if name not in names]:
            with contextlib.suppress(OSError):
                (self.folder / name).unlink(missing_ok=True)
                del self._sizes[name]
