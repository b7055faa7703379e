"""The manifest of a checkpoint: everything about it but the bytes of its tensors, as JSON.

`manifest.json` under the final name of a step's folder is what makes the step complete. It is
believed only after `Manifest.from_json` has found it whole:

    its digest           is that of all the bytes before it
    every value          is of its type and in its range (`manifest_fields`)
    units                tile every tensor, and fragments every file (`manifest_checks`)

Nothing is allocated or opened for that, however large the numbers in it are. Each unit is described
once, and who has written what of it follows (`divisions`); digests and what is a rank's own lie in
the records of the ranks (`record`). So its size hardly grows with the number of ranks.

That is format 2. Format 1 lists every fragment: `format_one` reads it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from functools import cache
from itertools import chain
from typing import Annotated, Any

from pydantic import FailFast, SkipValidation, TypeAdapter

from zrun_core.checkpoint import format_one
from zrun_core.checkpoint.best import Best
from zrun_core.checkpoint.digest import digest
from zrun_core.checkpoint.format_one import ListedManifest, read_listed
from zrun_core.checkpoint.manifest_checks import check_parts
from zrun_core.checkpoint.manifest_fields import (
    MAX_BYTES,
    Count,
    Name,
    NonZero,
    Text,
    Tree,
    exact_keys,
    parse_json,
    read,
    refuse,
)
from zrun_core.checkpoint.manifest_parts import (
    OTHERS,
    Division,
    EarlyStop,
    FileInfo,
    Layout,
    ModelInfo,
    Progress,
    Scaler,
    TensorInfo,
    UnitInfo,
    UnitRun,
)

FORMAT = 2

_TAIL = b',\n"digest":"%s"}\n'
_TAIL_BYTES = len(_TAIL % (b"0" * 32))
_NOT_IN_JSON = ("digest", "source")


@dataclass(frozen=True)
class PartOf:
    """The manifest of several models, of which another is the part that is about one of them."""

    whole: Manifest
    model: str


@exact_keys
@dataclass(frozen=True)
class Manifest:
    """Everything about a checkpoint but the bytes of its tensors.

    Attributes:
        job: the resolved job.
        layout: stage, shard group, precision, optimizer, units: how the first rank's part of the
            model was cut, and under "others", how the parts of others were. Loading does not
            depend on it.
        progress: of a job: counters, data cursor, scaler; of a script: options of the optimizers,
            extras.
        files: those of the ranks in their order, then those without tensors.
        divisions: none in format 1.
        model: None: several models, or an older zrun has saved it.
        digest: of its text, where it was read.
        source: where its fragments are known from; None: from `divisions`.
    """

    step: Count
    run_id: Name
    versions: dict[str, Text]
    job: Tree
    world_size: NonZero
    layout: Layout
    progress: Progress
    files: Annotated[list[FileInfo], FailFast()]
    tensors: Annotated[list[TensorInfo], FailFast()]
    divisions: Annotated[list[Division], FailFast()]
    model: ModelInfo | None = None
    format: Count = FORMAT
    digest: str = field(default="", compare=False)
    source: SkipValidation[ListedManifest | PartOf | None] = field(default=None, compare=False)

    @property
    def num_bytes(self) -> int:
        """Return the size of all files together."""
        return sum(file.num_bytes for file in self.files)

    @property
    def models(self) -> dict[str, dict[str, Any]]:
        """Return how each model was cut, by the names that a script gave them; "": the only one."""
        found: dict[str, dict[str, Any]] = self.layout.get("models", {"": self.layout})
        return found

    @property
    def layouts(self) -> list[dict[str, Any]]:
        """Return how each part of the model was cut, the first rank's first."""
        first = {key: value for key, value in self.layout.items() if key != OTHERS}
        return [first, *self.layout.get(OTHERS, ())]

    @property
    def files_beside(self) -> list[FileInfo]:
        """Return the files without tensors: what transformers needs beside them."""
        return [file for file in self.files if not file.name.endswith(".safetensors")]

    def to_json(self) -> bytes:
        """Return a line per key of the manifest, and per element of its lists.

        The last line holds the digest of all before.

        Raises:
            ValueError: it is of an older format.
        """
        if self.format != FORMAT:
            raise ValueError(f"format {self.format} is read only")
        lines = []
        for each in fields(self):
            if each.name in _NOT_IN_JSON:
                continue
            value = getattr(self, each.name)
            if isinstance(value, list):
                items = ",\n".join(_dump(_plain(item)) for item in value)
                lines.append(f'"{each.name}":[\n{items}\n]' if items else f'"{each.name}":[]')
            else:
                lines.append(f'"{each.name}":{_dump(_plain(value))}')
        body = ("{" + ",\n".join(lines)).encode()
        return body + _TAIL % digest(body).encode()

    @classmethod
    def from_json(cls, text: bytes) -> Manifest:
        """Return the manifest that `text` is, if every part of it can be believed.

        Raises:
            CheckpointError: damaged, of another format, or not consistent; the message says where.
        """
        body = text[:-_TAIL_BYTES]
        tail = text[-_TAIL_BYTES:]
        if len(text) > MAX_BYTES:
            refuse(f"is larger than {MAX_BYTES >> 20} MiB")
        if len(text) <= _TAIL_BYTES or tail[:12] != _TAIL[:12]:
            refuse("is not complete: it does not end with its digest")
        if tail != _TAIL % digest(body).encode():
            refuse("is damaged: its checksum is wrong")
        raw = parse_json(body + b"}")
        found = tail[_TAIL.index(b"%s") :][:32].decode()
        if raw.get("format") == format_one.FORMAT:
            return _of_listed(read_listed(raw), found)
        if raw.get("format") != FORMAT:
            shown = str(raw.get("format"))[:20]
            refuse(f"has format {shown}; this version of zrun reads formats 1 and {FORMAT}")
        if not raw.keys().isdisjoint(_NOT_IN_JSON):
            refuse(f"is not consistent: it has a key {' or '.join(_NOT_IN_JSON)}")
        manifest = read(_manifest_adapter(), raw | {"digest": found}, "the manifest", _KINDS)
        check_parts(manifest.files, manifest.tensors, manifest.divisions, manifest.world_size)
        return manifest


