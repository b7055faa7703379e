"""Optimizers that torch does not have, on flat parameters: Lion, and Adam and AdamW with moments in bf16.

A parameter is updated in chunks that stay in a CPU's cache while several operations pass over them. Chunks end at the
places that `place` names, so that an element is computed by the same instructions however the ranks divide the parameter.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from numbers import Real
from typing import Any, ClassVar, NamedTuple

import torch

_CHUNK = {"cpu": 1 << 18, "cuda": 1 << 22}  # elements; on a GPU only scratch depends on it


class ParamRange(NamedTuple):
    """A range of one parameter.

    Attributes:
        number: of the parameter among those that the optimizer was given.
        shard: that it lies in.
    """

    number: int
    start: int
    stop: int
    shard: int


class Chunk(NamedTuple):
    """What is updated at once: lists of equal length of 1-D fp32 tensors, and what they are parts of."""

    parts: list[ParamRange]
    params: list[torch.Tensor]
    grads: list[torch.Tensor]
    moments: list[list[torch.Tensor]]  # by name of the moment
    steps: list[torch.Tensor]


class Scratch:
    """Memory in fp32 for updates of chunks, which take turns in it: none outlives the next.

    Optimizers that take turns share one; those that may run at the same time must not.
    """

    def __init__(self) -> None:
        self._rooms: dict[int, torch.Tensor] = {}

    def like(self, tensors: list[torch.Tensor], number: int) -> list[torch.Tensor]:
        """Return undefined fp32 of the same sizes, in the same memory for each `number`."""
        sizes = [tensor.numel() for tensor in tensors]
        room = self._rooms.get(number)
        if room is None or room.numel() < sum(sizes):
            device = tensors[0].device
            room = torch.empty(max(sum(sizes), _CHUNK[device.type]), device=device)
            self._rooms[number] = room
        return list(room[: sum(sizes)].split(sizes))

    @property
    def num_bytes(self) -> int:
        """Bytes that are held."""
        return sum(room.nbytes for room in self._rooms.values())


class Chunked(torch.optim.Optimizer, ABC):
    """Base of optimizers over flat fp32 parameters, with gradients in fp32 that an update may overwrite.

    State as torch keeps it: per parameter a 0-d fp32 `step` and a tensor per moment, in `moment_dtype`. Moments in bf16
    are cast to fp32 for the update, and rounded to the nearest bf16 after it.

    Attributes:
        grad_scale: 0-d fp32 by which gradients are divided, or None.
        found_inf: 0-d fp32, 1 where the step must change nothing; None where it must be made.
        scratch: of its own, unless it is given one to share.
    """

    moment_names: ClassVar[tuple[str, ...]]
    num_scratch: ClassVar[int] = 0  # beside one for each moment that is not fp32
    _step_supports_amp_scaling = True

    def __init__(
        self, params: Iterable[torch.Tensor], defaults: dict[str, Any], moment_dtype: torch.dtype
    ) -> None:
        _check(defaults)
        self.moment_dtype = moment_dtype
        self.grad_scale: torch.Tensor | None = None
        self.found_inf: torch.Tensor | None = None
        self.scratch = Scratch()
        self._parts: dict[torch.Tensor, list[ParamRange]] = {}
        super().__init__(params, defaults)

    def place(self, param: torch.Tensor, number: int, start: int, every: int) -> None:
        """Say where `param` lies: it begins `start` elements after the first of shards of `every` elements each."""
        borders = [
            start,
            *range((start // every + 1) * every, start + param.numel(), every),
            start + param.numel(),
        ]
        size = _CHUNK[param.device.type]
        self._parts[param] = [
            ParamRange(number, low, min(low + size, border - start), (first // every))
            for first, border in pairwise(borders)
            for low in range(first - start, border - start, size)
        ]

    def _chunks(self, group: dict[str, Any]) -> Iterator[Chunk]:
        """The group's parameters that have a gradient, about a chunk at a time; moments are stored afterwards."""
        params = [param for param in group["params"] if param.grad is not None]
        states = [self._state_of(param) for param in params]
        if not params:
            return
        torch._foreach_add_([state["step"] for state in states], self._unless_skipped(1.0, 0.0))
        waiting, room = (
            Chunk([], [], [], [[] for _ in self.moment_names], []),
            _CHUNK[params[0].device.type],
        )
        for param, state in zip(params, states, strict=True):
            parts = self._parts_of(param)
            sizes = [part.stop - part.start for part in parts]
            columns = [
                tensor.split(sizes)
                for tensor in (param, param.grad, *(state[k] for k in self.moment_names))
            ]
            for part, size, cut in zip(parts, sizes, zip(*columns, strict=True), strict=True):
                if waiting.parts and size > room:
                    yield from self._in_fp32(waiting)
                    waiting = Chunk([], [], [], [[] for _ in self.moment_names], [])
                    room = _CHUNK[param.device.type]
                room -= size
                waiting.parts.append(part)
                waiting.params.append(cut[0])
                waiting.grads.append(cut[1])
                waiting.steps.append(state["step"])
                for moment, tensor in zip(waiting.moments, cut[2:], strict=True):
                    moment.append(tensor)
        yield from self._in_fp32(waiting)

    def _in_fp32(self, chunk: Chunk) -> Iterator[Chunk]:
        if self.moment_dtype == torch.float32:
            yield chunk
            return
        wide = [self.scratch.like(moment, number) for number, moment in enumerate(chunk.moments)]
        for moment, room in zip(chunk.moments, wide, strict=True):
            torch._foreach_copy_(room, moment)
        yield chunk._replace(moments=wide)
        for moment, room in zip(chunk.moments, wide, strict=True):
            torch._foreach_copy_(moment, room)

    def _parts_of(self, param: torch.Tensor) -> list[ParamRange]:
        if param not in self._parts:
            self.place(param, len(self._parts), 0, max(1, param.numel()))
        return self._parts[param]

    def _state_of(self, param: torch.Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[param]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
            for name in self.moment_names:
                state[name] = torch.zeros_like(param, dtype=self.moment_dtype)
        return state

    def _unless_skipped(self, value: float, skipped: float) -> Any:
        """`value`, or `skipped` if the device finds that the step is not to be made."""
        if self.found_inf is None:
            return value
        return torch.where(self.found_inf > 0, skipped, value)

    def _clean_grads(self, chunk: Chunk) -> None:
        """Divide the gradients by `grad_scale`, and make them zero in a step that is skipped on the device."""
        if self.grad_scale is not None:
            torch._foreach_div_(chunk.grads, self.grad_scale)
        if self.found_inf is not None:
            for grad in chunk.grads:
                grad.masked_fill_(self.found_inf > 0, 0.0)


class Elementwise(Chunked):
    """Base of optimizers of which each element is updated by itself."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update of the parameters that have a gradient."""
        for group in self.param_groups:
            for chunk in self._chunks(group):
                self._update(chunk, group)

    @abstractmethod
    def _update(self, chunk: Chunk, group: dict[str, Any]) -> None:
        """Update `chunk` in place. `chunk.steps` have counted this step already."""


class Bf16Adam(Elementwise):
    """Adam (Kingma and Ba 2015, Algorithm 1) with moments in bf16: decay is added to the gradient."""

    moment_names = ("exp_avg", "exp_avg_sq")
    _kernel: ClassVar[Callable[..., None]] = staticmethod(torch._fused_adam_)

    def __init__(
        self,
        params: Iterable[torch.Tensor],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        maximize: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "maximize": maximize,
        }
        super().__init__(params, defaults, torch.bfloat16)

    def _update(self, chunk: Chunk, group: dict[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        exp_avgs, exp_avg_sqs = chunk.moments
        self._kernel(
            chunk.params,
            chunk.grads,
            exp_avgs,
            exp_avg_sqs,
            [],
            chunk.steps,
            lr=group["lr"],
            beta1=beta1,
            beta2=beta2,
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=group["maximize"],
            grad_scale=self.grad_scale,
            found_inf=self.found_inf,
        )


class Bf16AdamW(Bf16Adam):
    """AdamW (Loshchilov and Hutter 2019, Algorithm 2) with moments in bf16: decay is apart from the gradient."""

    _kernel = staticmethod(torch._fused_adamw_)


class Lion(Elementwise):
    """Lion (Chen et al. 2023, Algorithm 2): the sign of an interpolated moment, decay apart from it."""

    moment_names = ("exp_avg",)
    num_scratch = 1

    def __init__(
        self,
        params: Iterable[torch.Tensor],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        moment_dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(
            params, {"lr": lr, "betas": betas, "weight_decay": weight_decay}, moment_dtype
        )

    def _update(self, chunk: Chunk, group: dict[str, Any]) -> None:
        self._clean_grads(chunk)
        beta1, beta2 = group["betas"]
        made = self._unless_skipped(1.0, 0.0)
        signs = self.scratch.like(chunk.params, 2)
        (moments,) = chunk.moments
        torch._foreach_copy_(signs, moments)
        torch._foreach_lerp_(signs, chunk.grads, 1 - beta1)
        torch._foreach_sign_(signs)
        if self.found_inf is not None:
            torch._foreach_mul_(signs, made)
        if group["weight_decay"]:
            torch._foreach_mul_(chunk.params, 1 - group["lr"] * group["weight_decay"] * made)
        torch._foreach_add_(chunk.params, signs, alpha=-group["lr"])
        if self.found_inf is None:
            torch._foreach_lerp_(moments, chunk.grads, 1 - beta2)
        else:
            for moment, grad in zip(moments, chunk.grads, strict=True):
                moment.lerp_(grad, (1 - beta2) * made)


def scratch_bytes(build: type[Chunked], moment_dtype: torch.dtype, device: str) -> int:
    """Bytes that their `Scratch` keeps from the first update on, on devices of this type."""
    casts = 0 if moment_dtype == torch.float32 else len(build.moment_names)
    return 4 * _CHUNK[device] * (build.num_scratch + casts)


def _check(defaults: dict[str, Any]) -> None:
    """Raise ValueError for a hyper-parameter with which no step can be made. The job's own keys are checked there."""
    for name in ("lr", "eps", "weight_decay"):
        if name in defaults and not (
            isinstance(defaults[name], Real) and 0 <= float(defaults[name]) < math.inf
        ):
            raise ValueError(f"{name} must be a number, 0 or more: {defaults[name]!r}")
    betas = defaults.get("betas", (0.0, 0.0))
    is_pair = isinstance(betas, list | tuple) and len(betas) == 2
    if not (is_pair and all(isinstance(beta, Real) and 0 <= float(beta) < 1 for beta in betas)):
        raise ValueError(f"betas must be two numbers in [0, 1): {betas!r}")
