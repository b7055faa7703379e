"""The optimizer of a loop of the user's own: it updates one sharded model."""

from __future__ import annotations

import functools
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple, NoReturn

import torch
from torch import nn

from zrun_core.checkpoint.checkpointer import SaveConsensus
from zrun_core.distributed.named_vector import NamedVector, sent_to
from zrun_core.errors import JobError, UserCodeError
from zrun_core.guards.replicas import ReplicaGuard
from zrun_core.library import arguments
from zrun_core.library.loop_profiles import LoopProfiles
from zrun_core.library.model import ModelHandle
from zrun_core.library.optimizer_choice import choose, make_groups
from zrun_core.library.skips import LoopSkips
from zrun_core.memory.buffers import Tier
from zrun_core.optim import lightweight
from zrun_core.optim.where import check_placed
from zrun_core.telemetry.step_totals import StepTotals
from zrun_core.train.step_runner import StepRunner, modules_differ
from zrun_core.user_code.build import check_trained
from zrun_core.zero.sharded_model import StepResult
from zrun_core.zero.unit.precision import LossScaler


class _IssuedStep(NamedTuple):
    """A step whose totals were not read yet.

    Attributes:
        number: of the step, from 1.
        lr: of the first parameter group.
        save: the save that the step's consensus is of.
        least_scale: as `LossScaler.least_scale`; None if the loss was not scaled.
    """

    number: int
    lr: float
    save: int
    least_scale: float | None


