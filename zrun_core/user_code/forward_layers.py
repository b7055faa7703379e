"""All layers that may lie around a module's own forward: their order, and how they are put on.

    module(x)
      ├─ a layer before hooks     stands in place of `_call_impl`
      ├─ hooks                    torch's: zrun's own and the user's, in order of registration
      ├─ layers around forward    stand in place of `forward`, each calls the one inside of it
      └─ forward                  of the class, or the one that the user has put in its place

A layer is a function that takes the place of another, so a call costs one frame for each layer and
nothing here. Its code has the layer's name: stacks, traces and debuggers say in which one they are.
Without layers a module has no attribute of ours, and `module.forward` is the one of its class.

[Note: what is no layer]
Hooks, which torch orders. A tiled linear (`zero/wrap/tiled_linear.py`): a module in place of
another one, which has its hooks. Modules inside of a ghost (`stages/ghosts.py`): for one call
without values they have no hooks, which is the opposite of a layer. A product within the forward
of a linear (`tensor_parallel/linear_product.py`), which a schedule may have made later. Stand-ins
for parameters (`zero/wrap/lookups.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch import nn

_TORCH = str(Path(torch.__file__).parent) + "/"
_LAYERS = "_zrun_layers"  # attribute of a module: its layers, from the outermost
_CALL = "_call_impl"
_FORWARD = "forward"


class Layer(Enum):
    """What may lie around a module's own forward, from the outermost to the innermost.

    Attributes:
        frame: the name of its code in stacks; "": torch's own.
        about: what it does, in a line.
    """

    WHOLE_CALL = "call_of_all_stages", "a hook's call of the model: all stages make it together"
    NODE = "call_of_node", "draws from a stream of its own; a pipeline is cut between such calls"
    INPUT_ELSEWHERE = (
        "input_elsewhere",
        "is recomputed in backward, from an input that is moved away or divided meanwhile",
    )
    COMPILED = "", "runs as torch.compile has compiled it"
    RECOMPUTED = "recomputed", "is recomputed in backward"
    RECOMPUTED_IN_GRAPH = "", "is recomputed in backward, inside of the compiled graph"
    OUTSIDE_GRAPHS = "", "breaks compiled graphs: its parts are gathered one by one"
    LATE_WEIGHT_GRADS = "late_weight_grads", "leaves its weight's gradient to a later pass"
    READS = "known_to_run", "tells who reads parameters of others, of which ranks have slices"
    DRAWS_INSIDE = "draws_inside", "draws as a region does: each rank has other tokens"
    LONE_LINEAR = "lone_linear", "computes with this rank's slice, and returns the whole result"
    HEAD = "own_logits", "makes the logits of this rank's part of the vocabulary"
    EMBEDDING = "own_rows", "looks up in the rows of this rank, and sums over ranks"
    EXPERTS = "experts_summed", "sums over ranks what slices of its experts return"
    ROW = "rows_summed", "ends a region: sums over ranks what slices make"
    ATTENTION = "own_heads", "attends with the heads of this rank"
    COLUMN = "column", "leaves its weight's gradient to the node at which its region begins"
    ONCE = "counted_once", "counts a parameter once, where ranks sum what they make with it"

    def __init__(self, frame: str, about: str) -> None:
        self.frame = frame
        self.about = about
        self.number = len(type(self).__members__)

    @property
    def label(self) -> str:
        """What to call it where stacks have no name of ours for it, too."""
        return self.frame or self.name.lower()

    @property
    def is_before_hooks(self) -> bool:
        """Whether it stands before the module's hooks."""
        return self in (Layer.WHOLE_CALL, Layer.NODE)

    @property
    def is_instead(self) -> bool:
        """Whether it computes in place of what is inside of it, which does not run."""
        return self in _INSTEAD

    @property
    def place(self) -> str:
        """The attribute of a module in whose place it stands."""
        return _CALL if self.is_before_hooks else _FORWARD


_INSTEAD = (Layer.LATE_WEIGHT_GRADS, Layer.LONE_LINEAR, Layer.ROW, Layer.ATTENTION, Layer.COLUMN)


