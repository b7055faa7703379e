"""Whole runs of a job on the ranks of a pool: what `zrun train` does, without its processes."""

from __future__ import annotations

import gc
import hashlib
import itertools
import json
import multiprocessing
import os
import random
import signal
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import nn
from toys import Block, own_device, world

from zrun_core.checkpoint.folder_lock import release
from zrun_core.checkpoint.model_state import CheckpointState, ModelState
from zrun_core.data.batch import MicroBatch
from zrun_core.distributed.comm import Comm
from zrun_core.distributed.mesh import Mesh
from zrun_core.errors import UserCodeError, ZrunError
from zrun_core.spine.config import JobConfig
from zrun_core.spine.parallel_dims import ParallelDims
from zrun_core.spine.spec import LaunchPlan, RankPlace, ResumeSpec, RunSpec, resolve_batch
from zrun_core.spine.stop_signals import StopSignals
from zrun_core.tiers.stored import BlockReader, Stored
from zrun_core.train import failure_note
from zrun_core.train.rank_builder import RankBuilder
from zrun_core.train.trainer import Trainer
from zrun_core.train.user_hooks import HookContext

JOB_DIR = Path(__file__).parent  # files that jobs name are found from there
VOCAB = 13
Event = dict[str, Any]


class Speaker(nn.Module):
    """Tokens [batch, time] -> logits, with dropout, a tied weight, a frozen one, and running
    statistics.
    """

    def __init__(
        self, dropout: float = 0.1, dim: int = 16, depth: int = 2, norm: bool = True
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(depth))
        self.drop = nn.Dropout(dropout)
        self.scale = nn.Parameter(torch.full((dim,), 0.5), requires_grad=False)
        self.norm = nn.BatchNorm1d(dim) if norm else nn.Identity()
        self.head = nn.Linear(dim, VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor, index: torch.Tensor
    ) -> torch.Tensor:
        x = self.drop(self.embed(input_ids))
        for block in self.blocks:
            x = self.drop(block(x)) * self.scale
        x = self.norm(x.transpose(1, 2)).transpose(1, 2)
        return nn.functional.cross_entropy(self.head(x).float().flatten(0, 1), labels.flatten())


class Faulty(Speaker):
    """Its loss is not a number on the last rank from one of its passes on."""

    def __init__(self, fault: int) -> None:
        super().__init__()
        self.left = fault if world()[0] == world()[1] - 1 else 1 << 30

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor, index: torch.Tensor
    ) -> torch.Tensor:
        self.left -= 1
        return super().forward(input_ids, labels, index) * (float("nan") if self.left < 0 else 1.0)


class Spoiled(Speaker):
    """On the last rank the gradient of a parameter is nan, another one in each of the given passes,
    from 1.
    """

    PLACES = "blocks.0.up.weight", "blocks.1.up.weight", "blocks.1.down.weight"

    def __init__(self, passes: list[int]) -> None:
        super().__init__()
        self.passes, self.count = passes, 0
        self.factor = float("nan") if world()[0] == world()[1] - 1 else 1.0

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor, index: torch.Tensor
    ) -> torch.Tensor:
        self.count += 1
        if self.count in self.passes:
            param = self.get_parameter(
                self.PLACES[self.passes.index(self.count)]
            )  # by all ranks: it may be gathered
            hook = param.register_hook(lambda grad: (hook.remove(), grad * self.factor)[1])
        return super().forward(input_ids, labels, index)


def run_reading_late(keys: dict[str, Any], run_dir: str) -> dict[str, Any]:
    """As `run`, but what a step came to is read within the next one, as on a GPU."""
    init = Trainer.__init__

    def late(self: Trainer, *args: Any) -> None:
        init(self, *args)
        self.steps.reads_late = True

    Trainer.__init__ = late  # type: ignore[method-assign]
    try:
        return run(keys, run_dir)
    finally:
        Trainer.__init__ = init  # type: ignore[method-assign]


def sudden(step: int) -> float:
    """The learning rate as a share of the job's."""
    return 1e-9 if step < 3 else 1.0


