"""Checkpoints of a user's own loop: models, optimizers, random streams, and what the user adds."""

from __future__ import annotations

import json
import os
import uuid
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError
from torch import nn

from zrun_core.checkpoint.checkpointer import Checkpointer, versions
from zrun_core.checkpoint.folder import CheckpointFolder
from zrun_core.checkpoint.folder_lock import hold
from zrun_core.checkpoint.manifest import Manifest, TensorInfo
from zrun_core.checkpoint.manifest_fields import RANK
from zrun_core.checkpoint.model_files import ModelFiles
from zrun_core.checkpoint.model_state import ModelState
from zrun_core.checkpoint.rank_save import RunInfo
from zrun_core.checkpoint.resume import Resumed, load_newest, restore_streams
from zrun_core.checkpoint.shard_file import WriteItem
from zrun_core.errors import CheckpointError, PeerError, SaveError, UserCodeError
from zrun_core.library import arguments
from zrun_core.library.model import ModelHandle
from zrun_core.library.optimizer import Optimizer
from zrun_core.library.run import Run, current
from zrun_core.spine.sections.checkpoint import CheckpointConfig
from zrun_core.spine.spec import ResumeSpec

Models = nn.Module | Mapping[str, nn.Module]
# What a user can do about an error, in the words of a loop. Those of a job are the defaults.
_OTHER_FOLDER = "name another folder"
_OTHER_MODEL = "give load() the model that was saved"


@dataclass(frozen=True)
class Loaded:
    """Result of `load`, beside the state that it filled in.

    Attributes:
        step: that was saved.
        extra: as `save` was given it.
    """

    step: int
    extra: dict[str, Any] = field(default_factory=dict)


def save(
    folder: str | os.PathLike[str],
    model: Models,
    *,
    step: int,
    extra: Mapping[str, Any] | None = None,
    keep: int = 3,
    wait: bool = True,
    busy: Literal["wait", "skip"] = "wait",
) -> bool:
    """Save one or more models as step `step` of a folder. Every rank calls it, between two steps.

    When it returns, the step is on disk with its digests, or an error was raised and the older
    steps are untouched. With `wait=False` it returns as soon as the state is copied in host memory.
    The copy is written in the background; optimizer steps move it on without waiting, and the one
    at which it is on disk commits it. An error is raised by the next `step`, `save`, `load` or
    `finish`. Call `finish` before the script ends.

    Args:
        folder: of the checkpoints; it is made, and locked for the life of this process.
        model: a sharded model with its optimizer, or several by name.
        extra: anything that JSON can say; the first rank's counts.
        keep: newest valid steps that are kept, 2 or more.
        wait: until the step is on disk.
        busy: "wait" or "skip": a save that does not wait, while the one before is being written,
            waits for that one, or is skipped with a warning.

    Returns:
        Whether the step is saved, or being saved; not if it was skipped.

    Raises:
        HangError: not every rank called it; it names those that did not.
        SaveError: it, or the one under way, could not be saved. On the other ranks a PeerError.
        DivergedError: ranks hold different values of what must be equal, so nothing is saved.
        UserCodeError: gradients wait for their step, or `extra` is not JSON.
        JobError: `folder` or `step` is no such thing.
    """
    path = arguments.folder("save", folder)
    run, states = _states(model, "save()")
    text = _as_json(extra)
    step = arguments.whole("save", "step", step, 0, "how many steps were made")
    if busy not in ("wait", "skip"):
        raise UserCodeError(f"save(busy={busy!r}): write wait or skip")
    for name, handle in states.handles.items():
        if handle.loop.num_backwards:
            who = name or "the model"
            raise UserCodeError(
                f"save(): {who} has gradients that no step has used: "
                "call step() or zero_grad() first"
            )
    run._meet("save()")
    under_way = run._background.step
    if not wait and busy == "skip" and under_way is not None:
        if run.is_main:
            _emit(warning=f"step {step} is not saved: step {under_way} is still being written")
        return False
    run._background.finish()
    for handle in states.handles.values():
        if isinstance(handle.optimizer, Optimizer) and handle.optimizer._replica_every is not None:
            handle.optimizer.check_replicas()
    groups = {name: _options(handle) for name, handle in states.handles.items()}
    progress = {"extra": json.loads(text), "groups": groups}
    checkpointer = _checkpointer(run, path, states, keep)
    if checkpointer.last_step == step:
        raise UserCodeError(
            f"save(step={step}): {path} holds that step already: continue to count from the "
            "loaded step"
        )
    run._background.save(checkpointer, step, progress, wait=wait)
    return True


