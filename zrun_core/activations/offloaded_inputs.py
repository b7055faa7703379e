"""The inputs of recomputed blocks wait for backward elsewhere than on the device, or as slices.

A block that is recomputed keeps nothing but its input. Here torch's checkpoint is called with a
handle in place of that input, so that nothing else holds it:

    forward     block i begins        its input begins to leave
                block i + 1 begins    waits for that, and gives up the memory on the device
    backward    block i + 1 begins    its input is there; that of block i begins to come back
                block i begins        its input is there; that of block i - 1 begins to come back

So at most two inputs are on the device in forward, and two in backward. The last one before
backward begins, which backward needs first, stays. Inputs are numbered as they leave, and backward
goes back through the numbers: with several micro-batches under way too, but for the first input of
each. Where all micro-batches go through a block before the next one comes (layer-major), it goes
forward through those of a block; so the next number is guessed from the last two.

With a partition, a rank keeps its slice of an input only, which moves in place of it; the whole is
given up at the end of the block's forward, and gathered when the block is recomputed.

What moves is the first floating tensor that requires a gradient. The others, such as masks and
rotary tables, are the same for all blocks.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import checkpoint

from zrun_core.activations.kept import Keeper, Kept, has_no_gaps
from zrun_core.activations.partition import Partition
from zrun_core.activations.recomputed_call import RecomputedForward
from zrun_core.errors import UserCodeError
from zrun_core.memory.buffers import Tier
from zrun_core.memory.tier_traffic import Move


class OffloadedInputs:
    """Moves the inputs of the recomputed blocks of one model."""

    def __init__(self, keeper: Keeper, partition: Partition | None = None) -> None:
        """Take who keeps them meanwhile, and over which ranks they are divided.

        Args:
            partition: divides them; None: they are kept whole.
        """
        self._keeper = keeper
        self._partition = partition
        self._inputs: WeakValueDictionary[int, _Input] = WeakValueDictionary()  # by number
        self._num_inputs = 0
        self._newest_back = 0
        self._direction = -1

    @property
    def kept_bytes(self) -> dict[Tier, int]:
        """The room that inputs have taken so far, by tier."""
        return self._keeper.kept_bytes

    @property
    def moved(self) -> Counter[Move]:
        """Bytes that have moved so far, as issued."""
        return self._keeper.moved

    @property
    def note(self) -> str:
        """Reason why it is slower than it might be, for the user; empty if there is none."""
        return self._keeper.note

    def checkpointed(self, name: str, recomputed: RecomputedForward) -> Callable[..., Any]:
        """Return a forward that is recomputed from an input that was elsewhere meanwhile."""
        return functools.partial(self._input_elsewhere, name, recomputed)

    def _input_elsewhere(
        self, name: str, recomputed: RecomputedForward, *args: Any, **kwargs: Any
    ) -> Any:
        place = _place_of_input(args, kwargs) if torch.is_grad_enabled() else None
        if place is None:
            return recomputed.recomputed(*args, **kwargs)
        tensor = args[place] if isinstance(place, int) else kwargs[place]
        handle = self._begin(name, tensor)
        # torch finds the device, whose random state it keeps, by a tensor among the arguments.
        mark = torch.empty(0, device=tensor.device)
        del tensor
        if isinstance(place, int):
            args = (*args[:place], handle, *args[place + 1 :])
        else:
            kwargs[place] = handle
        try:
            forward = recomputed.call()
            output = checkpoint(_run, forward, place, mark, *args, **recomputed.options, **kwargs)
            handle.refuse_change_in_forward()
            return output
        finally:
            handle.end_forward()

    def _begin(self, name: str, tensor: torch.Tensor) -> _Input:
        """Have an input begin to leave, and the one before it be gone."""
        before = self._inputs.get(self._num_inputs)
        if before is not None:
            before.leave()
        own = tensor.detach() if self._partition is None else self._partition.slice_of(tensor)
        kept = self._keeper.keep(own)
        self._num_inputs += 1
        after = functools.partial(self._after, self._num_inputs)
        handle = _Input(name, tensor, own, kept, self._partition, after)
        self._inputs[self._num_inputs] = handle
        return handle

    def _after(self, number: int) -> _Input | None:
        """Return the input that backward is likely to ask for after input `number`."""
        if abs(number - self._newest_back) == 1:
            self._direction = number - self._newest_back
        self._newest_back = number
        return self._inputs.get(number + self._direction)

    def __deepcopy__(self, memo: Any) -> OffloadedInputs:
        """A copy of a model moves its inputs by the same means."""
        return self


def _place_of_input(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int | str | None:
    """Return the number or the name of the argument that moves; None: there is none."""
    arguments = itertools.chain[tuple[int | str, Any]](enumerate(args), kwargs.items())
    for place, value in arguments:
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.requires_grad:
            return place if _can_leave(value) else None
    return None


def _can_leave(tensor: torch.Tensor) -> bool:
    """Return whether it is an activation in memory of its own, as opposed to a parameter's."""
    base = tensor if tensor._base is None else tensor._base
    is_plain = type(tensor) is torch.Tensor and tensor.numel() > 0
    return is_plain and not base.is_leaf and has_no_gaps(tensor)