def wrap_forward(
    module: nn.Module, layer: Layer, function: Callable[..., Any]
) -> Callable[[], None]:
    """Put a layer around all that a module has of them; return what takes it off again.

    Args:
        layer: one that belongs outside of all that are on.
        function: from now on in place of the attribute `layer.place`, which it calls as it was, or
            does the same by itself. Its code has the layer's name, with or without underscores
            before it.
    """
    own = vars(module)
    kind = type(module).__name__
    on = layers_of(module)
    assert layer not in on, f"{layer.name} is on this {kind} already, and {on[0].name} outermost"
    outermost = _outermost(on, layer.place)
    assert outermost is None or layer.number < outermost.number, (
        f"{layer.name} belongs inside of {outermost.name}, which is on this {kind} already"
    )
    code = _code_name(function)
    assert not layer.frame or code.lstrip("_") == layer.frame, (
        f"the code of {layer.name} is to be named {layer.frame}, and is {code}"
    )
    before = own.get(layer.place)
    own[layer.place] = function
    own[_LAYERS] = tuple(sorted((layer, *on), key=lambda each: each.number))
    return functools.partial(_take_off, module, layer, before)


@contextmanager
def wrapped_forward(
    module: nn.Module, layer: Layer, function: Callable[..., Any]
) -> Iterator[None]:
    """Have a layer on a module inside: see `wrap_forward`."""
    take_off = wrap_forward(module, layer, function)
    try:
        yield
    finally:
        take_off()


def layers_of(module: nn.Module) -> tuple[Layer, ...]:
    """Return the layers of a module, from the outermost."""
    layers: tuple[Layer, ...] = vars(module).get(_LAYERS, ())
    return layers


@contextmanager
def calls_without_layers(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Have no layers before the hooks of modules inside; afterwards those that were there.

    Those that are put on inside are taken off.
    """
    before = [(vars(module), vars(module).get(_CALL), layers_of(module)) for module in modules]
    for module in modules:
        _put(vars(module), _CALL, None, _around_forward(module))
    try:
        yield
    finally:
        for module, (own, call, layers) in zip(modules, before, strict=True):
            calls = [each for each in layers if each.is_before_hooks]
            _put(own, _CALL, call, [*calls, *_around_forward(module)])


def _take_off(module: nn.Module, layer: Layer, before: Callable[..., Any] | None) -> None:
    """Take off a layer that has lain around `before`; None: around what the class has."""
    on = layers_of(module)
    kind = type(module).__name__
    assert layer in on, f"{layer.name} is to come off this {kind}, which has not got it"
    outermost = _outermost(on, layer.place)
    assert outermost is layer, (
        f"{layer.name} is to come off this {kind}, and {outermost and outermost.name} is around it"
    )
    _put(vars(module), layer.place, before, (each for each in on if each is not layer))


def _put(
    own: dict[str, Any], place: str, function: Callable[..., Any] | None, layers: Iterable[Layer]
) -> None:
    """Give a module's attributes `own` a function, and the record of its layers."""
    for key, value in ((place, function), (_LAYERS, tuple(layers) or None)):
        if value is not None:
            own[key] = value
        else:
            own.pop(key, None)


def _around_forward(module: nn.Module) -> list[Layer]:
    return [each for each in layers_of(module) if not each.is_before_hooks]


def _outermost(on: Iterable[Layer], place: str) -> Layer | None:
    return next((each for each in on if each.place == place), None)


def _code_name(function: Any) -> str:
    """Return the name of a function's code, by which stacks know its frames."""
    if isinstance(function, functools.partial):
        return _code_name(function.func)
    code = getattr(function, "__code__", None)
    # Kept out of graphs. A function with `functools.wraps` may have a copy of that attribute.
    if code is not None and code.co_filename.startswith(_TORCH):
        inner = getattr(function, "_torchdynamo_orig_callable", None)
        if inner is not None:
            return _code_name(inner)
    return getattr(code, "co_name", type(function).__name__)
