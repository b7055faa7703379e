"""Whatever happens to the files of a checkpoint is found before a tensor is believed, and nothing
else is touched.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import random
import resource
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_toys import (
    forge_record,
    forged,
    fragments_of,
    nested,
    read_step_state,
    set_to,
    signed,
    write_files,
    write_step,
)

from zrun_core.checkpoint.export import export
from zrun_core.checkpoint.folder import CheckpointFolder, read_step
from zrun_core.checkpoint.manifest import Manifest
from zrun_core.checkpoint.manifest_parts import TensorInfo
from zrun_core.checkpoint.shard_file import WriteItem, read_fragment
from zrun_core.checkpoint.verify import read_back, verify
from zrun_core.errors import CheckpointError, SaveError

AUDITED: list[tuple[str, tuple[Any, ...]]] = []
LISTENING = [False]


def _listen(event: str, arguments: tuple[Any, ...]) -> None:
    if LISTENING[0] and (event == "open" or event.startswith(("pickle.", "os.system", "os.exec"))):
        AUDITED.append((event, arguments))


sys.addaudithook(_listen)  # it stays for the life of the process, hence the switch


@pytest.fixture
def audited() -> Iterator[list[tuple[str, tuple[Any, ...]]]]:
    AUDITED.clear()
    LISTENING[0] = True
    yield AUDITED
    LISTENING[0] = False


@pytest.fixture
def folder(tmp_path: Path) -> CheckpointFolder:
    """Steps 10 and 20; tests damage 20."""
    folder = CheckpointFolder(tmp_path / "checkpoints")
    for step in (10, 20):
        write_step(folder, step, scale=4)
    return folder


def problems(folder: CheckpointFolder) -> list[str]:
    """What scanning and verifying say about step 20."""
    found = folder.scan()[0]
    assert found.step == 20
    return [found.problem or ""] if found.manifest is None else verify(found.path, found.manifest)


def load_all(path: Path, manifest: Manifest) -> None:
    for fragment in fragments_of(path, manifest):
        into = torch.empty(fragment.stop - fragment.start, dtype=getattr(torch, fragment.dtype))
        read_fragment(path, fragment, into)


def test_nothing_is_wrong_without_damage(folder: CheckpointFolder) -> None:
    assert problems(folder) == []


def test_every_truncation_is_found(folder: CheckpointFolder) -> None:
    path = folder.step_path(20)
    for name in sorted(os.listdir(path)):
        content = (path / name).read_bytes()
        for end in [*range(0, len(content), 4096), len(content) - 1]:
            os.truncate(path / name, end)
            found = folder.scan()[0]
            assert found.manifest is None, (name, end)
            assert name in (found.problem or "")
            (path / name).write_bytes(content)
    assert problems(folder) == []


def test_every_bit_flip_is_found(folder: CheckpointFolder) -> None:
    """256 of 256: by verifying, and by reading what a resume reads."""
    path = folder.step_path(20)
    contents = {name: (path / name).read_bytes() for name in sorted(os.listdir(path))}
    manifest = read_step(path)
    headers = {info.name: info.header_bytes for info in manifest.files}
    chance = random.Random(0)
    found_verifying = found_loading = data_flips = 0
    for _ in range(256):
        name = chance.choice(list(contents))
        bit = chance.randrange(8 * len(contents[name]))
        damaged = bytearray(contents[name])
        damaged[bit // 8] ^= 1 << bit % 8
        (path / name).write_bytes(damaged)
        found_verifying += problems(folder) != []
        if name in headers and bit // 8 >= headers[name]:
            data_flips += 1
            with pytest.raises(CheckpointError, match="checksum"):
                load_all(path, manifest)
            found_loading += 1
        (path / name).write_bytes(contents[name])
    assert found_verifying == 256
    assert found_loading == data_flips > 64


def test_files_swapped_between_ranks(folder: CheckpointFolder) -> None:
    one, two = (folder.step_path(20) / f"rank-0000{rank}.safetensors" for rank in (0, 1))
    one.rename(one.with_suffix(".x"))
    two.rename(one)
    one.with_suffix(".x").rename(two)
    assert problems(folder) != []


@pytest.mark.parametrize("name", ["rank-00001.safetensors", "manifest.json"])
def test_file_of_another_step_or_run(folder: CheckpointFolder, tmp_path: Path, name: str) -> None:
    """Same sizes and names: only the digests tell."""
    other = CheckpointFolder(tmp_path / "other")
    write_step(other, 30, scale=4, run_id="run-2")
    os.rename(other.step_path(30), other.step_path(20))
    for source in (folder.step_path(10), other.step_path(20)):
        before = (folder.step_path(20) / name).read_bytes()
        shutil.copy(source / name, folder.step_path(20) / name)
        assert problems(folder) != []
        (folder.step_path(20) / name).write_bytes(before)


@pytest.mark.parametrize(
    "name", ["rank-00000.safetensors", "rank-00001.safetensors", "manifest.json"]
)
@pytest.mark.parametrize("instead", ["nothing", "folder", "symlink", "pipe", "unreadable"])
def test_missing_or_not_a_file(
    folder: CheckpointFolder, tmp_path: Path, name: str, instead: str
) -> None:
    path = folder.step_path(20) / name
    path.rename(tmp_path / "content")
    if instead == "folder":
        path.mkdir()
    elif instead == "symlink":
        path.symlink_to(tmp_path / "content")
    elif instead == "pipe":
        os.mkfifo(path)
    elif instead == "unreadable":
        path.symlink_to(path)
    assert name in problems(folder)[0]
    assert folder.scan()[1].problem is None


@pytest.mark.parametrize("block", [4096, 4 << 20])
@pytest.mark.parametrize("is_direct", [True, False])
def test_what_is_read_back_is_what_is_verified(
    folder: CheckpointFolder, monkeypatch: pytest.MonkeyPatch, block: int, is_direct: bool
) -> None:
    """A byte in each piece of a file, where reads pass the page cache and where a file system
    cannot do that.
    """
    real = os.preadv

    def preadv(file: int, views: Any, offset: int) -> int:
        if not is_direct and fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(file, views, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    monkeypatch.setattr("zrun_core.checkpoint.verify._BLOCK", block)
    path = folder.step_path(20)
    manifest = read_step(path)
    assert read_back(path, manifest) == []
    for info in manifest.files:
        content = bytearray((path / info.name).read_bytes())
        ends = [each.offset + each.num_bytes for each in fragments_of(path, manifest, info.name)]
        for place in (0, *(end - 1 for end in ends), info.num_bytes - 1):
            content[place] ^= 1
            (path / info.name).write_bytes(content)
            found = read_back(path, manifest)
            assert len(found) == 1
            assert found == verify(path, manifest)
            content[place] ^= 1
        (path / info.name).write_bytes(content)
    last = path / manifest.files[-1].name
    os.truncate(last, last.stat().st_size - 1)
    assert read_back(path, manifest) == verify(path, manifest) != []


@pytest.mark.parametrize("call", ["pread", "fstat"])
def test_a_disk_that_fails_while_a_manifest_is_read(
    folder: CheckpointFolder, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """Such a step does not count, like one that is damaged."""
    real, manifest = getattr(os, call), folder.step_path(20) / "manifest.json"

    def fail(file: int, *args: Any) -> Any:
        if os.readlink(f"/proc/self/fd/{file}") == str(manifest):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(file, *args)

    monkeypatch.setattr(os, call, fail)
    newest, older = folder.scan()[:2]
    monkeypatch.undo()
    assert newest.problem == f"{manifest} cannot be read: Input/output error"
    assert older.problem is None


def test_step_that_is_a_link(folder: CheckpointFolder, tmp_path: Path) -> None:
    os.rename(folder.step_path(20), tmp_path / "elsewhere")
    folder.step_path(20).symlink_to(tmp_path / "elsewhere")
    assert "is not a folder" in problems(folder)[0]
    folder.step_path(30).symlink_to(tmp_path / "elsewhere")
    for step in (40, 50):
        write_step(folder, step)
    assert folder.prune(2) == [30, 20, 10]
    assert (
        tmp_path / "elsewhere" / "manifest.json"
    ).exists()  # the links are gone, not what they led to


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\n",
        b"\xff\x00" * 9,
        b"../../etc/passwd",
        b"step-00000099\n",
        b"step-" + b"0" * 10**7,
        None,
    ],
)
def test_latest_is_only_a_hint(
    folder: CheckpointFolder, tmp_path: Path, content: bytes | None
) -> None:
    (folder.path / "latest").unlink()
    if content is None:
        (tmp_path / "outside").write_text("step-00000020")
        (folder.path / "latest").symlink_to(tmp_path / "outside")
    else:
        (folder.path / "latest").write_bytes(content)
    step, problem = folder.latest()
    assert step in (None, 99)
    assert problem is not None
    assert [found.step for found in folder.scan() if found.problem is None] == [20, 10]
    folder.point_latest(20)
    assert folder.latest() == (20, None)
    assert content is not None or (tmp_path / "outside").read_text() == "step-00000020"


# Manifests that somebody wrote to do harm: their digest fits.

_ORDER = {"order": None, "late": []}
_DIVISION = ("divisions", 0)
_UNIT = (*_DIVISION, "units", 0)
_RUN = (*_UNIT, "runs", 0)

HOSTILE = {
    "absolute path": (set_to("files", 0, "name", "/etc/passwd"), "plain name"),
    "parent": (set_to("files", 0, "name", "../manifest.json"), "plain name"),
    "null byte": (set_to("files", 0, "name", "a\0b"), "printable"),
    "the manifest as a shard": (
        set_to("files", 0, "name", "manifest.json"),
        "manifest.json as a file",
    ),
    "files in another order": (
        lambda raw: raw["files"].reverse(),
        "file 0 is rank-00001.safetensors, not rank-00000.safetensors",
    ),
    "a file of no rank": (
        lambda raw: raw["files"].append(raw["files"][0] | {"name": "rank-00002.safetensors"}),
        "rank-00002.safetensors is the file of no rank",
    ),
    "a file beside with a record": (
        lambda raw: raw["files"].append(raw["files"][0] | {"name": "config.json"}),
        "config.json has .* bytes, and parts",
    ),
    "a huge shape": (set_to("tensors", 0, "shape", [10**12, 33]), "units do not have the"),
    "an impossible shape": (set_to("tensors", 0, "shape", [2**61, 2**61]), "no possible shape"),
    "a thousand dimensions": (set_to("tensors", 0, "shape", [1] * 1000), "no possible shape"),
    "a huge file": (set_to("files", 0, "num_bytes", 10**15), "its parts"),
    "a huge record": (set_to("files", 0, "record_bytes", 2**40), "has a record of"),
    "no record": (set_to("files", 0, "record_bytes", 0), "has a record of 0 bytes"),
    "another record": (
        lambda raw: raw["files"][0].__setitem__(
            "record_bytes", raw["files"][0]["record_bytes"] - 1
        ),
        "rank-00000.safetensors has .* bytes, its parts",
    ),
    "another header": (set_to("files", 1, "header_bytes", 8192), "rank-00001.* its parts"),
    "more of its own": (set_to("files", 1, "own_bytes", 7), "rank-00001.* its parts"),
    "a digest that is none": (set_to("files", 1, "digest", "no"), "not a digest"),
    "a number beyond 64 bits": (set_to("files", 0, "num_bytes", 10**400), "whole number"),
    "a negative place": (set_to(*_RUN, "place", -8), "whole number"),
    "an infinite size": (set_to("files", 0, "num_bytes", float("inf")), "JSON"),
    "a size that is no number": (set_to("files", 0, "num_bytes", float("nan")), "JSON"),
    "a fractional size": (set_to(*_UNIT, "numel", 1.5), "whole number"),
    "a truth for a number": (set_to("step", True), "whole number"),
    "a huge run": (set_to(*_RUN, "numel", 10**12), "is more than its 6336 elements"),
    "a run of nothing": (set_to(*_RUN, "numel", 0), "0 is too few"),
    "a short run": (set_to(*_RUN, "numel", 6335), "units do not have the 6336 elements of layer.w"),
    "a run elsewhere": (set_to(*_RUN, "first", 1), "is more than its 6336 elements"),
    "a run beyond the unit": (set_to(*_RUN, "place", 10**6), "beyond the end of the unit"),
    "a run twice": (
        lambda raw: raw["divisions"][0]["units"][0]["runs"].append(
            raw["divisions"][0]["units"][0]["runs"][0]
        ),
        "overlaps with what is before it in layer.weight",
    ),
    "an overlap in the tensor": (
        lambda raw: raw["divisions"][0]["units"][0].__setitem__(
            "runs",
            [
                {"tensor": "layer.weight", "first": 0, "place": 0, "numel": 3168},
                {"tensor": "layer.weight", "first": 1, "place": 3168, "numel": 3168},
            ],
        ),
        "overlaps with what another run has of it",
    ),
    "a run of no tensor": (set_to(*_RUN, "tensor", "layer.scale"), "that it does not list"),
    "a run of another tensor": (set_to(*_RUN, "tensor", "norm.count"), "more than its 1 elements"),
    "a unit without runs": (set_to(*_UNIT, "runs", []), "nothing of any tensor"),
    "a unit twice": (
        lambda raw: raw["divisions"][0]["units"].append(raw["divisions"][0]["units"][0]),
        "units do not have the 6336 elements",
    ),
    "a larger unit": (set_to(*_UNIT, "numel", 10**6), "rank-00000.safetensors has .* its parts"),
    "a smaller unit": (set_to(*_UNIT, "numel", 10), "beyond the end of the unit"),
    "a rank that is not": (set_to(*_DIVISION, "ranks", [0, 2]), "are not some of 2, each once"),
    "a rank that writes twice": (set_to(*_DIVISION, "ranks", [0, 0]), "not some of 2, each once"),
    "a division of nobody": (set_to(*_DIVISION, "ranks", []), "not some of 2, each once"),
    "a rank of a division too few": (set_to(*_DIVISION, "ranks", [1]), "2 copies do not divide 1"),
    "ranks in another order": (set_to(*_DIVISION, "ranks", [1, 0]), "its parts"),
    "shards instead of copies": (set_to(*_DIVISION, "copies", 1), "2 shards do not divide the 33"),
    "copies of nothing": (set_to(*_DIVISION, "copies", 0), "0 is too few"),
    "huge copies": (set_to(*_DIVISION, "copies", 2**62), "do not divide 2 ranks"),
    "no divisions": (set_to("divisions", []), "units do not have the 6336 elements"),
    "more bytes than there are": (
        lambda raw: (
            raw["tensors"][0].update(shape=[2**60, 2], stride=[2, 1]),
            raw["divisions"][0]["units"][0].update(numel=2**61),
            raw["divisions"][0]["units"][0]["runs"][0].update(numel=2**61),
        ),
        "more bytes than any disk",
    ),
    "an overlap of strides": (set_to("tensors", 0, "stride", [0, 0]), "gaps or overlap"),
    "an unknown format of numbers": (
        set_to("tensors", 0, "states", "value", "object"),
        "'object' is unknown",
    ),
    "a state more": (set_to("tensors", 0, "states", "momentum", "float32"), "its parts"),
    "a state less": (lambda raw: raw["tensors"][0]["states"].pop("exp_avg"), "its parts"),
    "a state without a name": (set_to("tensors", 0, "states", "\x1b", "float32"), "printable"),
    "a state of a rank": (set_to("tensors", 0, "states", "rank", "uint8"), "rank is no state of"),
    "no value": (lambda raw: raw["tensors"][0]["states"].pop("value"), "there is no value of"),
    "an escape sequence": (set_to("tensors", 0, "name", "\x1b[2Jweight"), "printable"),
    "a tensor twice": (set_to("tensors", 1, "name", "tied.weight"), "twice"),
    "a missing tensor": (lambda raw: raw["tensors"].pop(0), "does not list"),
    "a missing file": (lambda raw: raw["files"].pop(0), "does not have the files of 2 ranks"),
    "a missing key": (lambda raw: raw.pop("step"), "keys"),
    "another key": (set_to("pickle", "cos\nsystem"), "keys"),
    "a key of ours": (set_to("source", {}), "a key digest or source"),
    "another key of a file": (
        set_to("files", 1, "mode", 0o777),
        r"files\[1\] does not have the keys",
    ),
    "another key of a run": (
        set_to(*_RUN, "state", "value"),
        r"divisions\[0\], units\[0\], runs\[0\] does not have the keys tensor, first, place, numel",
    ),
    "another key of a scaler": (
        set_to("progress", "scaler", {"scale": 2.0, "good": 1, "bad": 1, "ugly": 1}),
        "progress, scaler does not have the keys scale, good, bad",
    ),
    "groups that are null": (set_to("progress", "groups", None), "groups: not an object"),
    "other parts that are null": (set_to("layout", "others", None), "layout, others: not a list"),
    "a size that is a tree": (set_to("step", nested(300)), "step: an object is not a whole number"),
    "a newer format": (set_to("format", 3), "has format 3; .* reads formats 1 and 2"),
    "an older format": (set_to("format", 1), "does not have the keys"),
    "no object": (lambda raw: raw["files"].__setitem__(0, "x"), "keys"),
    "no ranks": (set_to("world_size", 0), "too few"),
    "more ranks": (set_to("world_size", 3), "does not have the files of 3 ranks"),
    "very many ranks": (set_to("world_size", 2**62), "does not have the files"),
    "fewer ranks": (set_to("world_size", 1), "are not some of 1, each once"),
    "a counter in words": (
        set_to("progress", "steps", "many"),
        "progress, steps: 'many' is not a whole number",
    ),
    "a counter below 0": (set_to("progress", "cursor", -1), "progress, cursor"),
    "a dataset of nothing": (
        set_to("progress", "dataset_samples", 0),
        "dataset_samples: 0 is too few",
    ),
    "a loss in words": (set_to("progress", "loss", "low"), "is not a number"),
    "a number beyond floats": (set_to("progress", "loss", 10**400), "is not a number"),
    "a scale of 0": (
        set_to("progress", "scaler", {"scale": 0, "good": 1, "bad": 1}),
        "scale: 0.0 is not more than 0",
    ),
    "half a scaler": (set_to("progress", "scaler", {"scale": 2.0}), "scale, good, bad"),
    "groups in words": (set_to("progress", "groups", {"": 7}), "groups: not a list"),
    "parameters for options": (
        set_to("progress", "groups", {"": [{"params": []}]}),
        "params are no option",
    ),
    "extras in a list": (set_to("progress", "extra", [1, 2]), "extra: not an object"),
    "models in a number": (
        set_to("layout", "models", 5),
        "models: not an object|layout: not an object",
    ),
    "a model in a number": (
        set_to("layout", "models", {"a": 5}),
        "layout, models, a: not an object",
    ),
    "other parts in a number": (set_to("layout", "others", 5), "layout, others: not a list"),
    "another part in a number": (
        set_to("layout", "others", [{}, 5]),
        r"layout, others\[1\]: not an object",
    ),
    "values of another kind": (
        set_to("tensors", 0, "states", "value", "int32"),
        "the value of layer.weight is int32, and the tensor float32",
    ),
    "a job without a bottom": (set_to("job", "a", nested(200)), "inside of more than 100"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_manifest(folder: CheckpointFolder, name: str) -> None:
    change, message = HOSTILE[name]
    with pytest.raises(CheckpointError, match=message):
        Manifest.from_json(forged((folder.step_path(20) / "manifest.json").read_bytes(), change))


# Records of ranks, whose digests fit too.

RECORDS = {
    "a stream too few": (lambda raw: raw["own"].pop(), "digests for"),
    "a digest too few": (lambda raw: raw["fragments"].pop(), "digests for"),
    "a digest too many": (lambda raw: raw["fragments"].append("0" * 32), "digests for"),
    "a digest that is none": (set_to("fragments", 0, "no"), r"fragments\[0\]: not a digest"),
    "a header without a digest": (lambda raw: raw.pop("header"), "does not have the keys rng, l"),
    "another key": (set_to("pickle", "cos\nsystem"), "does not have the keys"),
    "a size below 0": (set_to("own", 0, "numel", -1), r"own\[0\], numel: '-1' is not a whole"),
    "a huge size": (set_to("own", 0, "numel", 2**40), "tensors of the rank are not 101 bytes"),
    "an unknown format": (set_to("own", 0, "dtype", "object"), "'object' is unknown"),
    "streams of nobody": (set_to("own", 0, "name", "torch"), "torch belongs to no rank"),
    "streams of another rank": (set_to("own", 0, "name", "rng/0/torch"), "to another rank"),
    "a buffer of no tensor": (set_to("own", 0, "name", "buffer/1/layer.scale"), "is not listed"),
    "a buffer of another size": (
        set_to("own", 0, "name", "buffer/1/mask"),
        "uint8, and the tensor",
    ),
    "a buffer of another kind": (
        set_to("own", 0, {"name": "buffer/1/norm.count", "dtype": "uint8", "numel": 101}),
        "has 101 elements, and the tensor 1",
    ),
    "a rank without streams": (lambda raw: raw.pop("rng"), "does not have the keys rng, learnt"),
    "streams in a list": (set_to("rng", []), "rng: not an object"),
    "an order that is none": (set_to("learnt", {**_ORDER, "order": 5}), "learnt, order: not a li"),
    "an order of numbers": (set_to("learnt", {**_ORDER, "order": [1]}), "not a text"),
    "half an order": (set_to("learnt", {"order": None}), "keys order, late"),
    "no JSON": (None, "is not JSON"),
}


@pytest.mark.parametrize("name", RECORDS)
def test_hostile_record(folder: CheckpointFolder, name: str) -> None:
    """It is refused with its file, and nothing else of the step is."""
    change, message = RECORDS[name]
    path = folder.step_path(20)
    forge_record(path, 1, change)
    manifest = read_step(path)
    file = path / "rank-00001.safetensors"
    with pytest.raises(CheckpointError, match=message) as caught:
        fragments_of(path, manifest, file.name)
    assert f"the record of {file} " in str(caught.value)
    assert verify(path, manifest) == read_back(path, manifest) == [str(caught.value)]
    assert fragments_of(path, manifest, "rank-00000.safetensors")


def test_a_record_of_other_models(folder: CheckpointFolder) -> None:
    path = folder.step_path(20)
    text = (path / "manifest.json").read_bytes()
    change = set_to("layout", {"models": {"a": {}, "b": {}}})
    manifest = Manifest.from_json(forged(text, change))
    with pytest.raises(CheckpointError, match="learnt: not of the models in layout"):
        fragments_of(path, manifest)


def test_two_fragments_of_one_key(tmp_path: Path) -> None:
    """No rank writes them; nor is such a step believed."""
    value = torch.zeros(3)
    folder = CheckpointFolder(tmp_path)
    tmp = folder.begin(1)
    infos = [
        TensorInfo(
            "c", (3,), (1,), "float32", "param", (), {}, {"value": "float32", "a/b": "bool"}
        ),
        TensorInfo(
            "b/c", (3,), (1,), "float32", "param", (), {}, {"value": "float32", "x": "bool"}
        ),
    ]
    items = [
        WriteItem(info.name, state, 0, 3, value.to(getattr(torch, dtype)))
        for info in infos
        for state, dtype in info.states.items()
    ]
    folder.commit(tmp, write_files(tmp, 1, [items], infos))
    path = folder.step_path(1)
    text = (path / "manifest.json").read_bytes()
    rename = set_to("tensors", 1, "states", {"value": "float32", "a": "bool"})
    with pytest.raises(CheckpointError, match="two fragments have the key a/b/c"):
        fragments_of(path, Manifest.from_json(forged(text, rename)))
    items[-1] = replace(items[-1], state="a")
    with pytest.raises(SaveError, match="two tensors have the same key"):
        write_files(folder.begin(2), 2, [items], infos)


def test_a_record_that_is_damaged_or_cut(folder: CheckpointFolder) -> None:
    path = folder.step_path(20)
    manifest = read_step(path)
    file = path / "rank-00001.safetensors"
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match="the checksum of its record is wrong"):
        fragments_of(path, manifest)
    os.truncate(file, len(content) - 1)
    with pytest.raises(CheckpointError, match=f"{file} has {len(content) - 1} bytes, not"):
        fragments_of(path, manifest)
    file.unlink()
    with pytest.raises(CheckpointError, match=f"{file} is missing"):
        fragments_of(path, manifest)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"null",
        signed("[]"),
        signed("[" * 10**5 + "]" * 10**5),
        signed('{"a":1,"a":2}'),
        signed("{\xff}"),
        signed('{"step":' + "9" * 10**5 + "}"),
        b"\x00" * 10**6,
    ],
)
def test_hostile_text(text: bytes) -> None:
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        Manifest.from_json(text)


VALUES = [
    None,
    True,
    -1,
    0,
    1,
    2**31,
    2**62,
    2**63,
    10**12,
    10**30,
    -(10**12),
    1.5,
    -0.0,
    "",
    "..",
    "/etc/passwd",
    "a/b",
    "\0",
    "x" * 5000,
    "manifest.json",
    "value",
    "float64",
    [],
    {},
    [[]],
    {"a": {}},
    [10**12] * 65,
]


def _mutate(raw: Any, chance: random.Random) -> None:
    """Replace, remove, repeat or swap a value anywhere in `raw`."""
    while True:
        keys = list(raw.keys() if isinstance(raw, dict) else range(len(raw)))
        if not keys:
            return
        key = chance.choice(keys)
        if isinstance(raw[key], dict | list) and raw[key] and chance.random() < 0.9:
            raw = raw[key]
            continue
        other = chance.choice(keys)
        action = chance.randrange(5)
        if action == 0:
            del raw[key]
        elif action == 1:
            raw[key], raw[other] = raw[other], raw[key]
        elif action == 2 and isinstance(raw, list):
            raw.append(raw[key])
        elif action == 3 and type(raw[key]) is int:
            raw[key] += chance.choice([-1, 1, 8, -8, 4096])
        else:
            raw[key] = chance.choice(VALUES)
        return


@pytest.mark.thorough
def test_manifest_fuzz(
    folder: CheckpointFolder, audited: list[tuple[str, tuple[Any, ...]]]
) -> None:
    """3,000 forged manifests: refused, or harmless; constant memory.

    No file outside of the step is opened.
    """
    chance = random.Random(1)
    write_step(folder, 30, ranks=1)
    path = folder.step_path(30)
    good = (path / "manifest.json").read_bytes()
    body = json.loads(good)
    del body["digest"]
    plain = json.dumps(body)
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    accepted = 0
    for _ in range(3000):
        raw = json.loads(plain)
        for _ in range(chance.choice([1, 1, 2, 5])):
            _mutate(raw, chance)
        text = signed(json.dumps(raw))
        try:
            manifest = Manifest.from_json(text)
        except CheckpointError:
            continue
        accepted += 1
        (path / "manifest.json").write_bytes(text)
        found = folder.scan()[0]
        if found.manifest is not None:  # what is left to change does no harm, or the record tells
            wrong = verify(path, manifest)
            assert all("record of" in each or "its record" in each for each in wrong)
    LISTENING[0] = False
    assert 0 < accepted < 1000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - resident < 200 * 1024  # KiB
    opened = {
        str(arguments[0])
        for event, arguments in audited
        if event == "open" and isinstance(arguments[0], str | Path)
    }
    outside = {name for name in opened if not name.startswith(str(folder.path))}
    assert not outside
    assert opened


def test_a_forged_header_does_not_matter(folder: CheckpointFolder) -> None:
    """Extents come from the manifest; a header that says otherwise is found by its digest."""
    path = folder.step_path(20) / "rank-00000.safetensors"
    content = bytearray(path.read_bytes())
    content[0:8] = (2**40).to_bytes(8, "little")
    path.write_bytes(content)
    assert "header" in problems(folder)[0]


def test_no_pickle_is_loaded(
    folder: CheckpointFolder, tmp_path: Path, audited: list[tuple[str, Any]]
) -> None:
    """Neither by reading, nor when files hold pickles that would run something."""
    manifest = read_step(folder.step_path(20))
    read_step_state(folder.step_path(20), manifest)
    export(folder.step_path(20), manifest, tmp_path / "out")
    export(folder.step_path(20), manifest, tmp_path / "out.pt")
    bomb = b"cos\nmkdir\n(V%s\ntR." % str(tmp_path / "canary").encode()
    for name in ("rank-00000.safetensors", "manifest.json"):
        (folder.step_path(20) / name).write_bytes(bomb)
        assert problems(folder) != []
    LISTENING[0] = False
    assert {event for event, _ in audited} == {"open"}
    assert not (tmp_path / "canary").exists()
