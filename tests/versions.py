"""Releases of torch and of transformers, and whether the tests pass: `make test-versions`.

    python tests/versions.py [--torch 2.12.1 ...] [--transformers 4.57.6 ...]

Of each the lowest release that pyproject.toml allows, the one of constraints.txt and the newest
that pip finds. A release of torch has a virtual environment, which is made once, in
`.venv/versions`; those of transformers take turns in it. With each torch the tests of `OWN` run
once, and those of `MODELS` with each transformers.

torch from PyPI brings CUDA, 5 GB a release. PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
takes the wheels for CPUs where it is reachable.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CONSTRAINTS = ROOT / "constraints.txt"
PACKAGES = ("torch", "transformers")
PATIENCE_S = 1800.0  # for the tests of one cell
PASSED, FAILED, NOT_INSTALLED = "passed", "failed", "not installed"

# What depends on torch: its kernels and private names, autograd, fake tensors, groups of ranks.
OWN = """
tests/unit/optim/test_chunked.py
tests/unit/stages/test_ghosts.py
tests/unit/zero/test_graph_breaks.py
tests/unit/telemetry/test_high_water.py
tests/unit/optim/test_layerwise.py
tests/unit/optim/test_lightweight.py
tests/unit/telemetry/test_metrics.py
tests/unit/plan/test_plan_trace.py::test_a_linear_model_to_the_byte
tests/unit/plan/test_plan_trace.py::test_blocks_that_did_not_run_are_written_out
tests/unit/plan/test_plan_trace.py::test_recomputing_costs_flops_and_saves_memory
tests/unit/activations/test_recomputed_calls.py
tests/dist/house/test_axes.py::test_one_process
tests/dist/library/test_library.py::test_the_loop_is_bit_equal_to_ddp
tests/dist/tiers/test_offload.py::test_where_states_live_changes_no_bit
tests/dist/zero/test_optimizers.py::test_torchs_own_are_bit_equal_to_the_plain_model_at_every_stage
tests/dist/pipeline/test_pipeline_models.py::test_model
tests/dist/pipeline/test_pipelines.py::test_one_process
tests/dist/zero/test_precision.py::test_stages_are_bit_equal_in_every_precision
tests/dist/checkpoint/test_resume.py::test_resume_is_bit_identical
tests/dist/zero/test_stages.py::test_bit_equal_to_ddp_on_two_ranks
tests/dist/tensor_parallel/test_tensor_parallel.py::test_models
tests/dist/zero/test_tiles.py::test_numbers_are_those_of_the_untiled_model
tests/dist/tensor_parallel/test_vocabulary.py::test_loss_of_slices
tests/dist/models/test_zoo.py::test_losses_are_those_of_a_plain_loop
tests/e2e/test_init_train.py
"""
# What depends on transformers: its models, whole, as stages and in slices, and their files.
MODELS = """
tests/unit/models/test_gpt2_names.py
tests/unit/plan/test_plan_pretrained.py
tests/unit/tensor_parallel/test_tensor_fakes.py
tests/unit/tensor_parallel/test_tensor_plan.py
tests/dist/pipeline/test_pipeline_models.py::test_model
tests/dist/models/test_pretrained.py
tests/dist/tensor_parallel/test_tensor_parallel.py::test_models
tests/e2e/test_init_train.py
"""


def floor_of(package: str) -> str:
    """Return the lowest release that pyproject.toml allows."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["hf"]]
    (lowest,) = [text.removeprefix(f"{package}>=") for text in wanted if text.startswith(package)]
    return lowest


def pin_of(package: str) -> str:
    """Return the release that the tests run with."""
    text = CONSTRAINTS.read_text(encoding="utf-8")
    found = re.search(rf"^{package}==(\S+)$", text, re.MULTILINE)
    assert found is not None
    return found[1]


def newest_of(package: str) -> str | None:
    """Return the newest release that pip would install here; None if it finds none."""
    options = ["--dry-run", "--quiet", "--no-deps", "--ignore-installed", "--report", "-"]
    command = [sys.executable, "-m", "pip", "install", *options, package]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        print(f"newest {package}: not known: {_last_line(done.stderr)}", flush=True)
        return None
    version: str = json.loads(done.stdout)["install"][0]["metadata"]["version"]
    return version.partition("+")[0]


def releases_of(package: str) -> list[str]:
    """Return the lowest, the pinned and the newest release, each once."""
    found = [floor_of(package), pin_of(package), newest_of(package)]
    found = [f"{each}.0" if each and each.count(".") == 1 else each for each in found]  # as pip's
    return list(dict.fromkeys(filter(None, found)))


