"""`Disagreements`: writes calls on which the kernels disagreed as replay files or recorded calls."""

from __future__ import annotations

import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pytest_fusion.canary.evidence.events import Log
from pytest_fusion.canary.evidence.observation import Observation
from pytest_fusion.canary.live.calls.arguments import bucket_of
from pytest_fusion.canary.recording import recorded_file
from pytest_fusion.canary.recording.call_json import Binding, DescribedCall
from pytest_fusion.canary.recording.matching import UnmatchedError, match
from pytest_fusion.canary.recording.recorded_file import PRIVATE, TensorFiles
from pytest_fusion.canary.recording.recordings import write_replay
from pytest_fusion.case import counter_random
from pytest_fusion.spec.fusion_spec import FusionSpec

FOLDER = "finds"
# A bug shows in a few inputs; more of them add nothing. `_MOST` is for all buckets together.
MOST_PER_BUCKET = 20
_MOST = 500
_WAITING = 64
_MOST_BYTES = 16 << 20
_MOST_TENSOR_BYTES = 256 << 20
# The check of a test that would report the same.
_CHECKS = {"structure": "structure", "inputs": "inputs", "error": "error", "hang": "crash"}


@dataclass(slots=True, weakref_slot=True, eq=False)
class NotedCall:
    """The inputs of a comparison, before the kernels ran on them."""

    bucket: str
    call: DescribedCall


class Disagreements:
    """Writes a canary's disagreements in this process to ``folder / "finds"``, if there is a folder. Never raises."""

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        folder: Path | None,
        spec: FusionSpec | None,
        *,
        keep_bytes: float = 0.0,
        log: Callable[..., None] = lambda kind, **facts: None,
    ) -> None:
        self._binding = Binding(function)
        self._folder = None if folder is None else folder / FOLDER
        self._spec = spec
        self._keep_bytes = keep_bytes
        self._report = log
        self._log = Log(name, self._folder, _MOST_BYTES, suffix=recorded_file.SUFFIX, mode=PRIVATE)
        self.begin()

    def begin(self) -> None:
        """Starts empty, as in a new or a forked process."""
        self._log.begin()
        self._waiting: deque[tuple[Observation, NotedCall]] = deque()
        self._looks: weakref.WeakSet[NotedCall] = weakref.WeakSet()
        self._found: Counter[str] = Counter()
        self._tending = threading.RLock()
        self._holding = threading.RLock()
        self._tensors = None
        if self._log.path is not None and self._keep_bytes:
            self._tensors = TensorFiles(recorded_file.tensors_of(self._log.path), _MOST_TENSOR_BYTES)
        self.written = 0

    def note(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NotedCall | None:
        """Notes a call before it is known whether the kernels agree on it; waits for no device."""
        if self._folder is None:
            return None
        try:
            bucket = bucket_of(args, kwargs)
            if self._found[bucket] >= MOST_PER_BUCKET or self.written >= _MOST:
                return None
            # Hundreds of comparisons may wait; their copies have the same bound as those on disk.
            with self._holding:
                held = sum(look.call.held_bytes for look in self._looks)
            room = _MOST_TENSOR_BYTES - held if self._keep_bytes else 0
            found = DescribedCall(self._binding(args, kwargs), keep_bytes=max(min(self._keep_bytes, room), 0.0))
            look = NotedCall(bucket, found)
            if found.held_bytes:
                with self._holding:
                    self._looks.add(look)
            return look
        except Exception:  # noqa: BLE001 - a call that cannot be described is still compared
            return None

    def add(self, seen: Observation) -> None:
        """Queues a finished comparison, if the kernels disagreed."""
        look = seen.call
        if seen.result in ("ok", "skipped") or not isinstance(look, NotedCall):
            return
        if len(self._waiting) < _WAITING:
            self._waiting.append((seen, look))

    def tend(self) -> None:
        """Writes the disagreements whose numbers have arrived from the device."""
        with self._tending:
            for _ in range(len(self._waiting)):
                seen, look = self._waiting.popleft()
                with suppress(Exception):  # a write that fails must not end the thread
                    if not look.call.ready:
                        self._waiting.append((seen, look))
                    elif self._found[look.bucket] < MOST_PER_BUCKET:
                        self._write(seen, look)
            self._log.flush()

    def _write(self, seen: Observation, look: NotedCall) -> None:
        assert self._folder is not None
        number = self._found[look.bucket]
        self._found[look.bucket] += 1
        event: dict[str, Any] = {
            "bucket": look.bucket,
            "call": number,
            "result": seen.result,
            "reason": seen.reason,
            "seed": counter_random.mix("find", look.bucket, number, time.time_ns()) >> 33,
            "arguments": look.call.arguments(),
        }
        if self._tensors is not None and (held := look.call.tensors):
            with suppress(Exception):  # a full disk, a dtype that safetensors lacks: the rest is written
                file = self._tensors.keep(held)
                event |= {} if file is None else {"tensors": file}
        if self._spec is not None:
            try:
                matched = match(self._spec, event, None if self._tensors is None else self._tensors.folder.resolve())
            except UnmatchedError as error:
                event["unmatched"] = str(error)
            else:
                self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                check = _CHECKS.get(seen.result, "values")
                path = write_replay(
                    matched.case, self._spec, self._folder, check=check, mode=PRIVATE, made=_made(event)
                )
                self._report("find", bucket=look.bucket, result=seen.result, replay=str(path), notes=matched.notes)
                self.written += 1
                return
        self._log.add("find", **event)
        self.written += 1


def _made(event: dict[str, Any]) -> dict[str, Any]:
    """The device and versions for a replay file; empty for calls on a CPU."""
    if all(node.get("device") != "cuda" for node in event["arguments"].values()):
        return {}
    return {"lane": "cuda", "device_name": torch.cuda.get_device_name(), "torch": torch.__version__}
