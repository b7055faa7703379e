"""Which checkpoint a run goes on from: the newest that every rank can read whole, agreed on by all of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from zrun_core.checkpoint.folder import CheckpointFolder, read_step
from zrun_core.checkpoint.manifest import Manifest
from zrun_core.checkpoint.model_state import CheckpointState
from zrun_core.checkpoint.reader import Reader
from zrun_core.distributed import rng
from zrun_core.distributed.comm import Comm
from zrun_core.distributed.transport import Group
from zrun_core.errors import CheckpointError
from zrun_core.spine.spec import ResumeSpec


class SavedStreams(NamedTuple):
    """Those of one rank, as `rng.Streams.capture` has seen them."""

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
        """What to tell the user."""
        skipped = [
            f"step {step} is skipped: {problem}" for step, problem in sorted(self.skipped.items())
        ]
        return [*skipped, f"goes on after step {self.manifest.step} of {self.path}"]


_OTHER_STEP = "name another with --resume PATH or --resume STEP, or start anew with --fresh"


def load_newest(
    source: ResumeSpec,
    state: CheckpointState,
    comm: Comm,
    world: Group,
    *,
    advice: str = _OTHER_STEP,
) -> Resumed:
    """Fill the model from the newest valid step of `source`, or from the one that it names. Collective.

    Args:
        source: a folder of checkpoints, and a step of it if one is named.
        state: of the model, to be filled.
        comm, world: the ranks that have to agree on the step.
        advice: what the user can do if no step is valid; "" adds nothing.

    Raises:
        CheckpointError: none is valid, the named one is not, or it is of another model.
    """

    def agree(look: Callable[[], str]) -> list[str]:
        try:
            said = look()
        except CheckpointError as error:
            said = f"!{error}"
        return [
            each.decode() for each in comm.all_gather_bytes(said.encode(), world, name="resume")
        ]

    first = agree(lambda: _candidates(source) if world.index == 0 else "")[0]
    if first.startswith("!"):
        raise CheckpointError(first[1:])
    found = json.loads(first)
    skipped = {int(step): problem for step, problem in found["skipped"].items()}
    for step, name in found["paths"]:
        path = Path(name)
        manifests: list[Manifest] = []
        streams: list[SavedStreams | None] = []

        def look(path: Path = path, manifests: list[Manifest] = manifests) -> str:
            manifests.append(read_step(path))
            return manifests[0].to_json()[-40:].decode()  # with its digest

        def load(
            path: Path = path,
            manifests: list[Manifest] = manifests,
            streams: list[SavedStreams | None] = streams,
        ) -> str:
            reader = Reader(path, manifests[0], world)
            reader.check_files()
            streams.append(_own_streams(reader, manifests[0], world, comm.device))
            state.load(path, manifests[0])
            return ""

        problem = _first_problem(said := agree(look))
        if problem is None and len(set(said)) > 1:
            problem = f"{path}: ranks read different manifests"
        if problem is None:
            state.check(manifests[0])  # the same on every rank
            problem = _first_problem(agree(load))
        if problem is None:
            return Resumed(path, manifests[0], skipped, streams[0])
        skipped[step] = problem
    raise CheckpointError(_none_valid(source, skipped, advice))


def _own_streams(
    reader: Reader,
    manifest: Manifest,
    world: Group,
    device: torch.device,
) -> SavedStreams | None:
    """What this rank draws from, if there was such a rank. What nobody reads is verified.

    Raises:
        CheckpointError: it cannot be read, or is not what a rank draws from.
    """
    reader.check_of_ranks("rng/", first=world.size)
    own, prefix = manifest.rank_state(world.index), f"rng/{world.index}/"
    if own is None:
        return None
    tensors = reader.rank_tensors(prefix)
    named = {name.removeprefix(prefix): data for name, data in tensors.items()}
    streams = SavedStreams(named, own.rng)
    rng.check(*streams, device)
    return streams


def _candidates(source: ResumeSpec) -> str:
    """On rank 0: the steps worth trying, newest first, and those that are not, as JSON."""
    folder = CheckpointFolder(Path(source.folder))
    paths, skipped = [], {}
    for found in folder.scan():
        if source.step is not None and found.step != source.step:
            continue
        if found.manifest is not None:
            paths.append((found.step, str(found.path)))
        else:
            skipped[found.step] = found.problem or "it cannot be read"
    return json.dumps({"paths": paths, "skipped": skipped})


def _first_problem(said: list[str]) -> str | None:
    return next(
        (f"{text[1:]} (rank {rank})" for rank, text in enumerate(said) if text.startswith("!")),
        None,
    )


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
