"""A job file with some of its keys changed: in place, and never anything else."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError
from traced_gpt import GPT, planner_of

from zrun.estimate.patch import as_overrides, as_yaml, job_changes, patched, write_job
from zrun.job.document import Document
from zrun.job.load import load_job
from zrun.job.validate import validate
from zrun_core.errors import JobError
from zrun_core.hardware.simulated import parse_simulate
from zrun_core.memory.buffers import ON_DEVICE, placement_of
from zrun_core.plan.answer.search_space import SearchSpace, offload_chains
from zrun_core.plan.question.candidate import Candidate
from zrun_core.spine.config import JobConfig
from zrun_core.spine.parallel_dims import ParallelDims
from zrun_core.spine.sections.offload import OffloadConfig
from zrun_core.spine.spec import BatchPlan

ROOT = Path(__file__).resolve().parents[3]
JOB = """\
# What it is for.
name: tiny          # its name
model: train.py:build
data: train.py:data
steps: 10
batch: {global: 64, micro: 16}  # both
zero: 2             # two
precision:
    # the format
    compute: bf16
    reduce: fp32
checkpoint: 100     # often
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    return path


@pytest.mark.parametrize(
    ("changes", "old", "new"),
    [
        ({"zero.stage": 3}, "zero: 2             # two", "zero: 3             # two"),
        ({"zero.shard_group": 4}, "zero: 2 ", "zero: {stage: 2, shard_group: 4} "),
        ({"batch.micro": 8}, "{global: 64, micro: 16}", "{global: 64, micro: 8}"),
        ({"precision.compute": "fp16"}, "    compute: bf16", "    compute: fp16"),
        ({"precision.master": "fp32"}, "    compute: bf16", "    master: fp32\n    compute: bf16"),
        (
            {"activations.checkpoint": "full"},
            "# often\n",
            "# often\nactivations: full\n",
        ),
        ({"slots": 4}, "# often\n", "# often\nslots: 4\n"),
    ],
)
def test_one_key_changes_in_its_place(changes: dict[str, object], old: str, new: str) -> None:
    assert patched(JOB, dict(changes)) == JOB.replace(old, new)


def test_several_keys_one_of_them_twice_in_a_section() -> None:
    text = patched(
        JOB, {"zero.stage": 3, "zero.shard_group": 2, "batch.micro": 4, "batch.global": 128}
    )
    assert "zero: {stage: 3, shard_group: 2}             # two" in text
    assert "batch: {global: 128, micro: 4}  # both" in text
    assert text.startswith("# What it is for.\nname: tiny          # its name\n")


def test_overrides_of_the_command_line_go_into_the_file(job: Path) -> None:
    target = job.with_name("fits.yaml")
    write_job(
        job, target, {"zero.stage": 3}, ["batch.global=32", "seed=7", "env.API_TOKEN=hunter2"]
    )
    config = load_job(target).config
    assert (config.zero.stage, config.batch.global_, config.batch.micro, config.seed) == (
        3,
        32,
        16,
        7,
    )
    assert "# its name" in target.read_text()
    assert config.env == {"API_TOKEN": None}  # the shell's, not the command line's


