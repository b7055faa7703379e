"""Exceptions as text.

    user_traceback(error)       for a person at a screen
    full_traceback(error)       for a log

What is shown are the user's own frames and, from the last of them down, those of the libraries
that it called. Frames of zrun, of `importlib`, and those through which torch only passes a call on
are left out, and long runs of frames are folded into a line that counts them. Texts that come
from a process of its own, such as torch's of a data loader, are read in the same way.
"""

from __future__ import annotations

import importlib
import itertools
import linecache
import os
import re
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from zrun_core.spine.printable import printable

FATAL = "Fatal Python error"  # how faulthandler begins
_WHERE = "zrun: "  # begins a note that belongs into the headline
_LOG_CHARS = 1 << 20  # of one exception, in a log
_LINE_CHARS = 1000  # of a line of a message that is shown
_MESSAGE_LINES = 40  # of one message that are shown
_SHOWN_LINES = 120  # of everything
_SHOWN_CHARS = 1 << 14
_USER_FRAMES = 24  # of one stack that are shown
_LIBRARY_FRAMES = 8

_OWN = Path(__file__).parents[1]
_MODELS = f"{_OWN / 'models'}{os.sep}"  # the bundled ones are a library to the user
_PYTHON = f"{Path(importlib.__file__).parent.parent}{os.sep}"  # its own modules
_OWN_FOLDERS = tuple(f"{folder}{os.sep}" for folder in (_OWN, _OWN.parent / "zrun"))
_PACKAGE_FOLDERS = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_PACKAGE = re.compile(r".*[/\\](?:site|dist)-packages[/\\]([^/\\]+)")
# Through these a call only passes on its way.
_PASSAGES = (
    "<frozen ",
    f"{_PYTHON}importlib{os.sep}",
    f"{_PYTHON}contextlib.py",
    f"{_PYTHON}runpy.py",
)
_TORCH_PASSAGES = re.compile(
    r"[/\\](?:site|dist)-packages[/\\]torch[/\\](?:nn[/\\]modules[/\\](?:module|container)\.py"
    r"|autograd[/\\]|_dynamo[/\\]|_(?:compile|ops|tensor|utils)\.py"
    r"|utils[/\\](?:_contextlib|_python_dispatch|checkpoint|flop_counter)\.py"
    r"|utils[/\\]data[/\\](?:dataloader\.py|_utils[/\\](?:fetch|worker)\.py))"
)
_FRAME = re.compile(r'(?P<indent>[ |]*)File "(?P<file>[^"]+)", line \d+')
_REPEATED = re.compile(r"[ |]*\[Previous line repeated \d+ more times?\]$")


def full_traceback(error: BaseException, chars: int = _LOG_CHARS) -> str:
    """Return the traceback of `error` and of its causes, with every frame.

    Args:
        chars: how long it may be; what is more is cut out of its middle.
    """
    return _cut("".join(traceback.format_exception(error)).rstrip("\n"), chars)


def user_traceback(error: BaseException) -> str:
    """Return the traceback of `error` and of its causes as far as a person would read it.

    Where no frame would be left in it, each stack keeps the innermost one.
    """
    parts = _parts("".join(traceback.format_exception(error)).splitlines())
    stacks = [part for part in parts if isinstance(part, list)]
    tells = any(not frame.is_passage for stack in stacks for frame in stack)
    lines: list[str] = []
    for part in parts:
        if isinstance(part, _Message):
            lines += _without_middle(_clean(part.lines), _MESSAGE_LINES)
        elif not tells:
            lines += _clean(part[-1].lines)
        else:
            lines += _chosen(part)
    return _cut("\n".join(_without_middle(lines, _SHOWN_LINES)), _SHOWN_CHARS)


def crash_stack(log: Sequence[str]) -> list[str]:
    """Return the crash of native code that `faulthandler` wrote at the end of a log, in lines.

    It begins with the newest call of each thread; here the user's frames come first, and then
    those of libraries down to where it happened.
    """
    starts = [number for number, line in enumerate(log) if line.startswith(FATAL)]
    if not starts:
        return []
    dump = log[starts[-1] :]
    calls: list[str] = []
    heads = [number for number, line in enumerate(dump) if line.startswith("Current thread")]
    if heads:
        below = dump[heads[-1] + 1 :]
        calls = list(itertools.takewhile(lambda line: line.startswith("  "), below))
    stacks = [part for part in _parts(calls[::-1]) if isinstance(part, list)]
    found = [printable(dump[0]), "Stack of the thread that crashed (most recent call last):"]
    for stack in stacks:
        found += _chosen(stack) or _clean(stack[-1].lines)
    return found


def add_location(error: BaseException, where: str) -> None:
    """Note where `error` was raised, in words that the headline of its report ends with.

    A note goes with the exception, also as text out of another process.
    """
    error.add_note(_WHERE + where)


def split_location(text: str) -> tuple[str, str]:
    """Return the last note of `add_location` in a traceback, and the traceback without them."""
    lines = text.splitlines()
    notes = [line.strip().removeprefix(_WHERE) for line in lines if line.strip().startswith(_WHERE)]
    kept = [line for line in lines if not line.strip().startswith(_WHERE)]
    last = notes[-1] if notes else ""
    return last, "\n".join(kept)


def message_of(error: BaseException) -> str:
    """Return what `error` says, also where saying it fails."""
    try:
        return str(error)
    except Exception as failed:
        return f"<its message cannot be read: {type(failed).__name__}>"


def first_line(error: BaseException) -> str:
    """Return the first line of what `error` says, as far as a person would read it."""
    lines = printable(message_of(error)).splitlines()
    first = lines[0] if lines else type(error).__name__
    return first[:200]


