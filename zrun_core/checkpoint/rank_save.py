"""One save on one rank: what is written by its thread, and what rank 0's thread makes of all."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from zrun_core.checkpoint.best import Best
from zrun_core.checkpoint.divisions import Share
from zrun_core.checkpoint.folder import CheckpointFolder
from zrun_core.checkpoint.manifest import (
    Manifest,
    divisions_from_json,
    merge_tensors,
    tensors_from_json,
)
from zrun_core.checkpoint.manifest_fields import RANK, VALUE
from zrun_core.checkpoint.manifest_parts import (
    OTHERS,
    Division,
    FileInfo,
    SavedRank,
    TensorInfo,
)
from zrun_core.checkpoint.model_files import ModelFiles
from zrun_core.checkpoint.shard_file import DTYPES, WriteItem, write_plain, write_shard
from zrun_core.checkpoint.snapshot import LateCopies
from zrun_core.errors import SaveError, ZrunError


@dataclass(frozen=True)
class RunInfo:
    """The run, as a manifest describes it."""

    run_id: str
    job: dict[str, Any]
    versions: dict[str, str]


class Commit(NamedTuple):
    """The result of a commit, on rank 0.

    Attributes:
        error: why the step is not there; "": it is.
        warning: what went wrong after it was there.
    """

    error: str = ""
    warning: str = ""
    num_bytes: int = 0


@dataclass
class RankSave:
    """A save under way.

    Attributes:
        order: of the tensors of all parts.
        start: by the monotonic clock.
        writing: this rank's file; its result is the rank's report, or says why there is no file.
        prunes: whether older steps are removed after it.
        best: the evaluation of this step, if it is the best so far.
        beside: on rank 0, the files without tensors.
        stall_s: how long training has waited for it.
        is_written: every rank has written, and has told rank 0 of it.
        committing: on rank 0, once it has the reports.
    """

    step: int
    reason: str
    tmp: Path
    progress: dict[str, Any]
    order: Sequence[str]
    start: float
    writing: Future[bytes]
    prunes: bool
    best: Best | None = None
    beside: ModelFiles = field(default_factory=ModelFiles)
    stall_s: float = 0.0
    is_written: bool = False
    committing: Future[Commit] | None = None


@dataclass(frozen=True)
class RankPart:
    """What a rank writes, and what it tells rank 0 of it.

    Attributes:
        items: in its file.
        state: for the record in its file.
        shares: which parts of units the items are, beside those of state RANK.
        scalars: states of the optimizer that are one number, by tensor.
        layout, tensors: of its part of the model, where it describes that for all that have it.
    """

    items: Sequence[WriteItem]
    state: SavedRank
    shares: Sequence[Share]
    scalars: dict[str, dict[str, float]]
    layout: dict[str, Any] | None = None
    tensors: Sequence[TensorInfo] = ()

    def check(self) -> None:
        """Check that the items are what readers will derive from the shares.

        Raises:
            ValueError: they are not, by a mistake of ours.
        """
        states = self._states()
        derived = {
            (span.tensor, state, span.start, span.stop)
            for share in self.shares
            for span in share.spans()
            for state in states.get(span.tensor, {VALUE: ""})
        }
        written = {
            (item.tensor, item.state, item.start, item.stop)
            for item in self.items
            if item.state != RANK
        }
        if derived != written:
            example = min(derived ^ written)
            raise ValueError(f"what is written is not what is described: {example}")

    def report(self, file: FileInfo) -> bytes:
        """Return what rank 0 needs for the manifest, a JSON object: short.

        Each part of it comes from one rank: of a division, from its first; of a tensor, from the
        one that writes its first element.
        """
        firsts = {item.tensor for item in self.items if item.state == VALUE and item.start == 0}
        states = self._states()
        told: dict[str, Any] = {
            "file": asdict(file),
            "shares": [[share.identity, share.index] for share in self.shares],
            "divisions": {
                share.identity: {
                    "copies": share.copies,
                    "shards": share.shards,
                    "units": [asdict(unit) for unit in share.units],
                }
                for share in self.shares
                if share.index == 0
            },
            "states": {name: states[name] for name in sorted(firsts)},
            "scalars": {name: self.scalars[name] for name in self.scalars if name in firsts},
        }
        if self.layout is not None:
            told["layout"] = self.layout
            told["tensors"] = [asdict(info) for info in self.tensors]
        return json.dumps(told, separators=(",", ":")).encode()

    def _states(self) -> dict[str, dict[str, str]]:
        """Return the formats of the states of each tensor."""
        found: dict[str, dict[str, str]] = defaultdict(dict)
        for item in self.items:
            if item.state != RANK:
                dtype = item.data.dtype
                found[item.tensor][item.state] = DTYPES.get(dtype, str(dtype))  # or it is refused
        return found


def write_rank(path: Path, part: RankPart, late: LateCopies) -> bytes:
    """Write a rank's file, in its thread.

    Args:
        late: the copies that are to be made first; it is told when everything is read.

    Returns:
        What the rank tells rank 0, a JSON object; or in words, why there is no file.
    """
    try:
        late.make()
        part.check()
        file = write_shard(path, part.items, part.state, late.made.set)
        return part.report(file)
    except Exception as error:
        return describe_error(error).encode()
    finally:
        late.made.set()


def commit_step(
    save: RankSave, reports: Sequence[bytes], folder: CheckpointFolder, run: RunInfo
) -> Commit:
    """Make the files of all ranks a step, in rank 0's thread.

    Args:
        reports: of all ranks, as `write_rank` returns them.
    """
    try:
        beside = [
            write_plain(save.tmp / name, content) for name, content in save.beside.files.items()
        ]
        manifest = _make_manifest(save, [json.loads(text) for text in reports], beside, run)
        warning = folder.commit(save.tmp, manifest)
    except Exception as error:
        folder.discard(save.tmp)
        return Commit(error=describe_error(error))
    if warning:  # nothing older is removed while this step may not be on the disk
        return Commit(warning=warning, num_bytes=manifest.num_bytes)
    try:
        folder.point_latest(save.step)
        if save.best is not None:
            folder.point_best(save.best)
    except (SaveError, OSError) as error:
        return Commit(warning=str(error), num_bytes=manifest.num_bytes)
    return Commit(num_bytes=manifest.num_bytes)


def _make_manifest(
    save: RankSave, reports: Sequence[dict[str, Any]], beside: Sequence[FileInfo], run: RunInfo
) -> Manifest:
    scalars: dict[str, dict[str, float]] = {}
    states: dict[str, dict[str, str]] = {}
    for report in reports:
        scalars |= report["scalars"]
        states |= report["states"]
    layout, *others = [report["layout"] for report in reports if "layout" in report]
    if others:
        layout = layout | {OTHERS: others}
    tensors = merge_tensors(
        [tensors_from_json(report["tensors"]) for report in reports if "tensors" in report],
        save.order,
    )
    return Manifest(
        step=save.step,
        run_id=run.run_id,
        versions=run.versions,
        job=run.job,
        world_size=len(reports),
        layout=layout,
        progress=save.progress,
        files=[*(FileInfo(**report["file"]) for report in reports), *beside],
        tensors=[
            replace(info, scalars=scalars.get(info.name, {}), states=states.get(info.name, {}))
            for info in tensors
        ],
        divisions=_divisions(reports),
        model=save.beside.model,
    )


def _divisions(reports: Sequence[dict[str, Any]]) -> list[Division]:
    """Return the divisions that ranks have told their shares of.

    Raises:
        ValueError: of one, a part was written twice or not at all.
    """
    ranks: dict[str, dict[int, int]] = defaultdict(dict)  # by division, and part of it
    described: dict[str, dict[str, Any]] = {}
    for rank, report in enumerate(reports):
        described |= report["divisions"]
        for identity, index in report["shares"]:
            other = ranks[identity].setdefault(index, rank)
            if other != rank:
                raise ValueError(f"ranks {other} and {rank} have written the same")
    found = []
    for identity, by_index in ranks.items():
        told = described.get(identity, {"shards": 0, "copies": 0})
        size = told["shards"] * told["copies"]
        if sorted(by_index) != list(range(size)):
            few = sorted(by_index.values())[:9]
            raise ValueError(f"what ranks {few} have written of units is not all of them")
        written_by = [by_index[index] for index in range(size)]
        found.append({"ranks": written_by, "copies": told["copies"], "units": told["units"]})
    return divisions_from_json(found)


def describe_error(error: Exception) -> str:
    """Return the message of an error of ours, or the name and message of any other one."""
    if isinstance(error, ZrunError):
        return str(error)
    return f"{type(error).__name__}: {error}"
