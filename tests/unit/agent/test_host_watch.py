"""What an agent tells of its host: every ten seconds, and only what can be read there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import pytest

from zrun.agent.host_watch import HostWatch


def test_a_host_is_told_of_every_ten_seconds(tmp_path: Path) -> None:
    watch = HostWatch(4, tmp_path)
    assert watch.look(100.0) is None, "rates need a beginning"
    assert watch.look(109.0) is None
    told = watch.look(110.0)
    assert told is not None
    assert (told["type"], told["rank"]) == ("host", 4)
    assert 0 <= told["cores_busy"] <= 1
    assert 0 < told["memory_used_bytes"] < told["memory_bytes"]
    assert told["disk_free_bytes"] <= told["disk_bytes"]
    assert watch.look(119.0) is None
    assert watch.look(120.0) is not None


def test_rates_are_of_the_time_between_two_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Counters:
        bytes_sent = 1000
        bytes_recv = 0

    monkeypatch.setattr(psutil, "net_io_counters", Counters)
    watch = HostWatch(0, tmp_path)
    watch.look(0.0)
    monkeypatch.setattr(Counters, "bytes_sent", 21_000)
    told = watch.look(20.0)
    assert told is not None
    assert (told["sent_bytes_per_s"], told["received_bytes_per_s"]) == (1000.0, 0.0)


def test_what_cannot_be_read_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise PermissionError

    for name in ("net_io_counters", "cpu_percent", "virtual_memory", "disk_usage"):
        monkeypatch.setattr(psutil, name, refuse)
    watch = HostWatch(0, tmp_path)
    watch.look(0.0)
    told = watch.look(10.0)
    assert told is not None
    assert told["cores_busy"] is None
    assert told["memory_bytes"] is None
    assert "sent_bytes_per_s" not in told
