"""Ranks on cores of their own: every thread of real workers, and of processes that the agent
starts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from zrun.topology.cpus import USER_BINDING, format_cpus

HERE = Path(__file__).parent
CPUS = sorted(os.sched_getaffinity(0))

_HOOKS = """
import json, os
from pathlib import Path


def tell(context):
    numbers = os.listdir("/proc/self/task")
    threads = {number: sorted(os.sched_getaffinity(int(number))) for number in numbers}
    Path(__file__).with_name(f"rank-{os.environ['RANK']}.json").write_text(json.dumps(threads))
"""


def train(folder: Path, *options: str, **variables: str) -> Path:
    job = folder / "job.yaml"
    job.write_text(
        f"name: bound\nmodel: {HERE}/small_job.py:Net\ndata: {HERE}/small_job.py:Vectors\n"
        "steps: 2\nbatch: 4\n"
        "slots: 2\nhooks: {on_step: hooks.py:tell}\n"
    )
    (folder / "hooks.py").write_text(_HOOKS)
    run_dir = folder / "run"
    done = subprocess.run(
        [sys.executable, "-m", "zrun", "train", str(job), "--run-dir", str(run_dir), *options],
        env={key: value for key, value in os.environ.items() if key not in USER_BINDING}
        | variables,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return run_dir


def planned(run_dir: Path) -> list[Any]:
    return [place["cpus"] for place in json.loads((run_dir / "plan.json").read_text())["ranks"]]


def is_free() -> bool:
    """Whether the plan may bind here: no quota, no affinity of somebody else's."""
    from zrun.hosts.cluster import probe_host

    return len(CPUS) > 1 and probe_host().unbound is None


@pytest.mark.skipif(not is_free(), reason="one CPU, or a quota or an affinity of somebody else's")
@pytest.mark.thorough
def test_every_thread_of_a_worker_keeps_to_its_cores(tmp_path: Path) -> None:
    run_dir = train(tmp_path)
    told = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2)]
    for rank, threads in enumerate(told):
        assert len(threads) > 1  # torch and gloo have some of their own
        assert {format_cpus(cpus) for cpus in threads.values()} == {planned(run_dir)[rank]}
    first, second = (set(next(iter(threads.values()))) for threads in told)
    assert not first & second


@pytest.mark.parametrize(
    ("options", "variables"), [(("bind=off",), {}), ((), {"OMP_PROC_BIND": "false"})]
)
@pytest.mark.thorough
def test_ranks_that_are_not_bound(
    tmp_path: Path, options: tuple[str, ...], variables: dict[str, str]
) -> None:
    worker = tmp_path / "free_worker.py"
    worker.write_text(
        "import json, os, pathlib, sys\n"
        "from zrun_core.spine.events import Emitter\nfrom zrun_core.spine.spec import RunSpec\n"
        "def main():\n    spec, rank = RunSpec.read(pathlib.Path(sys.argv[1])), "
        "int(os.environ['RANK'])\n"
        "    emitter = Emitter(spec.telemetry, rank)\n"
        "    if rank == 0:\n        emitter.emit('end', step=2, reason='steps', total_s=0.1, "
        "loss=1.0)\n"
        "    emitter.close()\n    print(sorted(os.sched_getaffinity(0)))\n"
    )
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    run_dir = train(tmp_path, "--worker", "free_worker", *options, PYTHONPATH=path, **variables)
    assert planned(run_dir) == [None, None]
    assert [(run_dir / f"logs/rank-{rank}.log").read_text() for rank in range(2)] == [
        f"{CPUS}\n"
    ] * 2
