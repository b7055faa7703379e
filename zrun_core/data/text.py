"""Text as training data, from a job file:

    data: {call: "zrun_core.data.text:text", args: {paths: "corpus/**/*.txt", seq_len: 1024}}

`paths` is a file, a glob, a list of them, or `stdlib`: the source of Python's own library, real
text on every machine. Files are tokenised once, into one memory-mapped cache file, and split into
training and validation file by file.
"""

from __future__ import annotations

import glob
import hashlib
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import TypedDict

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from zrun_core.data.batch import IGNORED
from zrun_core.data.token_cache import PackedTokens, pack
from zrun_core.data.tokenizer import open_tokenizer
from zrun_core.distributed.rng import mix
from zrun_core.errors import JobError

_MASKED_FRACTION = 0.15
_SPLITS = ("train", "val", "all")
_SKIPPED_FOLDERS = frozenset(
    {"test", "tests", "site-packages", "dist-packages", "idlelib", "__pycache__"}
)


class TextSample(TypedDict):
    """One sample of a language model."""

    input_ids: Tensor  # int64 [T]
    labels: Tensor  # int64 [T]


class NextTokens(Dataset[TextSample]):
    """Windows of T tokens that do not overlap, labelled with the token after each.

    The tail is dropped.
    """

    def __init__(self, packed: PackedTokens, seq_len: int) -> None:
        self.packed = packed
        self.seq_len = seq_len
        self._tokens = packed.open()

    def __len__(self) -> int:
        return max(0, len(self._tokens) - 1) // self.seq_len  # the last label is one token further

    def __getitem__(self, index: int) -> TextSample:
        window = _window(self._tokens, index, self.seq_len, len(self), extra=1)  # [T + 1]
        return {"input_ids": window[:-1], "labels": window[1:]}

    def __reduce__(self) -> tuple[type[NextTokens], tuple[PackedTokens, int]]:
        # A mapped file would be pickled with its content.
        return type(self), (self.packed, self.seq_len)


class MaskedTokens(Dataset[TextSample]):
    """Windows of T tokens of which 15 % are to be guessed (Devlin et al. 2018, section 3.1).

    80 % of these are replaced by the mask, 10 % by a random token, 10 % stay. What is drawn for a
    window depends on (seed, index) alone: it is the same in every epoch, on every rank and in every
    loader process.
    """

    def __init__(
        self, packed: PackedTokens, seq_len: int, vocab_size: int, mask_id: int, seed: int
    ) -> None:
        self.packed = packed
        self.seq_len = seq_len
        self.vocab_size = vocab_size
        self.mask_id = mask_id
        self.seed = seed
        self._tokens = packed.open()

    def __len__(self) -> int:
        return len(self._tokens) // self.seq_len

    def __getitem__(self, index: int) -> TextSample:
        tokens = _window(self._tokens, index, self.seq_len, len(self), extra=0)  # [T]
        generator = torch.Generator().manual_seed(mix(self.seed, index))
        num_masked = max(1, round(_MASKED_FRACTION * self.seq_len))  # M
        masked = torch.randperm(self.seq_len, generator=generator)[:num_masked]  # positions, [M]
        fate = torch.rand(num_masked, generator=generator)  # [M]
        drawn = torch.randint(self.vocab_size, (num_masked,), generator=generator)  # [M]
        labels = torch.full_like(tokens, IGNORED)
        labels[masked] = tokens[masked]
        replaced = torch.where(fate < 0.9, drawn, tokens[masked])
        shown = torch.where(fate < 0.8, self.mask_id, replaced)
        return {"input_ids": tokens.index_copy(0, masked, shown), "labels": labels}

    def __reduce__(self) -> tuple[type[MaskedTokens], tuple[PackedTokens, int, int, int, int]]:
        return type(self), (self.packed, self.seq_len, self.vocab_size, self.mask_id, self.seed)


