"""The home of a state: what is stored there takes effect in the order of the calls."""

from __future__ import annotations

import threading
from functools import partial

import torch

from zrun_core.memory.buffers import Buffer, Kind, Tier
from zrun_core.memory.state_policy import SlotSizes
from zrun_core.tiers.copies import ThreadCopier
from zrun_core.tiers.tiers import Tiers
from zrun_core.zero.unit.home_elsewhere import OnHost

NUMEL = 1024


def wait_for(event: threading.Event) -> None:
    assert event.wait(60)


def test_what_is_stored_after_a_sum_is_not_added_to() -> None:
    sizes = SlotSizes(down=4 * NUMEL)
    buffers = [Buffer("gradient", Kind.GRAD, 4 * NUMEL, Tier.HOST), *sizes.buffers()]
    tiers = Tiers(torch.device("cpu"), buffers, sizes, None, apart=ThreadCopier())
    home = OnHost(tiers, Kind.GRAD, NUMEL, torch.float32)
    home.store(torch.full((NUMEL,), 1.0))
    may_add = threading.Event()
    tiers.submit(partial(wait_for, may_add))
    home.store(torch.full((NUMEL,), 2.0), accumulate=True)  # behind that in the worker
    threading.Timer(0.1, may_add.set).start()
    home.store(torch.full((NUMEL,), 8.0)).wait_on_host()
    home.settle()
    tiers.submit(lambda: None).wait_on_host()
    assert home.at().tolist() == [8.0] * NUMEL


def test_whoever_writes_waits_until_the_device_has_read() -> None:
    """The device may be far behind the host, which asks for the memory to write to it."""
    buffers = [Buffer("parameters", Kind.PARAM, 4 * NUMEL, Tier.HOST)]
    may_copy = threading.Event()

    def wait() -> float:
        wait_for(may_copy)
        return 0.0

    tiers = Tiers(torch.device("cpu"), buffers, SlotSizes(), None, apart=ThreadCopier(wait))
    home = OnHost(tiers, Kind.PARAM, NUMEL, torch.float32)
    home.at().fill_(1.0)
    on_device = torch.empty(NUMEL)
    coming = home.load(on_device)
    threading.Timer(0.1, may_copy.set).start()
    home.at().fill_(2.0)
    coming.wait()
    assert on_device.tolist() == [1.0] * NUMEL
