"""A terminal of which a program has all: another screen, keys as they are pressed, its size.

    with FullScreen(0, 1) as screen:
        screen.show(lines)
        key = screen.key(0.25)          # "q", "left", "resize", or None after that long

What was on the terminal is there again afterwards, whatever ends the program but SIGKILL.
"""

from __future__ import annotations

import os
import select
import signal
import termios
import tty
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any, Self

_ENTER = "\x1b[?1049h\x1b[?25l\x1b[2J"
_LEAVE = "\x1b[?25h\x1b[?1049l"
# Shown at once, by terminals that know how: no picture is seen half drawn.
_BEGIN, _END = "\x1b[?2026h", "\x1b[?2026l"
_KEYS = {
    "\x1b[A": "up",
    "\x1b[B": "down",
    "\x1b[C": "right",
    "\x1b[D": "left",
    "\x1b[H": "home",
    "\x1b[F": "end",
    "\x1b[1~": "home",
    "\x1b[4~": "end",
    "\x1b[5~": "page up",
    "\x1b[6~": "page down",
    "\x1b[Z": "back",
    "\t": "next",
    "\x1b": "escape",
    "\x03": "q",
    "\x04": "q",
}
_LEAVING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_ESCAPE_S = 0.03  # in which the rest of a key's sequence comes


class FullScreen:
    """All of a terminal, as long as it is entered."""

    def __init__(self, source: int, out: int) -> None:
        """
        Args:
            source: descriptor of the terminal that keys come from.
            out: descriptor of the terminal that is drawn on.
        """
        self._source = source
        self._out = out
        self._drawn = ""
        self._keys: list[str] = []

    def __enter__(self) -> Self:
        self._before = termios.tcgetattr(self._source)
        self._reading, self._waking = os.pipe()
        os.set_blocking(self._waking, False)
        self._handlers = {
            number: signal.signal(number, self._wake)
            for number in (*_LEAVING, signal.SIGWINCH, signal.SIGTSTP, signal.SIGCONT)
        }
        self._begin()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._end()
        os.close(self._reading)
        os.close(self._waking)

    def _begin(self) -> None:
        tty.setcbreak(self._source)
        self._write(_ENTER)
        self._drawn = ""

    def _end(self) -> None:
        self._write(_LEAVE)
        with suppress(termios.error):  # the terminal is gone
            termios.tcsetattr(self._source, termios.TCSADRAIN, self._before)

    def _wake(self, number: int, frame: FrameType | None) -> None:
        os.write(self._waking, bytes([number]))

    @property
    def size(self) -> os.terminal_size:
        """Columns and lines, as of now."""
        return os.get_terminal_size(self._out)

    def show(self, lines: Sequence[str]) -> None:
        """Draw a picture; what is the same as before is not drawn again."""
        picture = "\r\n".join(f"{line}\x1b[0m\x1b[K" for line in lines[: self.size.lines])
        if picture != self._drawn:
            self._drawn = picture
            self._write(f"{_BEGIN}\x1b[H{picture}\x1b[J{_END}")

    def key(self, patience_s: float) -> str | None:
        """Return the next key, "resize", or "q" where the terminal is gone; None: there was none.

        Args:
            patience_s: seconds to wait for one.
        """
        if not self._keys:
            ready, _, _ = select.select([self._source, self._reading], [], [], patience_s)
            if self._reading in ready:
                return self._woken(os.read(self._reading, 1)[0])
            if self._source in ready:
                self._keys = _split(self._read())
        return self._keys.pop(0) if self._keys else None

    def _woken(self, number: int) -> str:
        if number in _LEAVING:
            return "q"
        if number == signal.SIGTSTP:  # Ctrl-Z: the shell gets its screen
            self._end()
            os.kill(os.getpid(), signal.SIGSTOP)
        if number in (signal.SIGTSTP, signal.SIGCONT):
            self._begin()
        self._drawn = ""
        self._write("\x1b[2J")  # what a terminal has folded would stay
        return "resize"

    def _read(self) -> str:
        data = self._bytes()
        while data.endswith(b"\x1b") or data.endswith(b"\x1b["):
            if not select.select([self._source], [], [], _ESCAPE_S)[0]:
                break
            data += self._bytes()
        return data.decode(errors="replace")

    def _bytes(self) -> bytes:
        try:
            return os.read(self._source, 256) or b"\x04"
        except OSError:
            return b"\x04"

    def _write(self, text: str) -> None:
        data: Any = text.encode(errors="replace")
        while data:
            try:
                data = data[os.write(self._out, data) :]
            except OSError:  # the terminal is gone: `key` says so
                return


def _split(text: str) -> list[str]:
    """Return the keys of what a terminal has sent; sequences that are none of ours are left out."""
    keys = []
    while text:
        found = next(
            (code for code in sorted(_KEYS, key=len, reverse=True) if text.startswith(code)), None
        )
        if found == "\x1b" and len(text) > 1 and text[1] in "[O":
            end = next(
                (at for at in range(2, len(text)) if text[at].isalpha() or text[at] == "~"), 2
            )
            text = text[end + 1 :]
            continue
        if found is not None:
            keys.append(_KEYS[found])
            text = text[len(found) :]
            continue
        keys.append(text[0])
        text = text[1:]
    return keys
