"""Initial weights: safetensors, a torch `state_dict`, or a zrun checkpoint, without its optimizer.

Each rank reads the ranges that it keeps, in pieces, straight into its memory: beside the model
itself, all ranks together hold a few pieces of the file, never a copy of it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from zrun_core.checkpoint.folder import CheckpointFolder, read_step
from zrun_core.checkpoint.manifest_fields import MANIFEST
from zrun_core.checkpoint.manifest_parts import TensorInfo
from zrun_core.checkpoint.model_state import ModelState
from zrun_core.checkpoint.reader import Reader, Target, by_name
from zrun_core.checkpoint.step_index import open_index
from zrun_core.checkpoint.weight_files import SafetensorsFiles, StateDictFile
from zrun_core.distributed.transport import Group
from zrun_core.errors import CheckpointError
from zrun_core.spine.sections.checkpoint import InitFromConfig

_TORCH_SUFFIXES = {".pt", ".pth", ".bin", ".ckpt"}


class Weights(Protocol):
    """Named tensors in files."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """By name."""
        ...

    def fill(self, targets: Sequence[Target]) -> None:
        """Fill the memory of `targets`, whose first names are names of these weights.

        Raises:
            CheckpointError: a file cannot be read.
        """
        ...


def load_weights(config: InitFromConfig, state: ModelState, world: Group) -> list[str]:
    """Fill the model's parameters and persistent buffers from files.

    Args:
        world: the ranks, which divide the work of verifying a checkpoint.

    Returns:
        What the user should know.

    Raises:
        CheckpointError: it cannot be read, or does not fit the model; the message names the first
            difference.
    """
    path = Path(config.path).expanduser()
    weights = open_weights(path, world)
    chosen, notes = match(weights.shapes, state.all_tensors(), config)

    def fill(targets: Sequence[Target]) -> None:
        found = []
        for target in targets:
            name = target.names[0]
            if name in chosen:
                found.append(replace(target, names=(chosen[name],)))
        weights.fill(found)

    state.fill(fill)
    return [f"weights from {path}", *notes]


def match(
    shapes: Mapping[str, tuple[int, ...]], tensors: Sequence[TensorInfo], config: InitFromConfig
) -> tuple[dict[str, str], list[str]]:
    """Find the tensors of a model among those of files. Tied tensors go by any of their names.

    Args:
        shapes: of the tensors in the files, by name.

    Returns:
        The name in the files, by the name in the model; and what the user should know.

    Raises:
        CheckpointError: a tensor is missing, unexpected or of another shape.
    """
    path = config.path
    known = by_name(tensors)
    sources, unexpected = _rename(shapes, known, config)
    found: dict[str, str] = {}
    missing = []
    for info in tensors:
        for name in (info.name, *info.aliases):
            if name in sources:
                found[info.name] = sources[name]
                break
        else:
            missing.append(f"{info.name} {list(info.shape)}")
    if config.strict and missing:
        hint = f"its names are like {next(iter(shapes), 'nothing')}: map names with init_from.map"
        raise CheckpointError(
            f"init_from: {path} has no {missing[0]}{_more(missing)}; {hint}, "
            "or write init_from.strict: false"
        )
    if config.strict and unexpected:
        raise CheckpointError(
            f"init_from: the model has no place for {unexpected[0]} of {path}{_more(unexpected)}: "
            'map names with init_from.map (to "" to leave one out), '
            "or write init_from.strict: false"
        )
    notes = []
    if missing:
        notes.append(
            f"not in the file, so initialised by the model's code: {missing[0]}{_more(missing)}"
        )
    if unexpected:
        notes.append(f"not used: {unexpected[0]}{_more(unexpected)}")
    return found, notes


def _rename(
    shapes: Mapping[str, tuple[int, ...]], known: Mapping[str, TensorInfo], config: InitFromConfig
) -> tuple[dict[str, str], list[str]]:
    """Give the tensors of files the names that they have in the model.

    `shapes` are those of the tensors in the files, by name; `known` has the tensors of the model,
    by any name.

    Returns:
        The name in the files, by the name in the model; and those that the model does not have.
    """
    path = config.path
    sources: dict[str, str] = {}
    unexpected = []
    for name, shape in shapes.items():
        ours = _mapped(name, config.map)
        if not ours:
            continue  # mapped to nothing: left out
        if ours in sources:
            raise CheckpointError(
                f"init_from.map: {sources[ours]} and {name} of {path} both become {ours}"
            )
        sources[ours] = name
        if ours not in known:
            new_name = f", as {ours}," if ours != name else ""
            unexpected.append(f"{name} {list(shape)}{new_name}")
        elif shape != known[ours].shape:
            raise CheckpointError(
                f"init_from: {name} is {list(shape)} in {path}, "
                f"and {ours} is {list(known[ours].shape)} in the model"
            )
    return sources, unexpected


def _mapped(name: str, names: Mapping[str, str]) -> str:
    for pattern, replacement in names.items():
        found = re.fullmatch(pattern, name)
        if found is not None:
            return found.expand(replacement)
    return name


def _more(names: Sequence[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""


def open_weights(path: Path, world: Group) -> Weights:
    """Open the files at `path`.

    Args:
        path: a file, or a folder of files, of a checkpoint, or of checkpoints.
        world: the ranks, which divide the work of verifying a checkpoint.

    Raises:
        CheckpointError: nothing that can be read.
    """
    if path.is_dir():
        return _open_folder(path, world)
    if not path.is_file():
        raise CheckpointError(f"init_from: there is no file {path.absolute()}")
    if path.suffix == ".safetensors":
        return SafetensorsFiles([path])
    if path.suffix in _TORCH_SUFFIXES:
        return StateDictFile(path)
    raise CheckpointError(
        f"init_from: {path} is neither .safetensors nor a state_dict of torch (.pt, .pth, .bin)"
    )


def _open_folder(path: Path, world: Group) -> Weights:
    if (path / MANIFEST).is_file():
        return _ZrunStep(path, world)
    indices = sorted(path.glob("*.safetensors.index.json"))
    if len(indices) > 1:
        raise CheckpointError(f"init_from: {path} has {len(indices)} indices: name a file")
    if indices:
        return SafetensorsFiles(_files_of_index(indices[0]))
    files = sorted(path.glob("*.safetensors"))
    if files:
        return SafetensorsFiles(files)
    for folder in (path, path / "checkpoints"):
        found = CheckpointFolder(folder).scan()
        if not found:
            continue
        newest, *others = found
        valid = [each for each in others if each.manifest is not None]
        older = f"; name another, such as {valid[0].path}" if valid else ""
        if newest.manifest is None:  # which weights to begin with instead is not ours to say
            raise CheckpointError(
                f"init_from: the newest step of {folder} is not valid: {newest.problem}{older}"
            )
        return _ZrunStep(newest.path, world, older)
    raise CheckpointError(
        f"init_from: {path} holds neither safetensors files nor a checkpoint of zrun"
    )


def _files_of_index(index: Path) -> list[Path]:
    """Return the files of a sharded checkpoint of `transformers`."""
    try:
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise CheckpointError(f"init_from: {index} is no index of safetensors files") from None
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise CheckpointError(
                f"init_from: {index} names a file outside of its folder: {name!r}"
            )
        if not (index.parent / name).is_file():
            raise CheckpointError(
                f"init_from: {index.parent / name} is missing, which {index.name} names"
            )
    return [index.parent / name for name in names]


class _ZrunStep:
    """A checkpoint of zrun, at any layout."""

    def __init__(self, path: Path, world: Group, advice: str = "") -> None:
        manifest = read_step(path)
        self._advice = advice
        self._reader = Reader(open_index(path, manifest), world)
        known = by_name(manifest.tensors)
        self.shapes = {name: info.shape for name, info in known.items()}

    def fill(self, targets: Sequence[Target]) -> None:
        try:
            self._reader.fill(targets)
        except CheckpointError as error:
            raise CheckpointError(f"init_from: {error}{self._advice}") from None
