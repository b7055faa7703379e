"""Compare the steps of a user's own loop with those of a plain model: `with verify(model, build)`.

    model(x)            its arguments and its random numbers are kept
    loss.backward()     what the loss hands back to the outputs is kept
    optimizer.step()    the plain model runs the same calls, and gets the same from the loss;
                        its gradients, summed over ranks, are compared with the sharded ones

So the loss function, and what comes between model and loss, is the user's own both times.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zrun_core.data.batch import map_tensors
from zrun_core.distributed import rng
from zrun_core.errors import DiffersError, JobError
from zrun_core.library.model import ModelHandle
from zrun_core.library.optimizer import Optimizer
from zrun_core.zero.passes.module_hooks import tensors_in

# Relative differences that are rounding: of a gradient's own norm, and of the whole model's.
_OWN, _OF_ALL = 1e-4, 1e-6
_TIMES_FORMAT = 3.0  # of what the format makes of a plain gradient


@dataclass
class Verified:
    """What `verify` has seen so far.

    Attributes:
        steps: that agree.
        worst: largest difference of a gradient, relative to its norm.
    """

    steps: int = 0
    worst: float = 0.0


class _Call:
    """One call of the model in training: what it was given, and what its outputs got back."""

    def __init__(self, args: Any, kwargs: Any, position: Any) -> None:
        self.args = args
        self.kwargs = kwargs
        self.position = position  # of the random numbers
        self.grads: dict[int, torch.Tensor] = {}  # by number of the output

    def watch(self, output: Any) -> None:
        """Keep what backward hands to each tensor of an output."""
        for number, tensor in enumerate(tensors_in(output)):
            if tensor.requires_grad:
                tensor.register_hook(lambda grad, number=number: self._add(number, grad))

    def _add(self, number: int, grad: torch.Tensor) -> None:
        known = self.grads.get(number)
        self.grads[number] = grad.detach().clone() if known is None else known + grad.detach()


class _Verification:
    """Compares the steps of one model."""

    def __init__(self, handle: ModelHandle, module: nn.Module, plain: nn.Module) -> None:
        self.verified = Verified()
        self._sharded = handle.sharded
        self._comm = handle.sharded.comm
        self._module = module
        assert isinstance(handle.optimizer, Optimizer)
        self._optimizer = handle.optimizer
        self._plain = plain.to(self._comm.device)
        self._calls: list[_Call] = []
        dtypes = {}
        for unit in self._sharded.units:
            for slot in unit.layout.slots:
                dtypes[slot.part.tensor] = unit.layout.dtype
        own = dict(plain.named_parameters())
        if own.keys() != dtypes.keys():
            odd = sorted(own.keys() ^ dtypes.keys())[0]
            raise JobError(
                f"verify(): the plain model is a different model: only one of the two has {odd}"
            )
        for name, param in own.items():
            param.data = param.data.to(dtypes[name])
        self._is_narrow = any(dtype != torch.float32 for dtype in dtypes.values())
        self._load()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Compare the steps that are made inside."""
        with ExitStack() as stack:
            before = self._module.register_forward_pre_hook(self._begin, with_kwargs=True)
            after = self._module.register_forward_hook(self._end)
            stack.callback(before.remove)
            stack.callback(after.remove)
            self._optimizer.after_step = self._load
            self._optimizer.after_drop = self._drop
            stack.callback(setattr, self._optimizer, "after_step", None)
            stack.callback(setattr, self._optimizer, "after_drop", None)
            self._sharded.updates.watcher = self._compare
            try:
                yield
            finally:
                self._sharded.updates.watcher = None

    def _begin(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.is_grad_enabled():
            given = [map_tensors(_kept, each) for each in (args, kwargs)]
            self._calls.append(_Call(given[0], given[1], rng.capture(self._comm.device)))

    def _end(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Hand out views: what flows back within the call, as from loss to logits, is not seen."""
        if not torch.is_grad_enabled():
            return output
        output = map_tensors(lambda t: t.view_as(t) if t.requires_grad else t, output)
        self._calls[-1].watch(output)
        return output

    def _drop(self) -> None:
        """Forget what came back to outputs so far: `zero_grad` has dropped it."""
        for call in self._calls:
            call.grads.clear()

    def _load(self) -> None:
        """Take the values and buffers of the sharded model."""
        params = dict(self._plain.named_parameters())
        with self._sharded.gathered(), torch.no_grad():
            for name, param in self._module.named_parameters():
                params[name].copy_(param)
            buffers = dict(self._plain.named_buffers())
            for name, buffer in self._module.named_buffers():
                buffers[name].copy_(buffer)
        for own, inner in zip(self._plain.modules(), self._module.modules(), strict=True):
            own.training = inner.training

    def _compare(self, divisor: torch.Tensor, has_grad: Sequence[bytes]) -> None:
        """Compare the gradients that an update is about to be made of.

        Raises:
            DiffersError: they are others, on this rank or on another.
        """
        calls, self._calls = self._calls, []
        buffers = [buffer.clone() for buffer in self._plain.buffers()]
        plain = self._grads(calls)
        wide = plain
        if self._is_narrow:
            self._put_back(buffers)
            wide = self._grads(calls, in_fp32=True)
        total = math.sqrt(sum(float(grad.double().square().sum()) for grad in plain.values()))
        worst: tuple[float, float, str] = (0.0, 0.0, "")
        for unit in self._sharded.units:
            if not unit.trainable:
                continue
            first = unit.updated_range[0]
            found = unit.copied_grad()
            for each in unit.layout.tensor_ranges(first, first + len(found)):
                name = each.part.tensor
                stop = each.first + each.stop - each.start
                expected = _flat(plain[name], each.part.stride)
                off = float((found[each.start : each.stop] - expected[each.first : stop]).norm())
                size = float(expected.norm())
                allowed = _OWN * size + _OF_ALL * total
                if self._is_narrow:
                    eps = torch.finfo(unit.layout.dtype).eps
                    of_format = float((plain[name] - wide[name]).norm())
                    allowed += _TIMES_FORMAT * of_format + eps * (size + 0.01 * total)
                excess = off / max(allowed, 1e-30)
                worst = max(worst, (excess, off / max(size, 1e-30), name))
        world = self._sharded.mesh.world
        told = self._comm.all_gather_bytes(json.dumps(worst).encode(), world, name="verify")
        excess, apart, name = max(tuple(json.loads(each)) for each in told)
        step = self.verified.steps + 1
        if excess > 1 and math.isfinite(total):
            raise DiffersError(
                f"verify(): step {step}: the gradient of {name} differs by {apart:.2g} (relative) "
                "from that of the plain model. Usual causes: parts of the model called outside "
                "its forward, parameters read elsewhere, hooks, or code that depends on the rank"
            )
        self.verified.steps = step
        self.verified.worst = max(self.verified.worst, apart)

    def _put_back(self, buffers: Sequence[torch.Tensor]) -> None:
        with torch.no_grad():
            for buffer, values in zip(self._plain.buffers(), buffers, strict=True):
                buffer.copy_(values)

    def _grads(self, calls: Sequence[_Call], *, in_fp32: bool = False) -> dict[str, torch.Tensor]:
        """Return the plain gradients of calls, summed over ranks, fp32 on the CPU."""
        params = {n: p for n, p in self._plain.named_parameters() if p.requires_grad}
        formats = {name: param.dtype for name, param in params.items()}
        autocast = self._sharded.settings.precision.autocast
        with ExitStack() as stack, torch.enable_grad():
            if in_fp32:
                stack.callback(self._cast, formats)
                self._cast(dict.fromkeys(params, torch.float32))
            sums = {name: torch.zeros(param.shape) for name, param in params.items()}
            for call in calls:
                if not call.grads:
                    continue  # no backward has come to it
                with rng.kept_position(self._comm.device):
                    tensors_of, numbers = call.position
                    rng.restore(tensors_of, numbers, self._comm.device)
                    with ExitStack() as inside:
                        if not in_fp32:
                            inside.enter_context(autocast(self._comm.device))
                        output = self._plain(*call.args, **call.kwargs)
                tensors = tensors_in(output)
                ends = [tensors[number] for number in call.grads]
                grads = [g.to(t.dtype) for g, t in zip(call.grads.values(), ends, strict=True)]
                torch.autograd.backward(ends, grads)
                for name, param in params.items():
                    if param.grad is not None:
                        sums[name] += param.grad.detach().float().cpu()
                        param.grad = None
        world = self._sharded.mesh.world
        summed = {}
        for name, grad in sums.items():
            flat = grad.flatten().to(self._comm.device)
            total = self._comm.all_reduce_small(flat, world, name=f"verify {name}")
            summed[name] = total.cpu().view(grad.shape)
        return summed

    def _cast(self, formats: dict[str, torch.dtype]) -> None:
        params = dict(self._plain.named_parameters())
        for name, dtype in formats.items():
            params[name].data = params[name].data.to(dtype)


@contextmanager
def verify(model: nn.Module, build: Callable[[], nn.Module]) -> Iterator[Verified]:
    """Compare each step of a loop inside with the same model as it is without zrun.

    Every rank enters it, and holds a whole model in it. At each `optimizer.step()` the plain model
    runs the calls that the sharded one has had since the last step, with the same values, random
    numbers and gradients of the outputs; its gradients, summed over the ranks, must be those that
    the update is made of. Updates are torch's own, and not compared.

    Args:
        model: a sharded model.
        build: returns the same model as `shard` was given.

    Yields:
        What was seen so far: `steps` that agree, and the `worst` difference.

    Raises:
        DiffersError: a gradient is another; all ranks raise it.
        JobError: `build` returns another model, or the model has no optimizer yet, or tiles.
        UserCodeError: the model is not sharded.
    """
    handle = ModelHandle.of(model, "verify()")
    if handle.optimizer is None:
        raise JobError("verify(): the model has no optimizer yet: call zrun_core.optimizer first")
    if handle.sharded.settings.tile is not None:
        raise JobError("verify(): tiles are not compared: leave zero.tile out of shard() for it")
    handle.run._meet("verify()")
    with rng.fork_torch_rng(handle.run.device):
        verification = _Verification(handle, model, build())
    with verification.watching():
        yield verification.verified


def _kept(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _flat(tensor: torch.Tensor, stride: Sequence[int]) -> torch.Tensor:
    """Return the elements in the order of memory that a unit has them in."""
    flat = torch.empty(tensor.numel())
    flat.as_strided(tensor.shape, tuple(stride)).copy_(tensor)
    return flat