class Tokens(torch.utils.data.Dataset[Any]):
    """`length` samples, each with its index."""

    def __init__(self, length: int = 40, seq_len: int = 6, seed: int = 4) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(VOCAB, (length, seq_len + 1), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = self.tokens[index]
        return {"input_ids": row[:-1], "labels": row[1:], "index": torch.tensor(index)}


class Plain(Tokens):
    """Without the index."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        sample = super().__getitem__(index)
        del sample["index"]
        return sample


class Augmented(Tokens):
    """Samples of which a random token is replaced, by all three of the usual streams."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        sample = super().__getitem__(index)
        drawn = [
            random.randrange(VOCAB),
            int(np.random.randint(VOCAB)),
            int(torch.randint(VOCAB, ())),
        ]
        return {**sample, "input_ids": torch.cat([sample["input_ids"][3:], torch.tensor(drawn)])}


class Interrupted(Exception):  # noqa: N818 - no error
    """Stands for the end of a process."""


def on_step(context: HookContext) -> None:
    if str(context.step) == os.environ.get("STOP_AFTER"):
        raise Interrupted


def starve(context: HookContext) -> None:
    """From the third step on there is no memory."""

    def fail(*_: Any) -> None:
        raise MemoryError

    if context.step == 2:
        context.model.register_forward_pre_hook(fail)


def job(**keys: Any) -> dict[str, Any]:
    """A small job as a mapping."""
    return {
        "name": "resume",
        "model": "runs.py:Speaker",
        "data": {"call": "runs.py:Tokens", "shuffle": True},
        "steps": 8,
        "batch": {"global": 8, "micro": 1},
        "optim": {"lr": 1e-2, "weight_decay": 0.1, "no_decay": ["norm"], "clip": 1.0},
        "lr": {"schedule": "cosine", "warmup": 2},
        "hooks": {"on_step": "runs.py:on_step"},
        "checkpoint": {"every": 3},
        "seed": 3,
        **keys,
    }


class Listener:
    """Keeps what a rank would tell."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def emit(self, kind: str, **fields: Any) -> None:
        self.events.append({"type": kind, **fields})


class PoolWorker(RankBuilder):
    """A rank in a process that has met the others already.

    It has no board to write its phase on.
    """

    def __init__(self, spec: RunSpec, rank: int) -> None:
        self.told = Listener()
        self.trainer: Trainer | None = None
        super().__init__(spec, rank, self.told, StopSignals(), None, _give_up)
        multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # may have loaders

    def _join(self) -> None:
        pass

    def _connect(self) -> tuple[Comm, Mesh]:
        with patch("zrun_core.train.rank_builder.Watchdog"):  # it would outlive the run
            return super()._connect()

    def close(self) -> None:
        """Give up what a process gives up when it ends."""
        if self.lock is not None:
            release(self.lock)

    def prepare(self) -> Trainer:
        self.trainer = self.build()
        return self.trainer

    def report(self, error: BaseException) -> None:
        failure_note.report(
            error, Path(self.spec.run_dir), self.rank, self.phase.name, self.trainer
        )


def _give_up(error: ZrunError) -> None:
    raise AssertionError(error)


def device_of(rank: int) -> str:
    """The device of a rank, as a plan names it."""
    if own_device().type == "cpu":
        return "cpu"
    return f"cuda:{rank % torch.cuda.device_count()}"


def make_spec(
    keys: dict[str, Any],
    run_dir: str,
    resume: dict[str, Any] | None,
    dims: dict[str, Any] | None = None,
) -> RunSpec:
    _, size = world()
    config = JobConfig.model_validate(keys)
    axes = ParallelDims(**(dims or {"dp": size}))
    places = [
        RankPlace(
            rank=rank,
            host="host",
            local_rank=rank,
            device=device_of(rank),
            **axes.coordinates(rank)._asdict(),
        )
        for rank in range(size)
    ]
    return RunSpec(
        job=config,
        plan=LaunchPlan(ranks=places),
        batch=resolve_batch(config, axes.dp),
        job_dir=str(JOB_DIR),
        run_dir=run_dir,
        run_id="test",
        resume=None if resume is None else ResumeSpec.model_validate(resume),
    )


def run(
    keys: dict[str, Any],
    run_dir: str,
    resume: dict[str, Any] | None = None,
    stop_after: int | None = None,
    signal_in_batch: int | None = None,
    dims: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Train a job, or a part of it.

    Args:
        resume: fields of a `ResumeSpec`; its folder is that of the run directory unless it says
            otherwise.
        stop_after: end as if the process had died right after this step.
        signal_in_batch: of evaluation, in which a signal reaches the last rank.
        dims: fields of the `ParallelDims` of the ranks; None: all are data-parallel.

    Returns:
        `contents` of the end; where it goes on from a checkpoint, also those of the beginning, as
        "begun".
    """
    if resume is not None:
        resume = {"folder": f"{run_dir}/checkpoints", **resume}
    rank, _ = world()
    Path(run_dir).mkdir(exist_ok=True)
    worker = PoolWorker(make_spec(keys, run_dir, resume, dims), rank)
    trainer = None
    error, code, phase = "", 0, ""
    seen: dict[int, list[int]] = {}  # by step, the indices of the samples that counted
    begun = None
    try:
        trainer = worker.prepare()
        begun = None if resume is None else contents(trainer)
        step = trainer.step

        def watched(micro_batches: list[MicroBatch]) -> None:
            indices = [
                m.batch["index"].tolist()
                for m in micro_batches
                if m.num_samples and isinstance(m.batch, dict) and "index" in m.batch
            ]
            seen[trainer.progress.steps + 1] = [index for each in indices for index in each]
            step(micro_batches)

        trainer.step = watched
        trainer.stop.ignore = lambda: None  # type: ignore[method-assign]  # the process lives on
        if signal_in_batch is not None:
            _signal_in(trainer, signal_in_batch)
        os.environ["STOP_AFTER"] = str(stop_after)  # the job's reference loads this module anew
        trainer.run()
    except UserCodeError as caught:
        if "Interrupted" not in str(caught):
            raise
    except ZrunError as caught:
        error, code = f"{type(caught).__name__}: {caught}", int(caught.exit_code)
        phase = worker.phase.name
    if trainer is not None:
        # the loader's processes go now, not in the middle of a later test
        trainer.loader._steps.close()
        if trainer.checkpointer is not None:
            trainer.checkpointer.close()
    worker.close()
    found: dict[str, Any] = {
        "events": worker.told.events,
        "error": error,
        "code": code,
        "phase": phase,  # of the error
        "seen": seen,
        "begun": begun,
    }
    if trainer is not None:
        found |= contents(trainer)
    return found


def report(keys: dict[str, Any], run_dir: str, fault: str) -> dict[str, Any]:
    """What a rank writes of its own end.

    Args:
        fault: where there is no memory, or "hook", where a hook raises as if somebody had pressed
            ctrl-C.
    """
    rank, _ = world()
    Path(run_dir).mkdir(exist_ok=True)
    gc.collect()  # models of earlier tests of this process hold memory too
    worker = PoolWorker(make_spec(keys, run_dir, None), rank)

    def fail(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt if fault == "hook" else MemoryError

    try:
        trainer = worker.prepare()
        match fault:
            case "forward":
                trainer.module.register_forward_pre_hook(fail)
            case "update":
                trainer.sharded.optimizer.step = fail  # type: ignore[method-assign]
            case "evaluation":
                trainer.sharded.evaluation = fail  # type: ignore[method-assign]
            case "hook":
                trainer.hooks._functions = {"on_step": fail}
        trainer.run()
    except BaseException as error:
        worker.report(error)
    worker.close()
    note: dict[str, Any] = json.loads(
        (Path(run_dir) / "failures" / f"rank-{rank}.json").read_text()
    )
    return note


def _signal_in(trainer: Trainer, number: int) -> None:
    """A signal reaches the last rank in the evaluation batch `number`, counted from 1."""
    inner, numbers = trainer.sharded.evaluation, itertools.count(1)

    def evaluation() -> AbstractContextManager[None]:
        if next(numbers) == number and trainer.world.index == trainer.world.size - 1:
            trainer.stop.first = signal.SIGTERM
        return inner()

    trainer.sharded.evaluation = evaluation  # type: ignore[method-assign]


def look(
    keys: dict[str, Any],
    run_dir: str,
    resume: dict[str, Any] | None,
    dims: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """What a run begins with."""
    Path(run_dir).mkdir(exist_ok=True)
    rank, _ = world()
    if resume is not None:
        resume = {"folder": f"{run_dir}/checkpoints", **resume}
    worker = PoolWorker(make_spec(keys, run_dir, resume, dims), rank)
    try:
        trainer = worker.prepare()
    except ZrunError as caught:
        return {"error": f"{type(caught).__name__}: {caught}"}
    finally:
        worker.close()
    return {"error": "", **contents(trainer)}


def in_memory(data: torch.Tensor | Stored) -> torch.Tensor:
    """Return what a rank writes, read from where it lives."""
    if isinstance(data, torch.Tensor):
        return data
    with BlockReader() as reader:
        read = [part.clone() for part in data.read(reader)]
    return torch.cat(read).view(data.dtype)


def contents(trainer: Trainer) -> dict[str, Any]:
    """What this rank would save, and a digest of it."""
    state: CheckpointState = ModelState(trainer.sharded)
    if trainer.checkpointer is not None:  # it knows which buffers another stage saves
        state = trainer.checkpointer.state
    parts = {
        (p.tensor, p.state, p.start): in_memory(p.data).float().cpu().numpy().copy()
        for p in state.write_items()
    }
    digest = hashlib.sha256()
    for part in state.write_items():
        digest.update(
            f"{part.key} {part.stop}".encode()
            + in_memory(part.data).contiguous().view(torch.uint8).cpu().numpy().tobytes()
        )
    digest.update(repr(sorted(state.scalars().items())).encode())
    slots = [slot for layout in trainer.sharded.layouts for slot in layout.slots]
    return {
        "parts": parts,
        "orders": {slot.part.tensor: (slot.part.shape, slot.part.stride) for slot in slots},
        "scalars": state.scalars(),
        "digest": digest.hexdigest(),
        "step": trainer.progress.steps,
    }


def losses(result: dict[str, Any]) -> dict[int, float]:
    return {event["step"]: event["loss"] for event in result["events"] if event["type"] == "step"}
