"""The user's hooks: `hooks.on_start`, on_step, on_eval, on_save and on_end.

Each is called on every rank with a `HookContext`. `Hooks` keeps what it asks of the loop there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zrun_core.spine.flight_view import MEAN_NAME
from zrun_core.telemetry.recorder import Recorder, checked_name
from zrun_core.tensor_parallel.roles import any_number
from zrun_core.train.micro_batches import MicroBatchRunner
from zrun_core.train.rank_phase import RankPhase
from zrun_core.user_code.user import user_code
from zrun_core.zero.sharded_model import ShardedModel

_MOST_KINDS = 4  # of parameters, that are named
_REASON_CHARS = 300


@dataclass(frozen=True)
class HookContext:
    """Argument of a user's hook.

    Attributes:
        model: the user's module; parameters are whole only inside `gathered()`.
        step: optimizer steps done; in `on_save`, the step that was saved.
        loss: of the newest step, in `on_eval` of the evaluation; over all ranks.
        lr: learning rate of the newest step; None before this process has made one.
        grad_norm: global norm of the newest step's gradient, before clipping; None as `lr`.
        metrics: every number of the newest evaluation by name, `loss` among them; empty before.
        saved: in `on_save`, the folder of the step; else None.
        reason: in `on_end`, why the run ends, as in the `end` event, or "stopped"; else "".
        is_main: true on rank 0 only.
        run_dir: where the run writes; on other hosts a folder of the same name.
    """

    model: nn.Module
    step: int
    loss: float
    lr: float | None
    grad_norm: float | None
    metrics: Mapping[str, float]
    saved: Path | None
    reason: str
    rank: int
    world_size: int
    is_main: bool
    device: torch.device
    run_dir: Path
    _hooks: Hooks
    _name: str
    _values: dict[str, float] = field(default_factory=dict)

    @property
    def runs_model(self) -> bool:
        """True on rank 0, and on the ranks that have other parts of the same copy of the model.

        With `parallel.tp` and `parallel.pp` these call the model together, within `gathered()`;
        without them there is rank 0 only.
        """
        return self._hooks.sharded.mesh.data.index == 0

    def log(self, text: str) -> None:
        """Print a line above the progress display; only the main rank's lines are shown."""
        self._hooks.recorder.log(text)

    def gathered(self) -> AbstractContextManager[nn.Module]:
        """Make every parameter whole, to read or to write; enter it on all ranks.

        With `parallel.pp` each rank has the parameters of its own stage, and calls of the model
        are those of all stages: what is drawn inside is the same on each of them. With
        `parallel.tp` those of divided layers are slices of this rank, which a line says once.
        """
        return self._hooks.gathered(self._name)

    def mean(self, value: float | torch.Tensor) -> float:
        """Return the mean of `value` over all ranks, the same on each. Call it on all ranks."""
        return self._hooks.mean(float(value), self._name)

    def metric(self, name: str, value: float | torch.Tensor) -> None:
        """Record a number under a name, for the screen and `events.jsonl`. The main rank's counts.

        Where ranks have different ones: `context.metric(name, context.mean(value))`, on all ranks.

        Raises:
            ValueError: the name is not one.
        """
        self._values[checked_name(name)] = float(value)

    def stop(self, reason: str = "") -> None:
        """Have the run end well, on all ranks, although only one may call this.

        From `on_eval` it ends there, else after the step that comes next: it is saved and
        evaluated as at any end, the exit code is 0, and the record has `reason`.
        """
        printable = [char if char.isprintable() else " " for char in str(reason)]
        told = "".join(printable)[:_REASON_CHARS].strip()
        self._hooks.wish = f"hooks.{self._name}: {told or 'no reason given'}"


Hook = Callable[[HookContext], object]


class Hooks:
    """Calls the hooks that a job has.

    Attributes:
        wish: why a hook of this rank wants the run to end; "": none does.
    """

    def __init__(
        self,
        functions: Mapping[str, Hook],
        sharded: ShardedModel,
        recorder: Recorder,
        runner: MicroBatchRunner,
        run_dir: Path,
        phase: RankPhase,
    ) -> None:
        """
        Args:
            functions: by their keys: on_start, on_step, on_eval, on_save, on_end.
        """
        self._functions = functions
        self._runner = runner
        self._num_gathered = 0  # in this call of a hook
        self._has_told_slices = False
        self._run_dir = run_dir
        self._phase = phase
        self.sharded = sharded
        self.recorder = recorder
        self.wish = ""

    def __contains__(self, name: str) -> bool:
        return name in self._functions

    def call(self, name: str, **facts: Any) -> None:
        """Call the hook `name`, if the job has it, and emit the metrics that it records.

        Args:
            facts: fields of the context that differ from what the recorder knows.

        Raises:
            UserCodeError: it raised.
        """
        if name not in self._functions:
            return
        self._phase.enter("hook")
        recorder = self.recorder
        world = self.sharded.mesh.world
        known: dict[str, Any] = {
            "step": recorder.progress.steps,
            "loss": recorder.progress.loss,
            "saved": None,
            "reason": "",
        }
        context = HookContext(
            model=self.sharded.module,
            lr=recorder.lr,
            grad_norm=recorder.grad_norm,
            metrics=dict(recorder.metrics),
            rank=world.index,
            world_size=world.size,
            is_main=recorder.is_main,
            device=self.sharded.comm.device,
            run_dir=self._run_dir,
            _hooks=self,
            _name=name,
            **known | facts,
        )
        self._num_gathered = 0
        self.sharded.settle_updates()
        with user_code(f"hooks.{name} failed"):
            self._functions[name](context)
        recorder.hook_metrics(name, context.step, context._values)

    @contextmanager
    def gathered(self, name: str) -> Iterator[nn.Module]:
        """Make every parameter whole inside, for a hook that may call the model. Collective.

        `name` is that of the hook.
        """
        if not self._has_told_slices:
            self._has_told_slices = True
            told = slices_in_words(self.sharded, name)
            if told:
                self.recorder.log(told)
        self._num_gathered += 1
        step = self.recorder.progress.steps
        with (
            self.sharded.gathered() as module,
            self._runner.called_by_hook(step, self._num_gathered),
        ):
            yield module

    def mean(self, value: float, name: str) -> float:
        """Return the mean of `value` over all ranks. Collective; `name` is that of the hook."""
        comm = self.sharded.comm
        world = self.sharded.mesh.world
        own = torch.tensor([value], dtype=torch.float64, device=comm.device)
        total = comm.all_reduce_small(own, world, name=f"{MEAN_NAME}{name}")
        return comm.read(total)[0] / world.size


def slices_in_words(sharded: ShardedModel, hook: str) -> str:
    """Return which parameters are slices also where they are gathered; "": none is.

    A hook that computes with slices may be right, as an average is, or one that adds up a norm over
    ranks. So it is told, and not refused.
    """
    slices = [
        slot.part.tensor
        for unit in sharded.units
        for slot in unit.layout.slots
        if slot.part.local_shape != slot.part.shape
    ]
    if not slices:
        return ""
    kinds = sorted({any_number(name) for name in slices})
    shown = ", ".join(kinds[:_MOST_KINDS])
    if len(kinds) > _MOST_KINDS:
        shown += f" and {len(kinds) - _MOST_KINDS} more kinds"
    return (
        f"hooks.{hook}: inside of gathered() {len(slices)} parameters are slices of this rank "
        f"(parallel.tp): {shown}; element by element they are read and written as ever, but a "
        "norm, a sum, a mean or a shape is that of a slice"
    )
