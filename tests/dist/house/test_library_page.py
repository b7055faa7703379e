"""docs/library.md as written: its first script under torchrun, all of them on ready ranks."""

from __future__ import annotations

import io
import os
import re
import runpy
import subprocess
import sys
from contextlib import redirect_stdout
from multiprocessing import connection
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from pool import forks

from zrun_core.library import run as library

PAGE = Path(__file__).resolve().parents[3] / "docs" / "library.md"
TIMEOUT_S = 120


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with every script of the page, by the name above it or its section's heading."""
    folder = tmp_path_factory.mktemp("page")
    text = PAGE.read_text(encoding="utf-8")
    for match in re.finditer(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        before = text[: match.start()].rstrip()
        named = re.search(r"(\w+\.py)`[^`]*$", before.rpartition("\n\n")[2])
        heading = re.findall(r"^## (\w+)", before, re.MULTILINE)[-1]
        (folder / (named[1] if named else f"{heading.lower()}.py")).write_text(
            match[1], encoding="utf-8"
        )
    return folder


def torchrun(script: Path) -> subprocess.CompletedProcess[str]:
    """On two ranks."""
    command = [
        str(Path(sys.executable).with_name("torchrun")),
        "--nproc-per-node",
        "2",
        script.name,
    ]
    return subprocess.run(
        command, cwd=script.parent, capture_output=True, text=True, timeout=TIMEOUT_S
    )


def play(script: str) -> list[str]:
    """Run a script on a rank that stands ready, as if in its own process; return what it prints."""
    before = library._current, os.getcwd(), torch.get_num_threads()
    library._current = None
    sys.modules.pop("model", None)
    folder = str(Path(script).parent)
    sys.path.insert(0, folder)
    os.chdir(folder)
    out = io.StringIO()
    try:
        with redirect_stdout(out):
            runpy.run_path(script, run_name="__main__")
    finally:
        library._current, place, threads = before
        os.chdir(place)
        torch.set_num_threads(threads)
        sys.path.remove(folder)
    return out.getvalue().splitlines()


def losses(lines: list[str]) -> dict[int, str]:
    found = [re.fullmatch(r"step (\d+) loss ([\d.]+)", line) for line in lines]
    assert all(found), lines
    return {int(match[1]): match[2] for match in found if match}


@pytest.mark.thorough
def test_the_fifteen_lines_train_and_resume(ranks, scripts: Path, tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text((scripts / "model.py").read_text())
    text = (scripts / "loop.py").read_text()
    assert len([line for line in text.splitlines() if line and not line.startswith("import")]) <= 15
    whole, parts = tmp_path / "loop.py", tmp_path / "parts.py"
    whole.write_text(text)
    parts.write_text(text.replace('"checkpoints"', '"other"').replace(", 40)", ", 20)"))
    done = torchrun(whole)
    assert done.returncode == 0, done.stderr[-4000:]
    full = losses(done.stdout.splitlines())
    assert list(full) == [10, 20, 30, 40]
    assert float(full[40]) < 0.7 * float(full[10])
    first, second = ranks(2).run(play, str(parts))
    assert losses(first) == {step: full[step] for step in (10, 20)}
    assert second == []
    parts.write_text(text.replace('"checkpoints"', '"other"'))
    assert losses(ranks(2).run(play, str(parts))[0]) == {step: full[step] for step in (30, 40)}
    assert ranks(1).run(play, str(whole)) == [[]]  # one rank, nothing left to do


@pytest.mark.thorough
def test_one_rank_gets_the_same_losses(ranks, scripts: Path, tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text((scripts / "model.py").read_text())
    script = tmp_path / "loop.py"
    script.write_text((scripts / "loop.py").read_text().replace("bf16", "fp32"))
    alone = losses(ranks(1).run(play, str(script))[0])
    script.write_text(script.read_text().replace('"checkpoints"', '"other"'))
    together = losses(ranks(2).run(play, str(script))[0])
    assert {k: float(v) for k, v in alone.items()} == pytest.approx(
        {k: float(v) for k, v in together.items()}, abs=2e-5
    )


@pytest.mark.thorough
def test_the_gan_learns_the_circle(ranks, scripts: Path) -> None:
    for _ in range(2):  # the second time it is loaded
        (line,) = ranks(2).run(play, str(scripts / "gan.py"))[0]
        radius = float(re.search(r"radius ([\d.]+)", line)[1])
        assert 0.7 < radius < 1.3


@pytest.mark.parametrize("name", ["schedules.py", "average.py", "evaluation.py", "behind.py"])
@pytest.mark.at_most(2)
def test_the_other_scripts_run_again_and_again(ranks, scripts: Path, name: str) -> None:
    for _ in range(2):  # the second time it goes on from what the first one saved
        ranks(2).run(play, str(scripts / name))


ALONE = """
import torch
import zrun_core
from model import batch, build_model

run = zrun_core.init(patience_s=2)
model = zrun_core.shard(build_model, zero=3)
optimizer = zrun_core.optimizer(model, "sgd", lr=0.1)
x, label = batch(0, run.rank, run.world_size)
{action}
"""
CASES = {
    "if run.is_main:\n    model(x)": "another rank has ended",
    'if run.is_main:\n    zrun_core.save("alone", model, step=1)\n'
    "else:\n    import time; time.sleep(60)": (
        "zrun_core.errors.HangError: save(): rank 1 has not called it within 2 s; "
        "call it on every rank"
    ),
}


def be_rank(script: str, environment: dict[str, str], said: str) -> None:
    os.environ.update(environment)
    with open(said, "wb") as file:
        os.dup2(file.fileno(), 2)
    play(script)


def forkrun(script: Path) -> tuple[list[int | None], str]:
    """Run as torchrun does, with processes that have torch already; return exit codes and words."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    common = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    common |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    said = [f"{script}.{rank}" for rank in range(2)]
    processes = [
        forks().Process(
            target=be_rank,
            args=(str(script), {**common, "RANK": f"{r}", "LOCAL_RANK": f"{r}"}, said[r]),
        )
        for r in range(2)
    ]
    for process in processes:
        process.start()
    running = {process.sentinel: process for process in processes}
    while running and not any(process.exitcode for process in processes):
        ended = connection.wait(list(running), TIMEOUT_S)
        assert ended, "a hang"
        for sentinel in ended:
            running.pop(sentinel).join()
    for process in processes:
        process.kill()
        process.join()
    return [process.exitcode for process in processes], "".join(
        Path(each).read_text() for each in said
    )


@pytest.mark.parametrize("action", CASES)
@pytest.mark.at_most(1)
def test_what_one_rank_does_alone_is_an_error_and_no_hang(scripts: Path, action: str) -> None:
    script = scripts / "alone.py"
    script.write_text(ALONE.format(action=action))
    (code, _), said = forkrun(script)
    assert code == 1
    assert CASES[action] in said
    assert not (scripts / "alone").exists()


STUCK = """
import time
import torch
import zrun_core
from model import batch, build_model

run = zrun_core.init(patience_s=2)
model = zrun_core.shard(build_model, zero=2)
optimizer = zrun_core.optimizer(model, "sgd", lr=0.1)
x, label = batch(0, run.rank, run.world_size)


def load_sample():
    def has(rank, words):
        return words in open(f"stuck.py.{rank}").read()

    while not (has(0, "has waited") and has(1, "has kept")):
        time.sleep(0.02)  # until both ranks have told


if not run.is_main:
    load_sample()
loss = torch.nn.functional.cross_entropy(model(x), label)
loss.backward()
optimizer.step()
"""


@pytest.mark.thorough
def test_a_rank_that_others_wait_for_says_where_it_is_and_may_go_on(scripts: Path) -> None:
    script = scripts / "stuck.py"
    script.write_text(STUCK)
    codes, said = forkrun(script)
    assert codes == [0, 0], said
    for told in (
        r"^zrun_core: rank 0 has waited 2 s at stuck.py:\d+, loss.backward\(\), "
        r"for rank 1, which does something else$",
        r"^zrun_core: rank 1 has kept others waiting for 2 s: "
        r"it is at stuck.py:\d+, (while not |time.sleep)",
    ):
        assert re.search(told, said, re.MULTILINE), said
