"""Checkpoints of a user's own loop: models, optimizers, random streams, and what the user adds."""

from __future__ import annotations

import json
import os
import uuid
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError
from torch import nn

from zrun_core.checkpoint.checkpointer import Checkpointer, versions
from zrun_core.checkpoint.folder import CheckpointFolder
from zrun_core.checkpoint.folder_lock import hold
from zrun_core.checkpoint.rank_save import RunInfo
from zrun_core.checkpoint.resume import Resumed, load_newest, restore_streams
from zrun_core.checkpoint.several_models import SeveralModels
from zrun_core.errors import CheckpointError, PeerError, SaveError, UserCodeError
from zrun_core.guards.replicas import ReplicaGuard
from zrun_core.library import arguments
from zrun_core.library.model import ModelHandle
from zrun_core.library.optimizer import Optimizer
from zrun_core.library.run import Run, current
from zrun_core.spine.sections.checkpoint import CheckpointConfig
from zrun_core.spine.spec import ResumeSpec
from zrun_core.zero.sharded_model import ShardedModel

Models = nn.Module | Mapping[str, nn.Module]
_OTHER_FOLDER = "name another folder"  # what a user can do, in the words of a loop
_NO_MODELS = SeveralModels({})


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
        model: a sharded model, or several by name. An optimizer that one has is saved with it; an
            average of weights, a teacher or a reference needs none.
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
    run, handles = _handles(model, "save()")
    text = _as_json(extra)
    step = arguments.whole("save", "step", step, 0, "how many steps were made")
    if busy not in ("wait", "skip"):
        raise UserCodeError(f"save(busy={busy!r}): write wait or skip")
    for name, handle in handles.items():
        if handle.optimizer is not None and handle.loop.num_backwards:
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
    for saver in _savers.values():
        saver.state = _NO_MODELS  # those of other folders may be gone by now
    for handle in handles.values():
        _compare_replicas(handle, step)
    groups = {name: _options(handle) for name, handle in handles.items()}
    progress = {"extra": json.loads(text), "groups": groups}
    checkpointer = _checkpointer(run, path, SeveralModels(_sharded(handles)), keep)
    if checkpointer.last_step == step:
        raise UserCodeError(
            f"save(step={step}): {path} holds that step already: continue to count from the "
            "loaded step"
        )
    run._is_save_asked = False
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
        model: a sharded model, or several by name, as they were saved: with an optimizer where one
            had one.
        step: to load; None: the newest that is valid.
        weights_only: load parameters and buffers. Optimizers and random streams stay as they are.
            Of several models that were saved, some may be given.

    Returns:
        None where the folder holds no step and none was named.

    Raises:
        HangError: not every rank called it.
        CheckpointError: no step is valid, or it is of other models.
        JobError: `folder` or `step` is no such thing.
    """
    path = arguments.folder("load", folder)
    run, handles = _handles(model, "load()")
    if step is not None:
        step = arguments.whole("load", "step", step, 0, "a step that was saved, or None")
    run._meet("load()")
    run._background.finish()
    if path in _savers:  # or a step could go while it is read
        _savers[path].finish_pruning()
    if step is None and not _agreed(run, lambda: _any_step(path)):
        return None
    for handle in handles.values():
        handle.loop.drop_gradients()
        handle.sharded.begin_step()
    states = SeveralModels(_sharded(handles), weights_only=weights_only)
    source = ResumeSpec(folder=str(path), step=step)
    resumed = load_newest(source, states, run._comm, run._mesh(1).world, advice="")
    for number, text in sorted(resumed.skipped.items()):
        if run.is_main:
            warnings.warn(f"step {number} is skipped: {text}", stacklevel=2)
    if not weights_only:
        restore_streams(resumed, run._streams)
        for name, handle in handles.items():
            _set_options(handle, resumed.manifest.progress.get("groups", {}).get(name))
        run._step = resumed.manifest.step
        run._loaded_step = resumed.manifest.step
    _resumed[path] = resumed
    return Loaded(resumed.manifest.step, dict(resumed.manifest.progress.get("extra", {})))


def _handles(model: Models, what: str) -> tuple[Run, dict[str, ModelHandle]]:
    """Return the run, and the models by name; a single one by "".

    Raises:
        UserCodeError: they are not sharded models, or not named so that they can be told apart.
    """
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
    return next(iter(handles.values())).run, handles


def _sharded(handles: Mapping[str, ModelHandle]) -> dict[str, ShardedModel]:
    return {name: handle.sharded for name, handle in handles.items()}


def _compare_replicas(handle: ModelHandle, step: int) -> None:
    """Compare what several ranks hold of a model, unless its optimizer was told not to."""
    optimizer = handle.optimizer
    if optimizer is None:
        ReplicaGuard(handle.sharded).check(step, {})
    elif isinstance(optimizer, Optimizer) and optimizer._replica_every is not None:
        optimizer.check_replicas()


def _as_json(extra: Mapping[str, Any] | None) -> str:
    try:
        return json.dumps(dict(extra or {}), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise UserCodeError(f"save(extra=...): it must be JSON: {error}") from None


def _options(handle: ModelHandle) -> list[dict[str, Any]]:
    """Return the options of the optimizer's groups that JSON can hold; none without one."""
    if handle.optimizer is None:
        return []
    kinds = (bool, int, float, str, list, tuple, type(None))
    return [
        {key: value for key, value in group.items() if key != "params" and isinstance(value, kinds)}
        for group in handle.optimizer.param_groups
    ]


def _set_options(handle: ModelHandle, saved: Sequence[Mapping[str, Any]] | None) -> None:
    if saved is None or handle.optimizer is None:  # by a job, or without one
        return
    groups = handle.optimizer.param_groups
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


def _checkpointer(run: Run, path: Path, states: SeveralModels, keep: int) -> Checkpointer:
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