@pytest.mark.parametrize("path", sorted((ROOT / "jobs").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_bundled_job_can_be_changed_without_losing_a_comment(
    path: Path, tmp_path: Path
) -> None:
    text = path.read_text()
    changes = {
        "zero.stage": 1,
        "batch.micro": 1,
        "activations.checkpoint": "selective",
        "precision.compute": "fp32",
    }
    changed = patched(text, changes)
    assert [line for line in changed.splitlines() if line.startswith("#")] == [
        line for line in text.splitlines() if line.startswith("#")
    ]
    meant = load_job(path, as_overrides(changes)).config
    (tmp_path / "job.yaml").write_text(changed)
    assert load_job(tmp_path / "job.yaml").config == meant


def test_a_file_that_cannot_be_edited_is_written_anew() -> None:
    text = patched(
        JOB.replace("zero: 2             # two", "zero:\n  stage: 2\n  bucket: 1MiB"),
        {},
        ["zero=3"],
    )
    assert "zero: 3" in text
    assert "#" not in text  # its comments are lost, its meaning is not


def test_a_document_in_one_pair_of_braces() -> None:
    text = "{name: a, model: m:f, data: m:f, steps: 1, batch: 4}\n"
    assert patched(text, {"zero.stage": 1}) == "{zero: 1, " + text[1:]


def test_refusals(job: Path, tmp_path: Path) -> None:
    with pytest.raises(JobError, match="is there already"):
        write_job(job, job, {}, [])
    (tmp_path / "other").mkdir()
    with pytest.raises(JobError, match="beside the job file"):
        write_job(job, tmp_path / "other" / "job.yaml", {}, [])
    with pytest.raises(JobError, match=r"No such file|beside"):
        write_job(job, tmp_path / "none" / "job.yaml", {}, [])


def test_the_patch_alone(job: Path) -> None:
    config = load_job(job).config
    changes = {"zero.stage": 3, "activations.checkpoint": "full", "zero.shard_group": 2, "slots": 2}
    assert as_yaml(changes, config).splitlines() == [
        "zero:",
        "  stage: 3  # was 2",
        "  shard_group: 2  # was all",
        "activations: full  # was none",
        "slots: 2  # was auto",
    ]
    assert as_yaml({"zero.stage": 0}, config) == "zero: 0  # was 2"
    assert as_overrides(changes)[:2] == ["zero.stage=3", "activations.checkpoint=full"]


# States elsewhere


TIERS = [None, "device", "host", "disk"]


def offload_sections() -> Iterator[dict[str, Any]]:
    """Yield sections of jobs at stage 3: all that are valid, with their inputs at home and away."""
    for optimizer, grad, param in itertools.product(TIERS[1:], TIERS, TIERS[1:]):
        with contextlib.suppress(ValidationError):
            section = {"optimizer": optimizer, "grad": grad, "param": param, "fraction": 0.5}
            OffloadConfig.model_validate(section)
            yield section
    yield {"optimizer": "host", "schedule": "delayed"}
    yield {"optimizer": "host", "fraction": "auto"}
    yield {}


@pytest.mark.parametrize("hardware", ["1xCPU", "1xA100-80G"])
@pytest.mark.thorough
def test_a_patch_leads_to_the_homes_that_were_planned(hardware: str) -> None:
    machine = parse_simulate(hardware)
    kind = machine.device.kind
    document = {"name": "t", "model": "m:f", "data": "m:f", "steps": 1, "batch": {"micro": 1}}
    document |= {"zero": 3, "activations": {"checkpoint": "full", "offload": "host"}}
    planner = planner_of(GPT(2, 64, 2, vocab=128, seq=32), machine)
    ways = [ON_DEVICE, *(chain[0] for chain in offload_chains(planner, SearchSpace(1)))]
    assert len(ways) > 3
    batch = BatchPlan(global_size=1, micro=1, accumulation=1, ranks=1)
    for section in offload_sections():
        config = JobConfig.model_validate(document | {"offload": section})
        for way in ways:
            wanted = Candidate(3, ParallelDims(1), 1, 1, "full", "fp32", placement=way)
            keys = job_changes(config, batch, wanted, machine)
            text = yaml.safe_dump(document | {"offload": section}, sort_keys=False)
            job = validate(Document.parse(patched(text, keys), "job", {}))
            found = placement_of(job.offload, job.activations, kind)
            if way.is_on_device:
                found = replace(found, fraction=1.0)
            assert found == way, (section, keys)
            assert not job_changes(job, batch, wanted, machine)


@pytest.mark.parametrize(
    ("dims", "schedule"),
    [
        ((2, 1, 1), "1f1b"),
        ((2, 1, 1), "layer_major"),
        ((1, 1, 2), "1f1b"),
        ((1, 1, 2), "zero_bubble"),
        ((1, 1, 2, 2), "interleaved"),
    ],
)
@pytest.mark.parametrize(
    "parallel",
    [
        {},
        {"schedule": "layer_major"},
        {"pp": 2, "schedule": "zero_bubble", "split": ["h.2"]},
        {"pp": 2, "schedule": "interleaved"},
        {"pp": 2, "schedule": "pipedream"},
    ],
)
def test_a_patch_leads_to_the_stages_and_the_schedule_that_were_planned(
    parallel: dict[str, Any], dims: tuple[int, ...], schedule: str
) -> None:
    document = {"name": "t", "model": "m:f", "data": "m:f", "steps": 1, "batch": {"micro": 1}}
    document |= {"parallel": parallel}
    batch = BatchPlan(global_size=1, micro=1, accumulation=1, ranks=1)
    wanted = Candidate(0, ParallelDims(*dims), 1, 1, precision="fp32", schedule=schedule)
    keys = job_changes(JobConfig.model_validate(document), batch, wanted, parse_simulate("2xCPU"))
    text = yaml.safe_dump(document, sort_keys=False)
    job = validate(Document.parse(patched(text, keys), "job", {}))
    found = job.parallel
    assert (found.pp, found.virtual, found.split) == (wanted.dims.pp, wanted.dims.virtual, "auto")
    alike = {"zero_bubble", "1f1b"} if found.pp == 1 and schedule == "1f1b" else {schedule}
    assert found.schedule in alike
    assert not job_changes(job, batch, wanted, parse_simulate("2xCPU"))


def test_a_split_that_is_kept_changes_nothing() -> None:
    document = {"name": "t", "model": "m:f", "data": "m:f", "steps": 1, "batch": {"micro": 1}}
    document |= {"parallel": {"pp": 2, "split": ["h.2"]}}
    batch = BatchPlan(global_size=1, micro=1, accumulation=1, ranks=1)
    wanted = Candidate(0, ParallelDims(1, 1, 2), 1, 1, precision="fp32", split=("h.2",))
    config = JobConfig.model_validate(document)
    assert not job_changes(config, batch, wanted, parse_simulate("2xCPU"))


def test_what_moves_to_a_disk_is_one_word() -> None:
    assert patched(JOB, {"offload.optimizer": "disk"}).endswith("# often\noffload: disk\n")
    config = JobConfig.model_validate(
        {"name": "t", "model": "m:f", "data": "m:f", "steps": 1, "batch": {"micro": 1}}
    )
    assert as_yaml({"offload.optimizer": "disk"}, config) == "offload: disk  # was device"
