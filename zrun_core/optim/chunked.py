"""Optimizers that torch does not have, on flat parameters: Lion, and Adam(W) with bf16 moments.

[Note: ranges and chunks]
A parameter is updated range by range, so that its values stay in a CPU's cache while several
operations pass over them. A range ends after `CHUNK` elements, and where a shard ends. So it has
the same borders however many ranks divide the parameter, and each element is computed by the same
instructions: vectorized loops treat the last few elements of a range differently.

A parameter of 13 elements that begins at element 7, with shards of 10 elements and `CHUNK` 4:

    element         7   8   9 | 10  11  12  13  14  15  16  17  18  19
    shard           0   0   0 |  1   1   1   1   1   1   1   1   1   1
    of parameter    0   1   2 |  3   4   5   6   7   8   9  10  11  12
    range           0   0   0 |  1   1   1   1   2   2   2   2   3   3

Its ranges are [0, 3) in shard 0, and [3, 7), [7, 11) and [11, 13) in shard 1. On two ranks with a
shard each, the second has 10 elements of it, placed at 10: its ranges [0, 4), [4, 8) and [8, 10)
are the same elements as the last three.

A chunk is a list of ranges, of one parameter or of several small ones, with at most `CHUNK`
elements together. It is updated at once, by one call of each `torch._foreach_*` operation: of
parameters with 3, 1 and 4 elements the first two are one chunk, and the third is another.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from numbers import Real
from typing import Any, ClassVar, NamedTuple

import torch

# Elements of a range, by type of device; on a GPU only scratch depends on it.
CHUNK = {"cpu": 1 << 18, "cuda": 1 << 22}
# Elements that are updated at once at most, a multiple of these: see `zero/update/chunk_group.py`.
GROUP = {"cpu": 1 << 20, "cuda": 1 << 24}
_OF_GROUP = 3  # number of a buffer; 0 and 1 hold moments, and 2 what an update needs


class ParamRange(NamedTuple):
    """Elements [start, stop) of one parameter, all in one shard. See [Note: ranges and chunks].

    Attributes:
        number: of the parameter among those that the optimizer was given.
        shard: number of the shard that it lies in.
    """

    number: int
    start: int
    stop: int
    shard: int


class Chunk(NamedTuple):
    """Ranges that are updated at once: lists of equal length, an entry for each range.

    Attributes:
        ranges: the elements that the tensors are of.
        params: 1-D fp32 each.
        grads: 1-D fp32 each; an update may overwrite them.
        moments: by number of the moment, 1-D each.
        steps: 0-d fp32 each, updates of the parameter.
    """

    ranges: list[ParamRange]
    params: list[torch.Tensor]
    grads: list[torch.Tensor]
    moments: list[list[torch.Tensor]]
    steps: list[torch.Tensor]


class Scratch:
    """Memory in fp32 for updates of chunks, which take turns in it: none outlives the next.

    Optimizers that take turns share one; those that may run at the same time must not.
    """

    def __init__(self) -> None:
        self._buffers: dict[int, torch.Tensor] = {}

    def like(self, tensors: list[torch.Tensor], number: int) -> list[torch.Tensor]:
        """Return undefined fp32 tensors of the same sizes.

        Args:
            tensors: 1-D, at least one.
            number: of the buffer that the result lies in; calls with one number share memory.
        """
        sizes = [tensor.numel() for tensor in tensors]
        total = sum(sizes)
        device = tensors[0].device
        buffer = self._buffer(number, max(total, CHUNK[device.type]), device)
        return list(buffer[:total].split(sizes))

    def of_group(self, numel: int, device: torch.device) -> torch.Tensor:
        """Return undefined fp32 memory [numel] for a group of chunks, at most `GROUP` elements."""
        return self._buffer(_OF_GROUP, GROUP[device.type], device)[:numel]

    def _buffer(self, number: int, numel: int, device: torch.device) -> torch.Tensor:
        buffer = self._buffers.get(number)
        if buffer is None or buffer.numel() < numel:
            buffer = torch.empty(numel, device=device)
            self._buffers[number] = buffer
        return buffer

    @property
    def num_bytes(self) -> int:
        """Bytes that are held."""
        return sum(buffer.nbytes for buffer in self._buffers.values())


class Chunked(torch.optim.Optimizer, ABC):
    """Base of optimizers over flat fp32 parameters, with fp32 gradients that they may overwrite.

    State as torch keeps it: per parameter a 0-d fp32 `step` and a tensor per moment, in
    `moment_dtype`. Moments in bf16 are cast to fp32 for the update, and rounded to the nearest bf16
    after it.

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
        """
        Args:
            params: 1-D fp32 each, or groups of them.
            defaults: hyper-parameters by name.
            moment_dtype: fp32 or bf16.

        Raises:
            ValueError: a hyper-parameter is out of range.
        """
        _check(defaults)
        self.moment_dtype = moment_dtype
        self.grad_scale: torch.Tensor | None = None
        self.found_inf: torch.Tensor | None = None
        self.scratch = Scratch()
        self._ranges: dict[torch.Tensor, list[ParamRange]] = {}
        super().__init__(params, defaults)

    def place(self, param: torch.Tensor, number: int, start: int, every: int) -> None:
        """Divide `param` into ranges. See [Note: ranges and chunks].

        Args:
            param: one of this optimizer's, [numel].
            number: of the parameter in the model.
            start: its first element, counted from the beginning of shard 0.
            every: elements of a shard.
        """
        stop = start + param.numel()
        longest = CHUNK[param.device.type]
        ranges = []
        for low, high in pairwise(shard_borders(start, stop, every)):
            shard = low // every
            for begin in range(low, high, longest):
                end = min(begin + longest, high)
                ranges.append(ParamRange(number, begin - start, end - start, shard))
        self._ranges[param] = ranges

    def _chunks(self, group: dict[str, Any]) -> Iterator[Chunk]:
        """Yield the chunks of the group's parameters that have a gradient.

        Each is to be updated before the next is asked for; moments in bf16 are stored then.
        """
        params = [param for param in group["params"] if param.grad is not None]
        if not params:
            return
        states = [self._state_of(param) for param in params]
        steps = [state["step"] for state in states]
        self._count_step(steps)
        longest = CHUNK[params[0].device.type]
        chunk = self._empty_chunk()
        room = longest
        for param, state in zip(params, states, strict=True):
            moments = [state[name] for name in self.moment_names]
            ranges = self._ranges_of(param)
            slices = split_by_range([param, param.grad, *moments], ranges)
            for each, (param_part, grad_part, *moment_parts) in zip(ranges, slices, strict=True):
                size = each.stop - each.start
                if chunk.ranges and size > room:
                    yield from self._with_fp32_moments(chunk)
                    chunk = self._empty_chunk()
                    room = longest
                room -= size
                chunk.ranges.append(each)
                chunk.params.append(param_part)
                chunk.grads.append(grad_part)
                chunk.steps.append(state["step"])
                for column, part in zip(chunk.moments, moment_parts, strict=True):
                    column.append(part)
        yield from self._with_fp32_moments(chunk)

    def _count_step(self, steps: list[torch.Tensor]) -> None:
        """Add 1 to `steps`, or 0 where the device finds that the step is not to be made."""
        made = self._unless_skipped(1.0, 0.0)
        if isinstance(made, float):
            torch._foreach_add_(steps, made)
        else:  # without `alpha`, torch would take a tensor for a number, and ask the device for it
            torch._foreach_add_(steps, made, alpha=1)

    def _empty_chunk(self) -> Chunk:
        return Chunk([], [], [], [[] for _ in self.moment_names], [])

    def _with_fp32_moments(self, chunk: Chunk) -> Iterator[Chunk]:
        """Yield `chunk` with fp32 moments, and round them to `moment_dtype` after its update."""
        if self.moment_dtype == torch.float32:
            yield chunk
            return
        wide = [self.scratch.like(moment, number) for number, moment in enumerate(chunk.moments)]
        for moment, wide_moment in zip(chunk.moments, wide, strict=True):
            torch._foreach_copy_(wide_moment, moment)
        yield chunk._replace(moments=wide)
        for moment, wide_moment in zip(chunk.moments, wide, strict=True):
            torch._foreach_copy_(moment, wide_moment)

    def _ranges_of(self, param: torch.Tensor) -> list[ParamRange]:
        if param not in self._ranges:  # it was not placed: all of it is one shard
            self.place(param, len(self._ranges), 0, max(1, param.numel()))
        return self._ranges[param]

    def _state_of(self, param: torch.Tensor) -> dict[str, Any]:
        """Return the parameter's state, made by its first update."""
        state: dict[str, Any] = self.state[param]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
            for name in self.moment_names:
                state[name] = torch.zeros_like(param, dtype=self.moment_dtype)
        return state

    def _unless_skipped(self, value: float, skipped: float) -> Any:
        """Return `value`, or `skipped` where the device finds that the step is not to be made."""
        if self.found_inf is None:
            return value
        return torch.where(self.found_inf > 0, skipped, value)

    def _clean_grads(self, chunk: Chunk) -> None:
        """Divide the gradients by `grad_scale`; make them zero where the device skips the step."""
        if self.grad_scale is not None:
            torch._foreach_div_(chunk.grads, self.grad_scale)
        if self.found_inf is not None:
            for grad in chunk.grads:
                grad.masked_fill_(self.found_inf > 0, 0.0)


