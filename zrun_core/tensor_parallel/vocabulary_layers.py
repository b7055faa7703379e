"""Embeddings and heads of which each rank has the rows of its part of the vocabulary.

    ids ──► rows of own ids, zeros for others ── sum over ranks ──► [..., D]        an embedding
    x ── f ──► logits of own entries ──► `LogitSlice`                               a head

Both may have the same weight. The sum's gradient is the same on all ranks; f sums that of x.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from zrun_core.errors import JobError
from zrun_core.tensor_parallel.borders import copy_border, sum_out
from zrun_core.tensor_parallel.column_grads import ColumnGrads
from zrun_core.tensor_parallel.logit_slice import logit_slice
from zrun_core.tensor_parallel.vocabulary import Vocabulary
from zrun_core.user_code.forward_layers import Layer, wrap_forward
from zrun_core.zero.passes.graph_breaks import outside_graphs

# Options of an embedding that need all of its rows, or change them while the model runs.
_WHOLE_ONLY = {
    "max_norm": "changes rows as they are looked up",
    "scale_grad_by_freq": "counts how often each row is looked up",
    "sparse": "makes sparse gradients, which sharded parameters do not have",
}


def embed(
    ids: Tensor,
    weight: Tensor,
    vocabulary: Vocabulary,
    padding_idx: int | None = None,
) -> Tensor:
    """Return the rows of ids, of a weight that is divided over ranks.

    Args:
        ids: integers, [...], the same on all ranks.
        weight: rows of this rank, [vocabulary.length, D].
        padding_idx: the entry of which the row gets no gradient.

    Returns:
        [..., D].
    """
    vocabulary.check(ids)
    row = ids - vocabulary.start
    is_other = (row < 0) | (row >= vocabulary.num_own)
    own_padding = None
    if padding_idx is not None:
        padding_row = padding_idx % vocabulary.size - vocabulary.start
        own_padding = padding_row if 0 <= padding_row < vocabulary.num_own else None
    rows = F.embedding(row.masked_fill(is_other, 0), weight, own_padding)
    rows = rows.masked_fill_(is_other[..., None], 0.0)
    return sum_out(rows, vocabulary.comm, f"rows of {vocabulary.name}")


def divide_embedding(module: nn.Module, vocabulary: Vocabulary) -> None:
    """Let an embedding look up in the rows that this rank has, in place.

    What its forward does before and after its lookup stays as it is.

    Args:
        module: an `nn.Embedding`, or one of a class of the user's own, whose weight is divided.

    Raises:
        JobError: it has an option that needs all rows on one rank.
    """
    for option, why in _WHOLE_ONLY.items():
        if getattr(module, option, None):
            raise JobError(
                f"parallel.tp: {vocabulary.name} has {option}={getattr(module, option)!r}, which "
                f"{why}: that cannot be divided over ranks. Build it without, or write "
                "parallel.tp: 1"
            )
    forward = module.forward

    @outside_graphs
    def own_rows(*args: Any, **kwargs: Any) -> Any:
        with _Lookups(module, vocabulary):
            return forward(*args, **kwargs)

    wrap_forward(module, Layer.EMBEDDING, own_rows)


def divide_head(module: nn.Module, vocabulary: Vocabulary) -> None:
    """Let a head compute the logits of this rank's entries, in place. It returns a `LogitSlice`.

    Args:
        module: a linear whose weight, and bias if it has one, is divided.
    """
    columns = ColumnGrads([module])
    border = copy_border(vocabulary.comm, f"input of {vocabulary.name}")
    forward = module.forward

    @outside_graphs
    def own_logits(x: Tensor) -> Tensor:
        (entered,) = columns.enter([x], [border])
        logits = forward(entered)
        columns.leave()
        return logit_slice(logits, vocabulary)

    wrap_forward(module, Layer.HEAD, own_logits)


class _Lookups(TorchFunctionMode):
    """A mode in which lookups in the weight of a module are made by `embed`."""

    def __init__(self, module: nn.Module, vocabulary: Vocabulary) -> None:
        super().__init__()
        self._weight = module.get_parameter("weight")
        self._vocabulary = vocabulary

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.embedding and _weight_of(*args, **kwargs) is self._weight:
            return self._embed(*args, **kwargs)
        is_attribute = getattr(func, "__name__", "") == "__get__"
        if not is_attribute and any(each is self._weight for each in tree_leaves((args, kwargs))):
            raise JobError(
                f"parallel.tp: the forward of {self._vocabulary.name} uses its weight for "
                f"{getattr(func, '__name__', func)}: only a lookup (F.embedding) can be divided "
                "over ranks. Leave it out of parallel.plan, or write parallel.tp: 1"
            )
        return func(*args, **kwargs)

    def _embed(
        self, input: Tensor, weight: Tensor, padding_idx: int | None = None, *more: Any, **kw: Any
    ) -> Tensor:
        return embed(input, weight, self._vocabulary, padding_idx)


def _weight_of(input: Any = None, weight: Any = None, *args: Any, **kwargs: Any) -> Any:
    return weight
