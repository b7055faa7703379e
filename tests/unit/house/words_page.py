"""Write docs/other-words.md: what others call the keys of a job, from the tables that answer them.

python tests/unit/house/words_page.py
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from first_inputs import counts

from zrun.job.other_words import ADVICE, COMMANDS, KEYS, TEXTS, VALUES
from zrun.job.schema import find_key

PAGE = Path(__file__).resolve().parents[3] / "docs" / "other-words.md"
_HEAD = """\
# Words of other tools

What accelerate, the Trainer of transformers, Lightning, axolotl, DeepSpeed, torchtitan and
Megatron call the keys of a job, and what to write in its place. A job file that has one of these
words is refused with the same answer, in one line, which keeps the value where it means the same.
Some are taken as they are: `lr: 1e-3`, `optim: {name: torch.optim.AdamW}`, `optim: adamw_torch`,
`activations: full`, `precision: bf16-mixed`, `steps: 1e4`; and each key may be written like an
option, by its own name or by that of [the first table](#the-same-key): `--optim.lr 1e-3`,
`--max-steps 100`, `--trainer.devices 2`. Of a section about something else it is not taken:
`--model.dtype bf16` ends with what to write if the job's `precision` is meant. [All
keys](job-file.md) have a page of their own, and the tools [one side by side](coming-from.md). This
one is written by `python tests/unit/house/words_page.py`.
"""


def page() -> str:
    """Return the text of the page."""
    values = {name: f"{key}: {_written(value)}" for name, (key, value) in VALUES.items()}
    advice = {name: TEXTS[word] for name, word in ADVICE.items()}
    return "\n".join(
        [
            _HEAD,
            "## The same key\n\n" + _table(KEYS, "key here, with the same value", code=True),
            "## Another key, with a value\n\n" + _table(values, "write, for example", code=True),
            "## No key of a job\n\n" + _table(advice, "what to do", code=False),
            "## Another command\n\n" + _table(COMMANDS, "what to do", code=False),
            "## What is typed first\n\n" + _first_inputs(),
        ]
    )


def _first_inputs() -> str:
    """Return how many inputs of each tool are taken, and how many are answered."""
    rows = [f"| {tool} | {taken} | {told} |\n" for tool, (taken, told) in counts().items()]
    taken, told = map(sum, zip(*counts().values(), strict=True))
    return (
        f"Of {taken + told} command lines and keys that people type first, {taken} are taken as "
        "they are, since they can mean one\nthing only; the others end with exit code 2 and a line "
        "that says what to write.\nA test holds each of them.\n\n"
        f"| words of | taken | answered |\n|---|---|---|\n{''.join(rows)}"
    )


def _table(answers: Mapping[str, str], title: str, *, code: bool) -> str:
    names: dict[str, list[str]] = defaultdict(list)
    for name, answer in answers.items():
        names[answer].append(f"`{_shown(name)}`")
    rows = [
        f"| {', '.join(sorted(of_answer))} | {f'`{answer}`' if code else answer} |\n"
        for answer, of_answer in sorted(names.items())
    ]
    return f"| elsewhere | {title} |\n|---|---|\n{''.join(rows)}"


def _shown(name: str) -> str:
    """Return a name of others; of a section that jobs have too, as torchtitan's TOML has it."""
    section, _, key = name.partition(".")
    return f"[{section}] {key}" if key and find_key((section,)) is not None else name


def _written(value: Any) -> str:
    return str(value).replace("'", "")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
