"""Text to token ids and back: bytes, or a file of the `tokenizers` library."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from zrun_core.errors import JobError


class Tokenizer(Protocol):
    """A vocabulary."""

    @property
    def vocab_size(self) -> int:
        """The number of ids."""
        ...

    @property
    def identity(self) -> str:
        """Differs between vocabularies that encode differently."""
        ...

    @property
    def mask_id(self) -> int | None:
        """The id that hides a token from a masked language model; None: there is none."""
        ...

    def encode(self, text: bytes) -> NDArray[np.integer]:
        """Return the token ids of UTF-8 text, [tokens]."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids; what is not valid UTF-8 is shown as U+FFFD."""
        ...


class ByteTokenizer:
    """Every byte is its own token: any file can be encoded, and nothing has to be downloaded."""

    vocab_size = 256
    identity = "bytes"
    mask_id = 256  # one past the bytes: a model of masked bytes has a vocabulary of 257

    def encode(self, text: bytes) -> NDArray[np.uint8]:
        """Return the bytes themselves, without a copy."""
        return np.frombuffer(text, dtype=np.uint8)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of these bytes; ids beyond them are left out."""
        return bytes(i for i in ids if i < self.vocab_size).decode(errors="replace")


class FileTokenizer:
    """A `tokenizer.json` of the `tokenizers` library, without its special tokens around each text.

    Raises:
        JobError: the library is not installed, or it cannot read the file.
    """

    def __init__(self, path: Path) -> None:
        try:
            import tokenizers
        except ImportError:
            raise JobError(
                f"tokenizer: {path} needs the package tokenizers: pip install 'zrun[hf]'"
            ) from None
        try:
            content = path.read_bytes()
            self._tokenizer = tokenizers.Tokenizer.from_buffer(content)
        except Exception as error:  # the library raises no other for a file that is not its own
            raise JobError(f"tokenizer: cannot read {path}: {error}") from None
        self.identity = hashlib.sha256(content).hexdigest()
        self.vocab_size: int = self._tokenizer.get_vocab_size()
        self.mask_id: int | None = self._tokenizer.token_to_id("[MASK]")

    def encode(self, text: bytes) -> NDArray[np.uint32]:
        """Return the token ids; bytes that are not UTF-8 are read as U+FFFD."""
        encoding = self._tokenizer.encode(text.decode(errors="replace"), add_special_tokens=False)
        return np.asarray(encoding.ids, dtype=np.uint32)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of these tokens."""
        text: str = self._tokenizer.decode(list(ids))
        return text


def open_tokenizer(path: str | None) -> Tokenizer:
    """Return the tokenizer stored at `path`; None: bytes."""
    return ByteTokenizer() if path is None else FileTokenizer(Path(path).expanduser())
