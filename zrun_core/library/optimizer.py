"""The optimizer and the loss scaler of a user's own loop."""

from __future__ import annotations

import difflib
import functools
import inspect
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple, NoReturn

import torch
from torch import nn

from zrun_core.checkpoint.checkpointer import SaveConsensus
from zrun_core.distributed.named_vector import HostCopy, NamedVector
from zrun_core.errors import HangError, JobError, UserCodeError
from zrun_core.guards.replicas import ReplicaGuard
from zrun_core.library import arguments
from zrun_core.library.model import ModelHandle
from zrun_core.library.run import current
from zrun_core.library.skips import Skips
from zrun_core.optim import lightweight
from zrun_core.optim.resolve import (
    MOMENTS,
    OptimizerSpec,
    arguments_of,
    find_class,
    spec_of,
    with_bf16_moments,
)
from zrun_core.spine.config import LossScaleConfig
from zrun_core.zero.precision import LossScaler, Precision
from zrun_core.zero.sharded_model import StepResult


class _Unread(NamedTuple):
    """What a step came to, on its way to the host."""

    numbers: HostCopy
    save: int
    scaler: LossScaler | None
    step: int
    lr: float


class Optimizer(torch.optim.Optimizer):
    """Updates one sharded model; `optimizer()` makes it.

    `param_groups` holds what can be changed between steps, as in torch (`param_groups[0]["lr"]`), and torch's learning
    rate schedulers take it. The state lies in shards: `zrun_core.save` writes it.

    Attributes:
        grad_norm: 0-d, global 2-norm of the last step's gradient before clipping; not finite after an overflow.
        skipped: 0-d bool, whether the last step left the parameters as they were.
    """

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
        self._handle, self._replica_every = handle, replica_every
        self._replicas = ReplicaGuard(handle.sharded)
        self._num_steps = 0
        self._is_first = handle.run._claim_steps()
        self._told_at = time.monotonic()
        self._trained = [
            param for unit in handle.sharded.units if unit.trainable for param in unit.params
        ]
        self._skips = Skips(handle.sharded, max_skips, is_main=handle.run.is_main)
        self._unread: _Unread | None = None
        self._heard: tuple[int, SaveConsensus] | None = None  # of a save under way
        self._has_warned = False
        self.grad_norm = torch.tensor(float("nan"))
        self.skipped = torch.tensor(False)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of backward calls that no step has used."""
        self._handle.loop.drop_gradients()
        self._handle.sharded.begin_step()

    def step(
        self,
        closure: Callable[[], Any] | None = None,
        *,
        weight: float | torch.Tensor | None = None,
    ) -> Any:
        """Update the model. The gradients are used up: `zero_grad()` is needed only to drop some.

        The gradient is that of the sum of all losses that were differentiated since the last step, on all ranks,
        divided by the sum of the ranks' weights. With mean losses that is the mean over ranks, as in DDP; after
        `shard(accumulate=4)`, over ranks and the backward calls since the last step; with losses that are sums over
        tokens and the number of tokens for a weight, over all tokens.

        If the gradient is not finite, or all weights are 0, all ranks skip the update: `skipped` says so. Where no loss
        scale can help, a warning names the parameter.

        Args:
            closure: called first, with gradients; it computes the loss and its backward, as torch has it.
            weight: of this rank's losses, 0 or more. None: the number of backward calls where `shard` was told to
                accumulate, else 1.

        Returns:
            What the closure returns, or None.

        Raises:
            UserCodeError: there was no backward.
            JobError: the weight is no such number, or the closure cannot be called.
            HangError: ranks gathered different modules.
            NumericError: `max_skips` steps in a row were skipped; it names the parameter, its layer and the rank.
            DivergedError: ranks hold different values of what must be equal. Nothing was updated.
            SaveError: a save that went on behind has failed; on the other ranks a PeerError. The update was made.
        """
        loss = None
        if closure is not None:
            if not callable(closure):
                raise JobError(
                    f"step({closure!r}): the first argument is a closure; did you mean weight={closure!r}?"
                )
            with torch.enable_grad():
                loss = closure()
        self._step(weight, None)
        return loss

    def _step(self, weight: float | torch.Tensor | None, scaler: LossScaler | None) -> StepResult:
        handle = self._handle
        sharded, device = handle.sharded, handle.run.device
        if self.__dict__.pop("grad_scale", None) is not None:
            raise UserCodeError(
                "step(): torch's GradScaler finds no gradients here: use zrun_core.GradScaler"
            )
        self._warn_unscaled(scaler)
        save, consensus = handle.run._background.contribution()
        handle.loop.end_gradients()
        if weight is None:
            weight = handle.loop.num_backwards if handle.loop.accumulate > 1 else 1.0
        share = arguments.scalar("step", "weight", weight, is_weight=True)
        sums = NamedVector.of(
            device, weight=0.0, written=consensus.written, settled=consensus.settled
        )
        sums.add(weight=share.to(device))
        self._read_last()
        self._num_steps += 1
        if self._replica_every is not None and self._num_steps % self._replica_every == 0:
            self._compare(scaler)
        options = [
            {key: value for key, value in group.items() if key != "params"}
            for group in self.param_groups
        ]
        sharded.optimizer.set_options(options)
        result = sharded.step(None, sums, lambda totals: totals["weight"], scaler)
        torch.autograd.graph.increment_version(
            self._trained
        )  # a backward of what was called before is refused
        self.grad_norm, self.skipped = result.grad_norm, result.skipped
        try:
            self._look_at(result, save, scaler)
        finally:
            sharded.begin_step()
            handle.loop.end_step()
        heard, self._heard = self._heard, None
        if heard is not None:
            handle.run._background.advance(*heard)
        return result

    def check_replicas(self) -> None:
        """Compare with the other ranks what must be equal: parameters, masters, options. Every rank calls it.

        Raises:
            DivergedError: it is not; the message names the rank, and the parameter or the number.
        """
        self._compare(None)

    def _compare(self, scaler: LossScaler | None) -> None:
        numbers = {"step": float(self._num_steps)}
        for place, group in enumerate(self.param_groups):
            for key, value in group.items():
                if isinstance(value, int | float):
                    numbers[f"{key} of group {place}" if place else key] = float(value)
        if scaler is not None:
            numbers["loss scale"] = float(scaler.scale)
        self._replicas.check(self._num_steps, numbers)

    def _look_at(self, result: StepResult, save: int, scaler: LossScaler | None) -> None:
        """Read what the step came to at once; on a GPU with the next step, so it never idles.

        Args:
            save: which save the consensus in the result is for.
        """
        lr = float(self.param_groups[0].get("lr", 0.0))
        told = {"agreed": result.agreed, "skipped": result.skipped, "grad_norm": result.grad_norm}
        numbers = HostCopy.of(result.sums.extended(**told))
        self._unread = _Unread(numbers, save, scaler, self._num_steps, lr)
        if numbers.arrived is None:
            self._read_last()

    def _read_last(self) -> None:
        unread, self._unread = self._unread, None
        if unread is None:
            return
        numbers = unread.numbers.read()
        skipped = bool(numbers["skipped"])
        self._record(unread, numbers["grad_norm"], skipped=skipped)
        self._heard = unread.save, SaveConsensus(numbers["written"], numbers["settled"])
        can_scale_help = skipped and unread.scaler is not None and unread.scaler.can_shrink()
        self._skips.see(skipped=skipped, weight=numbers["weight"], helpless=not can_scale_help)
        if not numbers["agreed"]:
            raise HangError(
                "step(): ranks gathered different modules; name the module that chooses between them in "
                'shard(zero={"stage": ..., "leaf": [...]}), so that it is handled as a whole'
            )

    def _record(self, unread: _Unread, norm: float, *, skipped: bool) -> None:
        """Tell of a step, if this is the first optimizer of the run, whose steps are the run's."""
        run = self._handle.run
        if not self._is_first:
            return
        run._step = run._loaded_step + unread.step
        now = time.monotonic()
        seconds, self._told_at = now - self._told_at, now
        run._record.emit(
            "step",
            step=run._step,
            loss=None,
            lr=unread.lr,
            grad_norm=norm,
            skipped=skipped,
            step_s=seconds,
        )

    def _warn_unscaled(self, scaler: LossScaler | None) -> None:
        if scaler is None and not self._has_warned and self._handle.sharded.scaler.enabled:
            self._has_warned = True
            warnings.warn(
                "fp16 without zrun_core.GradScaler: small gradients become zero", stacklevel=4
            )

    def state_dict(self) -> NoReturn:
        """Refused: the state lies in shards."""
        raise UserCodeError(
            "state_dict(): the state lies in shards, on all ranks: use zrun_core.save(...)"
        )

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> NoReturn:
        """Refused: the state lies in shards."""
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
    """The optimizer of a sharded model.

    Args:
        model: what `shard` returned.
        name: an elementwise class of `torch.optim` or of the user's own, or the name of one of torch's; lamb, lars and
            lion are there too.
        groups: parameter groups with options of their own, as torch takes them; together they hold every parameter
            that requires a gradient. None is one group of all.
        clip: largest global 2-norm of the gradient; None never clips.
        moments: bf16 halves the moments of adam, adamw, lamb and lion; results change.
        max_skips: skipped steps in a row after which `step` raises an error; None never does.
        replica_every: steps between comparisons of what several ranks hold; also before each save. None never does.
        options: keyword arguments of the class, `lr` among them; what is not given has the class's own default.

    Raises:
        UserCodeError: the model is not sharded or has an optimizer already, or the groups are not of its parameters.
        JobError: no such optimizer, arguments that it does not take, or one that cannot work on shards.
    """
    handle = ModelHandle.of(model, "optimizer()")
    if handle.optimizer is not None:
        raise UserCodeError("optimizer(): this model has one already")
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
    made = _make_groups(model, groups)
    chosen = _choose(name, options, made, moments, handle.run.device)
    number_of = {
        id(param): number for number, group in enumerate(made) for param in group["params"]
    }
    by_name = {
        name: number_of[id(param)]
        for name, param in model.named_parameters()
        if param.requires_grad
    }
    settings = [{key: value for key, value in group.items() if key != "params"} for group in made]
    defaults = chosen.make([nn.Parameter(torch.zeros(1))], None).defaults
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