def _of_listed(listed: ListedManifest, found: str) -> Manifest:
    """Return a manifest of format 1 as one of today."""
    return Manifest(
        step=listed.step,
        run_id=listed.run_id,
        versions=listed.versions,
        job=listed.job,
        world_size=listed.world_size,
        layout=listed.layout,
        progress=listed.progress,
        files=listed.file_infos(),
        tensors=listed.tensor_infos(),
        divisions=[],
        model=listed.model,
        format=listed.format,
        digest=found,
        source=listed,
    )


def tensors_from_json(raw: Any) -> list[TensorInfo]:
    """Return the tensors that a rank has sent as JSON.

    Raises:
        CheckpointError: they are something else.
    """
    return read(_tensors_adapter(), raw, "tensors", _KINDS)


def divisions_from_json(raw: Any) -> list[Division]:
    """Return the divisions that ranks have told as JSON.

    Raises:
        CheckpointError: they are something else.
    """
    return read(_divisions_adapter(), raw, "divisions", _KINDS)


def merge_tensors(
    by_rank: Iterable[Sequence[TensorInfo]], order: Sequence[str] = ()
) -> list[TensorInfo]:
    """Return the tensors of several ranks, each once.

    Args:
        order: names in their order; others come last, as ranks have them.

    Raises:
        ValueError: two ranks describe one differently.
    """
    found: dict[str, TensorInfo] = {}
    for info in chain.from_iterable(by_rank):
        if found.setdefault(info.name, info) != info:
            raise ValueError(f"ranks have {info.name} in different shapes, orders or formats")
    first = {name: found.pop(name) for name in order if name in found}
    return [*first.values(), *found.values()]


@cache  # built when a manifest is read: 30 ms that a run which saves nothing need not wait for
def _manifest_adapter() -> TypeAdapter[Manifest]:
    return TypeAdapter(Manifest)


@cache
def _divisions_adapter() -> TypeAdapter[list[Division]]:
    return TypeAdapter(list[Division])


@cache
def _tensors_adapter() -> TypeAdapter[list[TensorInfo]]:
    return TypeAdapter(list[TensorInfo])


_KINDS: Mapping[str, type] = {  # by the field that holds them
    "the manifest": Manifest,
    "files": FileInfo,
    "tensors": TensorInfo,
    "divisions": Division,
    "units": UnitInfo,
    "runs": UnitRun,
    "model": ModelInfo,
    "scaler": Scaler,
    "early_stop": EarlyStop,
    "best": Best,
}


def _dump(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def _plain(item: Any) -> Any:
    if is_dataclass(item) and not isinstance(item, type):
        return asdict(item)
    return item
