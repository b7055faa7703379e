"""Find the key that was probably meant: `nearest_key(("zero", "stag")) == ("zero", "stage")`."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

from zrun.job.other_words import key_called
from zrun.job.problems import KeyPath
from zrun.job.schema import fields, find_key, keys
from zrun_core.spine.config import JobConfig


def nearest_key(path: KeyPath) -> KeyPath | None:
    """Return the key that an unknown `path` probably meant.

    That is what other tools call by this name, a sibling with a similar name, or a key of this name
    in another section; None: there is none.
    """
    name = str(path[-1])
    called = key_called(".".join(map(str, path)))
    if called is not None:
        return called
    sibling = nearest(name, siblings(path[:-1]))
    if sibling is not None:
        return (*path[:-1], sibling)
    elsewhere = {str(key): key.path for key in keys()}
    elsewhere |= {key.name: key.path for key in reversed(list(keys()))}  # the first of a name wins
    found = next(iter(get_close_matches(name, elsewhere, n=1, cutoff=0.8)), None)
    return None if found is None else elsewhere[found]


def siblings(parent: KeyPath) -> Iterable[str]:
    """Return the names that are allowed below `parent`."""
    key = find_key(parent)
    if key is None or key.section is None:
        return fields(JobConfig)
    return fields(key.section)


def nearest(name: str, names: Iterable[str]) -> str | None:
    """Return the one of `names` that looks most like `name`, if any does."""
    return next(iter(get_close_matches(name, names, n=1, cutoff=0.7)), None)
