"""An asynchronous parameter server where a push is no number, a rank hangs, or a signal comes."""

from __future__ import annotations

import itertools
import signal
import threading
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from async_jobs import keys_of, of_steps, warnings
from runs import Plain, PoolWorker, losses, make_spec, run
from torch import nn
from toys import world

from zrun_core.parameter_server.messages import Push
from zrun_core.spine.flight_recorder import FlightRecorder
from zrun_core.train.async_windows import AsyncWindows
from zrun_core.train.user_hooks import HookContext
from zrun_core.zero.push_pull import Applied, PushPull


class Sick(nn.Module):
    """Its gradient is not a number where it sees a certain sample."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Embedding(13, 8)
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 13)

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor, index: torch.Tensor
    ) -> torch.Tensor:
        x = self.norm(self.first(input_ids).transpose(1, 2)).transpose(1, 2)
        loss = nn.functional.cross_entropy(self.last(x).flatten(0, 1), labels.flatten())
        return loss * (float("nan") if bool((index == 7).any()) else 1.0)


SICK: dict[str, Any] = {
    "model": "parameter_server/test_async_guards.py:Sick",
    "data": {"call": "runs.py:Tokens"},
    "batch": {"global": 4, "micro": 1},
    "steps": 24,
}


def test_a_push_that_is_not_finite_is_left_out(ranks, tmp_path: Path) -> None:
    """The other pushes of its step are made use of: the step is not skipped, nor a fault."""
    keys = keys_of("any", **SICK, guards={"max_nonfinite": 1})
    found = ranks(2).run(run, keys, str(tmp_path / "run"))
    assert found[0]["error"] == ""
    assert not any(of_steps(found[0], "skipped"))
    told = [each for each in warnings(found[0]) if "left out" in each]
    # Samples 7, 47 and 87 of the stream.
    assert [each.split(":")[0] for each in told] == ["step 2", "step 12", "step 22"]
    assert "left out, since a gradient in " in told[0]
    assert "indices 6-7 of the dataset" in told[0]
    assert told[0].endswith("other updates of the step were made")
    assert not any("skipped on all ranks" in each for each in warnings(found[0]))
    assert sum(e["left_out"] for e in found[0]["events"] if e["type"] == "pushes") == 3
    assert np.isfinite(of_steps(found[0], "grad_norm")).all()
    assert all(np.isfinite(values).all() for values in found[0]["parts"].values())


def test_a_step_of_which_every_push_is_left_out_is_skipped(ranks, tmp_path: Path) -> None:
    keys = keys_of(
        "any",
        **{**SICK, "batch": {"global": 16, "micro": 8}, "steps": 6},
        guards={"max_nonfinite": 9},
        lr={"schedule": "constant", "warmup": 6},
    )
    with_two = {**keys, "data": {"call": "parameter_server/test_async_guards.py:Sevens"}}
    found = ranks(2).run(run, with_two, str(tmp_path / "run"))
    assert of_steps(found[0], "skipped") == [True] * 6
    assert sum("was skipped on all ranks: " in each for each in warnings(found[0])) == 6
    rates = of_steps(found[0], "lr")
    assert len(set(rates)) == 6, "within a window the rate follows the steps"


class Sevens(Plain):
    """Every sample is one that `Sick` does not bear."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {**super().__getitem__(index), "index": torch.tensor(7)}


def test_without_staleness_a_skipped_step_moves_the_rate_as_with_the_synchronous_server(
    ranks, tmp_path: Path
) -> None:
    late = keys_of(0, **SICK, lr={"schedule": "cosine", "warmup": 3})
    early = {**late, "sync": "server"}
    found, expected = (
        ranks(2).run(run, each, str(tmp_path / each["sync"])) for each in (late, early)
    )
    assert [n for n, each in enumerate(of_steps(found[0], "skipped"), 1) if each] == [2, 12, 22]
    for name in ("lr", "skipped", "loss"):
        pair = [of_steps(each[0], name) for each in (found, expected)]
        assert np.array_equal(*pair, equal_nan=True), name
    assert [each["digest"] for each in found] == [each["digest"] for each in expected]


def read_all(context: HookContext) -> None:
    """Read each parameter: afterwards ranks pull them all at once."""
    with context.gathered() as module:
        sum(float(param.detach().sum()) for param in module.parameters())