def _choose(
    name: str | Callable[..., torch.optim.Optimizer],
    options: dict[str, Any],
    groups: Sequence[Mapping[str, Any]],
    moments: str,
    device: torch.device,
) -> OptimizerSpec:
    """What `name` and `options` ask for; the options of each group are looked at too.

    Raises:
        JobError: no such optimizer, arguments that it does not take, or one that cannot work on shards.
    """
    if moments not in MOMENTS:
        raise JobError(f"optimizer(moments={moments!r}): write fp32 or bf16")
    try:
        build = find_class(name, _no_reference) if isinstance(name, str) else name
        title = name if isinstance(name, str) else getattr(name, "__name__", str(name))
        if not callable(build):
            raise JobError(f"{title} is no optimizer: pass a name, or a class")
        if moments == "bf16":
            build = with_bf16_moments(title, build)
        accepted = arguments_of(build)
        takes_all = any(param.kind is inspect.Parameter.VAR_KEYWORD for param in accepted.values())
        for key in options if not takes_all else ():
            if key not in accepted:
                near = difflib.get_close_matches(key, [*accepted, "moments"], 1)
                hint = f"did you mean {near[0]}?" if near else f"it takes {', '.join(accepted)}"
                raise JobError(f"{title} has no argument {key!r}; {hint}")
        chosen = spec_of(title, build, options, device, MOMENTS[moments])
        for own in _own_options(chosen, groups, accepted):
            in_group = spec_of(title, build, options | own, device, MOMENTS[moments])
            if "fused" in chosen.kwargs and "fused" not in in_group.kwargs:
                chosen = spec_of(title, build, {**options, "fused": False}, device)
        return chosen
    except JobError as error:
        text = str(error).removeprefix("optim.name: ").removeprefix("optim: ")
        text = text.replace("optim.moments: bf16", 'moments="bf16"')
        raise JobError(f"optimizer(): {text}") from None


