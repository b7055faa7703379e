"""Parameters that are read outside of their modules, where a rank would see a slice of them.

    loss + 0.01 * sum(param.pow(2).sum() for param in model.parameters())

In its module a slice is what the plan says, and ranks add up what it makes. A penalty, a norm or a
clipped weight in the loss, or in the forward of the model itself, would be of this rank's part.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

from zrun_core.tensor_parallel.plan import TensorPlan
from zrun_core.zero.module_hooks import tensors_in

_ROOTS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))  # not the user's code


class OutsideReads:
    """Looks for them in one forward of the whole model.

    Attributes:
        found: by name of a divided parameter, the first line of the user's that reads it outside.
    """

    def __init__(self, model: nn.Module, plan: TensorPlan) -> None:
        self.found: dict[str, str] = {}
        self._model = model
        self._plan = plan
        self._running: list[str] = []
        self._names: dict[int, list[str]] = {}  # by storage, of a divided parameter

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Know which modules run inside."""
        with ExitStack() as stack:
            begin = self._model.register_forward_pre_hook(lambda *_: self._find_names())
            stack.callback(begin.remove)
            for name, module in self._model.named_modules():
                if not name:
                    continue

                def enter(_: nn.Module, args: Any, name: str = name) -> None:
                    self._running.append(name)

                def leave(_: nn.Module, args: Any, out: Any, name: str = name) -> None:
                    if self._running[-1:] == [name]:  # else a hook before `enter` has raised
                        self._running.pop()

                stack.callback(module.register_forward_pre_hook(enter).remove)
                stack.callback(module.register_forward_hook(leave, always_call=True).remove)
            yield

    def used(self, args: Any) -> None:
        """See what an operation is given."""
        for tensor in tensors_in(args):
            names = self._names.get(tensor.untyped_storage()._cdata)
            if names is not None and not any(map(self._is_inside, names)):
                self.found.setdefault(names[0], _line(sys._getframe(2)))

    def _find_names(self) -> None:
        """Find the parameters, which are fake by now."""
        self._names.clear()
        for name, param in self._model.named_parameters(remove_duplicate=False):
            self._names.setdefault(param.untyped_storage()._cdata, []).append(name)
        self._names = {
            storage: names
            for storage, names in self._names.items()
            if self._plan.tensors[names[0]].cut is not None
        }

    def _is_inside(self, name: str) -> bool:
        return any(name.startswith(f"{module}.") for module in self._running)


def _line(frame: FrameType | None) -> str:
    """Return the file and line of the innermost code that is neither torch's nor ours."""
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(_ROOTS):
            return f"{Path(file).name}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"
