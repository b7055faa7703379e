"""Times of a step on simulated GPUs: what streams wait for is told, and no host waits to find out.

A kernel that sleeps makes one rank late. What the other then waits is compared with what it waits.
"""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest
import ranks

DIST = Path(__file__).resolve().parents[1] / "dist"
SLEEP_S = 0.2
MICRO_BATCHES = 4  # of a rank, in a step

# Trains a job to its end on this rank, and returns its events. In each forward of the rank `late`
# the device sleeps. With `strict` a wait of the host is an error from the third step on, but for
# that of the totals of the step before.
TRAIN = f"""
import time
sys.path.insert(0, {str(DIST)!r})
import runs
from pathlib import Path
from simulated_gpu import python_kernels

touched = torch.zeros(1, device=device)

def sleep_on_device():
    python_kernels.launch(lambda _: time.sleep({SLEEP_S}), writes=[touched])

def train(late, keys, dims=None, strict=True):
    keys = dict(data={{"call": "runs.py:Tokens", "shuffle": False}}, hooks={{}},
                checkpoint=None, **keys)
    folder = Path(os.environ["STORE"]).parent / "run"
    folder.mkdir(exist_ok=True)
    spec = runs.make_spec(runs.job(**keys), str(folder), None, dims)
    for place in spec.plan.ranks:
        object.__setattr__(place, "device", f"cuda:{{place.rank}}")
    worker = runs.PoolWorker(spec, rank)
    trainer = worker.prepare()
    module = trainer.module
    if rank == late:
        module.register_forward_pre_hook(lambda *_: sleep_on_device())
    step = trainer.step
    def watched(batches):
        is_strict = strict and trainer.progress.steps >= 2
        torch.cuda.set_sync_debug_mode("error" if is_strict else "default")
        step(batches)
        torch.cuda.set_sync_debug_mode("default")
    trainer.step = watched
    trainer.run()
    return worker.told.events

def of(events, kind):
    return [event for event in events if event["type"] == kind]
"""


def run(script: str, size: int, **settings: Any) -> list[list[Any]]:
    """Return what each rank said."""
    source = TRAIN + textwrap.dedent(script)
    ended = ranks.run(source, size, **settings)
    assert [each.code for each in ended] == [0] * size, "\n".join(each.error for each in ended)
    return [each.said for each in ended]


@pytest.mark.parametrize("stage", [0, 3])
def test_ranks_that_wait_for_a_late_one_say_so(stage: int) -> None:
    script = f"""
        events = train(1, dict(zero={stage}, steps=5, log={{"every": 1}}))
        say([event["split"] for event in of(events, "memory")])
        """
    prompt, late = (said[0] for said in run(script, 2, delay_us=50))
    assert len(prompt) == len(late) == 5
    assert all(split["forward"] > 0.9 * MICRO_BATCHES * SLEEP_S for split in late)
    assert sum(split["comm"] for split in prompt) > sum(split["comm"] for split in late)
    assert max(split["comm"] for split in prompt) > SLEEP_S


def test_a_slow_stage_of_a_pipeline_is_seen_in_the_grid_that_was_measured() -> None:
    script = """
        keys = dict(model={"call": "runs.py:Speaker", "args": {"norm": False}}, zero=1, steps=4,
                    batch={"global": 8, "micro": 2}, parallel={"pp": 2}, log={"every": 1})
        events = train(1, keys, {"pp": 2, "dp": 1})
        say([event["pipeline"] for event in of(events, "memory")])
        say(of(events, "schedule")[-1])
        """
    first, last = run(script, 2, delay_us=50)
    assert {use["stage"] for use in first[0]} == {0}
    assert all(use["span_s"] > 0.9 * MICRO_BATCHES * SLEEP_S for use in last[0])
    assert sum(use["waited_s"] for use in first[0]) > sum(use["waited_s"] for use in last[0])
    assert max(use["waited_s"] for use in first[0]) > SLEEP_S
    actions = last[1]["actions"]
    assert [action[0] for action in actions] == ["F", "B"] * MICRO_BATCHES
    for kind, _, _, begin, end, waited in actions:
        assert 0 <= waited <= end - begin
        if kind == "F":
            assert end - begin - waited > 0.9 * SLEEP_S
    ends = [action[4] for action in actions]
    assert ends == sorted(ends)


def test_waits_for_host_memory_are_told() -> None:
    """The host adds the gradients up and updates: it waits for them."""
    script = """
        keys = dict(zero=2, steps=5, offload={"optimizer": "host"}, log={"every": 1})
        events = train(0, keys, strict=False)
        for event in of(events, "step"):
            say([event["tiers"]["host"]["waited_s"], event["updates"]["lag_s"]])
        """
    told = run(script, 1, delay_us=50)[0]
    assert len(told) == 5
    assert all(waited >= 0 and lag >= 0 for waited, lag in told)
    assert all(waited + lag > 0 for waited, lag in told[2:])