class Environment:
    """A virtual environment with one release of torch."""

    def __init__(self, folder: Path, torch: str) -> None:
        self._folder = folder / f"torch-{torch}"
        self._torch = torch
        self._python = self._folder / "bin" / "python"
        self._constraints = folder / "constraints.txt"
        self._logs = folder / "logs"

    def make(self) -> bool:
        """Make it, unless it is there; return whether it is."""
        ready = self._folder / "ready"
        if ready.exists():
            return True
        shutil.rmtree(self._folder, ignore_errors=True)  # what an earlier try has left
        self._logs.mkdir(parents=True, exist_ok=True)
        free = ("torch==", *(f"{name}==" for name in ("transformers", "tokenizers")))
        pinned = CONSTRAINTS.read_text(encoding="utf-8").splitlines(keepends=True)
        self._constraints.write_text("".join(line for line in pinned if not line.startswith(free)))
        venv.create(self._folder, with_pip=True)
        if not self._install("-e", ".[test]", f"torch=={self._torch}"):
            return False
        ready.touch()
        return True

    def take(self, transformers: str) -> bool:
        """Install a release of transformers; return whether that could be done."""
        return self._install(f"transformers=={transformers}")

    def passes(self, name: str, tests: str, which: str) -> bool:
        """Run tests; return whether all of them pass. Prints the names of those that fail.

        Args:
            tests: files, or tests in them.
            which: of these tests, as of pytest's `-k`.
        """
        log = self._logs / f"torch-{self._torch}-{name}.log"
        options = ["-q", "--covering", "-n", "2", "--dist", "loadfile", "-p", "no:cacheprovider"]
        command = [self._python, "-m", "pytest", *options, "-k", which, *tests.split()]
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        with log.open("w", encoding="utf-8") as out:
            try:
                done = subprocess.run(
                    command,
                    cwd=ROOT,
                    env=environment,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    timeout=PATIENCE_S,
                )
            except subprocess.TimeoutExpired:
                print(f"  did not end in {PATIENCE_S:.0f} s: see {log}", flush=True)
                return False
        lines = log.read_text(encoding="utf-8").splitlines()
        for line in lines:
            if line.startswith(("FAILED ", "ERROR ")):
                print(f"  {line[:200]}", flush=True)
        print(f"  {lines[-1] if lines else 'no output'}: {log}", flush=True)
        return done.returncode == 0

    def _install(self, *wanted: str) -> bool:
        command = [self._python, "-m", "pip", "install", "-q", "--no-compile"]
        done = subprocess.run(
            [*command, "-c", self._constraints, *wanted], cwd=ROOT, capture_output=True, text=True
        )
        if done.returncode != 0:
            print(f"  {wanted[-1]}: not installed: {_last_line(done.stderr)}", flush=True)
        return done.returncode == 0


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.startswith("ERROR")]
    return (lines or text.strip().splitlines() or ["pip said nothing"])[-1]


def row(folder: Path, torch: str, transformers: Sequence[str]) -> list[str]:
    """Return how the tests do with one release of torch: alone, and with each transformers."""
    print(f"torch {torch}", flush=True)
    environment = Environment(folder, torch)
    if not environment.make():
        return [NOT_INSTALLED] * (1 + len(transformers))
    found = [NOT_INSTALLED]  # until a transformers is there, which the tests' own modules import
    for release in transformers:
        print(f"torch {torch}, transformers {release}", flush=True)
        if not environment.take(release):
            found.append(NOT_INSTALLED)
            continue
        if found[0] == NOT_INSTALLED:
            found[0] = _outcome(environment.passes("own", OWN, "not transformers"))
        which = "transformers or pretrained or tensor_plan or tensor_fakes or gpt2"
        name = f"transformers-{release}"
        found.append(_outcome(environment.passes(name, MODELS, which)))
    return found


def _outcome(passes: bool) -> str:
    return PASSED if passes else FAILED


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, default=ROOT / ".venv" / "versions")
    for package in PACKAGES:
        parser.add_argument(f"--{package}", nargs="+", help="releases in place of these three")
    asked = parser.parse_args()
    torches, transformers = (getattr(asked, name) or releases_of(name) for name in PACKAGES)
    folder = asked.folder.absolute()
    rows = [(torch, row(folder, torch, transformers)) for torch in torches]
    titles = ["zrun's own models", *(f"transformers {release}" for release in transformers)]
    print(f"\n{'torch':8}", *(f"{title:20}" for title in titles))
    for torch, cells in rows:
        print(f"{torch:8}", *(f"{cell:20}" for cell in cells))
    return int(any(FAILED in cells for _, cells in rows))


if __name__ == "__main__":
    sys.exit(main())