def text(
    paths: str | list[str] = "stdlib",
    split: str = "train",
    seq_len: int = 256,
    *,
    tokenizer: str | None = None,
    val_fraction: float = 0.1,
    limit_bytes: int | None = None,
    cache_dir: str | None = None,
) -> NextTokens:
    """Return next-token samples: {"input_ids", "labels"}, int64 [seq_len] each.

    Args:
        paths: a file, a glob (`**` crosses folders), a list of them, or "stdlib". Relative to the
            working directory.
        split: "train", "val" or "all". A file belongs to one side by a hash of its path below the
            glob's fixed part.
        tokenizer: path of a JSON file of the `tokenizers` library; None: bytes, a vocabulary of
            256.
        val_fraction: expected share of the files on the validation side.
        limit_bytes: take no more than this much text, in the order of the paths.
        cache_dir: folder for the packed tokens; None: $XDG_CACHE_HOME/zrun, ~/.cache/zrun or a
            temporary folder.

    Raises:
        JobError: no file matches or lands on this side of the split, or the text is shorter than
            one sample.
    """
    files = _select(paths, split, val_fraction)
    packed = pack(files, open_tokenizer(tokenizer), limit_bytes, cache_dir)
    dataset = NextTokens(packed, seq_len)
    _require_sample(dataset, paths)
    return dataset


def masked_text(
    paths: str | list[str] = "stdlib",
    split: str = "train",
    seq_len: int = 128,
    *,
    tokenizer: str | None = None,
    val_fraction: float = 0.1,
    limit_bytes: int | None = None,
    cache_dir: str | None = None,
    seed: int = 0,
) -> MaskedTokens:
    """Return masked-language-model samples: {"input_ids", "labels"}, int64 [seq_len] each.

    Labels are -100 where no token is to be guessed.

    Arguments and errors are those of `text`. The tokenizer must have a token `[MASK]`; for bytes
    the mask is id 256, so that the model needs a vocabulary of 257.
    """
    encoding = open_tokenizer(tokenizer)
    if encoding.mask_id is None:
        raise JobError(f"tokenizer: {tokenizer} has no token [MASK]")
    packed = pack(_select(paths, split, val_fraction), encoding, limit_bytes, cache_dir)
    dataset = MaskedTokens(packed, seq_len, encoding.vocab_size, encoding.mask_id, seed)
    _require_sample(dataset, paths)
    return dataset


def _window(
    tokens: NDArray[np.integer], index: int, seq_len: int, num_windows: int, *, extra: int
) -> Tensor:
    """Return a window of the tokens: int64 [seq_len + extra], a copy of the mapped file.

    There are `num_windows`, of `seq_len` tokens each; `extra` is how many come after the window.
    """
    if not 0 <= index < num_windows:
        raise IndexError(f"window {index} of {num_windows}")
    start = index * seq_len
    return torch.from_numpy(tokens[start : start + seq_len + extra].astype(np.int64))


def _require_sample(dataset: NextTokens | MaskedTokens, paths: str | list[str]) -> None:
    if len(dataset) == 0:
        raise JobError(
            f"data: the text of {paths} is shorter than one sample of {dataset.seq_len} tokens"
        )


def _select(paths: str | list[str], split: str, val_fraction: float) -> list[Path]:
    """Return the files on one side of the split, in the order of their relative paths."""
    if split not in _SPLITS:
        raise JobError(f"data: there is no split {split!r}: write {', '.join(_SPLITS)}")
    files = _stdlib_files() if paths == "stdlib" else _matching_files(paths)
    found = dict(files)
    if not found:
        raise JobError(f"data: no file matches {paths} in {Path.cwd()}")
    chosen = [
        path
        for name, path in sorted(found.items())
        if split == "all" or _is_val(name, val_fraction) == (split == "val")
    ]
    if not chosen:
        raise JobError(
            f"data: none of the {len(found)} files of {paths} falls into the split {split!r}: "
            "change val_fraction, or name the files of each side and write split: all"
        )
    return chosen


def _is_val(name: str, val_fraction: float) -> bool:
    """Flip a coin that every machine and every later run repeats, whatever other files exist."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]) < val_fraction * 2**64


def _stdlib_files() -> Iterator[tuple[str, Path]]:
    root = Path(sysconfig.get_path("stdlib"))
    for path in root.rglob("*.py"):
        name = path.relative_to(root)
        if not _SKIPPED_FOLDERS.intersection(name.parts):
            yield name.as_posix(), path


def _matching_files(patterns: str | list[str]) -> Iterator[tuple[str, Path]]:
    """Yield (path below the fixed part of its pattern, path) of every file that matches."""
    if isinstance(patterns, str):
        patterns = [patterns]
    for pattern in patterns:
        full = str(Path(pattern).expanduser())
        fixed = Path(full).parent
        while glob.has_magic(str(fixed)):
            fixed = fixed.parent
        for match in glob.iglob(full, recursive=True):
            path = Path(match)
            if path.is_file():
                yield path.relative_to(fixed).as_posix(), path
