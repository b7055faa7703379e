"""The job of a run as it ran, each key with where its value came from."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from zrun.job.hidden import may_be_secret, shown_value
from zrun.job.recorded import RecordedKey, recorded_keys
from zrun.pages import document
from zrun_core.errors import JobError
from zrun_core.sizes import several

_HIDDEN = "***"
_MOST = 2000  # characters of a value
_WORDS = {
    "file": "from the job file",
    "override": "from the command line",
    "auto": "chosen by zrun",
    "default": "defaults",
    "": "without an origin",
}


def job_keys(run_dir: Path) -> str:
    """Return the keys of a run's job, those that somebody chose first.

    One whose job cannot be read says why.
    """
    try:
        text = (run_dir / "job.yaml").read_text(encoding="utf-8")
        keys = recorded_keys(text)
    except OSError as error:
        return document.soft(f"job.yaml cannot be read: {error.strerror}.")
    except (JobError, UnicodeDecodeError) as error:
        return document.soft(f"job.yaml cannot be read: {error}.")
    parts = []
    for kind, words in _WORDS.items():
        of_kind = [key for key in keys if key.kind == kind]
        if not of_kind:
            continue
        if kind == "default":
            parts.append(document.details(f"{len(of_kind)} {words}", _table(of_kind)))
        else:
            parts.append(f'<h3 class="part">{words.capitalize()}</h3>{_table(of_kind)}')
    return "".join(parts)


def _table(keys: Iterable[RecordedKey]) -> str:
    rows = [document.row([key.name, _shown(key), _origin(key)]) for key in keys]
    return document.table(("key", "value", "origin"), rows, "words")


def _origin(key: RecordedKey) -> str:
    """Return where a value came from; of arguments that lie in several places, the first."""
    if key.kind != "file":
        return key.origin or "-"
    first, *others = key.origin.split(", ")
    return f"{first} and {several(len(others), 'more place')}" if others else first


def _shown(key: RecordedKey) -> str:
    """Return a value without what may be a secret: the page is handed around."""
    is_of_env = key.path[0] == "env"
    if any(may_be_secret(str(part)) for part in key.path) or (is_of_env and key.value):
        return _HIDDEN
    return shown_value(str(key.path[-1]), key.value)[:_MOST]
