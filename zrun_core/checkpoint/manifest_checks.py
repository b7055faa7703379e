"""The checks that the parts of a manifest do not contradict each other, once each is of its type.

What units have of tensors tiles each of them, and the parts of a division tile its units:

    tensor   | run of one unit | run of another |
             0                                  numel

    unit     | of rank 0 | of rank 2 | of rank 1 | ...
             0                                  numel

So each element of each state has been written by one rank, however many ranks there are, without
looking at every fragment. Each file is as long as its header, the fragments that follow from that,
what is the rank's own, and its record: nothing lies between or behind them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise

from zrun_core.checkpoint.divisions import bytes_by_rank
from zrun_core.checkpoint.manifest_fields import (
    ITEM_BYTES,
    LARGEST,
    MANIFEST,
    MAX_BYTES,
    RANK,
    VALUE,
    contradict,
    first_twice,
    number_class,
    rank_file,
)
from zrun_core.checkpoint.manifest_parts import Division, FileInfo, TensorInfo, UnitInfo, UnitRun

_MAX_DIMS = 64


def check_parts(
    files: Sequence[FileInfo],
    tensors: Sequence[TensorInfo],
    divisions: Sequence[Division],
    world_size: int,
) -> None:
    """Refuse what a manifest consists of, if it contradicts itself.

    Args:
        files: those of the ranks in their order, then those without tensors.

    Raises:
        CheckpointError: the message names the first contradiction.
    """
    check_file_names([file.name for file in files])
    check_tensors(tensors)
    _check_formats(tensors)
    known = {tensor.name: tensor for tensor in tensors}
    for division in divisions:
        _check_division(division, known, world_size)
    _check_tiles(tensors, divisions)
    _check_files(files, tensors, divisions, world_size)


def check_file_names(names: Sequence[str]) -> None:
    """Check that no file is there twice, and that the manifest is none of them.

    Raises:
        CheckpointError: one is.
    """
    if MANIFEST in names:
        contradict(f"it lists {MANIFEST} as a file of tensors")
    twice = first_twice(names)
    if twice is not None:
        contradict(f"it lists the file {twice} twice")


def check_tensors(tensors: Sequence[TensorInfo]) -> None:
    """Check that no tensor is there twice, and that its elements fill its memory.

    Raises:
        CheckpointError: one is, or they do not.
    """
    twice = first_twice(name for info in tensors for name in (info.name, *info.aliases))
    if twice is not None:
        contradict(f"it names the tensor {twice[:200]} twice")
    for tensor in tensors:
        _check_dense(tensor)


def _check_dense(tensor: TensorInfo) -> None:
    """Check that the elements fill the memory without gaps, in whatever order of the dimensions.

    [2, 3] may have the strides (3, 1) or (1, 2); a dimension of one element may have any.
    """
    num_dims = len(tensor.shape)
    if num_dims != len(tensor.stride) or num_dims > _MAX_DIMS or tensor.numel > LARGEST:
        contradict(f"the tensor {tensor.name[:200]} has no possible shape")
    if tensor.numel == 0:
        return
    expected = 1
    for stride, size in sorted(zip(tensor.stride, tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            contradict(f"the strides of {tensor.name[:200]} leave gaps or overlap")
        expected *= size


def _check_formats(tensors: Sequence[TensorInfo]) -> None:
    """Check that the value of every tensor is there, in a format that keeps its meaning."""
    for tensor in tensors:
        name = tensor.name[:200]
        if RANK in tensor.states:
            contradict(f"{RANK} is no state of {name}")
        dtype = tensor.states.get(VALUE)
        if dtype is None and (tensor.numel or tensor.states):
            contradict(f"there is no value of {name}")
        if dtype is not None and number_class(dtype) != number_class(tensor.dtype):
            contradict(f"the value of {name} is {dtype}, and the tensor {tensor.dtype}")


def _check_division(division: Division, tensors: Mapping[str, TensorInfo], world_size: int) -> None:
    """Check that ranks divide whole units, and that runs lie in units and in tensors."""
    ranks = division.ranks
    if not ranks or max(ranks) >= world_size or len(set(ranks)) != len(ranks):
        contradict(f"the ranks of a division are not some of {world_size}, each once")
    if len(ranks) % division.copies:
        contradict(f"{division.copies} copies do not divide {len(ranks)} ranks of a division")
    shards = len(ranks) // division.copies
    for unit in division.units:
        name = unit.name[:200]
        if unit.numel % shards:
            contradict(f"{shards} shards do not divide the {unit.numel} elements of {name}")
        if not unit.runs:
            contradict(f"the unit {name} has nothing of any tensor")
        end = 0
        for run in unit.runs:
            if run.place < end:
                contradict(f"{_in_words(run, unit)} overlaps with what is before it in {name}")
            end = run.place + run.numel
            tensor = tensors.get(run.tensor)
            if tensor is None:
                contradict(f"{_in_words(run, unit)} is of a tensor that it does not list")
            if run.first + run.numel > tensor.numel:
                contradict(f"{_in_words(run, unit)} is more than its {tensor.numel} elements")
        if end > unit.numel:
            contradict(f"{_in_words(unit.runs[-1], unit)} is beyond the end of the unit")


def _check_tiles(tensors: Sequence[TensorInfo], divisions: Sequence[Division]) -> None:
    """Check that units have every element of every tensor once."""
    runs: dict[str, list[tuple[UnitRun, UnitInfo]]] = defaultdict(list)
    for division in divisions:
        for unit in division.units:
            for run in unit.runs:
                runs[run.tensor].append((run, unit))
    for tensor in tensors:
        found = sorted(runs[tensor.name], key=lambda each: each[0].first)
        if sum(run.numel for run, _ in found) != tensor.numel:
            contradict(f"units do not have the {tensor.numel} elements of {tensor.name[:200]}")
        for (before, _), (after, unit) in pairwise(found):
            if after.first < before.first + before.numel:
                contradict(f"{_in_words(after, unit)} overlaps with what another run has of it")


def _check_files(
    files: Sequence[FileInfo],
    tensors: Sequence[TensorInfo],
    divisions: Sequence[Division],
    world_size: int,
) -> None:
    """Check that every byte of every file belongs to its header, a fragment or its record."""
    if len(files) < world_size:
        contradict(f"it does not have the files of {world_size} ranks")
    widths = {info.name: sum(map(ITEM_BYTES.__getitem__, info.states.values())) for info in tensors}
    if sum(info.numel * widths[info.name] for info in tensors) > LARGEST:
        contradict("its tensors have more bytes than any disk")
    of_model = bytes_by_rank(divisions, widths, world_size).tolist()
    for rank, (file, num_bytes) in enumerate(zip(files, of_model, strict=False)):
        if file.name != rank_file(rank):
            contradict(f"file {rank} is {file.name}, not {rank_file(rank)}")
        if not 0 < file.record_bytes <= MAX_BYTES:
            contradict(f"{file.name} has a record of {file.record_bytes} bytes")
        end = file.header_bytes + num_bytes + file.own_bytes + file.record_bytes
        if end != file.num_bytes:
            contradict(f"{file.name} has {file.num_bytes} bytes, its parts {end}")
    for file in files[world_size:]:
        if file.name.endswith(".safetensors"):
            contradict(f"{file.name} is the file of no rank")
        if file.header_bytes != file.num_bytes or file.own_bytes or file.record_bytes:
            contradict(f"{file.name} has {file.num_bytes} bytes, and parts")


def _in_words(run: UnitRun, unit: UnitInfo) -> str:
    last = run.first + run.numel
    return f"{run.tensor[:200]}, elements {run.first} to {last}, in the unit {unit.name[:200]}"
