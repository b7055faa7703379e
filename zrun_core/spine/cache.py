"""Small files that spare work: `~/.cache/zrun/<kind>/<key>.json`, readable by their owner alone, the newest of them."""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from zrun_core.spine.folders import make_private


def cache_folder(kind: str, environ: Mapping[str, str] = os.environ) -> Path:
    """Where files of a kind are kept."""
    home = environ.get("XDG_CACHE_HOME") or os.path.join(environ.get("HOME", "~"), ".cache")
    return Path(home).expanduser() / "zrun" / kind


def write_cached(place: Path, text: str | bytes, most: int) -> None:
    """Write `text` to `place`, and remove the oldest beside it beyond `most`. Where that cannot be, nothing is kept."""
    part = place.with_name(f".{place.stem}.{secrets.token_hex(4)}")
    with suppress(OSError):
        make_private(place.parent)
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(text.encode() if isinstance(text, str) else text)
        part.replace(place)
        for old in sorted(place.parent.glob("*.json"), key=lambda path: path.stat().st_mtime)[
            :-most
        ]:
            old.unlink(missing_ok=True)


def digest_of_file(path: str | os.PathLike[str]) -> str:
    """A digest of its content; "" if it is gone."""
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError:
        return ""


def are_unchanged(files: Mapping[str, str]) -> bool:
    """Whether these files still have these digests."""
    return all(digest_of_file(path) == expected for path, expected in files.items())
