"""The user's own code: `load(ref, job_dir)` finds it, `call` runs it, in the user's terms.

A job that names something which does not exist is a `JobError` (one line, exit 2, the nearest
name). Code that raises is a `UserCodeError` that says in which module of the model, and ends with
the traceback as a person would read it: see `zrun_core.spine.tracebacks`.
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from zrun_core.errors import (
    PEER_IS_GONE,
    JobError,
    OutOfMemoryError,
    PeerError,
    UserCodeError,
    ZrunError,
)
from zrun_core.spine.sections.section import Ref
from zrun_core.spine.tracebacks import (
    causes,
    first_line,
    is_packaged,
    message_of,
    raised_at,
    split_location,
    user_traceback,
)

if TYPE_CHECKING:
    from torch import nn

# Standard modules that act on the process or the file system. A job file is often somebody else's
# text, and nothing that a training job needs comes from here, so `model: os:system` is refused
# before anything is called.
_PROCESS_MODULES = frozenset(
    {"ctypes", "nt", "os", "posix", "pty", "runpy", "shutil", "signal", "subprocess", "sys"}
)

# Arguments that the functions of a job are called with, by key; those of `model`, `data` and
# `eval.data` are called with their args alone, once, and what they return counts.
TAKES: dict[str, tuple[str, ...]] = {
    "loss": ("model", "batch"),
    "data.collate": ("samples",),
    "eval.metrics": ("model", "batch"),
    "lr.schedule": ("step",),
    "hooks": ("context",),
}

# How torch says that a product of tensors of two formats, one of them float64, is none.
_MEETS_FLOAT64 = re.compile(r"(?i)(?=.*type)(?=.*\bdouble\b).*\b(float|bfloat16|half)\b")

LOADERS_END = "a data-loading process died; data.workers: 0 has the rank itself do its work"

# The runtime's code that runs under the user's model: in hooks, and in what these call.
_OWN_PACKAGE = Path(__file__).parents[1]
_MECHANISMS = (
    f"{_OWN_PACKAGE / 'zero'}{os.sep}",
    f"{_OWN_PACKAGE / 'optim'}{os.sep}",
    f"{_OWN_PACKAGE / 'distributed'}{os.sep}",
    f"{_OWN_PACKAGE / 'memory'}{os.sep}",
    str(_OWN_PACKAGE / "spine" / "flight_page.py"),
    str(_OWN_PACKAGE / "spine" / "flight_recorder.py"),
)
# What torch says of the user's code comes through these: its autograd of the graph, out of their
# `backward`, and its fake tensors of an operation.
_PASS_ON = {
    str(_OWN_PACKAGE / "zero" / name)
    for name in ("sharded_model.py", "passes/slice_walk.py", "wrap/fakes.py")
}


def add_to_path(job_dir: Path) -> None:
    """Put the job file's folder first on `sys.path`, as Python does with the folder of a script."""
    folder = os.path.abspath(job_dir)
    if folder in sys.path:
        sys.path.remove(folder)
    sys.path.insert(0, folder)


def load(ref: Ref, job_dir: Path) -> object:
    """Return what `ref` names, without calling it.

    It is an attribute of a module, or of a file relative to `job_dir`. A file is imported under its
    stem and kept in `sys.modules`, so that it runs once per process and its classes can be pickled
    for data-loading processes.

    Raises:
        JobError: there is no such file, module or attribute, or it belongs to a module that acts on
            the process.
        UserCodeError: the import raised.
    """
    if ref.where.partition(".")[0] in _PROCESS_MODULES:
        raise _refused(ref)
    module = (
        _import_file(ref, job_dir) if ref.where.endswith(".py") else _import_module(ref, job_dir)
    )
    found: object = module
    for name in ref.attr.split("."):
        parent = found
        try:
            found = getattr(parent, name)
        except AttributeError:
            nearest = _below_main(name, parent) or _nearest(name, dir(parent))
            raise JobError(f"{ref.call}: {ref.where} has no {name!r}{nearest}") from None
    # An alias (`from os import system`) still knows where it was defined.
    if str(getattr(found, "__module__", None)).partition(".")[0] in _PROCESS_MODULES:
        raise _refused(ref)
    return found


def function(ref: Ref, job_dir: Path, takes: Sequence[str] = ()) -> Callable[..., Any]:
    """Return what `ref` names as a function with `ref.args` bound to it.

    Of a class, it is an object made with them.

    It is not called, unlike what `call` finds: a loss, a collate function, a hook.

    Args:
        takes: what it will be called with, as in `TAKES`.

    Raises:
        JobError: as `load`, or it cannot be called, or not with that.
        UserCodeError: as `load`, or its class raised.
    """
    found = _callable(ref, job_dir)
    if isinstance(found, type):
        made = call(ref, job_dir)
        if not callable(made):
            raise JobError(
                f"{ref.call} is a class without __call__: zrun makes one object of it with args, "
                f"and calls that with ({', '.join(takes)}): write a __call__, or name a function"
            )
        _check_takes(ref, made, takes, {})
        return made
    _check_takes(ref, found, takes, ref.args)
    return functools.partial(found, **ref.args) if ref.args else found


