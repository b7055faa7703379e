# make train        train the main job: a language model of 10 million parameters on Python's own source, two CPU ranks
# make test         the tests, of large tables few rows, the linter and the type checker: 12 minutes
# make test-all     the same with all rows, and what is marked thorough: 30 minutes
# make test-hosts   the tests on three hosts, network namespaces with an sshd each (as root; installs sshd)
# make test-faults  a table of what goes wrong on three hosts, and what zrun makes of it: 3 minutes
# make test-slurm   the tests under a real Slurm of two nodes, and under Open MPI (as root; installs both): 2 minutes
# make test-offload  a table of placements of states, in which nothing may change a bit: 12 minutes
# make test-pipelines  a table of models in pipelines, none of which may change a bit: an hour
# make test-saves  a table of checkpoints that go on with other axes, in which nothing may change a bit: 6 minutes
# make test-tensors  a table of models whose layers ranks divide, each compared with one process: 6 minutes
# make test-joints  a table of mixtures, adapters and home-made models over tp and pp, with all else on: half an hour
# make test-models  3,000 random models on six layouts, each of which trains what a plain loop trains or is refused: 5 hours
# make test-versions  a table of releases of torch and transformers, lowest to newest, and whether tests pass: 20 minutes, 15 GB once
# make test-trackers  runs kept by tensorboard, wandb, mlflow and trackio, read by their own readers (installs them): a minute
# make test-gpu     the tests that need a GPU, on those of this machine
# make bench-gpu    zrun at each ZeRO stage beside DDP, FSDP2 and a plain loop, on all GPUs of this machine: 25 minutes at most
# make test-devices  of the tables on simulated GPUs, the rows that make test runs: two minutes; more rows for each of SEEDS='1-20', an hour
# make test-simulated-gpu  the tests of CUDA on simulated GPUs (installs g++, as root, where it is missing): three quarters of an hour
# make test-simulated-gpu ALL=1  and every stage with every place of states, size, format and accumulation: half an hour more
# make test-gpu-hosts  of these, the tests on two hosts, which either may lose (as root; installs sshd): 5 minutes
# make test-gpu-faults  a table of what goes wrong on simulated GPUs, on one host and on two, and what zrun makes of it: 3 minutes
# make bigger-than-memory  train a model whose states are six times the memory that it may take, through the disk: 6 minutes
# All set up .venv first, with the versions of constraints.txt.

PYTHON ?= python3

.PHONY: train test test-all test-unit test-ranks test-e2e test-hosts test-faults test-slurm test-offload test-pipelines test-saves test-tensors test-joints test-models test-versions test-trackers test-gpu test-devices test-simulated-gpu test-gpu-hosts test-gpu-faults bench-gpu bigger-than-memory lint clean

# In bf16, or in fp32 where the processor has no instructions for bf16: torch would take 30 times as long.
FORMAT = import torch; print("bf16" if torch.ops.mkldnn._is_mkldnn_bf16_supported() else "fp32")
train: .venv/ready
	.venv/bin/zrun train jobs/stdlib-gpt.yaml precision=$$(.venv/bin/python -c '$(FORMAT)')

# Of each table of tests, few rows in which each value occurs: see tests/conftest.py.
ROWS ?= --covering

test: .venv/ready
	$(MAKE) -j 2 --output-sync=target lint test-unit
	$(MAKE) -j 3 --output-sync=target test-ranks test-e2e test-hosts
	$(MAKE) test-devices

test-all:
	$(MAKE) test ROWS=

test-unit: .venv/ready
	.venv/bin/python -m pytest -q $(ROWS) -n 2 tests/unit

# These three at once: real ranks compute, the other two mostly wait for processes.
test-ranks: .venv/ready
	.venv/bin/python -m pytest -q $(ROWS) -n 2 --dist loadfile tests/dist tests/gpu

test-e2e: .venv/ready
	.venv/bin/python -m pytest -q $(ROWS) tests/e2e tests/trackers

test-hosts: .venv/ready
	tests/hosts/install-sshd
	.venv/bin/python -m pytest -q $(ROWS) tests/hosts

