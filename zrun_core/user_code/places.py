"""Lines of the user's code to which a module of the model belongs: `train.py:31, x = self.up(x)`.

They are read from the source when they are asked for: nothing is noted while a model trains.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from contextlib import suppress

from torch import nn

from zrun_core.spine.tracebacks import in_words, is_users


def called_at(model: nn.Module, name: str) -> str:
    """Return the line of the user's `forward` that calls a module; empty: there is none.

    A module within one of torch's, as of a `Sequential`, belongs to the line that calls that.

    Args:
        model: the outermost module.
        name: of a module in it, as `named_modules` has it.
    """
    return _line_in(model, name, "forward")


def made_at(model: nn.Module, name: str) -> str:
    """Return the line of the user's `__init__` that makes a module; empty: there is none."""
    return _line_in(model, name, "__init__")


def _line_in(model: nn.Module, name: str, method: str) -> str:
    """Return the line of the innermost class of the user's around a module that names it.

    Where no line does, that at which the method begins.
    """
    own = (model, "") if not name else None
    for parent, child in [own] if own else _parents(model, name):
        function = inspect.unwrap(getattr(type(parent), method))
        code = getattr(function, "__code__", None)
        if code is None or not is_users(code.co_filename):
            continue
        line = code.co_firstlineno
        with suppress(OSError, TypeError, SyntaxError):
            line += _offset(textwrap.dedent(inspect.getsource(function)), child)
        return in_words(code.co_filename, line)
    return ""


def _parents(model: nn.Module, name: str) -> Iterator[tuple[nn.Module, str]]:
    """Yield the modules around a module, innermost first, and the name of what leads to it."""
    path = name.split(".")
    for depth in reversed(range(len(path))):
        with suppress(AttributeError):
            yield model.get_submodule(".".join(path[:depth])), path[depth]


def _offset(source: str, name: str) -> int:
    """Return in which line of a method, from 0, an attribute of self is called, or else named."""
    tree = ast.parse(source)
    calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    named = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    for node in (*calls, *named):
        if isinstance(node, ast.Attribute) and node.attr == name and _is_self(node.value):
            return node.lineno - 1
    return 0


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"
