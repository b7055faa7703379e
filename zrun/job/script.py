"""A script that is launched as torchrun would, and the keys of a job that its launch has.

    loaded, script = load_script(ScriptCommand("train.py", ("--lr", "1")), ["slots=2"])

What a job says of a model and its training, the script says itself: these keys are refused. The job
that is made here holds placeholders for them, which nothing reads.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from zrun.job import overrides as command_line
from zrun.job.document import Document
from zrun.job.load import LoadedJob, job_values
from zrun.job.problems import DEFAULT
from zrun.job.render import with_origins
from zrun.job.scalars import write
from zrun.job.validate import validate
from zrun_core.errors import JobError
from zrun_core.spine.spec import ScriptSpec

# Of a job; all others are about what the script does.
KEYS = (
    *("name", "hosts", "launch", "slots", "device", "threads", "bind", "restarts", "min_hosts"),
    *("log", "env", "limits"),
)
_PLACEHOLDERS = "model: script:main\ndata: script:main\nsteps: 1\nbatch: {micro: 1}\n"
_OF_JOBS = (".yaml", ".yml")
_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_USAGE = "zrun run [options] script.py [its arguments], or zrun run -m module [its arguments]"


@dataclass(frozen=True)
class ScriptCommand:
    """A script as it is named on the command line.

    Attributes:
        name: path of a file, or a module.
        args: what follows it, all of which is its own.
    """

    name: str
    args: tuple[str, ...] = ()
    is_module: bool = False

    @property
    def words(self) -> list[str]:
        """Return it as it is written behind `zrun run` and its options."""
        return [*(["-m"] if self.is_module else []), self.name, *self.args]


def load_script(
    command: ScriptCommand, overrides: Sequence[str], environ: Mapping[str, str] = os.environ
) -> tuple[LoadedJob, ScriptSpec]:
    """Look for a script, and read the keys of its launch.

    Args:
        overrides: "key=value", of `KEYS`.
        environ: variables for `${env:VAR}`.

    Returns:
        The job, whose path is that of the script; and the script. They lack an address to meet at.

    Raises:
        JobError: there is no such script, or a key is wrong, or is none of a launch.
    """
    folder = Path.cwd()
    path = folder / command.name
    name = command.name
    if command.is_module:
        _check_module(command.name, folder)
    else:
        _check_file(command)
        name = os.path.abspath(path)
        path = Path(os.path.realpath(path))
    _check_keys(overrides, command)
    label = path.name if command.is_module else path.stem
    document = Document.parse(f"name: {write(_label(label))}\n{_PLACEHOLDERS}", "zrun run", {})
    command_line.apply(document, overrides, environ)
    config = validate(document)
    origins = {
        str(value): document.origin(value.path) if value.given else DEFAULT
        for value in job_values(config)
    }
    if document.origin(("name",)).kind == "file":
        origins["name"] = DEFAULT
    spec = ScriptSpec(
        name=name,
        is_module=command.is_module,
        args=list(command.args),
        folder=str(folder),
    )
    return LoadedJob(config, path, origins), spec


def script_text(job: LoadedJob, script: ScriptSpec) -> str:
    """Return what `job.yaml` of the run holds: the script, and the keys of its launch."""
    lines = [f"script: {write(script.name)}"]
    is_kept = False
    for line in with_origins(job).splitlines():
        if not line.startswith(" "):
            is_kept = line.partition(":")[0] in KEYS
        if is_kept:
            lines.append(line)
    return "\n".join(lines) + "\n"


def _check_file(command: ScriptCommand) -> None:
    path = Path(command.name)
    if path.suffix in _OF_JOBS:
        raise JobError(
            f"{path} is a job, and zrun run launches scripts: write zrun train "
            f"{' '.join([str(path), *command.args])}"
        )
    if path.is_dir():
        raise JobError(f"{path} is a directory: name the script in it, such as {path}/train.py")
    if not path.exists():
        named = f"{path}: no such file; usage: {_USAGE}"
        if not path.suffix and _MODULE.fullmatch(command.name):
            named = f"{path}: no such file; a module is written zrun run -m {path}"
        raise JobError(named)
    try:
        with path.open("rb") as file:
            first = file.readline(200)
    except OSError as error:
        raise JobError(f"{path} cannot be read: {error.strerror}") from None
    is_python = path.suffix == ".py" or (first.startswith(b"#!") and b"python" in first)
    if not is_python:
        raise JobError(
            f"{path} is not a Python script: name a file that ends with .py, or write -m module"
        )


def _check_module(name: str, folder: Path) -> None:
    """Refuse a module that cannot be found, without importing anything of it."""
    if name.endswith(".py") or not _MODULE.fullmatch(name):
        instead = "write -m package.module"
        if name.endswith(".py"):
            instead = f"leave -m out for a file: zrun run {name}"
        raise JobError(f"-m {name}: this is no name of a module: {instead}")
    top = name.partition(".")[0]
    found = None
    sys.path.insert(0, str(folder))
    try:
        with suppress(ValueError, ImportError):
            found = importlib.util.find_spec(top)
    finally:
        sys.path.remove(str(folder))
    if found is None:
        raise JobError(
            f"-m {name}: there is no module {top} for {sys.executable}: install it, or go to the "
            "folder that holds it"
        )


def _check_keys(overrides: Sequence[str], command: ScriptCommand) -> None:
    for text in overrides:
        key = text.partition("=")[0]
        if key.partition(".")[0] not in KEYS:
            raise JobError(
                f"{key} is not a key of zrun run: for the script, write it after {command.name}; "
                f"zrun run has {', '.join(KEYS)}"
            )


def _label(name: str) -> str:
    """Return the name of the run: of the script, with letters that a folder may have."""
    kept = re.sub(r"[^A-Za-z0-9._-]", "-", name).lstrip("._-")
    return kept[:100] or "script"
