"""Of many hosts as much is recorded as of few, and all news."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from recorded_ranks import Launcher, Simulated

from zrun.topology.boards import POWER_CAP
from zrun.watch.host_samples import FEW_HOSTS, HostSamples
from zrun_core.spine.events import Event

LOOK_S = 10.0
ROUNDS = 4


class Hosts:
    """Hosts that are looked at every ten seconds, and what is kept of it."""

    def __init__(self, number: int) -> None:
        self.now = 0.0
        self.kept: list[tuple[float, int]] = []  # when, and of which host
        self._number = number
        self._samples = HostSamples(number, lambda: self.now)

    def look(self, **slowed: Any) -> None:
        """Look at all of them; `of_3=["heat"]` slows the GPU of host 3 down."""
        for host in range(self._number):
            gpu = {"rank": host, "slowed": slowed.get(f"of_{host}", [POWER_CAP]), "uncorrected": 0}
            event = {"type": "gpus", "rank": host, "gpus": [gpu | slowed.get("all", {})]}
            if self._samples.is_kept(event):
                self.kept.append((self.now, host))
        self.now += LOOK_S

    def kept_of(self, host: int) -> list[float]:
        return [at for at, of in self.kept if of == host]


def test_all_that_few_hosts_say_is_kept() -> None:
    hosts = Hosts(FEW_HOSTS)
    for _ in range(20):
        hosts.look()
    assert len(hosts.kept) == 20 * FEW_HOSTS


@pytest.mark.parametrize("number", [17, 64, 512])
def test_of_many_as_much_is_kept_as_of_few_and_some_of_each(number: int) -> None:
    hosts = Hosts(number)
    looks = ROUNDS * number // FEW_HOSTS
    for _ in range(looks):
        hosts.look()
    counts = Counter(host for _, host in hosts.kept)
    assert len(counts) == number
    assert set(counts.values()) == {ROUNDS if number % FEW_HOSTS == 0 else looks // 2 + looks % 2}
    assert len(hosts.kept) <= looks * FEW_HOSTS * (1 + LOOK_S * FEW_HOSTS / number)


def test_a_gpu_that_is_slowed_down_is_told_of_at_once_and_so_is_its_end() -> None:
    hosts = Hosts(512)
    for number in range(32):
        hosts.look(**({"of_3": ["heat"]} if 10 <= number < 20 else {}))
    assert hosts.kept_of(3) == [0.0, 100.0, 200.0]
    assert hosts.kept_of(4) == [0.0], "of which nothing is told before 320 s have gone by"


def test_what_comes_and_goes_is_told_once_a_minute() -> None:
    hosts = Hosts(512)
    for number in range(31):
        hosts.look(**({"of_3": ["heat"]} if number % 2 else {}))
    assert hosts.kept_of(3) == [0.0, 70.0, 140.0, 210.0, 280.0]


def test_an_error_in_memory_is_news_and_the_power_cap_is_none() -> None:
    hosts = Hosts(512)
    for number in range(20):
        hosts.look(all={"slowed": [POWER_CAP] * (number % 2), "uncorrected": int(number > 9)})
    assert hosts.kept_of(9) == [0.0, 100.0]


def test_a_launch_records_of_hosts_what_is_kept_and_of_nonsense_all() -> None:
    ranks = Simulated(512, 64)
    launcher = Launcher(ranks)
    launcher.now = 1000.0
    for number in range(8):
        for host in ranks.hosts:
            for event in ranks.sensed(host, number):
                launcher.hear_of_host(event)
        launcher.now += LOOK_S
    assert len(launcher.sent) == 8 * 64 * 2
    assert len(launcher.record) == 2 * 64 * 2
    odd: Event = {"type": "gpus", "time": 1.0, "rank": 0, "gpus": 7}
    for _ in range(3):
        launcher.hear_of_host(odd)
    assert len(launcher.record) == 2 * 64 * 2 + 2, "the first one ended the choice"
