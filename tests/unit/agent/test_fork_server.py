"""One process imports for all ranks of a host and becomes them.

What each finds, and that none begins by accident.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from zrun.agent import fork_server
from zrun.system import processes
from zrun.system.processes import Process

PATIENCE_S = 60.0
CPUS = sorted(os.sched_getaffinity(0))
RANKS = range(3)

AGENT = """
import json, os, socket, sys
from pathlib import Path
from zrun.system import processes
from zrun.agent.workers import WorkerCommand
processes.adopt_orphans()
module, more = json.loads(sys.argv[1])
with socket.create_server(("127.0.0.1", 0)) as store:
    server = WorkerCommand(
        run_id="r", module=module, argument="spec.json",
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b"} | more,
        world_size=5, host=(0, 2), ranks=range(3),
        logs={rank: Path(f"{rank}.log").resolve() for rank in range(3)},
        # The CPUs of rank 2 are not there: a rank without them is slower, not wrong.
        cpus={0: str(min(os.sched_getaffinity(0))), 2: "4000-4001"}, alone={1: "MIG-b"},
        store=store,
    ).start()
    workers = server.workers()
    found = {rank: (worker.pid, worker.wait()) for rank, worker in workers.items()}
    processes.end_children(5)
    print(json.dumps([os.getpid(), store.fileno(), found, sorted(os.sched_getaffinity(0))]))
"""

TELLS = """
import ctypes, json, os, random, sys, threading
from pathlib import Path
import numpy
numpy.random.random()  # it has a state now, and OpenBLAS its threads
print("imports")

def main():
    signal, links = ctypes.c_int(), {}
    ctypes.CDLL(None).prctl(2, ctypes.byref(signal), 0, 0, 0)
    for number in os.listdir("/proc/self/fd"):
        try:
            links[int(number)] = os.readlink(f"/proc/self/fd/{number}")
        except OSError:  # what listed them
            pass
    found = []
    thread = threading.Thread(target=lambda: found.append(sorted(os.sched_getaffinity(0))))
    thread.start()
    thread.join()
    environ = Path("/proc/self/environ").read_bytes().split(b"\\0")[:-1]
    print("on stderr", file=sys.stderr)
    print(json.dumps({
        "pid": os.getpid(), "parent": os.getppid(), "session": os.getsid(0),
        "dies_by": signal.value, "links": links, "argv": sys.argv,
        "cpus": [sorted(os.sched_getaffinity(0)), *found], "stdin": sys.stdin.read(),
        "environ": dict(os.environ),
        "same": sorted(environ) == sorted(k + b"=" + v for k, v in os.environb.items()),
        "line": Path("/proc/self/cmdline").read_text().split("\\0")[:-1],
        "drawn": [random.random(), numpy.random.random()],
    }))
"""


def start(folder: Path, code: str, **more: str) -> list[Any]:
    """Run `code` as the module of three ranks.

    Pids and statuses by rank, and what else their agent knows.
    """
    (folder / "module_of_ranks.py").write_text(code)
    done = subprocess.run(
        [sys.executable, "-c", AGENT, json.dumps(["module_of_ranks", more])],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    said, _, last = done.stdout.rstrip().rpartition("\n")
    return [said, *json.loads(last)]


def logs(folder: Path) -> list[list[str]]:
    return [(folder / f"{rank}.log").read_text().splitlines() for rank in RANKS]


@pytest.mark.parametrize(
    "thread", ["", "threading.Thread(target=threading.Event().wait, daemon=True).start()\n"]
)
def test_what_a_rank_finds(tmp_path: Path, thread: str) -> None:
    """Also where a library starts a thread as it is imported, which no fork would copy.

    Each rank imports by itself.
    """
    said, agent, store, ended, cpus = start(tmp_path, TELLS + thread, OMP_NUM_THREADS="2")
    assert ("started threads (python), so each worker imports on its own" in said) == bool(thread)
    assert cpus == CPUS, "the agent's own stay what they were"
    lines = logs(tmp_path)
    # What is printed by the import comes once, or with each.
    assert lines[0][:-2] == ["imports"] * (2 if thread else 1)
    assert lines[1][:-2] == lines[2][:-2] == ["imports"] * bool(thread)
    told = [json.loads(each[-1]) for each in lines]
    for rank, found in enumerate(told):
        assert lines[rank][-2] == "on stderr"
        assert ended[str(rank)] == [found["pid"], 0]
        assert (found["parent"], found["session"], found["dies_by"]) == (agent, found["pid"], 9)
        log = str(tmp_path / f"{rank}.log")
        links = {int(number): link for number, link in found["links"].items()}
        assert [links.pop(number) for number in range(3)] == ["/dev/null", log, log]
        assert [*links] == [store] * (rank == 0), links
        assert found["argv"] == [str(tmp_path / "module_of_ranks.py"), "spec.json"]
        assert found["line"][-3:] == ["module_of_ranks", "spec.json", f"rank={rank}"]
        assert found["stdin"] == ""
        assert found["same"], "of what /proc shows and what the process has"
        assert found["cpus"] == [CPUS[:1] if rank == 0 else CPUS] * 2
        environ = {
            name: found["environ"].get(name)
            for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "GROUP_RANK")
        }
        assert environ == {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "5",
            "GROUP_RANK": "0",
        }
        assert found["environ"].get("ZRUN_STORE_FD") == (str(store) if rank == 0 else None)
        assert found["environ"]["CUDA_VISIBLE_DEVICES"] == ("MIG-b" if rank == 1 else "GPU-a,GPU-b")
    for numbers in zip(*(found["drawn"] for found in told), strict=True):
        assert len({*numbers}) == len(RANKS), "each draws numbers of its own"
    assert len({found["environ"]["MASTER_PORT"] for found in told}) == 1


def test_what_its_argument_needs_is_imported_before_the_fork(tmp_path: Path) -> None:
    code = (
        "import os\ndef import_for(argument):\n"
        "    global found\n    found = argument, os.getpid()\n"
        "def main():\n    print(found[0], found[1] == os.getpid())\n"
    )
    start(tmp_path, code)
    assert logs(tmp_path) == [["spec.json False"]] * 3


def test_whoever_binds_by_hand_is_left_alone(tmp_path: Path) -> None:
    start(
        tmp_path,
        "import os\ndef main():\n    print(sorted(os.sched_getaffinity(0)))\n",
        GOMP_CPU_AFFINITY="0",
    )
    assert logs(tmp_path) == [[str(CPUS)]] * 3


@pytest.mark.parametrize(
    ("code", "status", "last"),
    [
        ("raise ValueError('broken')", 1, ["ValueError: broken"]),
        ("import os\nos.kill(os.getpid(), 9)", -9, []),
        (
            "import os\nos.register_at_fork(after_in_child=lambda: os.kill(os.getpid(), "
            "9))\nmain = None",
            -9,
            [],
        ),
        ("def main():\n    raise SystemExit(7)", 7, []),
    ],
)
def test_ranks_that_fail_as_they_begin(
    tmp_path: Path, code: str, status: int, last: list[str]
) -> None:
    """What fails before they are processes of their own is told as theirs,
    and written to the first one's log.
    """
    _, _, _, ended, _ = start(tmp_path, code)
    assert [number for _, number in ended.values()] == [status] * 3
    assert [each[-1:] for each in logs(tmp_path)] == [last, [], []]


def test_processes_that_a_rank_spawns_find_its_modules(tmp_path: Path) -> None:
    """As those of a DataLoader do: they import the main module of the process that starts them."""
    code = """
