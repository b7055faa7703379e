"""Runs that are recorded on the ranks of a pool, and compared with a plain loop; faults in them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from runs import PoolWorker, make_spec, run
from torch import nn
from toys import world

from zrun_core.data.batch import MicroBatch
from zrun_core.errors import UserCodeError
from zrun_core.train.trainer import Trainer
from zrun_core.user_code.loss import Loss
from zrun_core.verification.comparison import compare
from zrun_core.verification.no_dropout import without_dropout
from zrun_core.verification.verdict import Verdict
from zrun_core.verification.witness import Witness


def recorded(
    keys: dict[str, Any],
    run_dir: str,
    dims: dict[str, Any] | None = None,
    resume: dict[str, Any] | None = None,
    fault: str | None = None,
    catches: bool = False,
) -> dict[str, Any]:
    """As `run`, and what each rank does is recorded.

    Args:
        fault: name of a mistake that is put into the run.
        catches: also errors of the user's code are returned.
    """
    rank, _ = world()
    prepare = PoolWorker.prepare

    def watched(self: PoolWorker) -> Trainer:
        trainer = prepare(self)
        assert self.streams is not None
        if fault is not None:
            FAULTS[fault](trainer, rank)
        Witness(trainer, self.streams, Path(run_dir), rank)
        return trainer

    Path(run_dir).mkdir(exist_ok=True)
    if rank == 0:
        make_spec(keys, run_dir, resume, dims).write(Path(run_dir) / "spec.json")
    drops: AbstractContextManager[None] = nullcontext()
    if (dims or {}).get("tp", 1) > 1:
        drops = without_dropout()
    with patch.object(PoolWorker, "prepare", watched), drops:
        try:
            return run(keys, run_dir, resume, dims=dims)
        except UserCodeError as error:
            if not catches:
                raise
            return {"error": f"UserCodeError: {error}", "code": int(error.exit_code)}


def verdict_of(*run_dirs: Path) -> Verdict:
    return compare(run_dirs)


# Mistakes. Each changes objects of one run only: the processes live on.


def times(trainer: Trainer, factor: Callable[[int], float]) -> None:
    """Multiply what is differentiated of each micro-batch, by its number in this rank's run."""
    share_of = trainer.micro_batches._share_of
    count = 0

    def changed(loss: Loss, batch: MicroBatch) -> torch.Tensor:
        nonlocal count
        count += 1
        return share_of(loss, batch) * factor(count - 1)

    trainer.micro_batches._share_of = changed  # type: ignore[method-assign]


def hooked(trainer: Trainer, suffix: str, factor: float) -> None:
    """Multiply the gradients of parameters whose names end so."""
    for name, param in trainer.module.named_parameters():
        if name.endswith(suffix) and param.requires_grad:
            param.register_hook(lambda grad: grad * factor)


def counted_twice(trainer: Trainer) -> None:
    norm = trainer.sharded.grad.square_norm
    trainer.sharded.grad.square_norm = lambda: norm() * 2  # type: ignore[method-assign]


def no_clipping(trainer: Trainer) -> None:
    object.__setattr__(trainer.sharded.settings, "clip", None)


def untied(trainer: Trainer) -> None:
    head = trainer.module.get_submodule("head")
    assert isinstance(head, nn.Linear)
    head.forward = lambda x: nn.functional.linear(x, head.weight.detach())  # type: ignore[method-assign]


def stale(trainer: Trainer) -> None:
    unit = trainer.sharded.units[1]
    unit.mark_stale = lambda: None  # type: ignore[method-assign]


def decays_all(trainer: Trainer) -> None:
    decay = trainer.job.optim.weight_decay
    trainer.sharded.optimizer.set_options([{"weight_decay": decay}, {"weight_decay": decay}])


def shifted_rate(trainer: Trainer) -> None:
    schedule = trainer.schedule
    trainer.schedule = lambda step: schedule(step + 1)


def not_updated(trainer: Trainer) -> None:
    trainer.sharded.optimizer._updates[1].update = lambda *_, **__: None  # type: ignore[method-assign]


