"""Models that a script saves together, as one state whose tensors are named `<model>.<tensor>`.

A single model is called "": its tensors keep their names, and its steps are like those of a job.
A model need not have an optimizer: an average of weights, a teacher, a reference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from zrun_core.checkpoint.divisions import Share
from zrun_core.checkpoint.manifest import Manifest, PartOf
from zrun_core.checkpoint.manifest_parts import TensorInfo
from zrun_core.checkpoint.model_files import ModelFiles
from zrun_core.checkpoint.model_names import is_of, join, join_of_rank, strip
from zrun_core.checkpoint.model_state import ModelState
from zrun_core.checkpoint.shard_file import WriteItem
from zrun_core.checkpoint.step_index import OneModel, StepIndex
from zrun_core.errors import CheckpointError
from zrun_core.zero.sharded_model import ShardedModel

# What a user can do about an error, in the words of a loop. Those of a job are the defaults.
_OTHER_MODEL = "give load() the model that was saved"
_WEIGHTS_ONLY = "load(..., weights_only=True) takes its values alone"


class SeveralModels:
    """States of several models as those of one: see `CheckpointState`, which it is."""

    def __init__(self, models: Mapping[str, ShardedModel], *, weights_only: bool = False) -> None:
        """
        Args:
            models: by name; a single one may be called "".
            weights_only: `check` and `load` leave optimizers alone, and the checkpoint may have
                more models.
        """
        self._weights_only = weights_only
        self._states = {
            name: ModelState(sharded, weights_only=weights_only, advice=_OTHER_MODEL)
            for name, sharded in models.items()
        }

    @property
    def layout(self) -> dict[str, Any]:
        """Layout of each model by name; that of the only model, as a job has it."""
        layouts = {name: state.layout for name, state in self._states.items()}
        return layouts.get("", {"models": layouts})

    @property
    def describes_part(self) -> bool:
        return all(state.describes_part for state in self._states.values())

    @property
    def order(self) -> Sequence[str]:
        return ()  # each rank has all tensors

    # Saving

    def tensors(self) -> list[TensorInfo]:
        return [
            _renamed(info, partial(join, name))
            for name, state in self._states.items()
            for info in state.tensors()
        ]

    def write_items(self) -> list[WriteItem]:
        return [
            replace(part, tensor=join(name, part.tensor))
            for name, state in self._states.items()
            for part in state.write_items()
        ]

    def shares(self) -> list[Share]:
        return [
            share.renamed(partial(join, name))
            for name, state in self._states.items()
            for share in state.shares()
        ]

    def scalars(self) -> dict[str, dict[str, float]]:
        return {
            join(name, tensor): scalars
            for name, state in self._states.items()
            for tensor, scalars in state.scalars().items()
        }

    def buffer_digests(self) -> dict[str, str]:
        return {
            join(name, buffer): digest
            for name, state in self._states.items()
            for buffer, digest in state.buffer_digests().items()
        }

    def own_buffers(self, first: Mapping[str, str]) -> list[WriteItem]:
        found = []
        for name, state in self._states.items():
            own = {strip(name, key): digest for key, digest in first.items() if is_of(name, key)}
            found += [
                replace(part, tensor=join_of_rank(name, part.tensor))
                for part in state.own_buffers(own)
            ]
        return found

    def before_update(self, call: Callable[[], None]) -> None:
        for state in self._states.values():
            state.before_update(call)

    def model_files(self) -> ModelFiles:
        if "" not in self._states:
            return ModelFiles()
        return self._states[""].model_files()

    def reducer_state(self) -> dict[str, Any]:
        learnt = {name: state.reducer_state() for name, state in self._states.items()}
        return learnt.get("", learnt)

    # Loading

    def check(self, manifest: Manifest) -> None:
        saved = manifest.models
        given = set(self._states)
        fits = given == set(saved)
        if self._weights_only:
            fits = given <= set(saved)
        if not fits:
            raise CheckpointError(
                f"the checkpoint is of {_listed(saved)}, "
                f"and load() was given {_listed(self._states)}"
            )
        for name, state in self._states.items():
            part = part_of(manifest, name)
            state.check_tensors(part)
            if not self._weights_only:
                _check_optimizer(name, saved[name].get("optimizer"), state.layout["optimizer"])
            state.check_optimizer(part)

    def load(self, step: StepIndex) -> None:
        for name, state in self._states.items():
            state.load(OneModel(step, part_of(step.manifest, name), name) if name else step)


def part_of(manifest: Manifest, name: str) -> Manifest:
    """Return what a manifest says of the model `name`, with the model's own tensor names."""
    if not name:
        return manifest
    return replace(
        manifest,
        layout=manifest.models[name],
        tensors=[
            _renamed(info, partial(strip, name))
            for info in manifest.tensors
            if is_of(name, info.name)
        ],
        divisions=[],
        source=PartOf(manifest, name),
    )


def _check_optimizer(name: str, saved: str | None, here: str | None) -> None:
    """Refuse another optimizer than a model had when it was saved, or one where it had none.

    Raises:
        CheckpointError: it says what to do.
    """
    who = name or "the model"
    if here == saved:
        return
    if saved is None:
        raise CheckpointError(
            f"{who} had no optimizer when it was saved, and has {here} here: {_WEIGHTS_ONLY}"
        )
    if here is None:
        raise CheckpointError(
            f"{who} has no optimizer, and had {saved} when it was saved: "
            f"call zrun_core.optimizer first, or {_WEIGHTS_ONLY}"
        )
    raise CheckpointError(
        f"{who} had the optimizer {saved} when it was saved, and has {here} here: "
        f"make it with {saved}, or {_WEIGHTS_ONLY}"
    )


def _renamed(info: TensorInfo, rename: Callable[[str], str]) -> TensorInfo:
    return replace(info, name=rename(info.name), aliases=tuple(map(rename, info.aliases)))


def _listed(names: Iterable[str]) -> str:
    return "one model" if list(names) == [""] else f"models called {', '.join(names)}"
