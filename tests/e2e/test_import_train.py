"""A configuration of DeepSpeed, imported, trains a model that knows nothing of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import PATIENCE_S

from zrun.job.load import load_job

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "peers"))
import peer_configs as peers

DEEPSPEED = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 16,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "steps_per_print": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.01}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"warmup_num_steps": 2, "warmup_type": "linear", "total_num_steps": 6},
    },
    "zero_optimization": {"stage": 2, "overlap_comm": True},
}


def zrun(folder: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "zrun", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_an_imported_configuration_trains(tmp_path: Path) -> None:
    zrun(tmp_path, "init", "-o", "first.yaml")  # for its train.py
    (tmp_path / "ds_config.json").write_text(json.dumps(DEEPSPEED))
    told = zrun(tmp_path, "import", "ds_config.json", "-o", "job.yaml")
    assert "zero_optimization.overlap_comm" in told
    here = ["loss=train.py:loss_fn", "device=cpu", "--slots", "2", "--ui", "none"]
    zrun(tmp_path, "train", "job.yaml", *here, "--run-dir", "run")
    recorded = load_job(tmp_path / "run" / "job.yaml").config
    assert (recorded.zero.stage, recorded.optim.clip, recorded.batch.micro) == (2, 1.0, 16)
    lines = (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    steps = [event for event in map(json.loads, lines) if event["type"] == "step"]
    assert len(steps) == 6
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert [step["lr"] for step in steps[:3]] == pytest.approx([0.005, 0.01, 0.01])


HERE = ["device=cpu", "batch={global: 8, micro: 4}", "log.to=[]", "--ui", "none"]
EACH = {
    "stage_0.json": (json.dumps(peers.STAGE_0_FP16), ["slots=1"]),
    "stage_1.json": (json.dumps(peers.STAGE_1_BF16), ["slots=2"]),
    "stage_2.json": (json.dumps(peers.STAGE_2_AUTO), ["slots=2"]),
    "stage_3.json": (json.dumps(peers.STAGE_3_BOTH_ON_CPU), ["slots=2"]),
    "nvme.json": (
        json.dumps(peers.STAGE_3_ON_NVME),
        ["slots=2", "zero.shard_group=all", "offload.dir=."],
    ),
    "fsdp.yaml": (peers.ACCELERATE_FSDP, ["slots=2"]),
    "deepspeed.yaml": (peers.ACCELERATE_DEEPSPEED, ["slots=2"]),
    "titan.toml": (
        peers.TORCHTITAN,
        ["slots=2", "parallel={pp: 2}", "activations=none"],
    ),
    "axolotl.yml": (peers.AXOLOTL, ["slots=1"]),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", EACH)
def test_each_imported_configuration_trains(tmp_path: Path, name: str) -> None:
    """On ranks and samples that are here; all else is as imported."""
    text, overrides = EACH[name]
    code = (Path(__file__).parent / "small_job.py").read_text()
    names = "def build_model():\n    return Net()\n\n\ndef build_data():\n    return Vectors()\n"
    (tmp_path / "train.py").write_text(f"{code}\n\n{names}")
    (tmp_path / "ds.json").write_text(json.dumps(peers.STAGE_2_AUTO))
    (tmp_path / name).write_text(text)
    zrun(tmp_path, "import", name, "-o", "job.yaml")
    zrun(tmp_path, "train", "job.yaml", *HERE, *overrides, "--smoke", "3", "--run-dir", "run")
    lines = (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    losses = [event["loss"] for event in map(json.loads, lines) if event["type"] == "step"]
    assert len(losses) == 3
    assert losses[0] == pytest.approx(1.6, rel=0.05)  # dropout and formats change no more
