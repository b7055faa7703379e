"""Resuming: all ranks load the newest checkpoint that every one of them can read whole."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from zrun_core.checkpoint.folder import CheckpointFolder, read_step
from zrun_core.checkpoint.manifest import Manifest
from zrun_core.checkpoint.model_state import CheckpointState
from zrun_core.checkpoint.reader import Reader
from zrun_core.checkpoint.step_index import StepIndex, open_index
from zrun_core.distributed import rng
from zrun_core.distributed.comm import Comm
from zrun_core.distributed.transport import Group
from zrun_core.errors import CheckpointError
from zrun_core.spine.spec import ResumeSpec


class SavedStreams(NamedTuple):
    """The random streams of one rank, as `rng.Streams.capture` returns them."""

    tensors: dict[str, torch.Tensor]
    numbers: dict[str, Any]


@dataclass(frozen=True)
class Resumed:
    """A checkpoint that was read.

    Attributes:
        skipped: newer steps that could not be believed, and why.
        streams: this rank's random streams; none if no such rank has saved.
    """

    path: Path
    manifest: Manifest
    skipped: dict[int, str]
    streams: SavedStreams | None

    def in_words(self) -> list[str]:
        """Return lines for the user."""
        lines = []
        for step, problem in sorted(self.skipped.items()):
            lines.append(f"step {step} is skipped: {problem}")
        return [*lines, f"continues after step {self.manifest.step} of {self.path}"]


_OTHER_STEP = "name another with --resume PATH or --resume STEP, or start over with --fresh"


def load_newest(
    source: ResumeSpec,
    state: CheckpointState,
    comm: Comm,
    world: Group,
    *,
    advice: str = _OTHER_STEP,
) -> Resumed:
    """Fill the model from the newest valid step of `source`, or from the one that it names.

    Collective.

    Args:
        source: a folder of checkpoints, and a step of it if one is named.
        comm, world: the ranks that have to agree on the step.
        advice: what the user can do if no step is valid; "" adds nothing.

    Raises:
        CheckpointError: none is valid, the named one is not, or it is of another model.
    """
    agree = partial(_agree, comm, world)
    first = agree(lambda: candidates(source) if world.index == 0 else "")[0]
    if first.startswith("!"):
        raise CheckpointError(first[1:])
    found = json.loads(first)
    skipped = {int(step): problem for step, problem in found["skipped"].items()}
    for step, name in found["paths"]:
        candidate = _Candidate(Path(name), state, world, comm.device)
        answers = agree(candidate.look)
        problem = _first_problem(answers)
        if problem is None and len(set(answers)) > 1:
            problem = f"{name}: ranks read different manifests"
        if problem is None:
            state.check(candidate.manifest)  # the same on every rank
            problem = _first_problem(agree(candidate.load))
        if problem is None:
            return Resumed(candidate.path, candidate.manifest, skipped, candidate.streams)
        skipped[step] = problem
    raise CheckpointError(_none_valid(source, skipped, advice))


def _agree(comm: Comm, world: Group, action: Callable[[], str]) -> list[str]:
    """Exchange what `action` returns on each rank; a message after "!" where it could not."""
    try:
        answer = action()
    except CheckpointError as error:
        answer = f"!{error}"
    by_rank = comm.all_gather_bytes(answer.encode(), world, name="resume")
    return [each.decode() for each in by_rank]


class _Candidate:
    """A step that may be the one to go on from.

    Attributes:
        manifest: once `look` has returned.
        streams: of this rank, once `load` has returned.
    """

    manifest: Manifest
    _index: StepIndex

    def __init__(
        self, path: Path, state: CheckpointState, world: Group, device: torch.device
    ) -> None:
        self.path = path
        self.streams: SavedStreams | None = None
        self._state = state
        self._world = world
        self._device = device

    def look(self) -> str:
        """Read the manifest, and this rank's part of the records: all of them together, once.

        Returns:
            The digest of the manifest, which must be the same on every rank.
        """
        own = slice(self._world.index, None, self._world.size)
        self.manifest = read_step(self.path, own)
        self._index = open_index(self.path, self.manifest)
        Reader(self._index, self._world).check_files()
        return self.manifest.digest

    def load(self) -> str:
        """Fill the model, and verify what no rank needs."""
        reader = Reader(self._index, self._world)
        self.streams = _own_streams(reader, self.manifest, self._world, self._device)
        self._state.load(self._index)
        return ""


def _own_streams(
    reader: Reader,
    manifest: Manifest,
    world: Group,
    device: torch.device,
) -> SavedStreams | None:
    """Return the streams of this rank, if there was such a rank; verify those that none needs.

    Raises:
        CheckpointError: it cannot be read, or is not what a rank draws from.
    """
    reader.check_of_ranks("rng/", first=world.size)
    own = reader.rank_state(world.index)
    if own is None:
        return None
    prefix = f"rng/{world.index}/"
    tensors = reader.rank_tensors(world.index, prefix)
    named = {name.removeprefix(prefix): data for name, data in tensors.items()}
    streams = SavedStreams(named, own.rng)
    rng.check(*streams, device)
    return streams


def candidates(source: ResumeSpec) -> str:
    """Return the steps worth trying, newest first, and those that are not, as JSON. For rank 0."""
    folder = CheckpointFolder(Path(source.folder))
    paths = []
    skipped = {}
    for found in folder.scan():
        if source.step is not None and found.step != source.step:
            continue
        if found.manifest is not None:
            paths.append((found.step, str(found.path)))
        else:
            skipped[found.step] = found.problem or "it cannot be read"
    return json.dumps({"paths": paths, "skipped": skipped})


def _first_problem(answers: list[str]) -> str | None:
    for rank, answer in enumerate(answers):
        if answer.startswith("!"):
            return f"{answer[1:]} (rank {rank})"
    return None


def _none_valid(source: ResumeSpec, skipped: dict[int, str], advice: str) -> str:
    what = f"step {source.step}" if source.step is not None else "a valid checkpoint"
    reasons = "".join(
        f"\n  step {step}: {problem}" for step, problem in sorted(skipped.items(), reverse=True)
    )
    text = f"{source.folder} does not hold {what}{reasons}"
    return f"{text}\n{advice}" if advice else text


def restore_streams(resumed: Resumed, streams: rng.Streams) -> None:
    """Go on with this rank's random streams; those of a rank that did not exist then are new."""
    if resumed.streams is not None:
        streams.restore(*resumed.streams)
    else:
        streams.begin_late(resumed.manifest.step)