def _run(
    forward: Callable[..., Any],
    place: int | str,
    mark: torch.Tensor,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Call a block's forward, or recompute it, with its input in place of the handle."""
    if isinstance(place, int):
        return forward(*args[:place], args[place].get(), *args[place + 1 :], **kwargs)
    return forward(*args, **{**kwargs, place: kwargs[place].get()})


class _Input:
    """An input of a recomputed block: a handle, which lives as long as backward may ask for it."""

    def __init__(
        self,
        name: str,
        tensor: torch.Tensor,
        own: torch.Tensor,
        kept: Kept,
        partition: Partition | None,
        after: Callable[[], _Input | None],
    ) -> None:
        """Hold on to an input until it has left.

        `own` is what this rank keeps of it, and `kept` the same elsewhere; `partition` makes it
        whole again (None: it is). `after` returns the handle of the input that is likely to be
        needed after it.
        """
        self._name = name
        self._in_forward: torch.Tensor | None = tensor
        self._here: torch.Tensor | None = own
        self._shape = tensor.shape
        self._stride = tensor.stride()
        self._version = tensor._version
        self._own_version = own._version
        self._kept = kept
        self._partition = partition
        self._after = after

    def refuse_change_in_forward(self) -> None:
        """Refuse a block that has changed its input.

        Raises:
            UserCodeError: it has.
        """
        assert self._in_forward is not None
        self._refuse_change(self._in_forward, self._version)

    def end_forward(self) -> None:
        """Let go of the tensor that belongs to the graph of forward."""
        self._in_forward = None

    def leave(self) -> None:
        """Give up the memory on the device, once the values are elsewhere."""
        if self._here is None:
            return
        self._kept.settle()
        self._refuse_change(self._here, self._own_version)
        self._here = None

    def get(self) -> torch.Tensor:
        """Return the input: in forward itself, for recomputation a leaf with its values."""
        if self._in_forward is not None:
            return self._in_forward
        with _disable_current_modes():  # a selective checkpoint's, which knows no operator of ours
            return self._back().requires_grad_()

    def _back(self) -> torch.Tensor:
        """Return the values, and have those of the next input come back too."""
        tensor = self._here
        if tensor is not None:
            self._refuse_change(tensor, self._own_version)
            self._kept.stay()
        else:
            self._kept.fetch()
        following = self._after()
        if following is not None:
            following.come()
        if tensor is None:
            tensor = self._kept.get()
        if self._partition is None:
            return tensor.detach()
        name = f"input of {self._name}"
        return self._partition.gather(tensor, self._shape, self._stride, name).detach()

    def come(self) -> None:
        """Begin to come back, ahead of use."""
        if self._here is None:
            self._kept.fetch()

    def _refuse_change(self, tensor: torch.Tensor, version: int) -> None:
        if tensor._version != version:
            raise UserCodeError(
                f"the input of {self._name}, which is recomputed from it in backward, was changed "
                "in place: write activations.checkpoint: none, or change a copy"
            )

    def __del__(self) -> None:
        self._kept.abandon()