class Optimizer(torch.optim.Optimizer):
    """Updates one sharded model; `optimizer()` makes it.

    `param_groups` holds what can be changed between steps, as in torch (`param_groups[0]["lr"]`),
    and torch's learning rate schedulers take it. The state is sharded: `zrun_core.save` writes it.

    Attributes:
        grad_norm: 0-d, global 2-norm of the last step's gradient before clipping; not finite after
            an overflow.
        skipped: 0-d bool, whether the last step left the parameters as they were.
    """

    # Called after each step, and after gradients were dropped, by whoever compares them.
    after_step: Callable[[], None] | None = None
    after_drop: Callable[[], None] | None = None

    _zrun_owned = True
    _step_supports_amp_scaling = True  # so that torch's GradScaler calls step(), which refuses it

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        defaults: dict[str, Any],
        handle: ModelHandle,
        max_skips: int | None,
        replica_every: int | None,
    ) -> None:
        super().__init__(groups, defaults)
        self._handle = handle
        self._replica_every = replica_every
        self._replicas = ReplicaGuard(handle.sharded)
        self._num_steps = 0
        self._is_first = handle.run._claim_steps()
        self._told_at = time.monotonic()
        self._profiles: LoopProfiles | None = None  # of the run, whose steps these are
        if self._is_first and handle.run.run_dir is not None:
            self._profiles = LoopProfiles(handle.run, handle.sharded)
        self._trained = [
            param for unit in handle.sharded.units if unit.trainable for param in unit.params
        ]
        self._skips = LoopSkips(handle.sharded, max_skips, is_main=handle.run.is_main)
        self._steps = StepRunner(handle.sharded)
        self._issued: _IssuedStep | None = None
        self._consensus: tuple[int, SaveConsensus] | None = None  # the number of a save, and its
        self._has_warned = False
        # The model's own scaler, which scales losses in a job, sees no loss of a user's loop.
        precision = replace(handle.sharded.settings.precision, compute=torch.float32)
        self._unscaled = LossScaler(precision, handle.sharded.comm.device)
        self.grad_norm = torch.tensor(float("nan"))
        self.skipped = torch.tensor(False)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of backward calls that no step has used."""
        self._handle.loop.drop_gradients()
        self._handle.sharded.begin_step()
        if self.after_drop is not None:
            self.after_drop()

    def step(
        self,
        closure: Callable[[], Any] | None = None,
        *,
        weight: float | torch.Tensor | None = None,
    ) -> Any:
        """Update the model. The gradients are used up: `zero_grad()` is needed only to drop some.

        The gradient is that of the sum of all losses that were differentiated since the last step,
        on all ranks, divided by the sum of the ranks' weights. With mean losses that is the mean
        over ranks, as in DDP; after `shard(accumulate=4)`, over ranks and the backward calls since
        the last step; with losses that are sums over tokens and the number of tokens for a weight,
        over all tokens.

        If the gradient is not finite, or all weights are 0, all ranks skip the update: `skipped`
        says so. Where no loss scale can help, a warning names the parameter.

        Args:
            closure: called first, with gradients; it computes the loss and its backward, as torch
                has it.
            weight: of this rank's losses, 0 or more. None: the number of backward calls where
                `shard` was told to accumulate, else 1.

        Returns:
            What the closure returns, or None.

        Raises:
            UserCodeError: there was no backward.
            JobError: the weight is no such number, or the closure cannot be called.
            HangError: ranks gathered different modules.
            NumericError: `max_skips` steps in a row were skipped; it names the parameter, its layer
                and the rank.
            DivergedError: ranks hold different values of what must be equal. Nothing was updated.
            SaveError: a save in the background failed; on the other ranks a PeerError. The update
                was made.
        """
        loss = None
        if closure is not None:
            if not callable(closure):
                raise JobError(
                    f"step({closure!r}): the first argument is a closure; "
                    f"did you mean weight={closure!r}?"
                )
            with torch.enable_grad():
                loss = closure()
        self._step(weight, None)
        return loss

    def _step(self, weight: float | torch.Tensor | None, scaler: LossScaler | None) -> StepResult:
        handle = self._handle
        sharded = handle.sharded
        if self.__dict__.pop("grad_scale", None) is not None:
            raise UserCodeError(
                "step(): torch's GradScaler finds no gradients here: use zrun_core.GradScaler"
            )
        self._warn_unscaled(scaler)
        save, consensus = handle.run._background.contribution()
        handle.loop.end_gradients()
        sums = self._own_sums(weight, consensus)
        self._read_issued(is_late=True)
        self._num_steps += 1
        if self._replica_every is not None and self._num_steps % self._replica_every == 0:
            self._compare(scaler)
        options = [
            {key: value for key, value in group.items() if key != "params"}
            for group in self.param_groups
        ]
        sharded.optimizer.set_options(options)
        used = self._unscaled if scaler is None else scaler
        result = self._steps.issue(None, sums, lambda totals: totals["weight"], used)
        # Autograd then refuses a backward of what was computed with the old parameters.
        torch.autograd.graph.increment_version(self._trained)
        self.grad_norm = result.grad_norm
        self.skipped = result.skipped
        self._issued = _IssuedStep(
            number=self._num_steps,
            lr=float(self.param_groups[0].get("lr", 0.0)),
            save=save,
            least_scale=used.least_scale,
        )
        try:
            # While a skip may end the loop, its culprit is looked for in gradients still there.
            if not self._steps.reads_late or self._skips.is_close:
                self._read_issued(is_late=False)
        finally:
            sharded.begin_step()
            handle.loop.end_step()
        if self.after_step is not None:
            self.after_step()
        # Only now are all ranks between two steps, where a save can be moved on.
        if self._consensus is not None:
            number, consensus = self._consensus
            self._consensus = None
            handle.run._background.advance(number, consensus)
        if self._profiles is not None:
            self._profiles.between_steps(handle.run._loaded_step + self._num_steps)
        return result

    def _own_sums(
        self, weight: float | torch.Tensor | None, consensus: SaveConsensus
    ) -> NamedVector:
        """Return the numbers that this rank adds to the step's message."""
        handle = self._handle
        if weight is None:  # a mean over backward calls where there are several, else over ranks
            weight = 1.0
            if handle.loop.accumulate > 1:
                weight = handle.loop.num_backwards
        share = arguments.scalar("step", "weight", weight, is_weight=True)
        device = handle.run.device
        sums = NamedVector.of(
            device,
            weight=0.0,
            written=consensus.written,
            settled=consensus.settled,
            profile=0.0 if self._profiles is None else self._profiles.contribution,
        )
        sums.add(weight=sent_to(device, share))
        launch = handle.run._launch
        if self._is_first and launch is not None:
            asked = torch.zeros((), dtype=torch.float64, device=device)
            if launch.take_request():
                asked += 1
            sums = sums.extended(asked=asked)
        return sums

    def check_replicas(self) -> None:
        """Compare with the other ranks: parameters, masters, options. Every rank calls it.

        Raises:
            DivergedError: it is not; the message names the rank, and the parameter or the number.
        """
        self._compare(None)

    def _compare(self, scaler: LossScaler | None) -> None:
        numbers = {"step": float(self._num_steps)}
        for place, group in enumerate(self.param_groups):
            for key, value in group.items():
                if isinstance(value, int | float):
                    name = f"{key} of group {place}" if place else key
                    numbers[name] = float(value)
        if scaler is not None:
            numbers["loss scale"] = float(scaler.scale)
        self._replicas.check(self._num_steps, numbers)

    def _read_issued(self, *, is_late: bool) -> None:
        """Read the totals of the step that was issued last, if they were not read yet.

        `is_late` says that the next step's gradient is there already.
        """
        totals = self._steps.read()
        if totals is None:
            return
        issued = self._issued
        assert issued is not None
        self._record(issued, totals)
        if totals.asked:
            self._handle.run._is_save_asked = True
        if self._profiles is not None:
            self._profiles.update(totals.profile)
        # The script saves, and not the save that is under way.
        self._consensus = issued.save, totals.consensus._replace(asked=0.0)
        self._skips.see(totals, issued.least_scale, is_late=is_late)
        if not totals.agreed:
            raise modules_differ("step()", 'shard(zero={"stage": ..., "leaf": [...]})')

    def _record(self, issued: _IssuedStep, totals: StepTotals) -> None:
        """Emit the step's event. The steps of the first optimizer are those of the run."""
        run = self._handle.run
        if not self._is_first:
            return
        run._step = run._loaded_step + issued.number
        now = time.monotonic()
        seconds = now - self._told_at
        self._told_at = now
        run._record.emit(
            "step",
            step=run._step,
            loss=None,
            lr=issued.lr,
            grad_norm=totals.grad_norm,
            skipped=bool(totals.skipped),
            step_s=seconds,
        )

    def _warn_unscaled(self, scaler: LossScaler | None) -> None:
        if scaler is None and not self._has_warned and self._handle.sharded.scaler.enabled:
            self._has_warned = True
            warnings.warn(
                "fp16 without zrun_core.GradScaler: small gradients become zero", stacklevel=4
            )

    def state_dict(self) -> NoReturn:
        """Refuse: the state is sharded."""
        raise UserCodeError(
            "state_dict(): the state lies in shards, on all ranks: use zrun_core.save(...)"
        )

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> NoReturn:
        """Refuse: the state is sharded."""
        raise UserCodeError(
            "load_state_dict(): the state lies in shards, on all ranks: use zrun_core.load(...)"
        )