def shard_borders(start: int, stop: int, every: int) -> list[int]:
    """Return `start`, the borders of shards of `every` elements in between, and `stop`."""
    first_border = (start // every + 1) * every
    return [start, *range(first_border, stop, every), stop]


def split_by_range(
    tensors: Iterable[torch.Tensor], ranges: Iterable[ParamRange]
) -> Iterator[tuple[torch.Tensor, ...]]:
    """Return for each range the parts of all tensors, [numel] each, that lie in it."""
    sizes = [each.stop - each.start for each in ranges]
    return zip(*(tensor.split(sizes) for tensor in tensors), strict=True)


class Elementwise(Chunked):
    """Base of optimizers of which each element is updated by itself."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the parameters that have a gradient."""
        for group in self.param_groups:
            for chunk in self._chunks(group):
                self._update(chunk, group)

    @abstractmethod
    def _update(self, chunk: Chunk, group: dict[str, Any]) -> None:
        """Update `chunk` in place. Its `steps` have counted this step already."""


class Bf16Adam(Elementwise):
    """Adam (Kingma and Ba 2015, Algorithm 1) with bf16 moments; decay is added to the gradient."""

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
    """AdamW (Loshchilov and Hutter 2019, Algorithm 2) with bf16 moments and decoupled decay."""

    _kernel = staticmethod(torch._fused_adamw_)


class Lion(Elementwise):
    """Lion (Chen et al. 2023, Algorithm 2): sign of an interpolated moment, decoupled decay."""

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
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay}
        super().__init__(params, defaults, moment_dtype)

    def _update(self, chunk: Chunk, group: dict[str, Any]) -> None:
        self._clean_grads(chunk)
        beta1, beta2 = group["betas"]
        is_made = self._unless_skipped(1.0, 0.0)
        lr = group["lr"]
        (moments,) = chunk.moments
        signs = self.scratch.like(chunk.params, 2)  # 0 and 1 may hold moments
        torch._foreach_copy_(signs, moments)
        torch._foreach_lerp_(signs, chunk.grads, 1 - beta1)
        torch._foreach_sign_(signs)
        if self.found_inf is not None:
            torch._foreach_mul_(signs, is_made)
        if group["weight_decay"]:
            torch._foreach_mul_(chunk.params, 1 - lr * group["weight_decay"] * is_made)
        torch._foreach_add_(chunk.params, signs, alpha=-lr)
        if self.found_inf is None:
            torch._foreach_lerp_(moments, chunk.grads, 1 - beta2)
        else:
            for moment, grad in zip(moments, chunk.grads, strict=True):
                moment.lerp_(grad, (1 - beta2) * is_made)


