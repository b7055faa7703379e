"""Ranks that die, hang and differ on NCCL, by the real command line: exit code, words, the rest.

Nothing of NCCL's tells of them: kernels run on, and the host waits for its device.
"""

from __future__ import annotations

from pathlib import Path

import gpu_faults
import pytest
from gpu_faults import ON_ONE_HOST, PIPELINE, Fault, launch


@pytest.mark.parametrize("fault", ON_ONE_HOST, ids=lambda fault: fault.name)
def test_what_goes_wrong_is_named_and_nothing_is_left(tmp_path: Path, fault: Fault) -> None:
    """The table that gpu_faults.py prints."""
    found = gpu_faults.strike(fault, tmp_path)
    print(f"{fault.name}: {found.seconds:.1f} s from the fault to the end")
    assert (found.code, found.left) == (fault.code, {}), found.said
    assert gpu_faults.cause(fault, found), found.said
    assert gpu_faults.is_in_time(fault, found)
    assert found.failure["exit_code"] == fault.code


def test_a_rank_that_hangs_is_named_with_what_the_other_waits_for(tmp_path: Path) -> None:
    ended = launch(tmp_path, "sleep", limits={"hang_s": 3})
    assert ended.code == 6, ended.said
    assert "no progress for 3 s (limits.hang_s): rank 1 of 2 (" in ended.said
    assert "cuda:1) is stuck in forward of step 3" in ended.said
    waits = ended.failure["ranks"][0]
    assert (waits["does"], waits["awaits"]["ranks"]) == ("waits", [1])
    assert "all_gather" in waits["awaits"]["what"]
    assert ended.left == {}


def test_the_place_of_a_killed_rank_is_in_the_report(tmp_path: Path) -> None:
    ended = launch(tmp_path, "kill", **PIPELINE)
    failed = {key: ended.failure[key] for key in ("rank", "device", "pp", "dp", "tp", "signal")}
    assert failed == {
        "rank": 1,
        "device": "cuda:1",
        "pp": 0,
        "dp": 1,
        "tp": 0,
        "signal": "SIGKILL",
    }
    assert ended.left == {}


def test_a_rank_without_memory_says_what_it_has(tmp_path: Path) -> None:
    ended = launch(tmp_path, "fill", gpu={"memory": 1 << 30})
    assert ended.code == 5, ended.said
    assert "out of memory" in ended.said
    assert (ended.failure["rank"], ended.failure["type"]) == (1, "OutOfMemoryError")
    assert ended.left == {}


def test_ranks_that_compute_different_modules_are_told_apart(tmp_path: Path) -> None:
    ended = launch(tmp_path, "leave out a block")
    assert ended.code == 6, ended.said
    assert "ranks disagree on the order of " in ended.said
    assert "'blocks.1.inner'" in ended.said
    assert "zero.leaf" in ended.said
    assert ended.left == {}


def test_a_wait_that_is_too_long_ends_before_torch_ends_it(tmp_path: Path) -> None:
    ended = launch(tmp_path, "sleep", limits={"collective_s": 25})
    assert ended.code == 6, ended.said
    assert "rank 0 has waited for more than 25 s (limits.collective_s) for all_gather" in ended.said
    assert "which rank 1 has not reached" in ended.said
    assert (ended.failure["rank"], ended.failure["kind"]) == (0, "zrun")
    assert "Watchdog caught" not in (tmp_path / "run" / "logs" / "rank-0.log").read_text()
    assert ended.left == {}


def test_a_rank_whose_code_reads_a_loss_ends_before_torch_ends_it(tmp_path: Path) -> None:
    """Its host waits in `loss.item()`, of which nobody is told: the watchdog sees the device."""
    limits = {"collective_s": 8}
    ended = launch(tmp_path, "hang while others read a loss", limits=limits)
    assert ended.code == 6, ended.said
    waits = "rank 0 has waited for more than 8 s (limits.collective_s) for all_gather"
    assert waits in ended.failure["message"]
    assert ended.failure["message"].endswith("which rank 1 has not reached")
    found = {key: ended.failure[key] for key in ("rank", "device", "step", "phase", "kind")}
    assert found == {
        "rank": 0,
        "device": "cuda:0",
        "step": 3,
        "phase": "forward",
        "kind": "zrun",
    }
    assert ended.seconds < 8 + gpu_faults.BUSY_S
    assert "Watchdog caught" not in (tmp_path / "run" / "logs" / "rank-0.log").read_text()
    assert ended.left == {}


def test_where_torch_ends_a_rank_its_words_are_told(tmp_path: Path) -> None:
    """A collective that the user's code issues by itself is on no page and has no marks.

    What the rank waited for in zrun is told as what came last.
    """
    ended = launch(tmp_path, "hang before a collective of the code")
    assert ended.code == 6, ended.said
    assert "torch ended the rank: its NCCL ALLREDUCE " in ended.said
    assert "did not finish within 3 s; it waited for other ranks, last: all_gather" in ended.said
    assert (ended.failure["rank"], ended.failure["phase"]) == (0, "forward")
    assert "Watchdog caught" in (tmp_path / "run" / "logs" / "rank-0.log").read_text()
    assert ended.left == {}


@pytest.mark.parametrize("tells", [0, 1])
def test_a_run_ends_in_order_whether_or_not_nccl_tells_of_ranks_that_leave(
    tmp_path: Path, tells: int
) -> None:
    ended = launch(tmp_path, "none", gpu={"nccl_remote_errors": tells, "delay_us": 2000})
    assert (ended.code, ended.left) == (0, {}), ended.said
    for rank in range(2):
        log = (tmp_path / "run" / "logs" / f"rank-{rank}.log").read_text()
        assert "Error" not in log
        assert "Watchdog" not in log
