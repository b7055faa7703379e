"""What a rank of a script waits for, by torch's flight recorder: written to a file on request.

    {"waits": [{"name": "all_reduce", "number": 3, "sizes": [[7]], "dtype": "Float", "group": ""}],
     "last": {...}, "counts": {"0": 3}}

Process groups of gloo and NCCL number their collectives. One that has not ended is what the rank
waits for; one that others wait for, and whose number a rank has not come to, names that rank.

The main thread waits in native code, where no handler of Python runs: a thread of its own answers.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zrun_core.spine.script_files import ASK, waits_file

_BINDINGS = "torch._C._distributed_c10d"
_DUMPS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
_MOST = 8  # collectives under way that are told


def listen(run_dir: Path, rank: int) -> None:
    """Answer `ASK` from now on. To be called before any other thread is started."""
    path = waits_file(run_dir, rank)
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600))
    # Threads inherit the mask: the signal waits for the one that asks for it.
    signal.pthread_sigmask(signal.SIG_BLOCK, {ASK})
    threading.Thread(target=_answer, args=(path,), name="zrun-testimony", daemon=True).start()


def _answer(path: Path) -> None:
    while True:
        signal.sigwait({ASK})
        try:
            text = json.dumps(tell())
        except Exception as error:  # the layout of another torch: it says nothing then
            text = json.dumps({"error": f"{type(error).__name__}: {error}"})
        path.write_text(text)


def tell() -> dict[str, Any]:
    """Return the collectives under way of this process, and the one that began last."""
    found = list(_collectives())
    return {
        "waits": [each for each, has_ended in found if not has_ended][:_MOST],
        "last": found[-1][0] if found else None,
        "counts": {each["group"]: each["number"] for each, _ in found if not each["is_message"]},
    }


def _collectives() -> Iterator[tuple[dict[str, Any], bool]]:
    """Yield the collectives that torch remembers, the oldest first, and whether each has ended."""
    bindings = sys.modules.get(_BINDINGS)  # else the script has not come to it
    for name in _DUMPS:
        dump = getattr(bindings, name, None)
        if dump is None:
            continue
        for entry in json.loads(dump(True, False)).get("entries", ()):
            yield _in_short(entry), bool(entry.get("retired") or entry.get("state") == "completed")


def _in_short(entry: dict[str, Any]) -> dict[str, Any]:
    group = entry.get("process_group") or ["", ""]
    number = entry["p2p_seq_id"] if entry.get("is_p2p") else entry["collective_seq_id"]
    return {
        "name": str(entry["profiling_name"]).partition(":")[2] or str(entry["profiling_name"]),
        "number": int(number),
        "is_message": bool(entry.get("is_p2p")),
        "sizes": entry.get("input_sizes") or entry.get("output_sizes") or [],
        "dtype": next(iter(entry.get("input_dtypes") or ()), ""),
        "group": str(group[0]),
        "described": "" if group[1] in ("default_pg", "undefined") else str(group[1]),
    }