def finish() -> None:
    """Wait until no save is under way and older steps are removed. Every rank calls it at the end.

    Raises:
        HangError: not every rank called it.
        SaveError: the save could not be made. On the other ranks a PeerError.
    """
    run = current()
    run._meet("finish()")
    run._background.finish()
    for saver in _savers.values():
        saver.finish_pruning()


def load(
    folder: str | os.PathLike[str],
    model: Models,
    *,
    step: int | None = None,
    weights_only: bool = False,
) -> Loaded | None:
    """Load models and optimizers from the newest valid step of a folder, or from `step`.

    Every rank calls it. Stage, precision and number of ranks may be others than when it was saved.
    Each rank goes on with its own random streams; the options of the optimizer's groups, such as
    the learning rate, are those that were saved.

    Args:
        folder: of the checkpoints.
        model: a sharded model with its optimizer, or several by name, as they were saved.
        step: to load; None: the newest that is valid.
        weights_only: load parameters and buffers. Models need no optimizer, and one that they have
            stays as it is, as do random streams. Of several models that were saved, some may be
            given.

    Returns:
        None where the folder holds no step and none was named.

    Raises:
        HangError: not every rank called it.
        CheckpointError: no step is valid, or it is of other models.
        JobError: `folder` or `step` is no such thing.
    """
    path = arguments.folder("load", folder)
    run, states = _states(model, "load()", weights_only=weights_only)
    if step is not None:
        step = arguments.whole("load", "step", step, 0, "a step that was saved, or None")
    run._meet("load()")
    run._background.finish()
    if path in _savers:  # or a step could go while it is read
        _savers[path].finish_pruning()
    if step is None and not _agreed(run, lambda: _any_step(path)):
        return None
    for handle in states.handles.values():
        handle.loop.drop_gradients()
        handle.sharded.begin_step()
    source = ResumeSpec(folder=str(path), step=step)
    resumed = load_newest(source, states, run._comm, run._mesh(1).world, advice="")
    for number, text in sorted(resumed.skipped.items()):
        if run.is_main:
            warnings.warn(f"step {number} is skipped: {text}", stacklevel=2)
    if not weights_only:
        restore_streams(resumed, run._streams)
        for name, handle in states.handles.items():
            _set_options(handle, resumed.manifest.progress.get("groups", {}).get(name))
        run._step = resumed.manifest.step
        run._loaded_step = resumed.manifest.step
    _resumed[path] = resumed
    return Loaded(resumed.manifest.step, dict(resumed.manifest.progress.get("extra", {})))


