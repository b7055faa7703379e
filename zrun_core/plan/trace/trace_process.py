"""Trace a job's model in a process of its own: `trace_in_subprocess(job, job_dir, micros=(4,))`.

The user's code may print, hang, call `sys.exit` or take the process with it: none of that reaches
who asks. The process says what it knows as soon as it knows it, a line each:

    doing "building model.py:net"      what is under way
    known {...}                        the profile so far: first the parameters, then the policy of
    known {...}                        checkpointing that matters most
    done {...}                         all of it, or
    failed ["text", 2]                 why not, and the exit code

What fails on fake tensors is run for real. The profile is kept as JSON in the user's cache folder,
and holds for as long as the job and every file of code do not change.

    python -m zrun_core.plan.trace.trace_process FD < request.json    the other side: answers on FD
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, TextIO

from zrun_core.errors import ExitCode, JobError, UserCodeError
from zrun_core.plan.trace.profile import Profile
from zrun_core.spine import memory_limits, tracebacks, visible_devices
from zrun_core.spine.cache import are_unchanged, cache_folder, digest_of_file, write_cached
from zrun_core.spine.config import JobConfig

# Keys of a job that decide what its trace is.
_KEYS = ("model", "data", "loss", "precision", "activations", "compile", "seed")
_MAX_CACHED = 100  # profiles
_MODES = ("fake", "values")
_LAST_WORDS_S = 10.0


def trace_job(
    job: JobConfig,
    job_dir: Path,
    *,
    micros: Sequence[int] = (),
    checkpoints: Sequence[str] = ("none",),
    **more: Any,
) -> Profile:
    """Trace in this process.

    Args:
        micros: as of `tracer.trace_job`.
        checkpoints: as of `tracer.trace_job`.
    """
    from zrun_core.plan.trace import tracer

    return tracer.trace_job(job, job_dir, micros=micros, checkpoints=checkpoints, **more)


def trace_in_subprocess(
    job: JobConfig,
    job_dir: Path,
    *,
    micros: Sequence[int] = (),
    checkpoints: Sequence[str] = ("none",),
    device: str = "cpu",
    threads: int = 1,
    environment: Mapping[str, str] | None = None,
    timeout_s: float = 120.0,
    use_cache: bool = True,
) -> Profile:
    """Return what the job's model and its micro-batches take.

    Args:
        job_dir: against which its code is imported.
        micros: micro-batches that will be asked for; they matter to models that are not affine in
            it.
        checkpoints: policies of activation checkpointing, the one that matters most first.
        device: whose kernels count: "cpu" or "cuda".
        threads: that compute for a rank on a CPU.
        environment: variables of the process in addition to those of this one.
        timeout_s: seconds for all of it. What is known by then is the answer.
        use_cache: whether an earlier answer may be returned.

    Raises:
        JobError: the job names what does not exist, or what the model cannot do.
        UserCodeError: the model cannot even be built, or not in this time.
    """
    request = _request(job, job_dir, micros, checkpoints, device, threads)
    place = cache_folder("profiles") / f"{_digest(request)}.json"
    if use_cache:
        stored = _stored(place)
        if stored is not None:
            return stored
    end = time.monotonic() + timeout_s
    found: Profile | None = None
    why = ""
    for mode in _MODES:
        asked = {**request, "mode": mode, "why": why}
        heard = _ask(asked, environment or {}, end - time.monotonic())
        if heard.is_late:
            heard.error = (
                f"{heard.doing} did not finish within {timeout_s:g} s: check that it ends by "
                "itself, or give zrun estimate more time with --patience S"
            )
        if heard.exit_code == ExitCode.USAGE:
            raise JobError(heard.error)
        if heard.known:
            found = Profile.from_json(heard.known)
        why = why or heard.error
        has_traces = found is not None and bool(found.traces)
        if heard.is_done or heard.is_late or has_traces:
            break
    if found is None:
        raise UserCodeError(why)
    if not heard.is_done:
        reason = why.strip().splitlines()[-1]
        untraced = dict.fromkeys([each for each in checkpoints if each not in found.traces], reason)
        found = replace(
            found,
            why=found.why if found.traces else reason,
            untraced=untraced | dict(found.untraced),
            is_partial=heard.is_late,
        )
    if use_cache and not found.is_partial:
        write_cached(place, found.to_json(), _MAX_CACHED)
    return found


def key_of_trace(
    job: JobConfig,
    job_dir: Path,
    *,
    micros: Sequence[int],
    checkpoints: Sequence[str],
    device: str,
    threads: int,
) -> str:
    """Return what is equal for questions with one answer, as long as `Profile.files` do not change.

    Args:
        micros: as of `trace_in_subprocess`.
        checkpoints: as of `trace_in_subprocess`.
        device: as of `trace_in_subprocess`.
        threads: as of `trace_in_subprocess`.
    """
    return _digest(_request(job, job_dir, micros, checkpoints, device, threads))


def _request(
    job: JobConfig,
    job_dir: Path,
    micros: Sequence[int],
    checkpoints: Sequence[str],
    device: str,
    threads: int,
) -> dict[str, Any]:
    return {
        "job": job.model_dump(mode="json", by_alias=True, exclude_unset=True),
        "job_dir": str(job_dir.absolute()),
        "micros": sorted(set(micros)),
        "checkpoints": list(dict.fromkeys(checkpoints)),
        "device": device,
        "threads": threads,
    }


# The other process

_under_way: dict[int, subprocess.Popen[bytes]] = {}
_ended: set[int] = set()  # of these, which `end_all` has


def end_all() -> None:
    """End the processes that trace for this one, in other threads: their answers are partial."""
    for pid, process in list(_under_way.items()):
        _ended.add(pid)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


@dataclass
class _Heard:
    """The answers of a process so far.

    Attributes:
        known: a profile as JSON, of what it knew; b"" if it knew nothing yet.
        doing: what was under way.
        is_done: `known` is all that it was asked.
        error: why it is not.
        exit_code: that belongs to the error; None: not known.
        is_late: it was ended, because its time was over.
    """

    known: bytes = b""
    doing: str = ""
    is_done: bool = False
    error: str = ""
    exit_code: int | None = None
    is_late: bool = False

    def hear(self, line: bytes) -> None:
        """Take in one line of what the process writes."""
        kind, _, rest = line.partition(b" ")
        if not rest.endswith(b"\n"):
            return  # it ended in the middle of it
        if kind in (b"known", b"done"):
            self.known = rest
            self.is_done = kind == b"done"
        elif kind == b"doing":
            self.doing = json.loads(rest)
        elif kind == b"failed":
            self.error, self.exit_code = json.loads(rest)


def _ask(request: dict[str, Any], environment: Mapping[str, str], timeout_s: float) -> _Heard:
    """Return what another process finds out in this time.

    After `timeout_s` seconds the process is ended. The request is as `_request` returns it, with
    the mode and why an earlier one failed; `environment` comes in addition to that of this process.
    """
    heard = _Heard(doing="starting Python")
    read_fd, write_fd = os.pipe()
    with tempfile.TemporaryFile() as said, open(read_fd, "rb") as answers:
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", "zrun_core.plan.trace.trace_process", str(write_fd)],
                stdin=subprocess.PIPE,
                stdout=said,
                stderr=subprocess.STDOUT,
                pass_fds=(write_fd,),
                env=os.environ | dict(environment) | visible_devices.NO_GPU,
                start_new_session=True,  # so that what the user's code starts can be ended with it
            )
        finally:
            os.close(write_fd)

        def listen() -> None:
            for line in answers:
                heard.hear(line)

        # A child of the child may hold the pipe open for ever: the thread must not.
        reader = threading.Thread(target=listen, daemon=True)
        reader.start()
        _under_way[process.pid] = process
        how = ""
        try:
            with suppress(BrokenPipeError):
                process.communicate(json.dumps(request).encode(), max(0.0, timeout_s))
            how = f"exit code {process.returncode}"
            if process.returncode < 0:
                how = f"signal {-process.returncode}"
        except subprocess.TimeoutExpired:
            heard.is_late = True
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            del _under_way[process.pid]
        if process.pid in _ended:
            _ended.discard(process.pid)
            heard.is_late = True
        reader.join(timeout=_LAST_WORDS_S)
        if how and not heard.is_done and not heard.error:
            heard.error = f"{heard.doing}: the process ended with {how}{_last_words(said)}"
        return heard


def _last_words(said: Any) -> str:
    """Return the last line of what the process printed, as the end of a message."""
    said.seek(0, os.SEEK_END)
    said.seek(max(0, said.tell() - 2000))
    lines = said.read().decode(errors="replace").strip().splitlines()
    return f": {lines[-1].strip()[:200]}" if lines else ""


# The cache


def _digest(request: Mapping[str, Any]) -> str:
    """Return what is equal for requests with one answer, but for the user's code."""
    job = {key: value for key, value in request["job"].items() if key in _KEYS}
    parallel = request["job"].get("parallel", {})
    if parallel.get("tp", 1) > 1:
        job["divided"] = [parallel.get(key) for key in ("tp", "plan", "sequence")]
    if request["job"].get("eval") is not None:
        of_evaluation = ("data", "metrics")
        job["evaluation"] = {key: request["job"]["eval"].get(key) for key in of_evaluation}
    if request["job"].get("hooks"):
        job["hooks"] = request["job"]["hooks"]
    zero = request["job"].get("zero", {})
    if zero.get("tile") is not None:
        job["tiles"] = [zero["tile"], zero.get("leaf")]
    own = [metadata.version("torch"), sys.version, _own_code()]
    facts = json.dumps([own, {**request, "job": job}], sort_keys=True)
    return hashlib.sha256(facts.encode()).hexdigest()[:32]


