"""A batch: nested dicts, lists, tuples and dataclasses around tensors, as collation has made it."""

from __future__ import annotations

import copy
import dataclasses
import functools
import re
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
import xxhash
from torch import Tensor

from zrun_core.errors import JobError
from zrun_core.hardware.accelerator import is_accelerator

IGNORED = -100  # label of a position that does not count, as in torch
# Names of integers that are no tokens, in a batch that is a mapping.
_NO_TOKENS = re.compile("mask|label|target|index|indices|edge|position|type|segment")
_PLAIN = (bool, int, float, str, bytes, type(None))
_TOKEN_DTYPES = (torch.int64, torch.int32, torch.int16)  # uint8 is pixels, bool is a mask


@dataclass(frozen=True)
class MicroBatch:
    """The samples that one rank runs through the model at once.

    A rank that has run out of samples before the others holds a stand-in: a valid batch with
    `num_samples` 0.
    """

    batch: Any
    num_samples: int
    num_tokens: int

    @classmethod
    def of(cls, batch: Any, num_samples: int) -> MicroBatch:
        """Wrap a collated batch of which `num_samples` samples count.

        Raises:
            JobError: it is a function, as of a collate function that was to be called first.
        """
        if isinstance(batch, FunctionType | functools.partial):
            raise JobError(
                "data.collate returned a function in place of a batch: it is called with the "
                "samples of each batch, not once to make the function; name the function itself, "
                "or a class with args and __call__"
            )
        num_tokens = count_tokens(batch) if num_samples else 0
        return cls(batch, num_samples, num_tokens)

    def to(self, device: torch.device) -> MicroBatch:
        """Return the same micro-batch with its tensors on `device`."""
        return MicroBatch(to_device(self.batch, device), self.num_samples, self.num_tokens)


def first_samples(micro: MicroBatch, most: int) -> MicroBatch:
    """Return a micro-batch of the first samples of one that torch's own collation has made.

    It stays whole where part of it is no tensor with a row for each sample.
    """
    if micro.num_samples <= most or not _is_of_rows(micro.batch, micro.num_samples):
        return micro
    return MicroBatch.of(map_tensors(lambda tensor: tensor[:most], micro.batch), most)


def _is_of_rows(value: Any, num_rows: int) -> bool:
    """Return whether all of a batch is tensors of so many rows."""
    if isinstance(value, Tensor):
        return value.dim() > 0 and len(value) == num_rows
    if isinstance(value, Mapping):
        return all(_is_of_rows(each, num_rows) for each in value.values())
    return isinstance(value, list | tuple) and all(_is_of_rows(each, num_rows) for each in value)


def count_tokens(batch: Any) -> int:
    """Return the number of tokens in a batch.

    These are the elements of its `input_ids`, else of its first integer tensor of 2 or more dims
    that is not called a mask, a label, a position or an index; 0 if it has neither.
    """
    if isinstance(batch, Mapping):
        ids = batch.get("input_ids")
        if isinstance(ids, Tensor):
            return ids.numel()
        batch = {name: each for name, each in batch.items() if not _NO_TOKENS.search(str(name))}
    tokens: list[int] = []

    def visit(tensor: Tensor) -> Tensor:
        if tensor.dim() >= 2 and tensor.dtype in _TOKEN_DTYPES:
            tokens.append(tensor.numel())
        return tensor

    map_tensors(visit, batch)
    return tokens[0] if tokens else 0


def to_device(batch: Any, device: torch.device) -> Any:
    """Copy a nested batch with every tensor to `device`.

    A copy to a GPU is from pinned memory, and is not waited for.
    """
    return map_tensors(lambda tensor: _move(tensor, device), batch)


def _move(tensor: Tensor, device: torch.device) -> Tensor:
    if not is_accelerator(device) or tensor.device.type != "cpu":
        return tensor.to(device)
    pinned = tensor if tensor.is_pinned() else tensor.pin_memory()
    return pinned.to(device, non_blocking=True)


def copied(batch: Any) -> Any:
    """Return a batch whose tensors and containers a forward may change."""
    return map_tensors(torch.clone, batch)


def digest(batch: Any) -> str:
    """Return a digest of the tensors of a batch: of their shapes, formats and values."""
    found = xxhash.xxh64()

    def add(tensor: Tensor) -> Tensor:
        found.update(str((tuple(tensor.shape), tensor.dtype)).encode())
        flat = tensor.detach().cpu().contiguous().view(-1)
        found.update(flat.view(torch.uint8).numpy().tobytes())
        return tensor

    map_tensors(add, batch)
    return found.hexdigest()


def map_tensors(change: Callable[[Tensor], Tensor], value: Any, *, in_records: bool = False) -> Any:
    """Apply `change` to every tensor in `value`, in order.

    What is no container of tensors stays itself.

    Args:
        in_records: also to those that are attributes of an object, where all else that it has are
            numbers, texts and None: `SimpleNamespace(logits=logits, loss=None)`.
    """
    if isinstance(value, Tensor):
        return change(value)
    change_in = functools.partial(map_tensors, change, in_records=in_records)
    if isinstance(value, MutableMapping):
        # Keeps the type: OrderedDict, defaultdict, a tokenizer's BatchEncoding.
        copied = copy.copy(value)
        for key, item in value.items():
            copied[key] = change_in(item)
        return copied
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(change_in, value))
    if isinstance(value, list | tuple):
        return type(value)(map(change_in, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {
            f.name: change_in(getattr(value, f.name)) for f in dataclasses.fields(value) if f.init
        }
        return dataclasses.replace(value, **fields)
    if in_records and _is_record(value):
        copied = copy.copy(value)
        vars(copied).update({key: change_in(item) for key, item in vars(value).items()})
        return copied
    return value


def _is_record(value: object) -> bool:
    """Return whether an object has tensors as attributes, and else only what is plain."""
    if isinstance(value, type | torch.nn.Module | FunctionType):
        return False
    own = getattr(value, "__dict__", {}).values()
    has_tensor = any(isinstance(each, Tensor) for each in own)
    return has_tensor and all(isinstance(each, (Tensor, *_PLAIN)) for each in own)