def optimizer(
    model: nn.Module,
    name: str | Callable[..., torch.optim.Optimizer] = "adamw",
    *,
    groups: Sequence[Mapping[str, Any]] | None = None,
    clip: float | None = None,
    moments: Literal["fp32", "bf16"] = "fp32",
    max_skips: int | None = 50,
    replica_every: int | None = 100,
    **options: Any,
) -> Optimizer:
    """Make the optimizer of a sharded model.

    Args:
        model: what `shard` returned.
        name: an elementwise class of `torch.optim` or of the user's own, or the name of one of
            torch's; lamb, lars and lion are there too.
        groups: parameter groups with options of their own, as torch takes them; together they hold
            every parameter that requires a gradient. None is one group of all.
        clip: largest global 2-norm of the gradient; None never clips.
        moments: bf16 halves the moments of adam, adamw, lamb and lion; results change.
        max_skips: skipped steps in a row after which `step` raises an error; None never does.
        replica_every: steps between comparisons of what several ranks hold; also before each save.
            None never does.
        options: keyword arguments of the class, `lr` among them; what is not given has the class's
            own default.

    Raises:
        UserCodeError: the model is not sharded, frozen or has an optimizer already, or the groups
            are not of its parameters.
        JobError: no such optimizer, arguments that it does not take, or one that cannot work on
            shards.
    """
    handle = ModelHandle.of(model, "optimizer()")
    if handle.optimizer is not None:
        raise UserCodeError("optimizer(): this model has one already")
    check_trained(model)
    if clip is not None:
        clip = arguments.number("optimizer", "clip", clip, "a number above 0, or None", above=0)
    if max_skips is not None:
        max_skips = arguments.whole(
            "optimizer", "max_skips", max_skips, 1, "1 or more steps, or None"
        )
    if replica_every is not None:
        replica_every = arguments.whole(
            "optimizer", "replica_every", replica_every, 1, "1 or more steps, or None"
        )
    made = make_groups(model, groups)
    placement = handle.sharded.settings.placement
    device = handle.run.device
    if placement.optimizer is not Tier.DEVICE and placement.fraction == 1:
        device = torch.device("cpu")
    chosen = choose(name, options, made, moments, device)
    check_placed(chosen, getattr(name, "__name__", str(name)), placement)
    number_of = {
        id(param): number for number, group in enumerate(made) for param in group["params"]
    }
    by_name = {
        name: number_of[id(param)]
        for name, param in model.named_parameters()
        if param.requires_grad
    }
    settings = [{key: value for key, value in group.items() if key != "params"} for group in made]
    defaults = chosen.make([nn.Parameter(torch.zeros(1))]).defaults
    build = functools.partial(
        Optimizer,
        defaults=defaults,
        handle=handle,
        max_skips=max_skips,
        replica_every=replica_every,
    )
    result = lightweight.build(build, made, {})  # type: ignore[arg-type]
    assert isinstance(result, Optimizer)
    handle.sharded.set_optimizer(chosen, settings, lambda slot: by_name[slot.name])
    handle.sharded.settings = replace(handle.sharded.settings, clip=clip)
    handle.optimizer = result
    return result
