"""Train jobs of `test_host_waits.py` on a simulated GPU, and see where the host waits in steps."""

from __future__ import annotations

import gc
import os
import sys
import threading
import types
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import simulated_gpu
import torch
from simulated_gpu import python_kernels
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.append(str(Path(__file__).resolve().parents[1] / "dist"))
import runs
import toys

import zrun_core
from zrun_core.hardware import accelerator
from zrun_core.tiers import worker as tier_worker

FREE = 2  # the first steps, in which a host may wait
HELD_S = 20.0  # in which a host queues a step
ROOT = Path(zrun_core.__file__).parent
# Modules that wait for whoever calls them.
INNER = ("hardware/accelerator.py", "tiers/tiers.py", "tiers/worker.py", "distributed/comm.py")


class Watch:
    """What makes the host wait for the device in some steps of a rank.

    Attributes:
        hidden: waits that torch's debug mode sees, by what is called and where.
        asked: how often a thread that trains has waited by a call that says so, by who calls.
        num_waits: that the debug mode has counted, in any thread.
        held_up: steps that were not queued to their end while the device stood still.
    """

    def __init__(self, device: torch.device, *, holds: bool) -> None:
        """
        Args:
            holds: have the device stand still at the beginning of each step, until the host has
                queued all of it.
        """
        self.hidden: Counter[str] = Counter()
        self.asked: Counter[str] = Counter()
        self.num_waits = 0
        self.held_up: list[int] = []
        self._holds = holds
        self._mark = torch.zeros(1, device=device)

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Watch a step, which is queued inside."""
        before = simulated_gpu.count()["host_waits"]
        with warnings.catch_warnings(), self._listening(), self._held(number):
            warnings.simplefilter("always")
            warnings.showwarning = self._hear
            torch.cuda.set_sync_debug_mode("warn")  # an error would leave the other rank alone
            try:
                yield
            finally:
                torch.cuda.set_sync_debug_mode("default")
        self.num_waits += simulated_gpu.count()["host_waits"] - before

    @contextmanager
    def _held(self, number: int) -> Iterator[None]:
        is_queued = threading.Event()

        def hold(_: torch.Tensor) -> None:
            if not is_queued.wait(HELD_S):
                self.held_up.append(number)

        if self._holds:
            python_kernels.launch(hold, writes=[self._mark])
        try:
            yield
        finally:
            is_queued.set()

    def _hear(self, message: Any, *_: Any, **__: Any) -> None:
        text = str(message).partition(" (Triggered")[0]
        if "synchronizing CUDA operation" in text:
            self.hidden[f"{text} in {_place()}"] += 1

    @contextmanager
    def _listening(self) -> Iterator[None]:
        """Hear of each wait that says that it is one."""
        waits = (
            (accelerator.Event, "wait_on_host"),
            (accelerator, "synchronize"),
            (tier_worker._Task, "wait"),
        )
        with ExitStack() as stack:
            for owner, name in waits:
                heard = _before(self._note, getattr(owner, name))
                stack.enter_context(patch.object(owner, name, heard))
            yield

    def _note(self) -> None:
        # Python's first thread trains, and those of autograd, which Python has not started.
        name = threading.current_thread().name
        if name == "MainThread" or name.startswith("Dummy"):
            self.asked[_place()] += 1


def _before(call: Callable[[], None], function: Callable[..., Any]) -> Callable[..., Any]:
    def called(*args: Any, **options: Any) -> Any:
        call()
        return function(*args, **options)

    return called


def _place() -> str:
    """Return the function of the runtime that waits, or "elsewhere"."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(ROOT):
            name = str(path.relative_to(ROOT))
            if name not in INNER:
                return f"{name} {frame.f_code.co_qualname}"
        frame = frame.f_back
    return "elsewhere"


class Peeking(runs.Speaker):
    """Looks at its loss."""

    def forward(self, *args: torch.Tensor, **named: torch.Tensor) -> torch.Tensor:
        loss = super().forward(*args, **named)
        loss.item()
        return loss


def train(
    keys: dict[str, Any], folder: str, dims: dict[str, int] | None, *, holds: bool
) -> dict[str, Any]:
    """Train a job on this rank; return what makes the host wait from the third step on.

    Args:
        dims: sizes of the axes; None: all ranks are data-parallel.
        holds: as of `Watch`.

    Returns:
        The attributes of a `Watch`.
    """
    gc.collect()  # a model of an earlier case waits for its own copies when it goes
    os.environ[toys.DEVICE] = "cuda"
    rank, _ = toys.world()
    Path(folder).mkdir(parents=True, exist_ok=True)
    worker = runs.PoolWorker(runs.make_spec(runs.job(**keys), folder, None, dims), rank)
    trainer = worker.prepare()
    watch = Watch(trainer.comm.device, holds=holds)
    run_steps = trainer._run_steps

    def watched() -> bool:
        if trainer.progress.steps < FREE:
            return run_steps()
        with watch.step(trainer.progress.steps + 1):
            return run_steps()

    trainer._run_steps = watched  # type: ignore[method-assign]
    trainer.stop.ignore = lambda: None  # type: ignore[method-assign]  # the process lives on
    with sdpa_kernel(SDPBackend.MATH):  # the fused attention of CPUs is not the simulated GPU's
        trainer.run()
    trainer.loader._steps.close()
    worker.close()
    assert trainer.progress.steps == keys["steps"]
    return {
        "hidden": watch.hidden,
        "asked": watch.asked,
        "num_waits": watch.num_waits,
        "held_up": watch.held_up,
    }
