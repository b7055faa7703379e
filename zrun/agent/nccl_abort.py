"""What torch says when it ends a rank whose work on NCCL hangs, as the note that such a rank lacks.

torch's watchdog aborts the process from a thread of its own: no Python of the rank's runs any more.
Its words are in the rank's log, and what the rank was waiting for is on its page of the flight
recorder.
"""

from __future__ import annotations

import re
from typing import Any

from zrun_core.errors import ExitCode, HangError, PeerError
from zrun_core.spine.flight_page import RankProgress

# Of ProcessGroupNCCL.cpp, torch 2.11 to 2.13.
_TIMEOUT = re.compile(
    r"Watchdog caught collective operation timeout: WorkNCCL\(SeqNum=(?P<number>\d+), "
    r"OpType=(?P<kind>\w+),[^\n]*\) ran for (?P<ms>\d+) milliseconds"
)
_STUCK = re.compile(r"ProcessGroupNCCL's watchdog got stuck for (?P<s>\d+) seconds")
_PEER = re.compile(r"ncclRemoteError: (?P<text>[^\n]*)(?:\s+Last error:\s*(?P<last>[^\n]*))?")


def note_of_abort(rank: int, log: str, state: RankProgress, awaits: str) -> dict[str, Any] | None:
    """Return the note of a rank that was ended by SIGABRT; None: not by torch's watchdog.

    Args:
        log: the end of what the rank printed.
        awaits: what the rank waited for, in words that follow "waited".
    """
    for find in (_after_an_error, _after_a_timeout, _after_a_standstill):
        found = find(log, awaits)
        if found is not None:
            kind, error, message = found
            return {
                "rank": rank,
                "step": state.step or None,
                "phase": state.phase,
                "kind": kind,
                "type": error.__name__,
                "message": message,
                "exit_code": int(ExitCode.HANG),
            }
    return None


_Found = tuple[str, type[Exception], str]


def _after_an_error(log: str, awaits: str) -> _Found | None:
    """NCCL has told that another rank, or the network, has gone."""
    found = _PEER.search(log)
    if found is None:
        return None
    last = f" ({found['last'].strip()})" if found["last"] else ""
    text = f"NCCL lost another rank, or the network to it{last}, as this rank waited {awaits}"
    return "peer", PeerError, text


def _after_a_timeout(log: str, awaits: str) -> _Found | None:
    found = _TIMEOUT.search(log)
    if found is None:
        return None
    seconds = int(found["ms"]) // 1000
    text = (
        f"torch ended the rank: its NCCL {found['kind']} {found['number']} did not finish within "
        f"{seconds} s; it waited {awaits}"
    )
    return "zrun", HangError, text


def _after_a_standstill(log: str, awaits: str) -> _Found | None:
    found = _STUCK.search(log)
    if found is None:
        return None
    text = (
        f"torch ended the rank: a CUDA or NCCL call had not returned for {found['s']} s; it "
        f"waited {awaits}"
    )
    return "zrun", HangError, text
