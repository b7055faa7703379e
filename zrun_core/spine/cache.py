"""The user's cache: the newest files `~/.cache/zrun/<kind>/<key>.json`, readable by their owner."""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from zrun_core.spine.folders import make_private


def cache_folder(kind: str, environ: Mapping[str, str] = os.environ) -> Path:
    """Return the folder of cached files of a kind."""
    home = environ.get("XDG_CACHE_HOME") or os.path.join(environ.get("HOME", "~"), ".cache")
    return Path(home).expanduser() / "zrun" / kind


def write_cached(place: Path, text: str | bytes, most: int) -> None:
    """Write a file, and remove the oldest beside it. On an error nothing is kept."""
    content = text.encode() if isinstance(text, str) else text
    part = place.with_name(f".{place.stem}.{secrets.token_hex(4)}")
    with suppress(OSError):
        make_private(place.parent)
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(content)
        part.replace(place)
        files = sorted(place.parent.glob("*.json"), key=lambda path: path.stat().st_mtime)
        for old in files[:-most]:
            old.unlink(missing_ok=True)


def digest_of_file(path: str | os.PathLike[str]) -> str:
    """Return a digest of a file's content; "" if there is no such file."""
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError:
        return ""


def are_unchanged(files: Mapping[str, str]) -> bool:
    """Return whether these files still have these digests."""
    return all(digest_of_file(path) == expected for path, expected in files.items())
