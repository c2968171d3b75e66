"""Calls by class of shapes: none lost among threads, and no more classes than there may be."""

from __future__ import annotations

import threading
from typing import NoReturn

import torch

from pytest_fusion.canary.live.calls.arguments import OTHERS, Traffic, bucket_of
from tests.canary.kernels import Patient, added, double, made


def test_32_threads_lose_no_call() -> None:
    """Calls of several shapes, made at once, add up in each bucket."""
    traffic, start = Traffic(64), threading.Barrier(32)
    shapes = [torch.empty(2**i) for i in range(4)]

    def work() -> None:
        start.wait()
        for step in range(400):
            slot = traffic.slot("route", (shapes[step % 4],), {})
            slot.candidate.up()

    threads = [threading.Thread(target=work) for _ in range(32)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        traffic.read()  # whoever reads meanwhile takes none away
    for thread in threads:
        thread.join()

    found = traffic.read()
    assert {bucket for _, bucket in found} == {f"float32[2^{i}]" for i in range(4)}
    assert {(one.calls, one.candidate, one.unverified) for one in found.values()} == {(3200, 3200, 0)}


def test_a_call_is_counted_in_the_bucket_of_its_arguments() -> None:
    """By position, by name, nested, with scalars and more tensors than are looked at: as ``bucket_of`` says."""
    traffic = Traffic(64)
    x, y = torch.empty(5, 7), torch.empty(3, dtype=torch.float16)
    calls = [((x,), {}), ((x, 2.0), {"y": y}), (([x, {"a": y}], None), {}), ((x,) * 6, {}), ((y,), {}), ((), {})]

    for args, kwargs in calls:
        for _ in range(2):
            assert traffic.slot("shadow", args, kwargs).bucket == bucket_of(args, kwargs)

    assert sum(one.calls for one in traffic.read().values()) == 2 * len(calls)


def test_buckets_are_bounded_in_number() -> None:
    """Past the bound a class that was never seen goes to the others, in each state alike; no call is lost."""
    traffic = Traffic(4)
    for power in range(10):
        for _ in range(3):
            traffic.slot("shadow", (torch.empty(2**power),), {})
    traffic.slot("full", (torch.empty(2**9),), {})

    found = traffic.read()
    assert [bucket for _, bucket in found] == [OTHERS, "float32[2^0]", "float32[2^1]", "float32[2^2]", OTHERS]
    assert found["shadow", OTHERS].calls == 21
    assert found["full", OTHERS].calls == 1


def test_every_call_weighs_whichever_kernel_served_it() -> None:
    """Shadowed or not, routed or not: the evidence has all calls, and comparisons of those that were compared."""
    kernel = made(double, added, Patient(), shadow=0.3, share=0.5, verify=0.2)
    for _ in range(100):
        kernel(torch.ones(8))
    kernel.set_state("route")
    kernel.set_state(None)
    for _ in range(50):
        kernel(torch.ones(2, 8))
    kernel.refresh()

    evidence = kernel.evidence()
    compared = kernel.status()["counts"]["compared: ok"]
    assert evidence.calls == {"float32[2^1,2^3]": 50, "float32[2^3]": 100}
    assert 10 < compared < 80
    assert evidence.pooled("violation").counts == {0: compared}
    assert evidence.pooled("fault").counts == {0: compared}


def test_a_call_that_has_no_class_is_served_and_counted() -> None:
    """Arguments that cannot be told apart by their sizes (here: a mapping that cannot be read) go to the others."""

    class Closed(dict[str, torch.Tensor]):
        def values(self) -> NoReturn:
            raise RuntimeError("closed")

    kernel = made(lambda x, more: x * 2, lambda x, more: x + x, Patient(), shadow=1.0, timed=1.0)
    for _ in range(3):
        assert torch.equal(kernel(torch.ones(2), Closed()), torch.full((2,), 2.0))
    assert kernel.evidence().calls == {OTHERS: 3}