def watched(keys: dict[str, Any], run_dir: str) -> dict[str, Any]:
    """Run a job whose last rank is slow, and updates of it take a while.

    Returns:
        What the ranks' pages say when all is over, and while the server updates or listens.
    """
    rank, size = world()
    Path(run_dir).mkdir(exist_ok=True)
    worker = PoolWorker(make_spec(keys, run_dir, None), rank)
    board = FlightRecorder(Path(run_dir) / "pages", rank, range(size), size)
    worker.board = board
    apply, compute = PushPull.apply, AsyncWindows._compute
    updating: list[bool] = []
    listening: list[str] = []

    def slow(self: PushPull, *args: Any, **options: Any) -> Applied:
        if threading.current_thread().name.startswith("pushes of"):
            time.sleep(0.1)  # the thread that trains waits, and this one does not
            updating.append(board.state(0).waiting)
        return apply(self, *args, **options)

    def late(self: AsyncWindows, *args: Any) -> tuple[Push, list[torch.Tensor]]:
        result = compute(self, *args)
        if rank == size - 1:
            time.sleep(0.1)
            if board.state(0).waiting:
                listening.append(board.awaits_in_words(0))
        return result

    with patch.object(PushPull, "apply", slow), patch.object(AsyncWindows, "_compute", late):
        trainer = worker.prepare()
        trainer.run()
    dist.barrier()
    told = [board.disagreement(), board.stalemate()]
    dist.barrier()
    worker.close()
    return {"told": told, "updating": updating, "listening": listening}


@pytest.mark.parametrize("staleness", [0, "any"])
@pytest.mark.at_most(1)
def test_a_watchdog_takes_neither_pace_nor_a_long_update_for_a_hang(
    ranks, tmp_path: Path, staleness: int | str
) -> None:
    keys = keys_of(
        staleness,
        steps=6,
        eval={"data": {"call": "runs.py:Plain"}, "every": 2},
        hooks={"on_eval": "parameter_server/test_async_guards.py:read_all"},
    )
    found = ranks(2).run(watched, keys, str(tmp_path / "run"))
    assert [each["told"] for each in found] == [[None, None]] * 2
    assert found[0]["updating"]
    assert not any(found[0]["updating"])
    if staleness == 0:
        assert found[1]["listening"]
    for words in found[1]["listening"]:
        assert words.startswith("for receive ")
        assert "from rank 1, 'gradients'" in words
        assert words.endswith("which rank 1 has not sent")


def hung(keys: dict[str, Any], run_dir: str) -> dict[str, Any]:
    """Run a job whose second rank does not come back from its share of the third step in time."""
    compute = AsyncWindows._compute

    def late(self: AsyncWindows, *args: Any) -> tuple[Push, list[torch.Tensor]]:
        step = args[2]  # the first of the window, which has no other
        if step == 2:  # the first one takes long by itself
            self._channel._limit_s = 1.0  # type: ignore[attr-defined]
        if world()[0] == 1 and step == 3:
            time.sleep(3.0)  # in vain: it is told so when it comes
        return compute(self, *args)

    with patch.object(AsyncWindows, "_compute", late):
        return run(keys, run_dir)


@pytest.mark.parametrize("staleness", [0, "any"])
@pytest.mark.at_most(1)
def test_who_does_not_push_in_time_is_named_on_all_ranks(
    ranks, tmp_path: Path, staleness: int | str
) -> None:
    eval_often = {"data": {"call": "runs.py:Plain", "args": {"length": 2}}, "every": 1}
    keys = keys_of(staleness, limits={"collective_s": 60}, eval=eval_often, steps=12)
    found = ranks(3).run(hung, keys, str(tmp_path / "run"))
    limits = "1 s (limits.collective_s)"
    told = f"HangError: others have waited for a push of rank 1 for more than {limits}"
    assert [each["error"] for each in found] == [told] * 3


def test_a_signal_ends_the_window_with_the_steps_that_were_begun(ranks, tmp_path: Path) -> None:
    keys = keys_of("any", checkpoint={"every": 1000}, steps=400)
    found = ranks(2).run(stopped, keys, str(tmp_path))
    assert {each["error"] for each in found} == {f"StoppedError: {found[0]['error'][14:]}"}
    last = max(losses(found[0]))
    assert last < 32
    assert found[0]["error"] == f"StoppedError: stopped after step {last}, saved"
    rest = ranks(2).run(run, {**keys, "steps": last + 8}, str(tmp_path), {})
    assert list(losses(rest[0])) == list(range(last + 1, last + 9))


def stopped(keys: dict[str, Any], run_dir: str) -> dict[str, Any]:
    """Run a job whose last rank gets a signal while it computes its third share."""
    compute, numbers = AsyncWindows._compute, itertools.count(1)

    def signalled(self: AsyncWindows, *args: Any) -> tuple[Push, list[torch.Tensor]]:
        rank, size = world()
        if rank == size - 1 and next(numbers) == 3:
            asked = self._asked_to_stop
            assert not asked()
            asked.__self__._stop.first = signal.SIGTERM  # type: ignore[attr-defined]
        return compute(self, *args)

    with patch.object(AsyncWindows, "_compute", signalled):
        return run(keys, run_dir)
