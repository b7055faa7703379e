"""A draft as the text of a job file, with the key of the configuration beside each value."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from zrun.job.scalars import write
from zrun.job.schema import find_key
from zrun.peers.draft import Draft, Written, plain, tree
from zrun_core.spine.config import JobConfig

_COMMENT_COLUMN = 32
# As `zrun init` writes them; the second is a key that a job may do without.
_YOURS = (
    "model: train.py:build_model     # yours: returns an nn.Module",
    "data: train.py:build_data       # yours: returns a Dataset",
    "# loss: train.py:loss_fn        # (model, batch) -> loss, where the model does not return it",
)
_LENGTHS = ("steps", "tokens", "epochs")


def job_text(name: str, title: str, draft: Draft) -> str:
    """Return the job file of a draft.

    Args:
        title: what it was made of, for its first line.
    """
    found = tree(draft.keys)
    if not any(key in found for key in _LENGTHS):
        found["steps"] = Written(1000, "", "the file does not say how long: write yours, or epochs")
    if "batch" not in found:
        found["batch"] = {"micro": Written(1, "", "the file does not say: write yours")}
    lines = [f"# {title}", f"name: {write(name)}", *_YOURS]
    for key in JobConfig.model_fields:
        if key in found:
            lines += _lines((key,), found[key])
    return "\n".join(lines) + "\n"


def _lines(path: tuple[str, ...], value: Mapping[str, Any] | Written) -> Iterator[str]:
    """Yield the lines of a key: one of a value or of a short form, else those of a block."""
    margin = "  " * (len(path) - 1)
    if isinstance(value, Written):
        yield _with_comment(f"{margin}{path[-1]}: {write(value.value)}", value.comment)
        return
    key = find_key(path)
    short = key.section.short if key is not None and key.section is not None else None
    if short is not None and list(value) == [short[0]]:
        yield from _lines(path, value[short[0]])
        return
    if key is None or key.section is None:  # a mapping of its own, such as optim.args
        comments = ", ".join(dict.fromkeys(_comments(value)))
        yield _with_comment(f"{margin}{path[-1]}: {write(dict(plain(value)))}", comments)
        return
    yield f"{margin}{path[-1]}:"
    for name in key.section.model_fields:
        alias = key.section.model_fields[name].alias or name
        if alias in value:
            yield from _lines((*path, alias), value[alias])


def _comments(value: Mapping[str, Any]) -> Iterator[str]:
    for item in value.values():
        if isinstance(item, Written):
            yield item.comment
        else:
            yield from _comments(item)


def _with_comment(line: str, comment: str) -> str:
    return f"{line.ljust(_COMMENT_COLUMN - 1)} # {comment}" if comment else line
