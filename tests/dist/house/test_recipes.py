"""docs/recipes.md as written: each job trains on two ranks what a plain loop trains."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import run
from test_library_page import play
from verifying import recorded, verdict_of

from zrun.job.load import load_job

PAGE = Path(__file__).resolve().parents[3] / "docs" / "recipes.md"
TEXT = PAGE.read_text(encoding="utf-8")
SECTIONS = {
    title: text
    for title, text in re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", TEXT, re.DOTALL | re.MULTILINE)
}
JOBS = [title for title, text in SECTIONS.items() if "```yaml" in text]
ACROSS_RANKS = "Contrastive pairs"  # a plain loop on one process has no other ranks


def block(title: str, language: str) -> str:
    found = re.search(rf"^```{language}\n(.*?)^```$", SECTIONS[title], re.DOTALL | re.MULTILINE)
    assert found is not None
    return found[1]


def job_of(title: str, folder: Path, *overrides: str) -> dict[str, Any]:
    """The job of a recipe, whose code is in `folder` under a name of its own.

    Ranks of the pool live on, and a module's name is taken then.
    """
    name = f"{title.lower().replace(' ', '_')}_{folder.name}"
    (folder / f"{name}.py").write_text(block(title, "python"), encoding="utf-8")
    text = block(title, "yaml").replace("train.py:", f"{folder}/{name}.py:")
    (folder / "job.yaml").write_text(text, encoding="utf-8")
    job = load_job(folder / "job.yaml", ["device=cpu", *overrides]).config
    assert job.hooks is not None
    return job.model_dump(mode="json", by_alias=True, exclude_unset=True)


@pytest.mark.parametrize("title", [title for title in JOBS if title != ACROSS_RANKS])
@pytest.mark.at_most(4)
def test_it_trains_what_a_plain_loop_trains(title: str, ranks: Any, tmp_path: Path) -> None:
    found = ranks(2).run(
        recorded, job_of(title, tmp_path, "steps=3"), str(tmp_path / "run"), {"dp": 2}
    )
    assert {each["error"] for each in found} == {""}
    verdict = verdict_of(tmp_path / "run")
    assert verdict.agrees, verdict.lines()


def losses(found: list[dict[str, Any]]) -> list[float]:
    assert {each["error"] for each in found} == {""}
    return [event["loss"] for event in found[0]["events"] if event["type"] == "step"]


def test_pairs_of_all_ranks_are_compared(ranks: Any, tmp_path: Path) -> None:
    job = job_of(ACROSS_RANKS, tmp_path)
    together = losses(ranks(2).run(run, job, str(tmp_path / "two"), None, None, None, {"dp": 2}))
    job = job_of(ACROSS_RANKS, tmp_path, "batch.micro=32")
    alone = losses(ranks(1).run(run, job, str(tmp_path / "one"), None, None, None, {"dp": 1}))
    assert len(together) == 8
    assert together == pytest.approx(alone, abs=2e-5)


def test_the_average_of_the_weights_goes_on(ranks: Any, tmp_path: Path) -> None:
    job = job_of("Diffusion", tmp_path)
    losses(ranks(2).run(run, job, str(tmp_path / "run"), None, None, None, {"dp": 2}))
    average = torch.load(tmp_path / "run" / "average.pt")
    assert average["head.weight"].shape == (2, 32)
    assert average["head.weight"].abs().sum() > 0


@pytest.mark.thorough
def test_a_game_is_learned(ranks: Any, tmp_path: Path) -> None:
    script = tmp_path / "ppo.py"
    script.write_text(block("Reinforcement learning and GANs", "python"), encoding="utf-8")
    first, last = ranks(2).run(play, str(script))[0]
    rewards = [float(line.rpartition(" ")[2]) for line in (first, last)]
    assert rewards[1] > rewards[0] + 0.2
