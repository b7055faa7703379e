"""Parameters that are read outside of their modules by a forward that is not like the first one.

    if not self.training: loss = loss + self.head.weight.norm()

What the forward without values shows is gathered (`whole_reads.py`) or refused. Of what comes later
a rank would see its slice in silence. It finds a stand-in there, which refuses to be computed with.

Whoever asks is told by the stack, and that is cheap where it is what it nearly always is: torch's
own layer, or a forward of the user's whose own parameter it is.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

from zrun_core.errors import JobError
from zrun_core.memory.tensors import TensorPart
from zrun_core.tensor_parallel.plan import TensorPlan
from zrun_core.zero.passes.running_pass import RunningPass
from zrun_core.zero.wrap.lookups import Lookups, is_asked_by_user, users_line

_READS_FOR_OTHERS = (
    nn.Module.__getattr__.__code__.co_filename,
    Lookups.items.__code__.co_filename,
)
_LAYERS = str(Path(nn.__file__).parent / "modules") + "/"
_OURS = tuple(  # all but models, which are written as a user's, and what asks for others
    str(Path(__file__).parents[1] / name) + "/"
    for name in ("tensor_parallel", "zero", "train", "checkpoint", "stages", "activations")
)
_NOT_USERS = (_LAYERS, *_OURS)
_NO_SLICE = (  # what is the same of a slice and of the whole
    *("dtype", "device", "layout", "requires_grad", "is_leaf", "is_meta", "is_cpu", "is_cuda"),
    *("ndim", "dim", "is_floating_point", "is_complex", "__hash__"),
)


class LateReads:
    """The parameters of one rank of which nothing was read outside of their modules."""

    def __init__(self, model: nn.Module, plan: TensorPlan, table: Mapping[str, TensorPart]) -> None:
        """
        Args:
            model: this rank's part of it, before it is transformed and sharded.
            table: by name of a parameter, what this rank has of it.
        """
        self._keys: dict[str, dict[str, str]] = {}  # by module and key, the first name
        self._around = [each.around for each in plan.regions if each.role is not None]
        known = plan.reads.looked_up
        names = {
            id(model.get_parameter(name)): name
            for name, part in table.items()
            if known is not None
            and name not in known
            and (plan.tensors[name].cut is not None or name in plan.summed or part.partial_over)
        }
        for prefix, module in model.named_modules():
            for key, param in module._parameters.items():
                if id(param) in names:
                    self._keys.setdefault(prefix, {})[key] = names[id(param)]

    def install(self, model: nn.Module, running: RunningPass) -> None:
        """Hand out stand-ins from now on.

        Args:
            running: the pass that runs, of the model, which is sharded.
        """
        holders: dict[str, list[nn.Module]] = {}
        for prefix, names in self._keys.items():
            around = [each for each in self._around if prefix.startswith(f"{each}.")]
            for name in names.values():
                found = holders.setdefault(name, [])
                found += map(model.get_submodule, (prefix, *around))
        for prefix, names in self._keys.items():
            module = model.get_submodule(prefix)
            module._parameters = _Watched(module._parameters, names, holders, running)


class _Watched(Lookups):
    """A module's parameters, which know who asks for one of them.

    `names` are those of the parameters, by key, and `holders` the modules in which each is where
    the plan has it.
    """

    def __init__(
        self,
        inner: Mapping[str, Any],
        names: Mapping[str, str],
        holders: Mapping[str, list[nn.Module]],
        running: RunningPass,
    ) -> None:
        super().__init__(inner, lambda key: None)
        self._names = names
        self._holders = holders
        self._running = running

    def __getitem__(self, key: str) -> Any:
        # Each layer asks, in each forward: it is one call, which ends at the first `return`.
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename in _READS_FOR_OTHERS:
            frame = frame.f_back
        if frame is None or frame.f_code.co_filename.startswith(_NOT_USERS):
            return self.inner[key]
        name = self._names.get(key)
        in_forward = self._running.active and not self._running.in_backward
        if name is None or not in_forward or _runs(self._holders[name], frame):
            return self.inner[key]
        return _stand_in(name, self.inner[key]) if is_asked_by_user() else self.inner[key]


def _runs(holders: list[nn.Module], frame: FrameType | None) -> bool:
    """Return whether one of some modules runs: a method of it is on the stack."""
    found = set(map(id, holders))
    while frame is not None:
        code = frame.f_code
        if code.co_argcount and id(frame.f_locals.get(code.co_varnames[0])) in found:
            return True
        frame = frame.f_back
    return False


class _StandIn(torch.Tensor):
    """A parameter of which its kind may be known, and nothing else."""

    _named: str

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__
        if name == "__get__":
            name = func.__self__.__name__
        if name in _NO_SLICE:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        found = next(each for each in _all_in((args, kwargs)) if isinstance(each, cls))
        raise JobError(
            f"parallel.tp: {found._named} is read outside of its module ({users_line()}), of which "
            "each rank has a slice, and the first forward does not read it there: ranks gather "
            "what that shows; read it in each forward (times 0 where it should not count), make it "
            "of what modules return, or write tp: 1"
        )


def _stand_in(name: str, param: torch.Tensor) -> torch.Tensor:
    found = param.detach().as_subclass(_StandIn)
    found._named = name
    found._is_param = True
    with torch._C.DisableTorchFunctionSubclass():
        return found.requires_grad_(param.requires_grad)


def _all_in(value: Any) -> list[Any]:
    """Return what containers hold."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if not isinstance(value, (list, tuple)):
        return [value]
    return [each for inner in value for each in _all_in(inner)]
