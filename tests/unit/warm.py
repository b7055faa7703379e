"""Processes that are forked from this one, which has torch, where a command would start Python anew
and import it.
"""

from __future__ import annotations

import faulthandler
import os
import runpy
import subprocess
import sys
import traceback
import warnings
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any


class WarmPopen(subprocess.Popen[Any]):
    """`Popen` whose child runs the module of `[python, "-m", module, ...]` right after the fork.

    Others as they are.
    """

    def __init__(self, command: Sequence[str], **options: Any) -> None:
        if list(command[:2]) == [sys.executable, "-m"]:
            environment, kept = options.get("env") or os.environ, options.get("pass_fds", ())
            options["preexec_fn"] = lambda: _play(command[2:], dict(environment), {0, 1, 2, *kept})
        super().__init__(command, **options)


def _play(arguments: Sequence[str], environment: Mapping[str, str], kept: set[int]) -> None:
    """Be what `python -m arguments` would be, and end."""
    code: object = 1
    try:
        faulthandler.disable()  # writes to a file of pytest's
        # One of the others is the pipe by which `Popen` hears that the program has begun.
        for low, high in pairwise([*sorted(kept), os.sysconf("SC_OPEN_MAX")]):
            os.closerange(low + 1, high)
        os.environ.clear()
        os.environ.update(environment)
        sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w")
        sys.argv = list(arguments)
        warnings.simplefilter("ignore")  # of a module that is imported already
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)
