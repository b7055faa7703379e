"""Ranks that torch's watchdog has ended: from its words to a note with what they waited for."""

from __future__ import annotations

import json
from pathlib import Path
from signal import SIGABRT, SIGSEGV

import pytest

from zrun.agent.nccl_abort import note_of_abort
from zrun.agent.observer import Observer
from zrun.launch.failures import FailureNote
from zrun_core.distributed.transport import Group
from zrun_core.spine.flight_recorder import FlightRecorder

TIMEOUT = """\
[rank0]:[E709 17:05:38.162555850 ProcessGroupNCCL.cpp:632] [Rank 0] Watchdog caught collective \
operation timeout: WorkNCCL(SeqNum=20585, OpType=ALLREDUCE, NumelIn=1259621, NumelOut=1259621, \
Timeout(ms)=720000) ran for 720012 milliseconds before timing out.
[rank0]:[E709 17:05:38.162814866 ProcessGroupNCCL.cpp:2271] [PG ID 0 PG GUID 0(default_pg) Rank 0] \
 failure detected by watchdog at work sequence id: 20585 PG status: last enqueued work: 20589, \
last completed work: 20584
terminate called after throwing an instance of 'c10::DistBackendError'
Fatal Python error: Aborted
"""
LOST = """\
[rank3]: torch.distributed.DistBackendError: NCCL error in: ../ProcessGroupNCCL.cpp:3763, remote \
process exited or there was a network error, NCCL version 2.28.8
ncclRemoteError: A call failed possibly due to a network error or a remote process exiting \
prematurely.
Last error:
socketProgressOpt: Call to recv from 172.16.0.4<33759> failed : Connection reset by peer
"""
STUCK = """\
[rank1]:[E429 13:55:49.384 ProcessGroupNCCL.cpp:1743] [PG ID 0 PG GUID 0(default_pg) Rank 1] \
ProcessGroupNCCL's watchdog got stuck for 480 seconds without making progress in monitoring \
enqueued collectives.
"""


@pytest.fixture
def board(tmp_path: Path) -> FlightRecorder:
    """Rank 0 waits for rank 1 in step 7."""
    recorders = [FlightRecorder(tmp_path / "board", rank, range(2), 2) for rank in range(2)]
    for recorder in recorders:
        recorder.step(7)
        recorder.phase("backward")
    recorders[0].issue("all_reduce", Group("data", (0, 1), 0, None), "head", 1 << 20)
    return recorders[0]


def left(folder: Path, board: FlightRecorder, log: str, status: int) -> FailureNote | None:
    """What the agent takes for the note of rank 0."""
    (folder / "logs").mkdir()
    (folder / "logs" / "rank-0.log").write_text(log)
    note, _ = Observer(board, folder).last_words(0, status)
    return FailureNote.parse(note)


@pytest.mark.parametrize(
    ("log", "kind", "message"),
    [
        (
            TIMEOUT,
            "zrun",
            "torch ended the rank: its NCCL ALLREDUCE 20585 did not finish within 720 s; it "
            "waited for all_reduce 1, 'head' (1.0 MiB), which rank 1 has not reached",
        ),
        (
            LOST,
            "peer",
            "NCCL lost another rank, or the network to it (socketProgressOpt: Call to recv from "
            "172.16.0.4<33759> failed : Connection reset by peer), as this rank waited for "
            "all_reduce 1, 'head' (1.0 MiB), which rank 1 has not reached",
        ),
        (
            STUCK,
            "zrun",
            "torch ended the rank: a CUDA or NCCL call had not returned for 480 s; it "
            "waited for all_reduce 1, 'head' (1.0 MiB), which rank 1 has not reached",
        ),
    ],
)
def test_the_agent_says_what_the_rank_could_not(
    tmp_path: Path, board: FlightRecorder, log: str, kind: str, message: str
) -> None:
    found = left(tmp_path, board, "step 6\n" + log, -SIGABRT)
    assert found is not None
    assert (found.kind, found.message, found.exit_code) == (kind, message, 6)
    assert (found.step, found.phase, found.is_echo) == (7, "backward", kind == "peer")


@pytest.mark.parametrize(
    ("log", "status"), [("Fatal Python error: Aborted\n", -SIGABRT), (TIMEOUT, -SIGSEGV)]
)
def test_other_ends_have_no_such_note(
    tmp_path: Path, board: FlightRecorder, log: str, status: int
) -> None:
    assert left(tmp_path, board, log, status) is None


def test_a_note_of_the_ranks_own_counts(tmp_path: Path, board: FlightRecorder) -> None:
    own = {"rank": 0, "kind": "user", "type": "E", "message": "mine", "exit_code": 5}
    (tmp_path / "failures").mkdir()
    (tmp_path / "failures" / "rank-0.json").write_text(json.dumps(own))
    found = left(tmp_path, board, TIMEOUT, -SIGABRT)
    assert found is not None
    assert found.message == "mine"


def test_a_log_without_such_words_is_no_hang(board: FlightRecorder) -> None:
    assert note_of_abort(0, "free(): invalid pointer", board.state(0), "for nothing") is None
