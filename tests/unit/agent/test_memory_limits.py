"""How much memory there is: what the kernel's files come to, and when ranks have taken too much of
it.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from zrun.agent import memory_watch
from zrun.agent.memory_watch import MemoryWatch, Shortage
from zrun_core.spine import memory_limits
from zrun_core.spine.memory_limits import share_of_rank

MIB = 1 << 20


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The root of control groups that are not there; this process is in `jobs/mine` of both
    versions.
    """
    read = memory_limits.text
    of_process = "4:cpu,memory:/jobs/mine\n0::/jobs/mine\n"
    monkeypatch.setattr(memory_limits, "_GROUPS", tmp_path)
    monkeypatch.setattr(
        memory_limits,
        "text",
        lambda path: of_process if str(path) == "/proc/self/cgroup" else read(path),
    )
    return tmp_path


def fill(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")


def test_without_a_limit_the_host_counts(group: Path) -> None:
    assert memory_limits.group_limit() is None
    assert memory_limits.group_available() is None
    assert 0 < memory_limits.host_available() < memory_limits.host_total()
    fill(
        group / "memory/jobs/mine",
        memory__limit_in_bytes=0x7FFFFFFFFFFFF000,
        memory__usage_in_bytes=1,
    )
    assert memory_limits.group_limit() is None


@pytest.mark.parametrize("version", [1, 2])
def test_the_tightest_group_counts_and_what_the_kernel_can_drop_is_free(
    group: Path, version: int
) -> None:
    limit, used = [
        ("memory__limit_in_bytes", "memory__usage_in_bytes"),
        ("memory__max", "memory__current"),
    ][version - 1]
    folder = group / ("memory" if version == 1 else "")
    fill(folder / "jobs/mine", **{limit: "900" if version == 1 else "max", used: 500})
    fill(
        folder / "jobs",
        **{limit: 700, used: 600, "memory__stat": "anon 1\ninactive_file 150\nactive_file 50\nodd"},
    )
    assert memory_limits.group_limit() == memory_limits.host_total() == 700
    assert memory_limits.group_available() == memory_limits.host_available() == 300


def test_ranks_may_take_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    left = 1000 * MIB
    monkeypatch.setattr(memory_limits, "host_total", lambda: 10_000 * MIB)
    monkeypatch.setattr(memory_limits, "host_available", lambda *, swap: left)
    watch = MemoryWatch(None)
    assert watch.look(0.0, []) is None
    assert 0.05 < watch.patience(0.0) <= 0.5
    left = 101 * MIB
    assert watch.look(1.0, []) is None
    assert watch.patience(1.0) == pytest.approx(0.02)
    left = 99 * MIB
    assert watch.look(1.01, []) is None  # nobody looks yet
    assert watch.look(1.02, []) == Shortage("99.0 MiB were left on this host")


def test_ranks_may_take_what_their_job_may(monkeypatch: pytest.MonkeyPatch) -> None:
    held = memory_limits.resident_bytes([os.getpid()])
    assert 10 * MIB < held < memory_limits.host_total()
    monkeypatch.setattr(memory_watch.memory_limits, "host_available", lambda *, swap: 1 << 40)
    monkeypatch.setattr(memory_watch, "_TOLERATED_PER_RANK", 0)
    assert MemoryWatch(2 * held).look(0.0, [os.getpid()]) is None
    found = MemoryWatch(MIB).look(0.0, [os.getpid(), 0])
    assert found is not None
    assert "and limits.memory is 1.0 MiB" in found.text
    assert not found.may_finish, "in its first step"


def test_what_ranks_share_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    own = memory_limits.held_together([os.getpid()])
    assert abs(own - memory_limits.resident_bytes([os.getpid()])) < 0.2 * own
    monkeypatch.setattr(memory_watch.memory_limits, "host_available", lambda *, swap: 1 << 40)
    monkeypatch.setattr(memory_watch.memory_limits, "resident_bytes", lambda pids: 900 * MIB)
    monkeypatch.setattr(memory_watch.memory_limits, "held_together", lambda pids: 500 * MIB)
    monkeypatch.setattr(memory_watch, "_TOLERATED_PER_RANK", 0)
    assert MemoryWatch(600 * MIB).look(0.0, [1, 2]) is None
    assert MemoryWatch(400 * MIB).look(0.0, [1, 2]) is not None


def test_a_jobs_limit_is_looked_after_until_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    held = 100 * MIB
    monkeypatch.setattr(memory_watch.memory_limits, "host_available", lambda *, swap: 0)
    monkeypatch.setattr(memory_watch.memory_limits, "resident_bytes", lambda pids: held)
    monkeypatch.setattr(memory_watch.memory_limits, "held_together", lambda pids: held)
    monkeypatch.setattr(memory_watch, "_TOLERATED_PER_RANK", 0)
    watch = MemoryWatch(200 * MIB)
    assert watch.look(0.0, [1]) == Shortage("0 B were left on this host")
    assert watch.settle()
    assert watch.look(1.0, [1]) is None  # what others take of the host is theirs now
    held = 201 * MIB
    assert watch.look(2.0, [1]) is None  # a little more does no harm
    held = 230 * MIB
    text = "ranks of this host held 230.0 MiB, and limits.memory is 200.0 MiB"
    assert watch.look(3.0, [1]) == Shortage(text, may_finish=True)
    assert watch.look(4.0, [1]) is None, "they have been asked"
    held = 280 * MIB
    assert watch.look(5.0, [1]) == Shortage(text.replace("230", "280"), may_finish=False)
    assert not MemoryWatch(None).settle()


def test_what_lies_beside_steps_is_asked_to_end_and_not_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    free, held, beside = 10_000 * MIB, 350 * MIB, True
    limits = memory_watch.memory_limits
    monkeypatch.setattr(limits, "host_total", lambda: 20_000 * MIB)
    monkeypatch.setattr(limits, "host_available", lambda *, swap: free)
    for name in ("resident_bytes", "held_together"):
        monkeypatch.setattr(limits, name, lambda pids: held)
    monkeypatch.setattr(memory_watch, "_TOLERATED_PER_RANK", 0)

    def look(watch: MemoryWatch, now: float) -> Shortage | None:
        return watch.look(now, [1], lambda: beside)

    unsettled = MemoryWatch(200 * MIB)
    found = look(unsettled, 0.0)
    assert found is not None
    assert not found.may_finish, "nothing is known of its first steps"
    watch = MemoryWatch(200 * MIB)
    watch.settle()
    text = "ranks of this host held 350.0 MiB, and limits.memory is 200.0 MiB"
    assert look(watch, 0.0) == Shortage(text, may_finish=True)
    held = 430 * MIB
    assert look(watch, 1.0) is None, "they have been asked"
    held = 441 * MIB
    found = look(watch, 2.0)
    assert found is not None
    assert not found.may_finish, "more than twice of what is tolerated"
    held, beside = 350 * MIB, False
    other = MemoryWatch(200 * MIB)
    other.settle()
    assert look(other, 0.0) == Shortage(text), "in a step"
    free, beside = 100 * MIB, True
    assert look(other, 1.0) == Shortage(text), "the host has no more"


def test_ranks_of_a_host_share_what_they_were_forked_with() -> None:
    gib = 1 << 30
    assert share_of_rank(8 * gib, 1) == 8 * gib
    shared = memory_limits.SHARED_BY_RANKS
    for ranks in (2, 8):
        own = share_of_rank(8 * gib, ranks) - shared
        assert shared + ranks * own == pytest.approx(8 * gib, abs=ranks)


def test_a_process_knows_the_most_it_has_held() -> None:
    before = memory_limits.peak_resident()
    assert before is not None
    taken = bytearray(b"x") * (64 * MIB)
    held = memory_limits.resident_bytes([os.getpid()])
    highest = memory_limits.peak_resident()
    assert highest is not None
    assert highest >= held - MIB
    del taken
    assert (
        highest - MIB <= memory_limits.peak_resident() <= highest + 8 * MIB
    )  # it is the most, not what is there now
