"""A model saved at stage 3 on four ranks, elsewhere.

Resumed, exported, in a plain model, in `transformers`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from runs import job, look, losses, run
from safetensors.torch import load_file

from zrun_core.checkpoint.export import export
from zrun_core.checkpoint.folder import read_step
from zrun_core.models.gpt import gpt
from zrun_core.models.gpt2_names import to_transformers

SHAPE = {"flavour": "gpt2", "vocab_size": 13, "dim": 32, "depth": 2, "heads": 4, "seq_len": 6}


def gpt_job(stage: int, **keys: Any) -> dict[str, Any]:
    model = {"call": "zrun_core.models.gpt:gpt", "args": SHAPE}
    data = {"call": "runs.py:Plain", "shuffle": True}
    batch = {"global": 12, "micro": 1}
    return job(**{"zero": stage, "model": model, "data": data, "steps": 4, "batch": batch, **keys})


@pytest.fixture(scope="module")
def travelled(ranks, tmp_path_factory) -> Path:
    """Step 5 of a run that began at stage 3 on 4 ranks and made its last step at stage 1 on 2."""
    folder = tmp_path_factory.mktemp("travel")
    ranks(4).run(run, gpt_job(3), str(folder))
    found = ranks(2).run(run, gpt_job(1, steps=5), str(folder), {})
    assert losses(found[0]).keys() == {5}
    return folder / "checkpoints" / "step-00000005"


@pytest.mark.parametrize("name", ["model.safetensors", "model.pt"])
@pytest.mark.at_most(1)
def test_exported_weights_fit_the_plain_model_and_transformers(ranks, travelled, tmp_path, name):
    transformers = pytest.importorskip("transformers")
    export(travelled, read_step(travelled), tmp_path / name)
    state = (
        load_file(tmp_path / name) if name.endswith("safetensors") else torch.load(tmp_path / name)
    )
    plain = gpt(**SHAPE).eval()
    plain.load_state_dict(state)
    held = ranks(3).run(look, gpt_job(2), str(tmp_path / "run"), {"folder": str(travelled.parent)})
    for key, value in plain.state_dict().items():
        parts = {
            start: data
            for each in held
            for (t, s, start), data in each["parts"].items()
            if (t, s) == (key, "value")
        }
        if key != "head.weight":  # tied
            whole = torch.cat([torch.from_numpy(parts[start]) for start in sorted(parts)])
            assert torch.equal(whole, value.flatten()), key
    config = transformers.GPT2Config(vocab_size=13, n_embd=32, n_layer=2, n_head=4, n_positions=6)
    theirs = transformers.GPT2LMHeadModel(config).eval()
    theirs.load_state_dict(to_transformers(state, heads=4))
    ids = torch.arange(12).view(2, 6)
    with torch.no_grad():
        torch.testing.assert_close(theirs(ids).logits, plain(ids), rtol=1e-5, atol=1e-5)
