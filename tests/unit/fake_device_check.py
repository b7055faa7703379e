"""Stands in for `zrun_core.library.device_check`: what a GPU does, its UUID says.

GPU-good computes, GPU-wrong finds a wrong number, GPU-crash ends, GPU-stuck stands still.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import time
from pathlib import Path

asked = json.loads(sys.argv[1])
rank = int(os.environ["RANK"])
gpu = os.environ["CUDA_VISIBLE_DEVICES"].split(",")[rank]
faulthandler.dump_traceback_later(asked["limit_s"], exit=True)
with Path(asked["folder"], f"{asked['part']}-{rank}.jsonl").open("w") as told:
    first = {"check": f"first of {asked['part']}", "found": "well", "problem": None, "rate": None}
    print(json.dumps(first), file=told, flush=True)
    if gpu == "GPU-crash":
        print("NCCL WARN a cable is loose", file=sys.stderr)
        sys.exit("RuntimeError: unhandled system error")
    if gpu == "GPU-stuck" or "GPU-crash" in os.environ["CUDA_VISIBLE_DEVICES"]:
        time.sleep(600)
    wrong = "2 is 3" if gpu == "GPU-wrong" else None
    second = {"check": "second", "found": wrong or "well", "problem": wrong, "rate": 2e9}
    print(json.dumps(second), file=told, flush=True)