test-faults: .venv/ready
	tests/hosts/install-sshd
	.venv/bin/python tests/hosts/faults.py

test-slurm: .venv/ready
	tests/slurm/install
	.venv/bin/python -m pytest -q tests/slurm

test-offload: .venv/ready
	.venv/bin/python tests/dist/tiers/offload_table.py

test-pipelines: .venv/ready
	.venv/bin/python tests/dist/pipeline/pipeline_table.py

test-saves: .venv/ready
	.venv/bin/python tests/dist/checkpoint/saves_table.py

test-tensors: .venv/ready
	.venv/bin/python tests/dist/tensor_parallel/tensor_table.py

test-joints: .venv/ready
	.venv/bin/python tests/dist/house/joints_table.py

MODELS ?= 0 3000
test-models: .venv/ready
	.venv/bin/python tests/dist/models/models_table.py $(MODELS)

TRACKERS = tensorboard==2.21.0 wandb==0.31.0 mlflow-skinny==3.17.2 trackio==0.43.0
test-trackers: .venv/ready
	.venv/bin/pip install -q -c constraints.txt $(TRACKERS)
	.venv/bin/python -m pytest -q -n 2 tests/trackers

# TORCH=2.12.1, TRANSFORMERS='5.0.0 5.24.0': these releases in place of the lowest, pinned and newest ones.
test-versions: .venv/ready
	.venv/bin/python tests/versions.py $(if $(TORCH),--torch $(TORCH)) $(if $(TRANSFORMERS),--transformers $(TRANSFORMERS))

test-gpu: .venv/ready
	.venv/bin/python -m pytest -q tests/gpu

# On simulated GPUs, whose kernels come late at random: SEED=7 has other delays.
SEED ?= 1
SIMULATED = PYTHONPATH=tests/simulated_gpu .venv/bin/python -m simulated_gpu seed=$(SEED),delay_us=300

DEVICES = tests/dist/hardware/test_devices.py tests/dist/hardware/test_device_loops.py

# SEEDS='1-20', or '3 5 8': more rows, and it says of each seed how many tests passed, and with how
# many races.
SEEDS ?= $(SEED)
ROWS_OF_SEEDS = $(if $(filter $(SEED),$(SEEDS)),--covering,-m 'covering or seeded')
test-devices: .venv/simulated-gpu/ready
	.venv/bin/python tests/simulated_gpu/seeds.py $(SEEDS) -- $(ROWS_OF_SEEDS) $(DEVICES)

test-simulated-gpu: .venv/simulated-gpu/ready
	tests/hosts/install-sshd
	.venv/bin/python -m pytest -q tests/simulated_gpu
	$(SIMULATED),devices=2 -m pytest -q tests/gpu
	$(SIMULATED),devices=8 -m pytest -q $(if $(ALL),,-m 'not thorough') $(DEVICES)

test-gpu-hosts: .venv/simulated-gpu/ready
	tests/hosts/install-sshd
	.venv/bin/python -m pytest -q tests/simulated_gpu/test_gpu_hosts.py

test-gpu-faults: .venv/simulated-gpu/ready
	tests/hosts/install-sshd
	$(SIMULATED) tests/simulated_gpu/gpu_faults.py

# A state of its sources, and of torch, is compiled once. Where there can be none, its tests say why.
.venv/simulated-gpu/ready: .venv/ready $(wildcard tests/simulated_gpu/device/*) tests/scenarios/fake_nvml.c
	tests/simulated_gpu/install-compiler
	PYTHONPATH=tests/simulated_gpu .venv/bin/python -m simulated_gpu --build
	touch $@

bench-gpu: .venv/ready
	.venv/bin/python benchmarks/gpu_systems.py

bigger-than-memory: .venv/ready
	.venv/bin/python benchmarks/bigger_than_memory.py

lint: .venv/ready
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "zrun needs Python 3.11 or newer: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install -q --disable-pip-version-check --no-compile -c constraints.txt -e '.[hf,test]'
	.venv/bin/python -m compileall -q -j 0 .venv/lib >.venv/compile.log || true  # pip would do it on one core
	touch .venv/ready

clean:
	rm -rf .venv runs