class States:
    """States of several models as those of one, with tensors named `<model>.<tensor>`."""

    def __init__(self, handles: Mapping[str, ModelHandle], *, weights_only: bool = False) -> None:
        self.handles = dict(handles)
        self._weights_only = weights_only
        self._states = {
            name: ModelState(handle.sharded, weights_only=weights_only, advice=_OTHER_MODEL)
            for name, handle in handles.items()
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
            replace(
                info,
                name=_join(name, info.name),
                aliases=tuple(_join(name, other) for other in info.aliases),
            )
            for name, state in self._states.items()
            for info in state.tensors()
        ]

    def write_items(self) -> list[WriteItem]:
        return [
            replace(part, tensor=_join(name, part.tensor))
            for name, state in self._states.items()
            for part in state.write_items()
        ]

    def scalars(self) -> dict[str, dict[str, float]]:
        return {
            _join(name, tensor): scalars
            for name, state in self._states.items()
            for tensor, scalars in state.scalars().items()
        }

    def buffer_digests(self) -> dict[str, str]:
        return {
            _join(name, buffer): digest
            for name, state in self._states.items()
            for buffer, digest in state.buffer_digests().items()
        }

    def own_buffers(self, first: Mapping[str, str]) -> list[WriteItem]:
        found = []
        for name, state in self._states.items():
            own = {_strip(name, key): digest for key, digest in first.items() if _is_of(name, key)}
            found += [
                replace(part, tensor=_rejoin(name, part.tensor)) for part in state.own_buffers(own)
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
        saved = manifest.layout.get("models", {"": manifest.layout})
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
            state.check(_only(manifest, name))

    def load(self, folder: Path, manifest: Manifest) -> None:
        for name, state in self._states.items():
            state.load(folder, _only(manifest, name))


def _only(manifest: Manifest, name: str) -> Manifest:
    """Return the part of a manifest that concerns one model, with the model's own tensor names."""
    if not name:
        return manifest
    fragments = []
    for fragment in manifest.fragments:
        own = _own_name(name, fragment.tensor, is_rank_state=fragment.state == RANK)
        if own is not None:
            fragments.append(replace(fragment, tensor=own))
    return replace(
        manifest,
        layout=manifest.layout["models"][name],
        tensors=[
            replace(
                info,
                name=_strip(name, info.name),
                aliases=tuple(_strip(name, other) for other in info.aliases),
            )
            for info in manifest.tensors
            if _is_of(name, info.name)
        ],
        fragments=fragments,
        rank_states=[replace(each, learnt=each.learnt[name]) for each in manifest.rank_states],
    )


def _own_name(name: str, tensor: str, *, is_rank_state: bool) -> str | None:
    """Return the model's own name of a fragment's tensor; None if it is another model's."""
    if not is_rank_state:
        if not _is_of(name, tensor):
            return None
        return _strip(name, tensor)
    kind, rank, rest = tensor.split("/", 2)
    if kind != "buffer":  # of a rank, not of a model
        return tensor
    if not _is_of(name, rest):
        return None
    return f"{kind}/{rank}/{_strip(name, rest)}"


def _join(name: str, tensor: str) -> str:
    return f"{name}.{tensor}" if name else tensor


def _rejoin(name: str, tensor: str) -> str:
    """Return the name of a model's `buffer/<rank>/<name>` among those of several models."""
    kind, rank, rest = tensor.split("/", 2)
    return f"{kind}/{rank}/{_join(name, rest)}"


def _is_of(name: str, tensor: str) -> bool:
    return not name or tensor.startswith(f"{name}.")


def _strip(name: str, tensor: str) -> str:
    return tensor.removeprefix(f"{name}.") if name else tensor


def _listed(names: Sequence[str] | Mapping[str, Any]) -> str:
    return "one model" if list(names) == [""] else f"models called {', '.join(names)}"


def _states(model: Models, what: str, *, weights_only: bool = False) -> tuple[Run, States]:
    models: Any = model
    if isinstance(model, nn.Module):
        models = {"": model}
    if not isinstance(models, Mapping) or not models:
        raise UserCodeError(f"{what}: give a sharded model, or a dict of several by name")
    handles: dict[str, ModelHandle] = {}
    for name, each in models.items():
        handle = ModelHandle.of(each, what)
        if isinstance(model, Mapping) and not (isinstance(name, str) and name.isidentifier()):
            raise UserCodeError(f"{what}: {name!r} cannot name a model: use letters, digits and _")
        twin = next((other for other, known in handles.items() if known is handle), None)
        if twin:
            raise UserCodeError(f"{what}: {twin} and {name} are the same model: name it once")
        handles[name] = handle
        if handle.optimizer is None and not weights_only:
            raise UserCodeError(
                f"{what}: {name or 'the model'} has no optimizer: call zrun_core.optimizer first"
            )
    return next(iter(handles.values())).run, States(handles, weights_only=weights_only)


def _as_json(extra: Mapping[str, Any] | None) -> str:
    try:
        return json.dumps(dict(extra or {}), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise UserCodeError(f"save(extra=...): it must be JSON: {error}") from None


def _options(handle: ModelHandle) -> list[dict[str, Any]]:
    """Return the options of the optimizer's groups that JSON can hold."""
    assert handle.optimizer is not None
    kinds = (bool, int, float, str, list, tuple, type(None))
    return [
        {key: value for key, value in group.items() if key != "params" and isinstance(value, kinds)}
        for group in handle.optimizer.param_groups
    ]


def _set_options(handle: ModelHandle, saved: Sequence[Mapping[str, Any]] | None) -> None:
    assert handle.optimizer is not None
    groups = handle.optimizer.param_groups
    if saved is None:  # by a job
        return
    if len(saved) != len(groups):
        raise CheckpointError(
            f"the optimizer had {len(saved)} groups when it was saved, and has {len(groups)} now"
        )
    for group, options in zip(groups, saved, strict=True):
        for key, value in options.items():
            if not _is_like(group.get(key), value):
                was = repr(str(value)[:40])
                raise CheckpointError(
                    f"the optimizer's {key} is {was} in the checkpoint, {group[key]} here"
                )
        for key, value in options.items():
            group[key] = tuple(value) if isinstance(value, list) else value


def _is_like(now: Any, saved: Any) -> bool:
    """Return whether an option was saved as the kind of value that it is now.

    That is a number, a bool, or several of them; a bool may have been None.
    """
    if isinstance(now, list | tuple) and now:
        return isinstance(saved, list) and len(saved) == len(now) and all(map(_is_like, now, saved))
    if isinstance(now, bool):
        return saved is None or isinstance(saved, bool)
    return not isinstance(now, int | float) or (
        isinstance(saved, int | float) and not isinstance(saved, bool)
    )


def _checkpointer(run: Run, path: Path, states: States, keep: int) -> Checkpointer:
    """Return the checkpointer of a folder, made at its first save, to save these states."""
    try:
        config = CheckpointConfig(keep=keep)
    except ValidationError:
        raise UserCodeError(
            f"save(keep={keep}): write 2 or more, so that a valid step is always there"
        ) from None
    saver = _savers.get(path)
    is_new = saver is None
    if saver is None:
        _refuse(run, _agreed(run, lambda: _try(lambda: hold(path, advice=_OTHER_FOLDER))))
        about = RunInfo(f"script-{uuid.uuid4().hex[:8]}", {}, versions())
        world = run._mesh(1).world
        saver = _savers[path] = Checkpointer(
            CheckpointFolder(path),
            states,
            run._streams,
            config,
            run._comm,
            world,
            about,
            _emit,
        )
    saver.state = states
    saver.config = config
    if is_new or path in _resumed:
        own = _try(lambda: saver.open(_resumed.get(path)))
        _refuse(run, _agreed(run, lambda: own))
        # Its damaged steps are set aside once: their numbers are used again.
        _resumed.pop(path, None)
    return saver


_savers: dict[Path, Checkpointer] = {}  # of this process, by folder
_resumed: dict[Path, Resumed] = {}  # what was loaded from a folder since it was saved to


def _agreed(run: Run, ask: Callable[[], str]) -> str:
    """Return the first rank's answer, on every rank."""
    own = b""
    if run.is_main:
        own = ask().encode()
    return run._comm.all_gather_bytes(own, run._mesh(1).world, name="agree")[0].decode()


def _refuse(run: Run, problem: str) -> None:
    """Raise the first rank's problem, if it has one.

    Raises:
        SaveError: on the first rank.
        PeerError: on the others.
    """
    if not problem:
        return
    if run.is_main:
        raise SaveError(problem)
    raise PeerError("rank 0 cannot save")


def _any_step(path: Path) -> str:
    """Return a text if the folder holds any step; else an empty one."""
    return "some" if CheckpointFolder(path).scan() else ""


def _try(action: Callable[[], object]) -> str:
    try:
        action()
    except SaveError as error:
        return str(error)
    return ""


def _emit(**fields: Any) -> None:
    record = current()._record
    if "warning" in fields:
        record.emit("warning", message=fields["warning"])
        warnings.warn(fields["warning"], stacklevel=2)
    else:
        record.emit("save", **fields)