def norms_of_slices(trainer: Trainer) -> None:
    comm = trainer.sharded.optimizer._comm
    reduce = comm.all_reduce_small

    def alone(values: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        return values if options.get("name") == "trust ratios" else reduce(values, *args, **options)

    comm.all_reduce_small = alone  # type: ignore[method-assign]


def same_samples(trainer: Trainer) -> None:
    trainer.loader._source._rank = 0  # type: ignore[attr-defined]
    trainer.loader.seek(0)


def counted_statistics(trainer: Trainer) -> None:
    norm = trainer.module.get_submodule("norm")
    norm.register_forward_hook(
        lambda module, args, out: (type(module).forward(module, *args), None)[1]
    )


def doubled_scale(trainer: Trainer) -> None:
    scaled = trainer.sharded.scaler.scaled
    trainer.sharded.scaler.scaled = lambda loss: scaled(loss) * 2  # type: ignore[method-assign]


def other_values(trainer: Trainer) -> None:
    with trainer.sharded.gathered(), torch.no_grad():
        next(iter(trainer.module.parameters()))[0].add_(1e-3)


def no_moments(trainer: Trainer) -> None:
    for update in trainer.sharded.optimizer._updates:
        for piece in update.pieces:
            for name, moment in update.stored_state_of(piece).items():
                if name != "step":
                    moment.zero_()


def no_statistics(trainer: Trainer) -> None:
    buffer = trainer.module.get_buffer("norm.running_mean")
    buffer.zero_()


def not_a_number(trainer: Trainer) -> None:
    norm = trainer.module.get_submodule("norm")

    def spoil(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        module.get_buffer("running_var").data.fill_(float("nan"))

    norm.register_forward_hook(spoil)


def other_draws(trainer: Trainer) -> None:
    trainer.micro_batches._draws.key += 1


def swapped_features(trainer: Trainer) -> None:
    param = dict(trainer.module.named_parameters())["head.weight"]
    param.register_hook(lambda grad: grad.flip(0))


FAULTS: dict[str, Callable[[Trainer, int], None]] = {
    "summed in place of a mean": lambda t, rank: times(t, lambda micro: 2.0),
    "one rank counts twice": lambda t, rank: times(t, lambda micro: 1.0 + (rank == 1)),
    "a micro-batch is dropped": lambda t, rank: times(t, lambda m: float(rank or m % 4 != 1)),
    "the last micro-batch alone": lambda t, rank: times(t, lambda micro: float(micro % 4 == 3)),
    "norm counted twice": lambda t, rank: counted_twice(t),
    "never clipped": lambda t, rank: no_clipping(t),
    "a gradient is lost": lambda t, rank: hooked(t, "head.weight", 0.0),
    "half more of one gradient": lambda t, rank: hooked(t, "blocks.3.down.weight", 1.5),
    "a tied head trains untied": lambda t, rank: untied(t),
    "stale parameters": lambda t, rank: stale(t),
    "all parameters decay": lambda t, rank: decays_all(t),
    "the rate of the next step": lambda t, rank: shifted_rate(t),
    "a shard is not updated": lambda t, rank: not_updated(t) if rank else None,
    "norms of shards": lambda t, rank: norms_of_slices(t),
    "two ranks read the same": lambda t, rank: same_samples(t) if rank else None,
    "statistics counted twice": lambda t, rank: counted_statistics(t),
    "half the gradient at a border": lambda t, rank: hooked(t, "", 0.5) if rank == 0 else None,
    "copies of slices drift": lambda t, rank: (
        hooked(t, "attention_norm.weight", 0.5) if rank else None
    ),
    "scaled twice": lambda t, rank: doubled_scale(t),
    "other initial values": lambda t, rank: other_values(t),
    "statistics are lost": lambda t, rank: no_statistics(t),
    "a buffer is not a number": lambda t, rank: not_a_number(t),
    "moments are lost": lambda t, rank: no_moments(t),
    "other draws": lambda t, rank: other_draws(t),
    "features in another order": lambda t, rank: swapped_features(t),
}