def scratch_bytes(optimizer: type[Chunked], moment_dtype: torch.dtype, device: str) -> int:
    """Return the bytes that a `Scratch` keeps from the first update on.

    Args:
        optimizer: class of the optimizers that share it.
        device: type of device, "cpu" or "cuda".
    """
    num_buffers = optimizer.num_scratch
    if moment_dtype != torch.float32:
        num_buffers += len(optimizer.moment_names)
    return num_buffers * CHUNK[device] * torch.float32.itemsize


def _check(defaults: dict[str, Any]) -> None:
    """Check hyper-parameters. The job's own keys are checked there.

    Raises:
        ValueError: no step can be made with one of them.
    """
    for name in ("lr", "eps", "weight_decay"):
        if name not in defaults:
            continue
        value = defaults[name]
        is_valid = isinstance(value, Real) and 0 <= float(value) < math.inf
        if not is_valid:
            raise ValueError(f"{name} must be a number, 0 or more: {value!r}")
    betas = defaults.get("betas", (0.0, 0.0))
    is_pair = isinstance(betas, list | tuple) and len(betas) == 2
    is_valid = is_pair and all(isinstance(beta, Real) and 0 <= float(beta) < 1 for beta in betas)
    if not is_valid:
        raise ValueError(f"betas must be two numbers in [0, 1): {betas!r}")
