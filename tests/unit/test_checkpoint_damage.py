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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_toys import read_step_state, write_step

from zrun_core.checkpoint.digest import digest
from zrun_core.checkpoint.export import export
from zrun_core.checkpoint.folder import CheckpointFolder, read_step
from zrun_core.checkpoint.manifest import Manifest
from zrun_core.checkpoint.shard_file import read_fragment
from zrun_core.checkpoint.verify import read_back, verify
from zrun_core.errors import CheckpointError

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
    for fragment in manifest.fragments:
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
        for place in (
            0,
            *(each.offset + each.num_bytes - 1 for each in manifest.fragments_of(info.name)),
        ):
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


def forged(manifest: Manifest, change: Callable[[Any], None]) -> bytes:
    raw = json.loads(manifest.to_json())
    del raw["digest"]
    change(raw)
    return signed(json.dumps(raw))


def signed(text: str) -> bytes:
    body = text.encode()[:-1]
    return body + b',\n"digest":"%s"}\n' % digest(body).encode()


def _set(*path: Any) -> Callable[[Any], None]:
    """A change that sets the value at `path[:-1]` to `path[-1]`."""

    def change(raw: Any) -> None:
        for key in path[:-2]:
            raw = raw[key]
        raw[path[-2]] = path[-1]

    return change


def _shift(raw: Any) -> None:
    raw["fragments"][1]["offset"] = raw["fragments"][0]["offset"]


def _of_state(state: str, field: str, value: Any) -> Callable[[Any], None]:
    """A change of every fragment of a state."""

    def change(raw: Any) -> None:
        for fragment in raw["fragments"]:
            if fragment["state"] == state:
                fragment[field] = value

    return change


def _set_random(key: str, value: Any) -> Callable[[Any], None]:
    """A change of the first fragment of the random streams."""
    return lambda raw: next(
        each for each in raw["fragments"] if each["state"] == "rank"
    ).__setitem__(key, value)


def _as_integers(raw: Any) -> None:
    for fragment in raw["fragments"]:
        if (fragment["tensor"], fragment["state"]) == ("layer.weight", "value"):
            fragment["dtype"] = "int32"


def _nested(depth: int) -> dict[str, Any]:
    return {"a": _nested(depth - 1)} if depth else {}


_ORDER = {"order": None, "late": []}


def _swap_ranges(raw: Any) -> None:
    first, second = (
        each
        for each in raw["fragments"]
        if (each["tensor"], each["state"]) == ("layer.bias", "value")
    )
    first["start"], first["stop"], second["start"] = 0, 17, 16
    first["num_bytes"] = 34


