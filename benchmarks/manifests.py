"""Manifests of a model of 70 billion parameters on up to 16,384 ranks: their size, time and memory.

    python benchmarks/manifests.py               both formats: half a minute
    python benchmarks/manifests.py --ranks 4096

Nothing of the model is there but its manifest, and the file of one rank, which is a hole with a
header and a record. 80 blocks of dimension 8192, AdamW in fp32: three states of each parameter, at
stage 3, each rank with an equal part of each of 82 units. "Write" is text of the manifest on the
disk, read again and checked, as a save does before its step gets its name. "Load" is what one rank
does when it resumes, less the tensors: it reads and checks the manifest, and the record and the
header of its own file, and looks up the fragments of all that it has. Memory is what its process
grows by meanwhile, at most.

Format 1 listed each fragment. Its rows are measured up to `--listed` ranks; beyond 256 MiB it was
refused.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from render import render

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # zrun without installing it

from zrun_core.checkpoint.digest import digest
from zrun_core.checkpoint.divisions import Divisions
from zrun_core.checkpoint.folder import read_step
from zrun_core.checkpoint.format_one import ListedFile
from zrun_core.checkpoint.manifest import Manifest
from zrun_core.checkpoint.manifest_fields import (
    ITEM_BYTES,
    MANIFEST,
    MAX_BYTES,
    RANK,
    VALUE,
    rank_file,
)
from zrun_core.checkpoint.manifest_parts import (
    Division,
    FileInfo,
    Fragment,
    SavedRank,
    TensorInfo,
    UnitInfo,
    key_of,
)
from zrun_core.checkpoint.record import KEY, OwnTensor, RankRecord
from zrun_core.checkpoint.shard_file import Entry, encode_header
from zrun_core.checkpoint.step_index import open_index
from zrun_core.memory.layout import lay_out
from zrun_core.memory.tensors import contiguous_stride

MIB = 1 << 20
STATES = dict.fromkeys((VALUE, "exp_avg", "exp_avg_sq"), "float32")
_DIM, _KV, _HIDDEN, _VOCABULARY, _BLOCKS = 8192, 1024, 28672, 128256, 80
_DIGEST = "0123456789abcdef" * 2
_LISTED = 1024  # ranks up to which format 1 is measured


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", default="64,512,1024,4096,16384", help="numbers of ranks")
    parser.add_argument("--listed", type=int, default=_LISTED, help="most ranks of format 1")
    parser.add_argument("--load", type=Path, help=argparse.SUPPRESS)  # in a process of its own
    args = parser.parse_args()
    if args.load is not None:
        print(json.dumps(load(args.load)))
        return
    rows = []
    for ranks in map(int, args.ranks.split(",")):
        with tempfile.TemporaryDirectory(prefix="zrun-manifests-") as folder:
            rows.append(_row(2, ranks, write(Path(folder), simulated(ranks))))
            rows[-1] += _loaded(Path(folder))
        if ranks > args.listed:
            num_bytes = _listed_bytes(ranks)
            words = "refused" if num_bytes > MAX_BYTES else ""
            rows.append([*_row(1, ranks, {"bytes": num_bytes}), words, ""])
            continue
        with tempfile.TemporaryDirectory(prefix="zrun-manifests-") as folder:
            rows.append(_row(1, ranks, write_listed(Path(folder), ranks)))
            rows[-1] += _loaded(Path(folder))
    print(render(["format", "ranks", "MiB", "write s", "load s", "load MiB"], rows))


def _row(version: int, ranks: int, told: dict[str, float]) -> list[str]:
    seconds = f"{told['seconds']:.2f}" if "seconds" in told else ""
    return [str(version), f"{ranks:,}", f"{told['bytes'] / MIB:.2f}", seconds]


def _loaded(step: Path) -> list[str]:
    """Load in a process of its own."""
    command = [sys.executable, __file__, "--load", str(step)]
    told = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return [f"{told['seconds']:.2f}", f"{told['bytes'] / MIB:.1f}"]


def parameters() -> list[list[tuple[str, tuple[int, ...]]]]:
    """Return the parameters of each unit, by name: its shape."""
    shapes = {
        "attention.wq.weight": (_DIM, _DIM),
        "attention.wk.weight": (_KV, _DIM),
        "attention.wv.weight": (_KV, _DIM),
        "attention.wo.weight": (_DIM, _DIM),
        "mlp.gate.weight": (_HIDDEN, _DIM),
        "mlp.up.weight": (_HIDDEN, _DIM),
        "mlp.down.weight": (_DIM, _HIDDEN),
        "norm1.weight": (_DIM,),
        "norm2.weight": (_DIM,),
    }
    blocks = [
        [(f"blocks.{number}.{name}", shape) for name, shape in shapes.items()]
        for number in range(_BLOCKS)
    ]
    first = [("embed.weight", (_VOCABULARY, _DIM))]
    last = [("norm.weight", (_DIM,)), ("head.weight", (_VOCABULARY, _DIM))]
    return [first, *blocks, last]


def simulated(ranks: int) -> Manifest:
    """Return the manifest that a save of this model would write."""
    import torch

    units = []
    tensors = []
    for number, members in enumerate(parameters()):
        with torch.device("meta"):
            params = [(name, torch.empty(shape), 0) for name, shape in members]
        layout = lay_out(
            f"unit.{number}", params, dtype=torch.float32, trainable=True, num_shards=ranks
        )
        runs = [
            _run(each.part.tensor, each.first, each.start, each.stop)
            for each in layout.tensor_ranges(0, layout.padded_numel)
        ]
        units.append(UnitInfo(layout.name, layout.padded_numel, runs))
        tensors += [
            TensorInfo(
                name,
                shape,
                contiguous_stride(shape),
                "bfloat16",
                "param",
                (),
                {"step": 1000.0},
                STATES,
            )
            for name, shape in members
        ]
    division = Division(list(range(ranks)), 1, units)
    whole = Divisions([division])
    files = [_file(whole, rank) for rank in range(ranks)]
    return Manifest(
        step=1000,
        run_id="20260101-000000-abcd",
        versions={"torch": "2.13.0"},
        job={"name": "simulated"},
        world_size=ranks,
        layout={"stage": 3, "shard_group": ranks, "units": [unit.name for unit in units]},
        progress={"steps": 1000},
        files=files,
        tensors=tensors,
        divisions=[division],
    )


def _run(tensor: str, first: int, start: int, stop: int) -> Any:
    from zrun_core.checkpoint.manifest_parts import UnitRun

    return UnitRun(tensor, first, start, stop - start)


def _entries(divisions: Divisions, rank: int) -> list[Entry]:
    """Return the fragments of the model that a rank has written."""
    found = []
    for span in divisions.of_rank(rank):
        for state, dtype in STATES.items():
            numel = span.stop - span.start
            key = key_of(span.tensor, state, span.start)
            found.append(Entry(key, dtype, (numel,), numel * ITEM_BYTES[dtype]))
    return found


def _own(rank: int) -> list[OwnTensor]:
    return [
        OwnTensor(f"rng/{rank}/numpy", "int64", 624),
        OwnTensor(f"rng/{rank}/python", "int64", 625),
        OwnTensor(f"rng/{rank}/cuda", "uint8", 16),
        OwnTensor(f"rng/{rank}/torch", "uint8", 5056),
    ]


def saved_rank(rank: int) -> SavedRank:
    """Return the state of a rank, less its tensors."""
    streams = {name: {"key": 2**31 + rank} for name in ("data", "inside", "forward")}
    python = {"python": {"version": 3, "gauss": None}}
    order = [f"unit.{number}" for number in range(_BLOCKS + 2)]
    return SavedRank(rank, python | streams, {"order": order, "late": []})


def _record(rank: int, num_fragments: int, header: str) -> bytes:
    state = saved_rank(rank)
    own = _own(rank)
    digests = [_DIGEST] * (num_fragments + len(own))
    return RankRecord(state.rng, state.learnt, own, header, digests).to_json()


def _file(divisions: Divisions, rank: int) -> FileInfo:
    """Return what a manifest says of the file of a rank; its header is about as long as that."""
    entries = _entries(divisions, rank)
    own_bytes = sum(each.num_bytes for each in _own(rank))
    record = _record(rank, len(entries), _DIGEST)
    header_bytes = 4096 * (1 + sum(len(each.key) + 66 for each in entries) // 4096)
    of_model = sum(each.num_bytes for each in entries)
    return FileInfo(
        name=rank_file(rank),
        num_bytes=header_bytes + of_model + own_bytes + len(record),
        header_bytes=header_bytes,
        own_bytes=own_bytes,
        record_bytes=len(record),
        digest=_DIGEST,
    )


def write(step: Path, manifest: Manifest) -> dict[str, float]:
    """Write the manifest of a step, and the file of one rank, which is a hole in between."""
    rank = _middle(manifest.world_size)
    info = manifest.files[rank]
    entries = _entries(Divisions(manifest.divisions), rank)
    header = encode_header([*entries, Entry(KEY, "uint8", (info.record_bytes,), info.record_bytes)])
    record = _record(rank, len(entries), digest(header))
    assert len(record) == info.record_bytes
    num_bytes = info.num_bytes + len(header) - info.header_bytes
    with (step / info.name).open("xb") as file:
        file.write(header)
        file.seek(num_bytes - len(record))
        file.write(record)
    files = list(manifest.files)
    files[rank] = replace(
        info, num_bytes=num_bytes, header_bytes=len(header), digest=digest(record)
    )
    manifest = replace(manifest, files=files)
    start = time.perf_counter()
    text = manifest.to_json()
    Manifest.from_json(text)
    _write(step / MANIFEST, text)
    return {"bytes": len(text), "seconds": time.perf_counter() - start}


def _middle(ranks: int) -> int:
    """Return a rank that has something of each unit; the last ones may have padding only."""
    return ranks // 2


def _write(path: Path, text: bytes) -> None:
    with path.open("xb") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def write_listed(step: Path, ranks: int) -> dict[str, float]:
    """Write a manifest of format 1, which lists the same."""
    manifest = simulated(ranks)
    divisions = Divisions(manifest.divisions)
    files, states = [], []
    fragments: list[Fragment] = []
    for rank in range(ranks):
        own, state = _listed(divisions, rank)
        fragments += own
        end = own[-1].offset + own[-1].num_bytes
        digest_of = ListedFile.digest_of(_DIGEST, own)
        files.append(ListedFile(rank_file(rank), end, 4096, _DIGEST, digest_of))
        states.append(state)
    tensors = [asdict(each) for each in manifest.tensors]
    for each in tensors:
        del each["states"]
    same = ("step", "run_id", "versions", "job", "world_size", "layout", "progress")
    start = time.perf_counter()
    told: dict[str, Any] = {name: getattr(manifest, name) for name in same}
    told |= {
        "files": [asdict(each) for each in files],
        "tensors": tensors,
        "fragments": [asdict(each) for each in fragments],
        "rank_states": [asdict(each) for each in states],
        "model": None,
        "format": 1,
    }
    body = json.dumps(told, separators=(",", ":")).encode()[:-1]
    text = body + b',\n"digest":"%s"}\n' % digest(body).encode()
    Manifest.from_json(text)
    _write(step / MANIFEST, text)
    return {"bytes": len(text), "seconds": time.perf_counter() - start}


def _listed_bytes(ranks: int) -> int:
    """Return about how many bytes format 1 takes: of as many fragments, of one that is as long."""
    sizes = []
    manifest = simulated(ranks)
    divisions = Divisions(manifest.divisions)
    chosen = range(0, ranks, max(1, ranks // 64))
    for rank in chosen:
        fragments, state = _listed(divisions, rank)
        parts = [asdict(each) for each in (*fragments, state)]
        sizes.append(sum(len(json.dumps(each, separators=(",", ":"))) + 2 for each in parts))
    return ranks * sum(sizes) // len(sizes)


def _listed(divisions: Divisions, rank: int) -> tuple[list[Fragment], SavedRank]:
    """Return what format 1 says of a rank."""
    found = []
    offset = 4096
    name = rank_file(rank)
    for span in divisions.of_rank(rank):
        for state, dtype in STATES.items():
            num_bytes = (span.stop - span.start) * ITEM_BYTES[dtype]
            key = key_of(span.tensor, state, span.start)
            place = (span.start, span.stop, dtype, name, key, offset, num_bytes)
            found.append(Fragment(span.tensor, state, *place, _DIGEST))
            offset += num_bytes
    for own in _own(rank):
        key = key_of(own.name, RANK, 0)
        place = (0, own.numel, own.dtype, name, key, offset, own.num_bytes)
        found.append(Fragment(own.name, RANK, *place, _DIGEST))
        offset += own.num_bytes
    return found, saved_rank(rank)


def load(step: Path) -> dict[str, float]:
    """Do what a rank does when it resumes, less its tensors."""
    small = Path(step.parent) / f"{step.name}-small"
    small.mkdir()
    write(small, simulated(1))  # what is made once in a process is not counted
    _look(small)
    for path in small.iterdir():
        path.unlink()
    small.rmdir()
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak is that from here on
    before = _memory("VmRSS")
    start = time.perf_counter()
    _look(step)
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "bytes": _memory("VmHWM") - before}


def _memory(field: str) -> int:
    """Return what the system says of this process's memory, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(f"{field}:"))
    return 1024 * int(line.split()[1])


def _look(step: Path) -> None:
    from zrun_core.checkpoint.shard_file import check_header

    manifest = read_step(step, slice(0))
    rank = _middle(manifest.world_size)
    index = open_index(step, manifest)
    content = index.content(rank_file(rank))
    if manifest.divisions:
        check_header(step, manifest.files[rank], content.header_digest)
    assert index.rank_state(rank) is not None
    own = [each for each in content.fragments if each.state in STATES]
    for each in own:
        (span,) = index.spans(each.tensor, each.state, each.start, each.stop)
        assert (span.file, span.start, span.stop) == (each.file, each.start, each.stop)


if __name__ == "__main__":
    main()
