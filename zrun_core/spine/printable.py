"""Text of others, as a terminal may show it: `printable("\\x1b]0;title\\a") == "^[]0;title^G"`.

What user code, a checkpoint or another host says could move the cursor, rename the window or
hide a line. Whatever is not zrun's own comes through here before it reaches a terminal.
"""

from __future__ import annotations

import re

_CONTROL_SEQUENCE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")  # ECMA-48: colours, moves, erasures


def printable(text: str) -> str:
    """Return `text` in its lines, without colours and moves of the cursor.

    Whatever else would act on a terminal is spelt out.
    """
    plain = _CONTROL_SEQUENCE.sub("", text.replace("\r\n", "\n")).expandtabs()
    if plain.isprintable():
        return plain
    return "".join(_spelt(char) for char in plain)


def _spelt(char: str) -> str:
    if char.isprintable() or char == "\n":
        return char
    code = ord(char)
    if code < 0x20 or code == 0x7F:
        return f"^{chr(code ^ 0x40)}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