HOSTILE = {
    "absolute path": (_set("files", 0, "name", "/etc/passwd"), "plain name"),
    "parent": (_set("files", 0, "name", "../manifest.json"), "plain name"),
    "dots": (_set("fragments", 0, "file", ".."), "plain name"),
    "null byte": (_set("files", 0, "name", "a\0b"), "printable"),
    "the manifest as a shard": (
        _set("files", 0, "name", "manifest.json"),
        "manifest.json as a file",
    ),
    "a huge shape": (_set("tensors", 0, "shape", [10**12, 33]), "strides|elements"),
    "an impossible shape": (_set("tensors", 0, "shape", [2**61, 2**61]), "no possible shape"),
    "a thousand dimensions": (_set("tensors", 0, "shape", [1] * 1000), "no possible shape"),
    "a huge fragment": (_set("fragments", 0, "stop", 10**12), "bytes"),
    "a huge file": (_set("files", 0, "num_bytes", 10**15), "its parts"),
    "a number beyond 64 bits": (_set("files", 0, "num_bytes", 10**400), "whole number"),
    "a negative offset": (_set("fragments", 0, "offset", -8), "whole number"),
    "an infinite size": (_set("fragments", 0, "num_bytes", float("inf")), "JSON"),
    "a size that is no number": (_set("files", 0, "num_bytes", float("nan")), "JSON"),
    "a fractional size": (_set("fragments", 0, "num_bytes", 1.5), "whole number"),
    "a truth for a number": (_set("step", True), "whole number"),
    "an overlap in the file": (_shift, "overlaps|gap"),
    "an overlap in the tensor": (_swap_ranges, "overlaps|bytes|gap"),
    "an overlap of strides": (_set("tensors", 0, "stride", [0, 0]), "gaps or overlap"),
    "an unknown format of numbers": (_set("fragments", 0, "dtype", "object"), "unknown"),
    "an escape sequence": (_set("tensors", 0, "name", "\x1b[2Jweight"), "printable"),
    "a tensor twice": (_set("tensors", 1, "name", "tied.weight"), "twice"),
    "a missing tensor": (lambda raw: raw["tensors"].pop(0), "does not list"),
    "a missing fragment": (lambda raw: raw["fragments"].pop(0), "gap|parts|digest"),
    "a missing file": (lambda raw: raw["files"].pop(0), "does not list"),
    "a missing key": (lambda raw: raw.pop("step"), "keys"),
    "another key": (_set("pickle", "cos\nsystem"), "keys"),
    "another key of a file": (
        _set("files", 1, "mode", 0o777),
        r"files\[1\] does not have the keys",
    ),
    "another key of a scaler": (
        _set("progress", "scaler", {"scale": 2.0, "good": 1, "bad": 1, "ugly": 1}),
        "progress, scaler does not have the keys scale, good, bad",
    ),
    "groups that are null": (_set("progress", "groups", None), "groups: not an object"),
    "other parts that are null": (_set("layout", "others", None), "layout, others: not a list"),
    "a size that is a tree": (_set("step", _nested(300)), "step: an object is not a whole number"),
    "another digest": (_set("files", 0, "digest", "0" * 32), "not that of its parts"),
    "a newer format": (_set("format", 2), "format 2"),
    "no object": (lambda raw: raw["files"].__setitem__(0, "x"), "keys"),
    "no ranks": (_set("world_size", 0), "too few"),
    "a counter in words": (
        _set("progress", "steps", "many"),
        "progress, steps: 'many' is not a whole number",
    ),
    "a counter below 0": (_set("progress", "cursor", -1), "progress, cursor"),
    "a dataset of nothing": (
        _set("progress", "dataset_samples", 0),
        "dataset_samples: 0 is too few",
    ),
    "a loss in words": (_set("progress", "loss", "low"), "is not a number"),
    "a number beyond floats": (_set("progress", "loss", 10**400), "is not a number"),
    "a scale of 0": (
        _set("progress", "scaler", {"scale": 0, "good": 1, "bad": 1}),
        "scale: 0.0 is not more than 0",
    ),
    "half a scaler": (_set("progress", "scaler", {"scale": 2.0}), "scale, good, bad"),
    "groups in words": (_set("progress", "groups", {"": 7}), "groups: not a list"),
    "parameters for options": (
        _set("progress", "groups", {"": [{"params": []}]}),
        "params are no option",
    ),
    "extras in a list": (_set("progress", "extra", [1, 2]), "extra: not an object"),
    "models in a number": (
        _set("layout", "models", 5),
        "models: not an object|layout: not an object",
    ),
    "a model in a number": (_set("layout", "models", {"a": 5}), "layout, models, a: not an object"),
    "other models": (_set("layout", "models", {"a": {}}), "not of the models in layout"),
    "other parts in a number": (_set("layout", "others", 5), "layout, others: not a list"),
    "another part in a number": (
        _set("layout", "others", [{}, 5]),
        r"layout, others\[1\]: not an object",
    ),
    "a state too few": (lambda raw: raw["rank_states"].pop(), "states of 2 ranks"),
    "a rank twice": (_set("rank_states", 1, "rank", 0), "states of 2 ranks"),
    "a rank without streams": (
        lambda raw: raw["rank_states"][0].pop("rng"),
        "keys rank, rng, learnt",
    ),
    "an order that is none": (
        _set("rank_states", 0, "learnt", {**_ORDER, "order": 5}),
        "learnt, order: not a list",
    ),
    "an order of numbers": (
        _set("rank_states", 0, "learnt", {**_ORDER, "order": [1]}),
        "not a text",
    ),
    "half an order": (_set("rank_states", 0, "learnt", {"order": None}), "keys order, late"),
    "streams of nobody": (_set_random("tensor", "torch"), "belongs to no rank"),
    "streams of a rank that is not": (_set_random("tensor", "rng/2/torch"), "belongs to no rank"),
    "a buffer of no tensor": (_set_random("tensor", "buffer/0/layer.scale"), "does not list"),
    "a buffer of another size": (_set_random("tensor", "buffer/0/norm.count"), "elements"),
    "a buffer of another kind": (
        _set_random("tensor", "buffer/0/layer.weight"),
        "is uint8, and the tensor float32",
    ),
    "values of another kind": (_as_integers, "is int32, and the tensor float32"),
    "a job without a bottom": (_set("job", "a", _nested(200)), "inside of more than 100"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_manifest(folder: CheckpointFolder, name: str) -> None:
    change, message = HOSTILE[name]
    with pytest.raises(CheckpointError, match=message):
        Manifest.from_json(forged(read_step(folder.step_path(20)), change))


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
        assert (
            found.manifest is None or verify(path, manifest) == []
        )  # what is left to change does no harm
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
