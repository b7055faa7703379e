"""Sequence parallelism: outside of regions, each rank has a slice of the sequence.

    embedding ── split ──► norm ── gather ──► region ── scatter sum ──► + ... ── join ──► norm, head
    [b, s, h]              [b, s/t, h]        [b, s, h]                 [b, s/t, h]       [b, s, h]

(Korthikanti et al. 2022, section 4.2.2.) Between the first block and the last one, norms, dropouts
and residuals are computed for a slice of the tokens, and kept for backward as such. A sum over
ranks in and out of each region becomes a gather and a reduce-scatter, which move as many bytes.
What all ranks have whole in these blocks, such as norms, gets a part of its gradient on each: the
step sums them (`Reducer.sum_shared`).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from zrun_core.errors import JobError
from zrun_core.tensor_parallel.borders import Border, Move, cross, gather_out, split_in
from zrun_core.tensor_parallel.tensor_comm import TensorComm
from zrun_core.zero.passes.graph_breaks import outside_graphs

_DIM = 1  # of [batch, sequence, hidden]


class SequenceSlices:
    """The slices of the sequence that this rank has between blocks, of the forward under way.

    A forward without gradients whose length the ranks do not divide, as of a text that grows token
    by token, has none: its sequence stays whole, as without `parallel.sequence`.

    Attributes:
        comm: of the ranks that have them.
        are_off: the sequence is whole.
    """

    def __init__(self, comm: TensorComm) -> None:
        self.comm = comm
        self.are_off = False

    def gather_border(self, x: torch.Tensor, name: str) -> Border:
        """Return what makes of `x` the whole sequence, [b, s, h], at the input of a region.

        Args:
            x: [b, s / size, h], or [b * s / size, h] of tokens that are computed one by one.
        """
        gather, _ = _moves(x, self.comm, name)
        return Border(gather, partial(self.comm.begin_reduce_scatter, dim=_dim(x), name=name))

    def scatter_out(self, y: torch.Tensor, name: str) -> torch.Tensor:
        """Return this rank's slice, [b, s / size, h], of the sum of what a region's ranks computed.

        Args:
            y: [b, s, h], or [b * s, h].
        """
        gather, scatter = _moves(y, self.comm, name)
        return cross(y, scatter, gather)

    def begin(self, hidden: torch.Tensor, block: str) -> torch.Tensor:
        """Return what this rank computes with from the first block on.

        Args:
            hidden: what is given to it, [b, s, h], the same on all ranks.
            block: its name.

        Raises:
            JobError: there are gradients, and the ranks do not divide the length.
        """
        self.are_off = not torch.is_grad_enabled() and not _is_divided(
            hidden, self.comm.size, block
        )
        if self.are_off:
            return hidden
        check_length(hidden, self.comm.size, block)
        return split_in(hidden, self.comm, _DIM, f"input of {block}")

    def end(self, hidden: torch.Tensor, block: str) -> torch.Tensor:
        """Return the whole of what the last block returns.

        Args:
            block: its name.
        """
        if self.are_off:
            return hidden
        return gather_out(hidden, self.comm, _DIM, f"output of {block}")


def _moves(tokens: torch.Tensor, comm: TensorComm, name: str) -> tuple[Move, Move]:
    """Return a gather and a scattered sum of tokens: routed ones are [batch * sequence, hidden]."""
    dim = _dim(tokens)
    gather = partial(comm.all_gather, dim=dim, name=name)
    return gather, partial(comm.reduce_scatter, dim=dim, name=name)


def _dim(tokens: torch.Tensor) -> int:
    return _DIM if tokens.dim() > 2 else 0


def slice_between(model: nn.Module, blocks: Sequence[str], slices: SequenceSlices) -> None:
    """Let blocks compute with slices of the sequence.

    Args:
        blocks: names of those that follow each other. The first argument of the first one, and the
            first result of the last one, are hidden states, [b, s, h].
    """
    first, last = blocks[0], blocks[-1]

    @outside_graphs
    def split(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        hidden = hidden_states(args, kwargs)
        own = slices.begin(hidden, first)
        if args:
            return (own, *args[1:]), kwargs
        return args, {key: own if value is hidden else value for key, value in kwargs.items()}

    @outside_graphs
    def join(module: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, torch.Tensor):
            return slices.end(output, last)
        hidden, *others = output
        return type(output)((slices.end(hidden, last), *others))

    model.get_submodule(first).register_forward_pre_hook(split, with_kwargs=True)
    model.get_submodule(last).register_forward_hook(join)


def spans(chunks: Sequence[Sequence[str]]) -> list[list[str]]:
    """Return the names of blocks that follow each other in one list of the model.

    Args:
        chunks: names of blocks that are computed one after the other. An encoder and a decoder in
            one chunk are two spans.
    """
    found: list[list[str]] = []
    for chunk in chunks:
        for _, names in itertools.groupby(chunk, key=lambda name: name.rpartition(".")[0]):
            found.append(list(names))
    return found


@contextmanager
def order_checked(model: nn.Module, blocks: Sequence[str]) -> Iterator[None]:
    """Check, in forwards inside, that slices begin with the first block and end with the last one.

    Args:
        blocks: names of those between which sequences will be slices, in order of registration.

    Raises:
        JobError: a forward calls the first one after others, others after the last one, or one of
            both twice.
    """
    if not blocks:
        yield
        return
    first, last = blocks[0], blocks[-1]
    is_inside = False
    has_ended = True

    def begin(module: nn.Module, args: Any) -> None:
        nonlocal is_inside, has_ended
        is_inside = is_inside and has_ended  # what raised, as where there are no values, is over
        has_ended = False

    def end(module: nn.Module, args: Any, output: Any) -> None:
        nonlocal has_ended
        has_ended = True

    def check(name: str, module: nn.Module, args: Any) -> None:
        nonlocal is_inside
        if is_inside == (name == first):
            raise JobError(
                f"parallel.sequence: forward calls {name} before {first}, after {last}, or again, "
                "and sequences are slices from the first block to the last as they are "
                "registered: register blocks in the order in which they are called, once each, "
                "or write sequence: false"
            )
        is_inside = name != last

    with ExitStack() as stack:
        stack.callback(model.register_forward_pre_hook(begin).remove)
        stack.callback(model.register_forward_hook(end).remove)
        for name in blocks:
            hook = functools.partial(check, name)
            stack.callback(model.get_submodule(name).register_forward_pre_hook(hook).remove)
        yield


@contextmanager
def lengths_checked(model: nn.Module, blocks: Sequence[str], size: int) -> Iterator[None]:
    """Check, in forwards inside, that sequences which come to blocks can be divided.

    Args:
        blocks: names of those in front of which sequences will be divided.
        size: ranks that will have slices of them.
    """
    with ExitStack() as stack:
        for name in blocks:

            def check(_: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
                check_length(hidden_states(args, kwargs), size, name)

            block = model.get_submodule(name)
            handle = block.register_forward_pre_hook(check, with_kwargs=True)
            stack.callback(handle.remove)
        yield


def check_length(x: Any, size: int, name: str) -> None:
    """Check that hidden states can be divided along the sequence.

    Raises:
        JobError: they cannot.
    """
    if _is_divided(x, size, name):
        return
    length = x.shape[_DIM]
    raise JobError(
        f"parallel.sequence: {name} is given a sequence of {length}, and {length} / tp {size} "
        f"= {length / size:.4g} is not whole: make samples of a length that {size} divides, "
        f"pad them (data.collate), or write sequence: false"
    )


def _is_divided(x: Any, size: int, name: str) -> bool:
    """Return whether ranks divide the length of hidden states.

    Raises:
        JobError: it is something else.
    """
    if not isinstance(x, torch.Tensor) or x.dim() != 3:
        shape = list(x.shape) if isinstance(x, torch.Tensor) else type(x).__name__
        raise JobError(
            f"parallel.sequence: the first argument of {name} is {shape}, and not hidden states of "
            "[batch, sequence, width]: write sequence: false"
        )
    return x.shape[_DIM] % size == 0


def hidden_states(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the first argument of a block; of keyword arguments, the first tensor."""
    if args:
        return args[0]
    return next((value for value in kwargs.values() if isinstance(value, torch.Tensor)), None)
