"""Users' models in a folder of their own, trained by the command line at stage 3 on two ranks.

What such models may be is tried in tests/dist/models/test_zoo.py; here is what a job file and a
launch add to it.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from waiting import PATIENCE_S

ZOO = Path(__file__).parents[1] / "dist" / "zoo.py"
STEPS, GLOBAL = 4, 8
OPTIM = {"lr": 1e-3, "weight_decay": 0.1}


@pytest.fixture(scope="module")
def zoo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("zoo_of_jobs", ZOO)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["zoo_of_jobs"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def zrun(folder: Path, **keys: Any) -> subprocess.CompletedProcess[str]:
    shutil.copy(ZOO, folder)
    keys = {
        "name": "zoo",
        "steps": STEPS,
        "batch": GLOBAL,
        "optim": OPTIM,
        "slots": 2,
        "device": "cpu",
        **keys,
    }
    (folder / "job.yaml").write_text(
        "".join(f"{key}: {json.dumps(value)}\n" for key, value in keys.items())
    )
    command = [
        sys.executable,
        "-m",
        "zrun",
        "train",
        "job.yaml",
        "--run-dir",
        "run",
        "--ui",
        "none",
    ]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=PATIENCE_S)


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = (folder / "run" / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["type"] == kind]


def plain(
    zoo: ModuleType, build: str, args: dict[str, Any], data: str, loss: str | None
) -> list[float]:
    """A plain loop; each step's gradient is the mean of those of the halves that the two ranks
    take.
    """
    torch.manual_seed(0)
    model, dataset = getattr(zoo, build)(**args), getattr(zoo, data)()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], **OPTIM)
    losses = []
    for step in range(STEPS):
        total = 0.0
        for half in range(2):
            first = step * GLOBAL + half * GLOBAL // 2
            batch = torch.utils.data.default_collate(
                [dataset[i % len(dataset)] for i in range(first, first + GLOBAL // 2)]
            )
            if loss is not None:
                result = getattr(zoo, loss)(model, batch)
            else:
                result = model(**batch) if isinstance(batch, dict) else model(*batch)
            value = result["loss"] if isinstance(result, dict) else getattr(result, "loss", result)
            (value / 2).backward()
            total += value.item() / 2
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


@pytest.mark.parametrize(
    ("build", "args", "data", "keys"),
    [
        ("convnet", {"channels_last": True}, "images", {"loss": "zoo.py:classify"}),
        ("Branching", {}, "vectors", {"leaf": "router"}),
    ],
)
@pytest.mark.at_most(1)
def test_losses_are_those_of_a_plain_loop(zoo, tmp_path, build, args, data, keys):
    leaf = [keys.pop("leaf")] if "leaf" in keys else []
    done = zrun(
        tmp_path,
        model={"call": f"zoo.py:{build}", "args": args},
        data=f"zoo.py:{data}",
        zero={"stage": 3, "bucket": "2KiB", "leaf": leaf},
        **keys,
    )
    assert done.returncode == 0, done.stderr
    losses = [event["loss"] for event in events(tmp_path, "step")]
    expected = plain(zoo, build, args, data, keys.get("loss", ":").partition(":")[2] or None)
    assert losses == pytest.approx(expected, abs=2e-6, rel=0)
    assert events(tmp_path, "end")[0]["reason"] == "steps"


@pytest.mark.parametrize(
    ("build", "keys", "named"),
    [
        ("Branching", {}, ["'router.left.0'", "'router.right.0'"]),
        # Where no rank comes after the one that runs more.
        (
            "ExtraAtTheEnd",
            {"eval": {"data": "zoo.py:vectors", "every": 2, "samples": 8}},
            ["'extra'"],
        ),
    ],
)
@pytest.mark.thorough
def test_ranks_that_run_different_modules_stop_with_their_names(tmp_path, build, keys, named):
    done = zrun(
        tmp_path,
        model=f"zoo.py:{build}",
        data="zoo.py:vectors",
        zero={"stage": 3, "bucket": "2KiB"},
        **keys,
    )
    assert done.returncode == 6
    for name in [*named, "zero.leaf"]:
        assert name in done.stderr
    assert "Traceback" not in done.stderr