def call(ref: Ref, job_dir: Path, **more: Any) -> object:
    """Call what `ref` names with `more` and `ref.args`; the job's own arguments win.

    Raises:
        JobError: as `function`, or the arguments do not fit its signature.
        UserCodeError: as `load`, or the call raised.
    """
    target = check_call(ref, job_dir, **more)
    with user_code(f"{ref.call} failed"):
        return target(**more | ref.args)


def check_call(ref: Ref, job_dir: Path, **more: Any) -> Callable[..., Any]:
    """Return what `call` would call.

    Raises:
        JobError: as `call`.
        UserCodeError: as `load`.
    """
    target = _callable(ref, job_dir)
    _check_arguments(ref, target, {**more, **ref.args})
    return target


def _callable(ref: Ref, job_dir: Path) -> Callable[..., Any]:
    found = load(ref, job_dir)
    if not callable(found):
        raise JobError(
            f"{ref.call} is not callable: it is {_a_type(found)}; write a function that returns it "
            "and name that"
        )
    return found


def build_model(ref: Ref, job_dir: Path) -> nn.Module:
    """Return the module that the user's factory makes, in the mode (training or not) it chose.

    Raises:
        JobError: as `call`, or `ref` names a module object where a factory is needed.
        UserCodeError: as `call`, or the factory returned something else.
    """
    from torch import nn

    if isinstance(found := load(ref, job_dir), nn.Module):
        raise JobError(
            f"model: {ref.call} is a {type(found).__name__} that was built on import, before the "
            "seed was set: write a function that builds and returns it"
        )
    model = call(ref, job_dir)
    if not isinstance(model, nn.Module):
        raise UserCodeError(f"model must return an nn.Module, {ref.call} returned {_a_type(model)}")
    return model


@contextmanager
def user_code(what: str) -> Iterator[None]:
    """Turn what the body raises into a `UserCodeError` that starts with `what`.

    A `ZrunError` passes unchanged (the bundled models and data raise those), and so does an
    interrupt. What comes out of the runtime's own hooks is not the user's: another rank exited, or
    it is a bug of ours.

    Raises:
        PeerError: a collective failed because of another rank.
        OutOfMemoryError: there was no memory for a tensor.
    """
    try:
        yield
    except ZrunError:
        raise
    except (Exception, SystemExit) as error:
        where = module_at(error)
        what += f" in {where}" if where is not None else ""
        what += _remark(error)
        if is_out_of_memory(error):
            place = raised_at(error)
            at = f" at {place}" if place is not None else ""
            raise OutOfMemoryError(f"{what}{at}: out of memory: {first_line(error)}") from error
        if _comes_from_runtime(error):
            if PEER_IS_GONE.search(message_of(error)):
                raise PeerError(f"another rank ended: {message_of(error)}") from error
            raise
        noted, text = split_location(user_traceback(error))
        what += noted if noted.startswith(":") else f" {noted}".rstrip()
        raise UserCodeError(f"{what}\n{text}") from error


def _remark(error: BaseException) -> str:
    """Return what the message of some exceptions leaves out."""
    if isinstance(error, SystemExit):
        return (
            ": it ended the process, as sys.exit() and argparse do (the log has what it "
            'printed); put what only a script does below if __name__ == "__main__"'
        )
    if isinstance(error, FileNotFoundError):
        path = error.filename
        if isinstance(path, str) and not os.path.isabs(path):
            return f" (paths begin at {os.getcwd()})"
    if type(error).__module__ == "torch._subclasses.fake_tensor":
        return (
            ": it looks at the value of a tensor that another stage has; with parallel.pp a rank "
            "has its own part of the model only"
        )
    if isinstance(error, RuntimeError) and _MEETS_FLOAT64.search(message_of(error)):
        return (
            ": a tensor of float64, numpy's own format, meets one of another: give samples the "
            'format of the model, as by x.astype("float32") or x.float() in the dataset'
        )
    if is_loaders_end(error):
        return f": {LOADERS_END}"
    if "CUDA error" in message_of(error):
        return (
            ": CUDA reports errors late; with env: {CUDA_LAUNCH_BLOCKING: 1} in the job the "
            "traceback names the line, and device: cpu often gives a plainer message"
        )
    return ""


def is_loaders_end(error: BaseException) -> bool:
    """Return whether a process of torch's data loader has died.

    Torch says so to whatever runs when the system tells of it, far from the data.
    """
    return isinstance(error, RuntimeError) and "DataLoader worker (pid" in message_of(error)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an allocator had no memory: Python's, torch's on a CPU, or a device's."""
    if isinstance(error, MemoryError):
        return True
    if not isinstance(error, RuntimeError):
        return False
    of_a_device = type(error).__name__ == "OutOfMemoryError"
    return of_a_device or "can't allocate memory" in message_of(error)


