"""Steps as zrun wrote them in format 1, made of steps of today."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from checkpoint_toys import signed

from zrun_core.checkpoint.block_writer import write_file
from zrun_core.checkpoint.folder import read_step
from zrun_core.checkpoint.format_one import ListedFile
from zrun_core.checkpoint.manifest import Manifest
from zrun_core.checkpoint.manifest_parts import FileInfo, Fragment
from zrun_core.checkpoint.shard_file import Entry, encode_header
from zrun_core.checkpoint.step_index import open_index


def rewrite(path: Path) -> None:
    """Make a step one of format 1: the same tensors in files without a record."""
    manifest = read_step(path)
    index = open_index(path, manifest)
    files, fragments = [], []
    for info in manifest.files:
        content = index.content(info.name)
        file, listed = _rewrite_file(path, info, list(content.fragments))
        files.append(file)
        fragments += listed
    states = [index.rank_state(rank) for rank in range(manifest.world_size)]
    plain = {each: getattr(manifest, each) for each in _SAME}
    plain |= {
        "files": [asdict(each) for each in files],
        "tensors": [_without_states(asdict(each)) for each in manifest.tensors],
        "fragments": [asdict(each) for each in fragments],
        "rank_states": [asdict(each) for each in states if each is not None],
        "model": None if manifest.model is None else asdict(manifest.model),
        "format": 1,
    }
    (path / "manifest.json").write_bytes(signed(json.dumps(plain)))
    assert Manifest.from_json((path / "manifest.json").read_bytes()).format == 1


_SAME = ("step", "run_id", "versions", "job", "world_size", "layout", "progress")


def _without_states(tensor: dict[str, Any]) -> dict[str, Any]:
    del tensor["states"]
    return tensor


def _rewrite_file(
    path: Path, info: FileInfo, fragments: list[Fragment]
) -> tuple[ListedFile, list[Fragment]]:
    old = (path / info.name).read_bytes()
    (path / info.name).unlink()
    if not info.record_bytes:
        header, pieces = old, []
    else:
        entries = [
            Entry(each.key, each.dtype, (each.stop - each.start,), each.num_bytes)
            for each in fragments
        ]
        header = encode_header(entries)
        pieces = [old[each.offset : each.offset + each.num_bytes] for each in fragments]
    content = [np.frombuffer(piece, dtype=np.uint8) for piece in (header, *pieces)]
    num_bytes = sum(map(len, content))
    header_digest, *_ = write_file(path / info.name, num_bytes, content)
    shift = len(header) - info.header_bytes
    found = [replace(each, offset=each.offset + shift) for each in fragments]
    digest = ListedFile.digest_of(header_digest, found)
    return ListedFile(info.name, num_bytes, len(header), header_digest, digest), found
