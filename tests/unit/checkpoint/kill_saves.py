"""Kills a process while it saves, again and again, and looks at what is left.

Step k or k - 1, whole, never a mix.

    python tests/unit/checkpoint/kill_saves.py FOLDER 1000

First it dies once at each call that changes a file, then by SIGKILL at random instants. A table is
printed; the exit code is 1 if a step was lost, or half of one believed.
"""

from __future__ import annotations

import os
import random
import select
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from checkpoint_toys import read_step_state, toy_state, write_step

from zrun_core.checkpoint.folder import CheckpointFolder
from zrun_core.checkpoint.verify import verify

_CALLS = (
    "open",
    "close",
    "pwrite",
    "posix_fallocate",
    "fsync",
    "rename",
    "replace",
    "mkdir",
    "unlink",
    "rmdir",
)
_KEEP = 2


def save_forever(folder: CheckpointFolder, step: int, report: int) -> None:
    """Save step after step, and tell each that is committed."""
    os.write(report, b"s")
    while True:
        write_step(folder, step)
        os.write(report, b"%010d" % step)
        folder.prune(_KEEP)
        step += 1


def forked(work: Callable[[int], None]) -> tuple[int, int]:
    """Run `work` in a child. Returns its process and what it reports through."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reading)
            work(writing)
        finally:
            os._exit(1)
    os.close(writing)
    return child, reading


def committed(reading: int, before: int) -> int:
    """The last step that the child has reported."""
    os.set_blocking(reading, True)
    told = b""
    while piece := os.read(reading, 2**16):
        told += piece
    os.close(reading)
    steps = told.removeprefix(b"s")
    return int(steps[-10:]) if steps else before


def judge(folder: CheckpointFolder, told: int) -> str:
    """What is left after a death.

    The name of an outcome, beginning with a capital letter where it is a bad one.
    """
    found = folder.scan()
    if any(each.problem for each in found):
        return f"A step that does not count: {next(each.problem for each in found if each.problem)}"
    newest = found[0].step if found else 0
    if newest not in (told, told + 1):
        return f"Step {newest} after {told} was committed"
    if told >= _KEEP and len(found) < _KEEP:
        return f"Only {len(found)} steps are left"
    for each in found:
        assert each.manifest is not None
        if verify(each.path, each.manifest):
            return f"Damage in step {each.step}"
        expected = toy_state(each.step)
        read = read_step_state(each.path, each.manifest)
        if not all(torch.equal(read[name], tensor) for name, tensor in expected.items()):
            return f"Step {each.step} is a mix"
    return "step k, not yet reported" if newest > told else "step k - 1"


def die_at_call(number: int) -> None:
    """Let this process end without a word at its `number`th call that changes a file."""
    left = [number]

    def dying(real: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object, **options: object) -> object:
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(60)
            return real(*arguments, **options)

        return call

    for name in _CALLS:
        setattr(os, name, dying(getattr(os, name)))


def main(path: Path, kills: int) -> int:
    torch.set_num_threads(1)
    folder = CheckpointFolder(path)
    outcomes: Counter[str] = Counter()
    step = 1
    started = time.monotonic()
    for _ in range(3):
        write_step(folder, step)
        step += 1
    save_s = (time.monotonic() - started) / 3
    told = step - 1
    calls = 0
    while True:  # until a child gets through a whole save and its pruning

        def one_save(report: int, step: int = step, calls: int = calls) -> None:
            die_at_call(calls)
            write_step(folder, step)
            os.write(report, b"s%010d" % step)
            folder.prune(_KEEP)
            os._exit(0)

        child, reading = forked(one_save)
        told = committed(reading, told)
        status = os.waitpid(child, 0)[1]
        outcomes[f"at a call: {judge(folder, told)}"] += 1
        folder.sweep()
        folder.prune(_KEEP)
        told = folder.scan()[0].step
        step = told + 1
        calls += 1
        if status == 0:
            break
    chance = random.Random(0)
    for _ in range(kills):
        child, reading = forked(lambda report, step=step: save_forever(folder, step, report))  # type: ignore[misc]
        select.select([reading], [], [])
        time.sleep(chance.uniform(0, 3 * save_s))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        told = committed(reading, told)
        outcomes[f"at random: {judge(folder, told)}"] += 1
        folder.sweep()
        folder.prune(_KEEP)
        told = folder.scan()[0].step
        step = told + 1
    for outcome, count in sorted(outcomes.items()):
        print(f"{count:6}  {outcome}")
    bad = sum(
        count for outcome, count in outcomes.items() if outcome.partition(": ")[2][0].isupper()
    )
    print(f"{outcomes.total()} deaths in {step - 1} steps, {bad} bad")
    return int(bad > 0 or calls < 20)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
