"""The jobs that come with the repository: valid, and of the size that they claim."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from zrun.job.load import load_job
from zrun_core.spine.config import JobConfig
from zrun_core.user_code import user

JOBS = Path(__file__).parents[3] / "jobs"

PARAMETERS = {
    "stdlib-gpt": 10_720_128,
    "gpt-3d": 10_720_128,
    "gpt2-124m": 124_439_808,
    "gpt2-xl-1.5b": 1_557_611_200,
    "llama-8b": 8_030_261_248,
    "bert-base": 109_514_298,
    "turing-nlg-17b": 17_176_845_728,
}


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A folder of this module's own for the packed text."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def read(name: str) -> JobConfig:
    return load_job(JOBS / f"{name}.yaml").config


def test_every_job_is_known() -> None:
    assert {path.stem for path in JOBS.glob("*.yaml")} == set(PARAMETERS)


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_job_builds_the_model_that_it_names(name: str) -> None:
    job = read(name)
    assert job.name == name
    with torch.device("meta"):
        model = user.build_model(job.model, JOBS)
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS[name]


@pytest.mark.parametrize("name", PARAMETERS)
@pytest.mark.at_most(2)
def test_the_data_fits_the_model(name: str) -> None:
    job = read(name)
    for ref in [job.data, *([job.eval.data] if job.eval else [])]:
        dataset = user.call(ref, JOBS)
        sample = dataset[0]
        assert len(sample["input_ids"]) == job.model.args["seq_len"]
        assert int(sample["input_ids"].max()) < job.model.args["vocab_size"]