@cache
def _own_code() -> str:
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parents[2].rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _stored(place: Path) -> Profile | None:
    """Return the profile at `place`, if the files that it came from have not changed."""
    try:
        found = Profile.from_json(place.read_bytes())
    except (OSError, ValueError):
        return None  # not there, damaged, or of another version
    return found if are_unchanged(found.files) else None


def _user_files(job_dir: Path) -> dict[str, str]:
    """Return digests of the imported Python files, but for those of Python, torch and zrun."""
    own = [str(Path(__file__).parents[2]), str(Path(os.__file__).parent)]
    apart = [f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages")]
    found = {str(path) for path in job_dir.glob("*.json")}  # which often hold a model's sizes
    for module in list(sys.modules.values()):
        path = getattr(module, "__file__", None)
        if not isinstance(path, str) or not path.endswith(".py"):
            continue
        is_installed = any(part in path for part in apart)
        is_foreign = is_installed or path.startswith(tuple(own))
        if path.startswith(str(job_dir)) or not is_foreign:
            found.add(path)
    return {path: digest_of_file(path) for path in sorted(found)}


def _main() -> None:
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: end with who asked
    with suppress(OSError):  # niceness orders processes of one session only: tell the session too
        Path("/proc/self/autogroup").write_text(str(os.getpriority(os.PRIO_PROCESS, 0)))
    request = json.load(sys.stdin)
    answer_fd = int(sys.argv[1])
    os.set_inheritable(answer_fd, False)
    # What does not bear the meta device is built for real, however large.
    memory_limits.limit_growth(memory_limits.host_available() * 4 // 5)
    with open(answer_fd, "w", encoding="utf-8") as file:
        _answer(request, file)
    sys.stdout.flush()
    os._exit(0)  # threads of the user's code must not delay the end


def _answer(request: Mapping[str, Any], file: TextIO) -> None:
    """Write what is known as soon as it is: see the module's docstring."""
    from zrun_core.errors import ZrunError
    from zrun_core.plan.trace import tracer

    job_dir = Path(request["job_dir"])

    def say(kind: str, text: str) -> None:
        file.write(f"{kind} {text}\n")
        file.flush()

    def tell(news: str | Profile) -> None:
        if isinstance(news, str):
            say("doing", json.dumps(news))
        else:
            say("known", replace(news, files=_user_files(job_dir)).to_json())

    try:
        profile = tracer.trace_job(
            JobConfig.model_validate(request["job"]),
            job_dir,
            micros=request["micros"],
            checkpoints=request["checkpoints"],
            device=request["device"],
            mode=request["mode"],
            why=request["why"],
            threads=request["threads"],
            tell=tell,
        )
    except ZrunError as error:
        say("failed", json.dumps([str(error), error.exit_code]))
    except Exception as error:
        say("failed", json.dumps([tracebacks.user_traceback(error), None]))
    else:
        files = _user_files(job_dir)
        say("done", replace(profile, files=files, tracing_bytes=_most_resident()).to_json())


def _most_resident() -> int:
    """Return the most bytes that this process has had in memory; 0: nobody says."""
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) << 10
    return 0


if __name__ == "__main__":
    _main()
