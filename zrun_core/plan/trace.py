"""Trace a job's model in a process of its own: `trace_in_subprocess(job, job_dir, micros=(4,), checkpoints=("none",))`.

The user's code may print, hang, call `sys.exit` or take the process with it: none of that reaches who asks. What fails
on fake tensors is run for real, and a model for which that fails too is described by its parameters alone. What was
found is kept as JSON in the user's cache folder, and holds for as long as the job and every file of code do not change.

    python -m zrun_core.plan.trace FD < request.json        the other side: answers on that file descriptor
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from zrun_core.config import JobConfig
from zrun_core.errors import ExitCode, JobError, UserCodeError
from zrun_core.plan.profile import Profile

_KEYS = ("model", "data", "loss", "precision", "activations", "compile", "seed")  # of a job that decide
_KEPT = 100  # profiles in the cache
_MODES = ("fake", "values", "shape")


def trace_job(
    job: JobConfig, job_dir: Path, *, micros: Sequence[int] = (), checkpoints: Sequence[str] = ("none",), **more: Any
) -> Profile:
    """Trace in this process. See `tracing.trace_job`."""
    from zrun_core.plan import tracing

    return tracing.trace_job(job, job_dir, micros=micros, checkpoints=checkpoints, **more)


def trace_in_subprocess(
    job: JobConfig,
    job_dir: Path,
    *,
    micros: Sequence[int] = (),
    checkpoints: Sequence[str] = ("none",),
    device: str = "cpu",
    environment: Mapping[str, str] | None = None,
    timeout_s: float = 120.0,
    use_cache: bool = True,
) -> Profile:
    """What the job's model and its micro-batches take.

    Args:
        micros: micro-batches that will be asked for; they matter to models that are not linear in it.
        checkpoints: policies of activation checkpointing.
        device: whose kernels count: "cpu" or "cuda".
        environment: variables of the process beside those of this one.
        timeout_s: seconds for each way to find out.
        use_cache: whether an earlier answer will do.

    Raises:
        JobError: the job names what does not exist, or what the model cannot do.
        UserCodeError: the model cannot even be built.
    """
    request = {
        "job": job.model_dump(mode="json", by_alias=True, exclude_unset=True),
        "job_dir": str(job_dir.absolute()),
        "micros": sorted(set(micros)),
        "checkpoints": list(dict.fromkeys(checkpoints)),
        "device": device,
    }
    place = _folder() / f"{_digest(request)}.json"
    if use_cache and (found := _stored(place)) is not None:
        return found
    why = ""
    answer: dict[str, Any] = {}
    for mode in _MODES:
        if mode == "values" and "was not traced within" in why:
            continue  # what takes too long without values does with them
        answer = _ask({**request, "mode": mode, "why": why}, dict(environment or {}), timeout_s)
        if "profile" in answer or answer.get("exit_code") == ExitCode.USAGE:
            break
        why = why or str(answer["error"]).splitlines()[-1].strip()
    if "profile" not in answer:
        raise (JobError if answer.get("exit_code") == ExitCode.USAGE else UserCodeError)(answer["error"])
    if use_cache:
        _store(place, answer)
    return Profile.from_json(answer["profile"])


# The other process


def _ask(request: dict[str, Any], environment: Mapping[str, str], timeout_s: float) -> dict[str, Any]:
    """The answer of a process, or why there is none: {"error": ...}."""
    read_fd, write_fd = os.pipe()
    with tempfile.TemporaryFile() as said, open(read_fd, "rb") as answers:
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", "zrun_core.plan.trace", str(write_fd)],
                stdin=subprocess.PIPE,
                stdout=said,
                stderr=subprocess.STDOUT,
                pass_fds=(write_fd,),
                env=os.environ | dict(environment) | {"CUDA_VISIBLE_DEVICES": ""},
                start_new_session=True,  # so that what the user's code starts can be ended with it
            )
        finally:
            os.close(write_fd)
        received: list[bytes] = []
        # A child of the child may hold the pipe open for ever: the thread must not.
        reader = threading.Thread(target=lambda: received.append(answers.read()), daemon=True)
        reader.start()
        try:
            with suppress(BrokenPipeError):
                process.communicate(json.dumps(request).encode(), timeout_s)
            how = f"signal {-process.returncode}" if process.returncode < 0 else f"exit code {process.returncode}"
        except subprocess.TimeoutExpired:
            how = ""
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        reader.join(timeout=10.0)
        if received and received[0]:
            with suppress(ValueError):
                answer: dict[str, Any] = json.loads(received[0])
                return answer
        call = request["job"]["model"]
        call = call["call"] if isinstance(call, dict) else call
        if not how:
            return {"error": f"model: {call} was not traced within {timeout_s:g} s"}
        return {"error": f"model: the process that traced {call} ended with {how}{_last_words(said)}"}


def _last_words(said: Any) -> str:
    said.seek(0, os.SEEK_END)
    said.seek(max(0, said.tell() - 2000))
    lines = said.read().decode(errors="replace").strip().splitlines()
    return f": {lines[-1].strip()[:200]}" if lines else ""


# The cache


def _folder() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(home).expanduser() / "zrun" / "profiles"


def _digest(request: Mapping[str, Any]) -> str:
    """What is equal for requests with one answer, but for the user's code."""
    job = {key: value for key, value in request["job"].items() if key in _KEYS}
    own = [metadata.version("torch"), sys.version, _own_code()]
    facts = json.dumps([own, {**request, "job": job}], sort_keys=True)
    return hashlib.sha256(facts.encode()).hexdigest()[:32]