import multiprocessing, os
def answer(number):
    return 2 * number, os.environ["RANK"]
def main():
    for method in ("spawn", "forkserver", "fork"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            print(pool.map(answer, [21]))
"""
    _, _, _, ended, _ = start(tmp_path, code)
    assert logs(tmp_path) == [[str([(42, str(rank))])] * 3 for rank in RANKS]
    assert [status for _, status in ended.values()] == [0] * 3


def test_a_program_that_an_import_starts_holds_up_nobody(tmp_path: Path) -> None:
    _, _, _, ended, _ = start(
        tmp_path, "import os\nos.system('sleep 600 &')\ndef main():\n    print('begun')\n"
    )
    assert logs(tmp_path) == [["begun"]] * 3
    assert [status for _, status in ended.values()] == [0] * 3


@pytest.mark.parametrize("word", [b"", fork_server.BEGIN * 2])
def test_no_rank_begins_without_its_agent(tmp_path: Path, word: bytes) -> None:
    """Where it ends before it says so, and just after that.

    This process does not adopt them, as if it were gone.
    """
    (tmp_path / "marks.py").write_text("def main():\n    print('begun')\n")
    told, told_end = os.pipe()
    begin_end, begin = os.pipe()
    seats = [
        {"rank": rank, "env": {}, "log": f"{rank}.log", "cpus": None, "has_store": False}
        for rank in range(2)
    ]
    request = {
        "agent": os.getpid(),
        "told": told_end,
        "begin": begin_end,
        "store": None,
        "seats": seats,
    }
    command = [sys.executable, "-m", fork_server.__name__, "marks", "spec.json"]
    with subprocess.Popen(
        command, cwd=tmp_path, stdin=subprocess.PIPE, pass_fds=[told_end, begin_end]
    ) as server:
        os.close(told_end)
        os.close(begin_end)
        server.communicate(json.dumps(request).encode(), timeout=PATIENCE_S)
    assert server.returncode == 0
    with open(told, "rb") as pipe:
        ranks = [Process.find(pid) for pid in json.loads(pipe.read())["pids"].values()]
    assert all(rank is not None and rank.alive() for rank in ranks)
    os.write(begin, word)
    os.close(begin)
    assert processes.wait_gone([rank for rank in ranks if rank is not None], PATIENCE_S) == []
    assert [(tmp_path / f"{rank}.log").read_text() for rank in range(2)] == ["", ""]


def test_nothing_is_imported_for_an_agent_that_is_gone(tmp_path: Path) -> None:
    (tmp_path / "marks.py").write_text("print('imported')\n")
    done = subprocess.run(
        [sys.executable, "-m", fork_server.__name__, "marks", "spec.json"],
        input=json.dumps({"agent": 1, "told": 1, "begin": 0, "store": None, "seats": []}),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert (done.returncode, done.stdout) == (1, "")