def user_location(frame: FrameType | None) -> str:
    """Return where the user's code stands in a stack: "loop.py:12, model(x)".

    Args:
        frame: the innermost one of that stack.
    """
    while frame is not None:
        code = frame.f_code
        if is_users(code.co_filename):
            return in_words(code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return "an unknown place"


def raised_at(error: BaseException) -> str | None:
    """Return the innermost place of the user's code on the way to where `error` was raised."""
    places = [
        (frame.f_code.co_filename, line)
        for each in causes(error)
        for frame, line in traceback.walk_tb(each.__traceback__)
        if is_users(frame.f_code.co_filename)
    ]
    return in_words(*places[-1]) if places else None


def names_users_code(text: str) -> bool:
    """Return whether a traceback, as text, has a frame of the user's own code."""
    found = (_FRAME.match(line) for line in text.splitlines())
    return any(match is not None and is_users(match["file"]) for match in found)


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield `error`, what it was raised from or while handling, and so on."""
    seen: set[int] = set()
    found: BaseException | None = error
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        yield found
        if found.__cause__ is not None or found.__suppress_context__:
            found = found.__cause__
        else:
            found = found.__context__


def is_users(file: str) -> bool:
    """Return whether code of this file is the user's own: not zrun's, Python's or a package's."""
    return not (is_packaged(file) or file.startswith(("<frozen ", *_OWN_FOLDERS)))


def is_packaged(file: str) -> bool:
    """Return whether this file is Python's or that of an installed package."""
    return file.startswith(_PYTHON) or any(folder in file for folder in _PACKAGE_FOLDERS)


def in_words(file: str, number: int) -> str:
    """Return a line of a file as errors name it: "loop.py:12, model(x)"."""
    place = f"{os.path.relpath(file)}:{number}"
    line = linecache.getline(file, number).strip()
    return f"{place}, {line}" if line else place


@dataclass
class _Frame:
    """A frame of a traceback as text, with the lines of its source."""

    file: str
    indent: str
    lines: list[str]

    @property
    def is_passage(self) -> bool:
        if self.file.startswith(_MODELS):
            return False
        is_ours = self.file.startswith((*_PASSAGES, *_OWN_FOLDERS))
        return is_ours or _TORCH_PASSAGES.search(self.file) is not None

    @property
    def whose(self) -> str:
        """Return the owner of the code in a word: a package, Python, or the file."""
        package = _PACKAGE.match(self.file)
        if package:
            return package[1]
        if self.file.startswith(_PYTHON):
            return "Python"
        return Path(self.file).name


@dataclass
class _Message:
    """Lines of a traceback that belong to no frame."""

    lines: list[str] = field(default_factory=list)


def _parts(report: Sequence[str]) -> list[list[_Frame] | _Message]:
    """Cut a traceback into its stacks, outermost frame first, and what stands between them."""
    parts: list[list[_Frame] | _Message] = []
    frame: _Frame | None = None  # to which the line before belongs
    for line in report:
        match = _FRAME.match(line)
        if match is not None:
            if frame is None:
                parts.append([])
            frame = _Frame(match["file"], match["indent"], [line])
            stack = parts[-1]
            assert isinstance(stack, list)
            stack.append(frame)
        elif frame is not None and (line.startswith(frame.indent + "  ") or _REPEATED.match(line)):
            frame.lines.append(line)
        else:
            frame = None
            if not parts or not isinstance(parts[-1], _Message):
                parts.append(_Message())
            message = parts[-1]
            assert isinstance(message, _Message)
            message.lines.append(line)
    return parts


def _chosen(stack: list[_Frame]) -> list[str]:
    """Return the lines of a stack that are shown."""
    kept = [frame for frame in stack if not frame.is_passage]
    users = [number for number, frame in enumerate(kept) if is_users(frame.file)]
    below = users[-1] + 1 if users else 0
    own = _folded([kept[number] for number in users], _USER_FRAMES)
    return [*own, *_folded(kept[below:], _LIBRARY_FRAMES)]


def _folded(frames: list[_Frame], most: int) -> list[str]:
    """Return the lines of at most `most` frames, and one that counts those left out."""
    if len(frames) <= most + 1:
        return [line for frame in frames for line in _clean(frame.lines)]
    left_out = frames[most // 2 : len(frames) - most // 2]
    names = list(dict.fromkeys(frame.whose for frame in left_out))
    where = ", ".join(names[:3])
    if len(names) > 3:
        where += " and others"
    fold = f"{left_out[0].indent}... {len(left_out)} frames in {where} ..."
    head = frames[: most // 2]
    tail = frames[len(frames) - most // 2 :]
    return [*_folded(head, most), fold, *_folded(tail, most)]


def _cut(text: str, chars: int) -> str:
    """Return at most so many characters, and a line that counts those left out between them."""
    more = len(text) - chars
    if more <= 0:
        return text
    half = chars // 2
    return f"{text[:half]}\n ... {more} characters left out here ...\n{text[-half:]}"


def _clean(lines: Sequence[str]) -> list[str]:
    """Return lines as a terminal may show them, each cut to `_LINE_CHARS`."""
    return [_short(printable(line)) for line in lines]


def _short(line: str) -> str:
    more = len(line) - _LINE_CHARS
    return line if more <= 0 else f"{line[:_LINE_CHARS]} ... ({more} characters more)"


def _without_middle(lines: list[str], most: int) -> list[str]:
    """Return at most `most` lines, and one that counts those left out between them."""
    if len(lines) <= most + 1:
        return lines
    left_out = len(lines) - 2 * (most // 2)
    return [*lines[: most // 2], f"  ... {left_out} lines ...", *lines[len(lines) - most // 2 :]]
