"""A configuration that another one names, such as that of DeepSpeed in one of accelerate's."""

from __future__ import annotations

from pathlib import Path

from zrun.peers.read_file import read_file
from zrun.peers.source import Source


def source_of_named_file(source: Source, key: str, name: str, tool: str) -> Source | None:
    """Return the configuration in the file `name`; None, after it was told so: it is not here."""
    places = [source.path.parent / name, Path(name)]
    path = next((place for place in places if place.is_file()), None)
    if path is None:
        source.leave(key, f"{name} is not here: `zrun import` it by itself, and put both together")
        return None
    value = read_file(path)
    if not isinstance(value, dict):
        raise source.error(f"{key}: {path} is no mapping of keys; name the file of {tool}")
    return Source(path, tool, value, source.draft, label=f"{path.name}: ")
