"""Who has met others goes on after all of them have come: on GPUs too, where only streams wait."""

from __future__ import annotations

from pathlib import Path

import ranks

# Rank 1 comes this late. Who does not wait for it is through in milliseconds.
LATE_S = 2.0

_COMM = """
from zrun_core.distributed.comm import Comm
from zrun_core.distributed.transport import Group
import time
group = Group("data", tuple(range(size)), rank, dist.group.WORLD)
comm = Comm(device)
comm.barrier(group)  # ranks do not start at one time
"""


def test_nobody_passes_a_barrier_before_the_last_rank_has_come(tmp_path: Path) -> None:
    script = f"""{_COMM}
from pathlib import Path
here = Path({str(tmp_path)!r})
if rank == 1:
    time.sleep({LATE_S})
(here / str(rank)).touch()
comm.barrier(group)
say(sorted(path.name for path in here.iterdir()))
"""
    ended = ranks.run(script, 2)
    assert [each.code for each in ended] == [0, 0], ended[0].error + ended[1].error
    assert [each.said for each in ended] == [[["0", "1"]]] * 2


def test_payloads_in_the_store_are_those_of_the_call() -> None:
    """A key is used again by the next payload of its name: nobody reads the one before."""
    script = f"""{_COMM}
for number in range(3):
    if rank == number % 2:
        time.sleep({LATE_S} / 4)
    payload = b"%d" % number if rank == 0 else b""
    say(comm.share_bytes(payload, group, name="payload").decode())
"""
    ended = ranks.run(script, 2)
    assert [each.code for each in ended] == [0, 0], ended[0].error + ended[1].error
    assert [each.said for each in ended] == [["0", "1", "2"]] * 2


def test_init_keeps_what_ranks_share_until_the_last_one_has_opened_it() -> None:
    """The first rank deletes their folder when all have come."""
    script = f"""
import time
import zrun_core
from zrun_core.library import run as library_run

def late(comm, mesh):
    connect(comm, mesh)
    if rank == 1:
        time.sleep({LATE_S})
        say(folders[0].exists())

folders = []
connect, library_run.connect = library_run.connect, late
recorder = library_run.FlightRecorder

def opened(file, *rest):
    folders.append(file.parent)
    return recorder(file, *rest)

library_run.FlightRecorder = opened
zrun_core.init(threads=1)
say(folders[0].name.startswith("zrun-"))
"""
    ended = ranks.run(script, 2)
    assert [each.code for each in ended] == [0, 0], ended[0].error + ended[1].error
    assert [each.said for each in ended] == [[True], [True, True]]