@cache
def _own_code() -> str:
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _stored(place: Path) -> Profile | None:
    """The profile at `place`, if the files that it came from are what they were."""
    try:
        found = json.loads(place.read_bytes())
        if all(_of_file(path) == expected for path, expected in found["files"].items()):
            return Profile.from_json(found["profile"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass  # not there, damaged, or of another version
    return None


def _store(place: Path, answer: Mapping[str, Any]) -> None:
    """Keep an answer. Where nothing can be written, nothing is kept."""
    part = place.with_name(f".{place.stem}.{secrets.token_hex(4)}")
    kept = {"files": answer["files"], "profile": answer["profile"]}
    with suppress(OSError):
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            json.dump(kept, file)
        part.replace(place)
        for old in sorted(place.parent.glob("*.json"), key=lambda path: path.stat().st_mtime)[:-_KEPT]:
            old.unlink(missing_ok=True)


def _of_file(path: str) -> str:
    """A digest of the content of a file; "" if it is gone."""
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError:
        return ""


def _user_files(job_dir: Path) -> dict[str, str]:
    """The digests of the Python files that were imported, but for those of Python, torch and zrun."""
    own = [str(Path(__file__).parents[1]), str(Path(os.__file__).parent)]
    apart = [f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages")]
    found = {str(path) for path in job_dir.glob("*.json")}  # sizes of a model often lie beside its code
    for module in list(sys.modules.values()):
        path = getattr(module, "__file__", None)
        if not isinstance(path, str) or not path.endswith(".py"):
            continue
        inside = any(part in path for part in apart)
        if path.startswith(str(job_dir)) or not (inside or path.startswith(tuple(own))):
            found.add(path)
    return {path: _of_file(path) for path in sorted(found)}


def _main() -> None:
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: end with who asked
    request = json.load(sys.stdin)
    answer_fd = int(sys.argv[1])
    os.set_inheritable(answer_fd, False)
    answer = _answer(request)
    with open(answer_fd, "w", encoding="utf-8") as file:
        json.dump(answer, file)
    sys.stdout.flush()
    os._exit(0)  # threads of the user's code must not delay the end


def _answer(request: Mapping[str, Any]) -> dict[str, Any]:
    from zrun_core import user
    from zrun_core.errors import ZrunError
    from zrun_core.plan import tracing

    job_dir = Path(request["job_dir"])
    try:
        profile = tracing.trace_job(
            JobConfig.model_validate(request["job"]),
            job_dir,
            micros=request["micros"],
            checkpoints=request["checkpoints"],
            device=request["device"],
            mode=request["mode"],
            why=request["why"],
        )
    except ZrunError as error:
        return {"error": str(error), "exit_code": error.exit_code}
    except Exception as error:
        return {"error": f"{user.user_traceback(error)}\n{type(error).__name__}: {error}"}
    return {"profile": profile.to_json(), "files": _user_files(job_dir)}


if __name__ == "__main__":
    _main()
