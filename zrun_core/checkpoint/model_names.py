"""Names of tensors where several models are saved as one: `<model>.<tensor>`. A single one is "".

What belongs to a rank is `buffer/<rank>/<model>.<name>` then.
"""

from __future__ import annotations


def join(model: str, tensor: str) -> str:
    """Return the name of a model's tensor among those of several models."""
    return f"{model}.{tensor}" if model else tensor


def is_of(model: str, tensor: str) -> bool:
    """Return whether a tensor of several models is one of `model`."""
    return not model or tensor.startswith(f"{model}.")


def strip(model: str, tensor: str) -> str:
    """Return the model's own name of its tensor."""
    return tensor.removeprefix(f"{model}.") if model else tensor


def join_of_rank(model: str, tensor: str) -> str:
    """Return the name of a model's `buffer/<rank>/<name>` among those of several models."""
    kind, rank, rest = tensor.split("/", 2)
    return f"{kind}/{rank}/{join(model, rest)}"


def own_name(model: str, tensor: str, *, is_rank_state: bool) -> str | None:
    """Return the model's own name of a fragment's tensor; None if it is another model's."""
    if not is_rank_state:
        return strip(model, tensor) if is_of(model, tensor) else None
    kind, rank, rest = tensor.split("/", 2)
    if kind != "buffer":  # of a rank, not of a model
        return tensor
    return f"{kind}/{rank}/{strip(model, rest)}" if is_of(model, rest) else None
