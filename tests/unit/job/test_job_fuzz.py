"""Ten thousand damaged job files: each is a job, or an error that names a line and a column.

Never anything else.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from zrun.job.load import load_job
from zrun_core.errors import JobError
from zrun_core.spine.config import JobConfig

NUM_FILES = 10_000
_PLACE = re.compile(r":\d+:\d+: ")
_SEEDS = (
    "name: a\nmodel: m.py:f\ndata: d.py:g\nsteps: 10\nbatch: {global: 8, micro: 2}\n"
    "precision: bf16\nzero: 2\n",
    "name: b\nmodel: {call: m:f, args: {dim: 64, names: [x, 'y']}}\ndata: d:g\nepochs: 1\n"
    "batch: 4\n"
    "optim:\n  lr: 1e-4\n  betas: [0.9, 0.95]\n  no_decay: ['bias$']\n"
    "lr: {schedule: cosine, warmup: 5}\n",
    "name: c\nmodel: m:f\ndata:\n  call: d:g\n  collate: {call: d:c}\ntokens: 99\n"
    "batch:\n  micro: auto\n  global: 6\n"
    'zero: {stage: 3, bucket: 1MiB, units: ["h\\\\.[0-9]+"]}\nenv: {A: "${env:HOME}", B: null}\n'
    "eval: {data: d:v}\n",
)
_ODD_VALUES = (
    "",
    "~",
    "null",
    "[]",
    "{}",
    "[[[[",
    "{a: {b: [c",
    "*a",
    "&a 1",
    "!!python/object:os.system x",
    "!x",
    "- 1",
    "? x",
    "|\n  text",
    ">-\n a",
    "'",
    '"',
    '"\\U99999999"',
    '"\\ud800"',
    "1e999",
    "-.inf",
    ".nan",
    "9" * 5000,
    "0x" + "f" * 80,
    "0o8",
    "true",
    "on",
    "1:20",
    "2026-01-01",
    "=",
    "<<",
    "%TAG ! x",
    "@x",
    "`x`",
    "\t",
    "x: y: z",
    "${env:}",
    "${env:NO}",
    "${env:HOME}",
    "\u2028",
    "\ufeff",
    "\x85",
    "\x00",
    "\x1b[31m",
    "é",
    "😀",
    "---",
    "...",
    "# c",
    "-1",
    "0",
    "1.5",
    "64MiB",
    "7XiB",
    "[" * 100,
    "{" * 70,
    "a" * 3000,
    "[1, 2",
    "{1: 2}",
    "{[a]: b}",
    "{{a: b}: c}",
    "m:f",
    "../x.py:f",
    "(",
)


def _flip_bytes(text: bytes, rng: random.Random) -> bytes:
    damaged = bytearray(text)
    for _ in range(rng.randint(1, 4)):
        damaged[rng.randrange(len(damaged))] = rng.randrange(256)
    return bytes(damaged)


def _drop_line(text: bytes, rng: random.Random) -> bytes:
    lines = text.splitlines(keepends=True)
    del lines[rng.randrange(len(lines))]
    return b"".join(lines)


def _repeat_line(text: bytes, rng: random.Random) -> bytes:
    lines = text.splitlines(keepends=True)
    lines.insert(rng.randrange(len(lines) + 1), rng.choice(lines))
    return b"".join(lines)


def _odd_value(text: bytes, rng: random.Random) -> bytes:
    head, separator, tail = _cut(text, rng, rb": ")
    line, newline, rest = tail.partition(b"\n")
    return (
        head
        + separator
        + rng.choice(_ODD_VALUES).encode()
        + rng.choice((b"", line))
        + newline
        + rest
    )


def _misspell(text: bytes, rng: random.Random) -> bytes:
    words = list(re.finditer(rb"\w+", text))
    word = rng.choice(words)
    letters = bytearray(word.group())
    place = rng.randrange(len(letters))
    letters[place : place + 1] = rng.choice(
        (b"", b"x", bytes(letters[place : place + 1]) * 2, b".", b" ")
    )
    return text[: word.start()] + bytes(letters) + text[word.end() :]


def _break_indent(text: bytes, rng: random.Random) -> bytes:
    head, separator, tail = _cut(text, rng, rb"\n")
    return head + separator + rng.choice((b" ", b"\t", b"   ", b"- ", b"  - ")) + tail


def _cut_short(text: bytes, rng: random.Random) -> bytes:
    return text[: rng.randrange(len(text))]


def _cut(text: bytes, rng: random.Random, pattern: bytes) -> tuple[bytes, bytes, bytes]:
    found = list(re.finditer(pattern, text))
    if not found:
        return text, b"", b""
    match = rng.choice(found)
    return text[: match.start()], match.group(), text[match.end() :]


_DAMAGES: tuple[Callable[[bytes, random.Random], bytes], ...] = (
    _flip_bytes,
    _drop_line,
    _repeat_line,
    _odd_value,
    _odd_value,
    _misspell,
    _break_indent,
    _cut_short,
)


@pytest.mark.thorough
def test_damaged_files(tmp_path: Path) -> None:
    rng = random.Random(0)
    path = tmp_path / "job.yaml"
    num_jobs = 0
    for _ in range(NUM_FILES):
        text = rng.choice(_SEEDS).encode()
        for _ in range(rng.randint(1, 3)):
            text = rng.choice(_DAMAGES)(text, rng) or b" "
        path.write_bytes(text)
        try:
            job = load_job(path, (), {"HOME": "/root"}).config
        except JobError as error:
            message = str(error)
            assert _PLACE.search(message), (text, message)
            assert not re.search(
                r"function-|literal\[|constrained|Input should|Value error", message
            ), (text, message)
            message.encode()  # no lone surrogates, which no terminal can show
        else:
            num_jobs += 1
            assert (
                JobConfig.model_validate_json(job.model_dump_json(by_alias=True)) == job
                or "nan" in text.decode()
            )
    assert 0.02 * NUM_FILES < num_jobs < 0.5 * NUM_FILES  # the damage is neither harmless nor total


def test_damaged_overrides(tmp_path: Path) -> None:
    rng = random.Random(1)
    path = tmp_path / "job.yaml"
    path.write_text(_SEEDS[1])
    keys = (
        "zero",
        "zero.stage",
        "zero.units.x",
        "model.args.a.b",
        "optim",
        "lr",
        "lr.schedule.call",
        "env.A",
        "",
        "a..b",
        "é",
    )
    for _ in range(1000):
        overrides = [
            f"{rng.choice(keys)}={rng.choice(_ODD_VALUES)}" for _ in range(rng.randint(1, 3))
        ]
        message = _error(path, overrides)
        assert message is None or "override " in message, (overrides, message)


def _error(path: Path, overrides: list[str]) -> str | None:
    try:
        load_job(path, overrides, {})
    except JobError as error:
        return str(error)
    return None
