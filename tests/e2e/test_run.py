"""`zrun run`: scripts as torchrun starts them, on two ranks of this host, to the exit code."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from waiting import PATIENCE_S, wait_for

from zrun.runs.listing import RunStatus, read_run

TOLD = """
import json, os, sys
print(json.dumps({
    "env": dict(os.environ), "argv": sys.argv, "path": sys.path[0], "name": __name__,
    "package": __package__, "torch": "torch" in sys.modules, "cwd": os.getcwd(),
}), flush=True)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "1":
    if "--fail-once" in sys.argv:
        raise ValueError("this time")
"""

DDP = """
import sys, time, torch, torch.distributed as dist
from torch import nn
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(6):
    loss = model(torch.full((4, 8), rank + 1.0)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 3 and rank == 1:
        exec(sys.argv[1])
print(f"{float(sum(p.double().sum() for p in model.parameters())):.9f}", flush=True)
dist.destroy_process_group()
"""

FSDP2 = """
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
for layer in (model[0], model[2], model):
    fully_shard(layer, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for _ in range(3):
    model(torch.ones(4, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
print(type(model[0].weight).__name__, tuple(model[0].weight.to_local().shape), flush=True)
dist.destroy_process_group()
"""

ACCELERATE = """
import torch
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
rows = torch.utils.data.TensorDataset(torch.ones(64, 8))
model, optimizer, data = accelerator.prepare(
    model, optimizer, torch.utils.data.DataLoader(rows, batch_size=4)
)
for (x,) in data:
    accelerator.backward(model(x).square().mean())
    optimizer.step()
    optimizer.zero_grad()
print(accelerator.num_processes, type(model).__name__, len(data), flush=True)
accelerator.end_training()
"""

TRAINER = """
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
config = GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=1, n_head=2)
rows = [{"input_ids": torch.arange(8), "labels": torch.arange(8)} for _ in range(64)]
arguments = TrainingArguments(
    output_dir="out", max_steps=4, per_device_train_batch_size=4, use_cpu=True, report_to=[],
    save_strategy="no",
)
done = Trainer(model=GPT2LMHeadModel(config), args=arguments, train_dataset=rows).train()
print(arguments.world_size, done.global_step, flush=True)
"""

LIBRARY = """
import sys, time, torch, zrun_core
run = zrun_core.init(run_dir="runs/own/1")
model = zrun_core.shard(lambda: torch.nn.Linear(8, 1), zero=2)
optimizer = zrun_core.optimizer(model, "sgd", lr=0.01)
for step in range(1, int(sys.argv[1]) + 1):
    loss = model(torch.ones(4, 8)).square().mean()
    loss.backward()
    optimizer.step()
    run.metric("loss", loss)
    if run.save_asked:
        zrun_core.save(run.run_dir / "checkpoints", model, step=step)
    if len(sys.argv) > 2 and step == int(sys.argv[2]) and run.rank == 1:
        time.sleep(1000)
    time.sleep(0.01)
"""


def command(folder: Path, *words: str) -> dict[str, Any]:
    return {
        "args": [sys.executable, "-m", "zrun", "run", "--ui", "plain", "--run-dir", "run", *words],
        "cwd": folder,
        "text": True,
        "stdin": subprocess.DEVNULL,
        "env": {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"},
    }


def zrun_run(folder: Path, script: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run `script` as train.py on two ranks; `words` are its keys, its name and its arguments."""
    (folder / "train.py").write_text(script)
    keys = ("--slots", "2", "device=cpu", "log.ranks=all")
    settings = command(folder, *keys, *words)
    return subprocess.run(**settings, capture_output=True, timeout=PATIENCE_S)


def output(folder: Path, rank: int) -> list[str]:
    return (folder / "run" / "logs" / f"rank-{rank}.log").read_text().splitlines()


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    path = folder / "run" / "events.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [event for event in map(json.loads, lines) if event["type"] == kind]


def test_ranks_find_what_torchrun_gives_them(tmp_path: Path) -> None:
    done = zrun_run(tmp_path, TOLD, "train.py", "--slots", "7", "x=1", "--", "-m")
    assert done.returncode == 0, done.stderr
    told = [json.loads(output(tmp_path, rank)[0]) for rank in range(2)]
    for rank, each in enumerate(told):
        script = str(tmp_path / "train.py")
        assert each["argv"] == [script, "--slots", "7", "x=1", "--", "-m"]
        assert (each["name"], each["package"], each["path"]) == ("__main__", None, str(tmp_path))
        assert (each["cwd"], each["torch"]) == (str(tmp_path), False)
        env = each["env"]
        assert (env["RANK"], env["LOCAL_RANK"], env["ROLE_RANK"]) == (str(rank),) * 3
        sizes = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE")
        assert [env[name] for name in sizes] == ["2"] * 3
        assert (env["GROUP_RANK"], env["NODE_RANK"], env["GROUP_WORLD_SIZE"]) == ("0", "0", "1")
        assert (env["MASTER_ADDR"], env["ROLE_NAME"]) == ("127.0.0.1", "default")
        assert env["TORCHELASTIC_RUN_ID"] == "run"
        assert env["TORCHELASTIC_MAX_RESTARTS"] == "0"
        assert int(env["OMP_NUM_THREADS"]) >= 1
        assert not {"ZRUN_STORE", "GLIBC_TUNABLES", "PYTORCH_ALLOC_CONF"} & set(env)
    assert told[0]["env"]["MASTER_PORT"] == told[1]["env"]["MASTER_PORT"]
    assert "done  the script ended on 2 ranks" in done.stdout
    assert read_run(tmp_path / "run").state is RunStatus.FINISHED


def test_a_module_is_found_as_python_finds_it_and_failures_start_again(tmp_path: Path) -> None:
    package = tmp_path / "recipes"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(TOLD)
    done = zrun_run(tmp_path, "", "restarts=1", "-m", "recipes", "--fail-once")
    assert done.returncode == 0, done.stderr
    assert "ValueError: this time" in done.stderr
    assert "rank 1 of 2" in done.stderr
    assert "restart 1 of 1 in 5 s, from where the script itself resumes" in done.stderr
    told = json.loads(output(tmp_path, 1)[0])
    assert told["argv"] == [str(package / "__main__.py"), "--fail-once"]
    assert (told["package"], told["path"]) == ("recipes", str(tmp_path))
    env = told["env"]
    assert (env["TORCHELASTIC_RESTART_COUNT"], env["TORCHELASTIC_MAX_RESTARTS"]) == ("1", "1")


@pytest.mark.parametrize(
    ("name", "script", "said"),
    [
        ("torch", FSDP2, "DTensor (8, 8)"),
        ("accelerate", ACCELERATE, "2 DistributedDataParallel 8"),
        pytest.param("accelerate", TRAINER, "2 4", marks=pytest.mark.thorough),
    ],
    ids=["fsdp2", "accelerate", "trainer"],
)
def test_scripts_of_others_run_as_they_are(
    tmp_path: Path, name: str, script: str, said: str
) -> None:
    if find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    done = zrun_run(tmp_path, script, "train.py")
    assert done.returncode == 0, done.stderr
    assert [output(tmp_path, rank)[-1] for rank in range(2)] == [said, said]


@pytest.mark.thorough
def test_ddp_has_the_bits_that_torchrun_gives_it(tmp_path: Path) -> None:
    done = zrun_run(tmp_path, DDP, "threads=1", "train.py", "pass")
    assert done.returncode == 0, done.stderr
    found = [output(tmp_path, rank)[-1] for rank in range(2)]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    other = subprocess.run(
        [*torchrun, "train.py", "pass"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert other.stdout.split() == found


@pytest.mark.parametrize(
    ("does", "code", "says"),
    [
        ("raise ValueError('no more data')", 5, "train.py"),
        ("import os; os.kill(os.getpid(), 9)", 5, "rank 1 of 2 .* was killed by SIGKILL"),
        ("sys.exit(3)", 5, "rank 1 of 2 .* ended with status 3"),
        ("sys.exit(0)", 5, "rank 0 of 2 .* failed after rank 1 had ended with status 0"),
    ],
)
@pytest.mark.at_most(1)
def test_the_rank_that_ended_the_run_is_named(
    tmp_path: Path, does: str, code: int, says: str
) -> None:
    done = zrun_run(tmp_path, DDP, "train.py", does)
    assert done.returncode == code, done.stderr
    failure = json.loads((tmp_path / "run" / "failure.json").read_text())
    assert failure["rank"] == (0 if "exit(0)" in does else 1)
    if "raise" in does:
        assert (failure["type"], failure["message"]) == ("ValueError", "ValueError: no more data")
        assert "zrun_core/script" not in done.stderr  # the frames are those of the script
        assert "rank 1 of 2" in done.stderr
    else:
        assert find(says, done.stderr)


# What torch's own threads may do while a process of Python ends.
CRASHES_LATE = """
import ctypes, os, sys
libc = ctypes.CDLL(None)
libc.on_exit(ctypes.cast(libc.abort, ctypes.c_void_p), None)
"""


@pytest.mark.parametrize(
    ("ends", "code", "says"),
    [
        ("pass", 0, ""),
        ("sys.exit(3)", 5, "rank 0 of 2 .* ended with status 3"),
        ("import atexit; atexit.register(os.abort)", 5, "was killed by SIGABRT"),  # still Python
        ("sys.exit(0) if os.fork() else sys.exit(4)", 0, ""),  # what the child ends with is its own
    ],
)
@pytest.mark.at_most(2)
def test_a_crash_behind_the_end_of_python_changes_no_status(
    tmp_path: Path, ends: str, code: int, says: str
) -> None:
    done = zrun_run(tmp_path, CRASHES_LATE + f"if os.environ['RANK'] == '0': {ends}", "train.py")
    assert (done.returncode, find(says, done.stderr)) == (code, True), done.stderr


def find(pattern: str, text: str) -> bool:
    return re.search(pattern, text) is not None


def test_a_hang_says_which_rank_did_not_come_where(tmp_path: Path) -> None:
    done = zrun_run(tmp_path, DDP, "limits.hang_s=4", "train.py", "time.sleep(1000)")
    assert done.returncode == 6, done.stderr
    assert find(
        r"no progress for 4 s \(limits.hang_s\): rank 1 of 2 \(.*\) has not reached all_reduce \d+ "
        r".*, which others wait for",
        done.stderr,
    )
    assert find(r"rank 0 is idle at train.py:\d+, waits for all_reduce", done.stderr)
    failure = json.loads((tmp_path / "run" / "failure.json").read_text())
    assert (failure["kind"], failure["rank"], failure["limit"]) == ("hang", 1, "limits.hang_s")
    assert "train.py" in failure["traceback"]
    assert "zrun_core/script" not in failure["traceback"]
    stacks = tmp_path / "run" / "stacks"
    assert all("train.py" in (stacks / f"rank-{rank}.txt").read_text() for rank in range(2))


def test_a_script_with_the_library_joins_the_record_and_saves_when_asked(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LIBRARY)
    settings = command(tmp_path, "--slots", "2", "device=cpu", "train.py", "100000")
    launcher = subprocess.Popen(**settings, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        wait_for(lambda: len(events(tmp_path, "step")) > 3)
        found = read_run(tmp_path / "run")
        assert (found.state, found.ranks, found.job) == (RunStatus.RUNNING, 2, "train")
        save = [sys.executable, "-m", "zrun", "save", "run"]
        saved = subprocess.run(save, cwd=tmp_path, capture_output=True, text=True, check=True)
        assert "saved step" in saved.stdout
        launcher.send_signal(signal.SIGTERM)
        _, told = launcher.communicate(timeout=PATIENCE_S)
    finally:
        launcher.kill()
        launcher.wait()
    assert launcher.returncode == 143, told
    (start,) = events(tmp_path, "start")
    assert (start["job"], start["world_size"]) == ("train", 2)
    (save_event,) = events(tmp_path, "save")
    step = f"step-{save_event['step']:08d}"
    assert (tmp_path / "run" / "checkpoints" / step / "manifest.json").exists()
    assert {"loss"} == {name for each in events(tmp_path, "metrics") for name in each["values"]}
    assert "stopped after step" in told
    assert not (tmp_path / "runs").exists()  # its own folder, which it names
    assert any("init(run_dir=" in line for line in output(tmp_path, 0))


@pytest.mark.thorough
def test_of_a_script_with_the_library_a_hang_names_the_unit(tmp_path: Path) -> None:
    done = zrun_run(tmp_path, LIBRARY, "limits.hang_s=4", "train.py", "100000", "5")
    assert done.returncode == 6, done.stderr
    assert find(
        r"rank 1 of 2 \(.*\) has not reached all_gather 5, 'model' .*, which others wait for",
        done.stderr,
    )


def test_a_script_in_the_background_is_listed_and_stopped(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import time\nprint('here', flush=True)\ntime.sleep(1000)\n")
    settings = command(tmp_path, "--detach", "--slots", "2", "device=cpu", "train.py")
    begun = subprocess.run(**settings, capture_output=True, timeout=PATIENCE_S)
    assert begun.returncode == 0, begun.stderr
    assert "is running in the background" in begun.stdout
    assert read_run(tmp_path / "run").state is RunStatus.RUNNING
    for name, says in (("save", "has not called zrun_core.init"), ("profile", "cannot profile")):
        asked = [sys.executable, "-m", "zrun", name, "run"]
        refused = subprocess.run(asked, cwd=tmp_path, capture_output=True, text=True)
        assert (refused.returncode, says in refused.stderr) == (2, True), refused.stderr
    stop = [sys.executable, "-m", "zrun", "stop", "run"]
    stopped = subprocess.run(stop, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert stopped.stdout == "stopped, exit code 143\n"
    assert read_run(tmp_path / "run").state is RunStatus.STOPPED
