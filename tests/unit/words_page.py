"""Write docs/other-words.md: what others call the keys of a job, from the tables that answer them.

python tests/unit/words_page.py
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zrun.job.other_words import ADVICE, KEYS, TEXTS, VALUES

PAGE = Path(__file__).resolve().parents[2] / "docs" / "other-words.md"
_HEAD = """\
# Words of other tools

What accelerate, the Trainer of transformers, Lightning, axolotl, DeepSpeed, torchtitan and
Megatron call the keys of a job, and what to write in its place. A job file and a command line
that have one of these words are refused with the same answer, in one line. Some are taken as they
are: `lr: 1e-3`, `optim: {name: torch.optim.AdamW}`, `activations: full`, `precision: bf16-mixed`,
`steps: 1e4`; and each key may be written like an option: `--optim.lr 1e-3`, `--steps 100`. [All
keys](job-file.md) have a page of their own, and the tools [one side by side](coming-from.md). This
one is written by `python tests/unit/words_page.py`.
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
        ]
    )


def _table(answers: Mapping[str, str], title: str, *, code: bool) -> str:
    names: dict[str, list[str]] = defaultdict(list)
    for name, answer in answers.items():
        names[answer].append(f"`{name}`")
    rows = [
        f"| {', '.join(sorted(of_answer))} | {f'`{answer}`' if code else answer} |\n"
        for answer, of_answer in sorted(names.items())
    ]
    return f"| elsewhere | {title} |\n|---|---|\n{''.join(rows)}"


def _written(value: Any) -> str:
    return str(value).replace("'", "")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
