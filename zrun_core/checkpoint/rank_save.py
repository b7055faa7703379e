"""One save on one rank: what is written by its thread, and what rank 0's thread makes of all."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from zrun_core.checkpoint.best import Best
from zrun_core.checkpoint.folder import CheckpointFolder
from zrun_core.checkpoint.manifest import (
    OTHERS,
    FileInfo,
    Fragment,
    Manifest,
    SavedRank,
    TensorInfo,
    merge_tensors,
    tensors_from_json,
)
from zrun_core.checkpoint.model_files import ModelFiles
from zrun_core.checkpoint.shard_file import WriteItem, write_plain, write_shard
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
        layout, tensors: of this rank's part of the model; on rank 0 they go into the manifest.
        order: of the tensors of all parts.
        start: by the monotonic clock.
        writing: this rank's file; its result is the rank's report, or says why there is no file.
        prunes: whether older steps are removed after it.
        best: the evaluation of this step, if it is the best so far.
        beside: on rank 0, the files without tensors.
        stall_s: how long training has waited for it.
        reports: of all ranks, once every rank has written.
        committing: on rank 0, once it has the reports.
    """

    step: int
    reason: str
    tmp: Path
    progress: dict[str, Any]
    layout: dict[str, Any]
    tensors: Sequence[TensorInfo]
    order: Sequence[str]
    start: float
    writing: Future[bytes]
    prunes: bool
    best: Best | None = None
    beside: ModelFiles = field(default_factory=ModelFiles)
    stall_s: float = 0.0
    reports: list[bytes] | None = None
    committing: Future[Commit] | None = None


def write_rank(
    path: Path, items: Sequence[WriteItem], report: dict[str, Any], late: LateCopies
) -> bytes:
    """Write a rank's file, in its thread.

    Args:
        path: of the file.
        items: what is in it.
        report: what the rank tells the others beside that.
        late: the copies that are to be made first; it is told when everything is read.

    Returns:
        What the rank tells the others, a JSON object; or in words, why there is no file.
    """
    try:
        late.make()
        file, fragments = write_shard(path, items, late.made.set)
    except Exception as error:
        return describe_error(error).encode()
    finally:
        late.made.set()
    written = {"file": asdict(file), "fragments": [asdict(each) for each in fragments]}
    return json.dumps({**written, **report}).encode()


def commit_step(
    save: RankSave, reports: Sequence[bytes], folder: CheckpointFolder, run: RunInfo
) -> Commit:
    """Make the files of all ranks a step, in rank 0's thread.

    Args:
        save: what is saved.
        reports: of all ranks, as `write_rank` returns them.
        folder: that the step will be in.
        run: what the manifest says of it.
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
    for report in reports:
        scalars |= report["scalars"]
    others = [report for report in reports if "layout" in report]
    layout = save.layout
    if others:
        layout = layout | {OTHERS: [report["layout"] for report in others]}
    tensors = merge_tensors(
        [save.tensors, *(tensors_from_json(report["tensors"]) for report in others)], save.order
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
        tensors=[replace(info, scalars=scalars.get(info.name, {})) for info in tensors],
        fragments=[Fragment(**each) for report in reports for each in report["fragments"]],
        rank_states=[SavedRank(**report["own"]) for report in reports],
        model=save.beside.model,
    )


def describe_error(error: Exception) -> str:
    """Return the message of an error of ours, or the name and message of any other one."""
    if isinstance(error, ZrunError):
        return str(error)
    return f"{type(error).__name__}: {error}"
