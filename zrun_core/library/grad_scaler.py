"""Dynamic loss scaling in a loop of the user's own."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch

from zrun_core.errors import JobError, UserCodeError
from zrun_core.library import arguments
from zrun_core.library.optimizer import Optimizer
from zrun_core.library.run import current
from zrun_core.spine.sections.precision import LossScaleConfig
from zrun_core.zero.unit.precision import LossScaler, Precision


class GradScaler:
    """Dynamic loss scaling for fp16, used as `torch.amp.GradScaler` is; several models share one.

    Scale each loss, step each optimizer through the scaler, then update once. An optimizer whose
    gradients overflowed skips its step, on all ranks, and the others make theirs; the scale halves
    if any of them did.
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
        """Make a scaler on the run's device.

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
        """Return `loss` times the scale, to be differentiated.

        Args:
            loss: of any shape.

        Raises:
            JobError: it is no tensor.
        """
        if not isinstance(loss, torch.Tensor):
            raise JobError(f"GradScaler.scale({loss!r}): pass the loss, a tensor")
        if not self._scaler.enabled:
            return loss
        return loss * self._scaler.scale

    def step(self, optimizer: Optimizer, *, weight: float | torch.Tensor | None = None) -> None:
        """Step with gradients divided by the scale; all ranks skip it if the gradients overflowed.

        Args:
            optimizer: made by `zrun_core.optimizer`.
            weight: as for `Optimizer.step`.

        Raises:
            UserCodeError: as `Optimizer.step`, or `update` was not called since the optimizer's
                last step.
        """
        if not isinstance(optimizer, Optimizer):
            raise UserCodeError(
                f"GradScaler.step(): {type(optimizer).__name__} was not made by zrun_core.optimizer"
            )
        if id(optimizer) in self._overflows:
            raise UserCodeError(
                "GradScaler.step(): this optimizer has stepped already: call update() once per step"
            )
        self._overflows[id(optimizer)] = optimizer._step(weight, self._scaler).overflow

    def update(self) -> None:
        """Let the scale follow the overflows of all steps since the last update.

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
        """Return the scale as it is now."""
        return float(self._scaler.scale)

    def state_dict(self) -> dict[str, float]:
        """Return the scale, and how far it is from changing, as JSON."""
        return self._scaler.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, float]) -> None:
        """Restore what `state_dict` returned.

        Raises:
            JobError: it is something else.
        """
        what = "GradScaler.load_state_dict"
        if not isinstance(state_dict, Mapping) or not {"scale", "good", "bad"} <= state_dict.keys():
            raise JobError(
                f"{what}(): this is no state of a zrun_core.GradScaler, which holds scale, good "
                "and bad; of one of torch's take the scale: GradScaler(init_scale=...)"
            )
        scale = arguments.number(what, "scale", state_dict["scale"], "a number above 0", above=0)
        counts = {
            key: arguments.whole(what, key, state_dict[key], 0, "a number of steps")
            for key in ("good", "bad")
        }
        self._scaler.load_state_dict({"scale": scale, **counts})
