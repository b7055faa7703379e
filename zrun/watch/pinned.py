"""A block of lines that stays at the bottom of a terminal, while others scroll away above it.

    pinned = Pinned(console, draw)      # draw(width, height) -> what to show in so much room
    pinned.start()
    pinned.refresh()
    console.print("a message above")
    pinned.stop()

The cursor waits on an empty line below the block, where it is no trouble: it is never hidden, so
that a process that is killed or stopped leaves it to the shell. Before anything is written, the
block is erased from where it begins now: a terminal that became narrower has broken it into more
rows than were drawn. (The few terminals that cut lines instead lose as many rows of messages.)
After a stop (Ctrl-Z) others have written below it: then it stays, and a new one is drawn.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import TextIO, cast

from rich.console import Console, ConsoleDimensions, ConsoleRenderable, RenderableType, RenderHook
from rich.control import Control
from rich.file_proxy import FileProxy
from rich.segment import ControlType, Segment, Segments

_WHOLE = 1000  # lines of a terminal that has room for everything


class Pinned(RenderHook):
    """Draws the block, and draws it anew below whatever is printed meanwhile.

    That is what `console` prints, and what comes by way of `sys.stdout` and `sys.stderr` where they
    are terminals.
    """

    def __init__(self, console: Console, draw: Callable[[int, int], RenderableType]) -> None:
        self._console = console
        self._draw = draw
        self._is_stale = True
        self._size = ConsoleDimensions(0, 0)
        self._lines: list[list[Segment]] = []
        self._standing: list[int] = []  # columns of each line that is on the terminal
        self._streams = sys.stdout, sys.stderr
        self._on_continue = signal.getsignal(signal.SIGCONT) or signal.SIG_DFL

    def start(self) -> None:
        """Begin, in the main thread: signals are received there."""
        self._console.push_render_hook(self)
        signal.signal(signal.SIGCONT, self._continue)
        sys.stdout, sys.stderr = map(self._above, self._streams)

    def stop(self) -> None:
        """Leave a last picture, a whole one, for the scrollback."""
        sys.stdout, sys.stderr = self._streams
        signal.signal(signal.SIGCONT, self._on_continue)
        self._console.pop_render_hook()
        self._measure()
        self._console.print(self._erasure(), self._draw(self._size.width, _WHOLE), sep="")

    def refresh(self) -> None:
        """Show what is new."""
        self._is_stale = True
        if self._console.is_terminal:
            self._console.print(Control(), end="")

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        """Put what is printed above the block. Called by rich."""
        if not self._console.is_terminal:
            return renderables
        before = self._size
        self._measure()
        if self._is_stale or self._size != before:
            self._is_stale = False
            picture = self._draw(*self._size)
            lines = self._console.render_lines(picture, self._console.options, pad=False)
            self._lines = lines[: self._size.height - 1]
        erasure = self._erasure()
        self._standing = [Segment.get_line_length(line) for line in self._lines]
        block = [segment for line in self._lines for segment in (*line, Segment.line())]
        return [erasure, *renderables, Segments(block)]

    def _continue(self, number: int, frame: object) -> None:
        self._standing = []

    def _above(self, stream: TextIO) -> TextIO:
        """Send what a terminal would get to above the block; what goes to a file still does."""
        if self._console.is_terminal and stream.isatty():
            return cast(TextIO, FileProxy(self._console, stream))
        return stream

    def _erasure(self) -> Segments:
        """Erase the block as it stands, with whatever the terminal has echoed below it."""
        width = max(1, self._size.width)
        rows = sum(max(1, -(-columns // width)) for columns in self._standing)
        self._standing = []
        codes = ""
        if rows:
            codes = f"\r\x1b[{rows}A\x1b[J"
        return Segments([Segment(codes, None, [(ControlType.CARRIAGE_RETURN,)])])

    def _measure(self) -> None:
        """Ask the terminal how large it is now; variables of the environment may say how it was."""
        self._size = self._console.size
        try:
            self._size = ConsoleDimensions(*os.get_terminal_size(self._console.file.fileno()))
            self._console.size = self._size
        except (AttributeError, OSError, ValueError):  # not a real terminal
            return