def _own_options(
    chosen: OptimizerSpec, groups: Sequence[Mapping[str, Any]], accepted: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """What each group sets of the optimizer's arguments, where it sets any.

    Raises:
        JobError: it sets one that holds for all groups.
    """
    defaults = chosen.make([nn.Parameter(torch.zeros(1))], None).defaults
    for number, group in enumerate(groups):
        own = {key: value for key, value in group.items() if key in accepted}
        if shared := own.keys() - defaults.keys():
            key = sorted(shared)[0]
            raise JobError(
                f"groups[{number}] has {key!r}, which holds for all groups: write optimizer(..., {key}=...)"
            )
        if own:
            yield own


def _no_reference(reference: str) -> NoReturn:
    raise JobError(f"{reference}: pass the class itself")


def _make_groups(
    model: nn.Module, groups: Sequence[Mapping[str, Any]] | None
) -> list[dict[str, Any]]:
    """`groups` with their parameters as lists, each checked to be one of the model's own, and in one group only."""
    names = {id(param): name for name, param in model.named_parameters() if param.requires_grad}
    if groups is None:
        return [{"params": [param for param in model.parameters() if param.requires_grad]}]
    if not isinstance(groups, Iterable):
        raise UserCodeError(
            f"optimizer(groups={groups!r}): write a list of parameter groups, as torch takes them"
        )
    seen: set[int] = set()
    made = []
    for number, group in enumerate(groups):
        if not isinstance(group, Mapping) or "params" not in group:
            raise UserCodeError(f'optimizer(): groups[{number}] is no mapping with "params"')
        params = group["params"]
        members = [params] if isinstance(params, torch.Tensor) else list(_iterable(params, number))
        for place, param in enumerate(members):
            if id(param) not in names:
                what = (
                    f"a parameter of shape {tuple(param.shape)}"
                    if isinstance(param, torch.Tensor)
                    else repr(param)
                )
                raise UserCodeError(
                    f"optimizer(): groups[{number}] holds {what} (number {place}) that is none of this model's, or "
                    "requires no gradient: take them from model.named_parameters() after shard()"
                )
            if id(param) in seen:
                raise UserCodeError(
                    f"optimizer(): {names[id(param)]} is in two groups: leave it in one"
                )
            seen.add(id(param))
        made.append({**group, "params": members})
    if missing := [name for key, name in names.items() if key not in seen]:
        raise UserCodeError(
            f"optimizer(): {len(missing)} parameters are in no group, {missing[0]} first: add them, or call "
            "requires_grad_(False) on them before shard()"
        )
    return made


def _iterable(params: Any, number: int) -> Iterable[Any]:
    if not isinstance(params, Iterable):
        raise UserCodeError(
            f'optimizer(): groups[{number}]["params"] is {type(params).__name__}, not parameters'
        )
    return params


class GradScaler:
    """Dynamic loss scaling for fp16, used as `torch.amp.GradScaler` is; several models share one.

    Scale each loss, step each optimizer through the scaler, then update once. An optimizer whose gradients overflowed
    skips its step, on all ranks, and the others make theirs; the scale halves if any of them did.
    """

    def __init__(
        self,
        init_scale: float = 65536.0,
        *,
        growth_interval: int = 2000,
        hysteresis: int = 1,
        min_scale: float = 1.0,
        enabled: bool = True,
    ) -> None:
        """A scaler on the run's device.

        Args:
            init_scale: the first scale.
            growth_interval: good steps before the scale doubles.
            hysteresis: overflows in a row before the scale halves.
            min_scale: the scale never falls below this.
            enabled: False makes everything here do nothing: losses stay, optimizers step.

        Raises:
            JobError: an argument is no such number.
        """
        number = functools.partial(
            arguments.number, "GradScaler", write="a number above 0", above=0
        )
        steps = functools.partial(
            arguments.whole, "GradScaler", least=1, write="a number of steps, 1 or more"
        )
        config = LossScaleConfig(
            init=number("init_scale", init_scale),
            min=number("min_scale", min_scale),
            window=steps("growth_interval", growth_interval),
            hysteresis=steps("hysteresis", hysteresis),
        )
        compute = torch.float16 if enabled else torch.float32
        self._scaler = LossScaler(Precision(compute, torch.float32, config), current().device)
        self._overflows: dict[int, torch.Tensor] = {}  # by optimizer, since the last update

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """`loss` times the scale, to be differentiated.

        Args:
            loss: of any shape.

        Raises:
            JobError: it is no tensor.
        """
        if not isinstance(loss, torch.Tensor):
            raise JobError(f"GradScaler.scale({loss!r}): pass the loss, a tensor")
        return loss * self._scaler.scale if self._scaler.enabled else loss

    def step(self, optimizer: Optimizer, *, weight: float | torch.Tensor | None = None) -> None:
        """`optimizer.step(weight=weight)` with gradients divided by the scale; skipped if they overflowed.

        Raises:
            UserCodeError: as `Optimizer.step`, or `update` was not called since the optimizer's last step.
        """
        if not isinstance(optimizer, Optimizer):
            raise UserCodeError(
                f"GradScaler.step(): {type(optimizer).__name__} was not made by zrun_core.optimizer"
            )
        if id(optimizer) in self._overflows:
            raise UserCodeError(
                "GradScaler.step(): this optimizer has stepped already: call update() after each round"
            )
        self._overflows[id(optimizer)] = optimizer._step(weight, self._scaler).overflow

    def update(self) -> None:
        """Let the scale follow what the optimizers' steps since the last update came to.

        Raises:
            UserCodeError: there was none.
        """
        if not self._overflows:
            raise UserCodeError(
                "GradScaler.update(): no optimizer has stepped: call step(optimizer) first"
            )
        self._scaler.update(torch.stack(list(self._overflows.values())).any())
        self._overflows.clear()

    def get_scale(self) -> float:
        """The scale as it is now."""
        return float(self._scaler.scale)

    def state_dict(self) -> dict[str, float]:
        """The scale, and how far it is from changing: JSON."""
        return self._scaler.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, float]) -> None:
        """Restore what `state_dict` returned.

        Raises:
            JobError: it is something else.
        """
        what = "GradScaler.load_state_dict"
        if not isinstance(state_dict, Mapping) or not {"scale", "good", "bad"} <= state_dict.keys():
            raise JobError(
                f"{what}(): this is no state of a zrun_core.GradScaler, which holds scale, good and bad; of one of "
                "torch's take the scale: GradScaler(init_scale=...)"
            )
        scale = arguments.number(what, "scale", state_dict["scale"], "a number above 0", above=0)
        counts = {
            key: arguments.whole(what, key, state_dict[key], 0, "a number of steps")
            for key in ("good", "bad")
        }
        self._scaler.load_state_dict({"scale": scale, **counts})