def _comes_from_runtime(error: BaseException) -> bool:
    """Return whether the innermost frame that is of no package is of the runtime's mechanisms."""
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    last = next((file for file in reversed(files) if not is_packaged(file)), "")
    return last.startswith(_MECHANISMS) and last not in _PASS_ON


def module_at(error: BaseException) -> str | None:
    """Return the module of a model in which `error` was raised: "net.2 (Linear)".

    It is read from the frames that the error came through, so that nothing is paid before one does.
    The name is the module's path from the outermost module that holds it; without one, its class.
    """
    from torch import nn

    frames = (frame for each in causes(error) for frame, _ in traceback.walk_tb(each.__traceback__))
    owners = [frame.f_locals.get("self") for frame in frames]
    modules = [owner for owner in owners if isinstance(owner, nn.Module)]
    if not modules:
        return None
    inner = modules[-1]
    with suppress(Exception):  # one that is only being made has no children to be asked for
        for outer in modules:
            for name, module in outer.named_modules():
                if module is inner:
                    path = name.replace("_orig_mod.", "")  # a part of a compiled module's name
                    return f"{path} ({type(inner).__name__})" if path else type(inner).__name__
    return type(inner).__name__


def _import_module(ref: Ref, job_dir: Path) -> ModuleType:
    try:
        with user_code(f"{ref.call}: importing {ref.where} failed"):
            return importlib.import_module(ref.where)
    except UserCodeError as error:
        cause = error.__cause__
        if isinstance(cause, ModuleNotFoundError) and f"{ref.where}.".startswith(f"{cause.name}."):
            nearest = _nearest(ref.where, (path.stem for path in job_dir.glob("*.py")))
            raise JobError(
                f"{ref.call}: there is no module {cause.name!r} in {job_dir} nor among the "
                f"installed packages{nearest}"
            ) from None
        raise


def _import_file(ref: Ref, job_dir: Path) -> ModuleType:
    path = Path(os.path.abspath(job_dir / Path(ref.where).expanduser()))
    if not path.is_file():
        nearest = _nearest(path.name, (other.name for other in path.parent.glob("*.py")))
        raise JobError(f"{ref.call}: there is no file {path}{nearest}")
    name = path.stem
    if (loaded := sys.modules.get(name)) is not None:
        origin = getattr(loaded, "__file__", None)
        if origin is None or not os.path.exists(origin) or not path.samefile(origin):
            raise JobError(
                f"{ref.call}: the module name {name!r} is taken by {origin or 'Python'}: rename "
                f"{path}"
            )
        return loaded
    # After everything else: the file's neighbours can be imported, and nothing is shadowed by them.
    if (folder := str(path.parent)) not in sys.path:
        sys.path.append(folder)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        with user_code(f"{ref.call}: importing {path} failed"):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _check_arguments(ref: Ref, target: Callable[..., Any], arguments: dict[str, Any]) -> None:
    try:
        signature = inspect.signature(target)
    except (TypeError, ValueError):  # some functions written in C have none
        return
    try:
        signature.bind(**arguments)
    except TypeError as error:
        unknown = [name for name in arguments if name not in signature.parameters]
        nearest = _nearest(unknown[0], signature.parameters) if unknown else ""
        takes = ", ".join(signature.parameters) or "nothing"
        raise JobError(f"{ref.call}: {error}{nearest} (it takes {takes})") from None


def _check_takes(
    ref: Ref, target: Callable[..., Any], takes: Sequence[str], args: dict[str, Any]
) -> None:
    if not takes:
        return
    try:
        signature = inspect.signature(target)
    except (TypeError, ValueError):  # some functions written in C have none
        return
    try:
        signature.bind(*takes, **args)
    except TypeError as error:
        unknown = [name for name in args if name not in signature.parameters]
        given = ", ".join([*takes, *(f"{name}={value!r}" for name, value in args.items())])
        nearest = _nearest(unknown[0], signature.parameters) if unknown else ""
        own = ", ".join(signature.parameters) or "nothing"
        raise JobError(
            f"{ref.call}: {error}{nearest}: it is called as ({given}), and takes {own}; "
            "to make one with args first, write a class with __call__"
        ) from None


def _below_main(name: str, module: object) -> str:
    """Return a remark if `name` is defined where an import does not reach it, else ""."""
    with suppress(OSError, TypeError, SyntaxError):
        for node in ast.parse(inspect.getsource(module)).body:  # type: ignore[arg-type]
            if not isinstance(node, ast.If) or "__name__" not in ast.unparse(node.test):
                continue
            if any(getattr(each, "name", None) == name for each in node.body):
                return ': it is below if __name__ == "__main__", which an import leaves out'
    return ""


def _refused(ref: Ref) -> JobError:
    return JobError(
        f"{ref.call} is refused: it acts on the process, not on a model; name a function of your "
        "own code"
    )


def _nearest(name: str, known: Iterable[str]) -> str:
    public = [other for other in known if not other.startswith("_")]
    close = get_close_matches(name, public, n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _a_type(value: object) -> str:
    return "None" if value is None else type(value).__name__
