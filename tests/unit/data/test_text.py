"""Text data: windows, splits, tokenizers, the cache, and masked samples."""

from __future__ import annotations

import json
import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from zrun_core.data import token_cache
from zrun_core.data.text import MaskedTokens, masked_text, text
from zrun_core.data.tokenizer import ByteTokenizer, FileTokenizer, open_tokenizer
from zrun_core.errors import JobError


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Forty files of 100 bytes each, in two folders."""
    for index in range(40):
        folder = tmp_path / "corpus" / ("deep/er" if index % 2 else ".")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{index:02}.txt").write_text(f"{index:02}" * 50)
    return tmp_path / "corpus"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "zrun"


def test_windows_do_not_overlap_and_labels_are_the_next_tokens(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(bytes(range(10)))
    data = text(str(tmp_path / "a.txt"), split="all", seq_len=3)
    assert len(data) == 3
    assert [data[index]["input_ids"].tolist() for index in range(3)] == [
        [0, 1, 2],
        [3, 4, 5],
        [6, 7, 8],
    ]
    assert [data[index]["labels"].tolist() for index in range(3)] == [
        [1, 2, 3],
        [4, 5, 6],
        [7, 8, 9],
    ]
    assert data[0]["labels"].dtype == data[0]["input_ids"].dtype == torch.int64
    with pytest.raises(IndexError):
        data[3]


def test_files_are_read_in_order_of_their_paths(corpus: Path) -> None:
    data = text(str(corpus / "**" / "*.txt"), split="all", seq_len=100)
    first = [bytes(data[index]["input_ids"].tolist()[:2]).decode() for index in range(3)]
    assert first == ["00", "02", "04"]
    assert len(data) == 39  # the last window lacks its last label


def test_split_is_by_file_complete_and_stable(corpus: Path) -> None:
    def files(split: str, folder: Path) -> set[str]:
        data = text([str(folder / "**/*.txt")], split=split, seq_len=1, val_fraction=0.3)
        names = data.packed.open().reshape(-1, 100)[:, :2]  # each file repeats its two digits
        return {bytes(name).decode() for name in names}

    train, val = files("train", corpus), files("val", corpus)
    assert not train & val
    assert len(train | val) == 40
    assert 4 <= len(val) <= 20
    for index in range(40, 60):  # more files, another folder: nobody changes sides
        (corpus / f"{index}.txt").write_text(str(index) * 50)
    moved = corpus.rename(corpus.parent / "elsewhere")
    assert val <= files("val", moved)
    assert train <= files("train", moved)


def test_stdlib_is_python_source_without_its_tests() -> None:
    train, val = text(limit_bytes=200_000), text(split="val", limit_bytes=200_000)
    for data in (train, val):
        assert len(data) == 199_999 // 256
        source = bytes(data[5]["input_ids"].tolist()).decode(errors="replace")
        assert source.isprintable() or "\n" in source
    assert not np.array_equal(train.packed.open(), val.packed.open())


def test_cache_is_reused_until_a_file_changes(corpus: Path, cache: Path) -> None:
    def pack() -> Path:
        return text(str(corpus / "*.txt"), split="all", seq_len=8).packed.path

    first = pack()
    written = first.stat().st_mtime_ns
    assert pack() == first
    assert first.stat().st_mtime_ns == written
    assert first.parent == cache
    (corpus / "00.txt").write_text("x" * 100)
    assert pack() != first


def test_ranks_that_pack_at_once_agree(corpus: Path, cache: Path) -> None:
    def pack(_: int) -> bytes:
        return text(str(corpus / "**/*.txt"), split="all", seq_len=8).packed.open().tobytes()

    with ThreadPoolExecutor(8) as pool:
        contents = set(pool.map(pack, range(16)))
    assert len(contents) == 1
    assert len(contents.pop()) == 4000
    assert sorted(path.suffix for path in cache.iterdir()) == [".lock", ".uint8"]


def test_a_failed_packing_leaves_nothing(
    corpus: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(file: Path) -> bytes:
        raise JobError("unreadable")

    monkeypatch.setattr(token_cache, "_read", fail)
    with pytest.raises(JobError, match="unreadable"):
        text(str(corpus / "*.txt"), split="all")
    assert [path.suffix for path in cache.iterdir()] == [".lock"]


def test_cache_falls_back_to_a_temporary_folder(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "occupied").write_text("a file, where a folder would be made")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "occupied"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "scratch"))
    data = text(str(corpus / "*.txt"), split="all", seq_len=8)
    assert data.packed.path.parent == tmp_path / "scratch" / f"zrun-{os.getuid()}"
    with pytest.raises(JobError, match="cache_dir: cannot write to"):
        text(str(corpus / "*.txt"), split="all", cache_dir=str(tmp_path / "occupied" / "x"))


def test_limit_stops_in_the_middle_of_a_file(corpus: Path) -> None:
    data = text(str(corpus / "*.txt"), split="all", seq_len=10, limit_bytes=151)
    assert len(data.packed.open()) == 151
    assert len(data) == 15


def test_pickles_name_the_file_instead_of_holding_it(corpus: Path) -> None:
    for data in (
        text(str(corpus / "*.txt"), split="all"),
        masked_text(str(corpus / "*.txt"), split="all"),
    ):
        pickled = pickle.dumps(data)
        assert len(pickled) < 500
        again = pickle.loads(pickled)
        assert torch.equal(again[2]["input_ids"], data[2]["input_ids"])


@pytest.fixture
def tokenizer_file(tmp_path: Path) -> Path:
    """A word-level vocabulary with more than 256 entries."""
    import tokenizers
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    vocabulary = {
        word: index
        for index, word in enumerate(["[UNK]", "[MASK]", *(f"w{i}" for i in range(300))])
    }
    tokenizer = tokenizers.Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def test_tokenizer_file(tmp_path: Path, tokenizer_file: Path) -> None:
    (tmp_path / "a.txt").write_text("w7 w299 never w0 w1")
    data = text(str(tmp_path / "a.txt"), split="all", seq_len=4, tokenizer=str(tokenizer_file))
    assert data.packed.dtype == "uint16"
    assert data[0]["input_ids"].tolist() == [9, 301, 0, 2]
    assert open_tokenizer(str(tokenizer_file)).decode([9, 301]) == "w7 w299"


def test_bytes_tokenizer_reads_anything() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.encode(b"\xff\x00a").tolist() == [255, 0, 97]
    assert tokenizer.decode([255, 97, 256]) == "\ufffda"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"paths": "none/*.txt"}, "no file matches none/\\*.txt in "),
        ({"split": "test"}, "there is no split 'test': write train, val, all"),
        (
            {"split": "val", "val_fraction": 0.0},
            "none of the 20 files of .* falls into the split 'val'",
        ),
        ({"split": "all", "seq_len": 5000}, "is shorter than one sample of 5000 tokens"),
        ({"tokenizer": "missing.json"}, "tokenizer: cannot read missing.json"),
    ],
)
def test_unusable_arguments(corpus: Path, args: dict[str, object], message: str) -> None:
    with pytest.raises(JobError, match=message):
        text(**({"paths": str(corpus / "*.txt")} | args))


def test_a_file_that_is_no_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text(json.dumps({"a": 1}))
    with pytest.raises(JobError, match=r"tokenizer: cannot read .*other.json"):
        FileTokenizer(tmp_path / "other.json")


@pytest.fixture
def masked(tmp_path: Path) -> MaskedTokens:
    """Two hundred windows of 100 letters."""
    (tmp_path / "a.txt").write_bytes(bytes(97 + i % 26 for i in range(20_000)))
    return masked_text(str(tmp_path / "a.txt"), split="all", seq_len=100, seed=3)


def test_masked_samples_follow_the_rule(masked: MaskedTokens) -> None:
    assert len(masked) == 200
    fates = {"mask": 0, "same": 0, "random": 0}
    for index in range(len(masked)):
        original = torch.tensor([97 + (index * 100 + i) % 26 for i in range(100)])
        sample = masked[index]
        hidden = sample["labels"] != -100
        assert hidden.sum() == 15
        assert torch.equal(sample["labels"][hidden], original[hidden])
        assert torch.equal(sample["input_ids"][~hidden], original[~hidden])
        shown = sample["input_ids"][hidden]
        fates["mask"] += int((shown == 256).sum())
        fates["same"] += int((shown == original[hidden]).sum())
        fates["random"] += int(((shown != 256) & (shown != original[hidden])).sum())
    total = sum(fates.values())
    assert fates["mask"] / total == pytest.approx(0.8, abs=0.03)
    assert fates["same"] / total == pytest.approx(0.1, abs=0.03)
    assert fates["random"] / total == pytest.approx(0.1, abs=0.03)


def test_masks_depend_on_seed_and_index_alone(masked: MaskedTokens) -> None:
    before = torch.get_rng_state()
    assert torch.equal(masked[5]["labels"], masked[5]["labels"])
    assert torch.equal(torch.get_rng_state(), before)
    other = MaskedTokens(masked.packed, 100, 256, 256, seed=4)
    assert not torch.equal(masked[5]["labels"], other[5]["labels"])
    positions = {
        tuple((masked[index]["labels"] != -100).nonzero().flatten().tolist()) for index in range(20)
    }
    assert len(positions) == 20


def test_masking_needs_a_mask_token(tmp_path: Path, tokenizer_file: Path) -> None:
    (tmp_path / "a.txt").write_text("w1 w2 w3 " * 50)
    path = str(tmp_path / "a.txt")
    assert masked_text(path, split="all", seq_len=10, tokenizer=str(tokenizer_file)).mask_id == 1
    content = json.loads(tokenizer_file.read_text())
    del content["model"]["vocab"]["[MASK]"]
    tokenizer_file.write_text(json.dumps(content))
    with pytest.raises(JobError, match=r"has no token \[MASK\]"):
        masked_text(path, split="all", seq_len=10, tokenizer=str(tokenizer_file))
