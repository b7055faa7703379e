"""Job files: what is read, and the exact message for each usual mistake."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zrun.job import render
from zrun.job.document import Document
from zrun.job.load import MAX_FILE_BYTES, LoadedJob, load_job
from zrun.job.scalars import resolve, write
from zrun.job.schema import find_key, job_schema, keys
from zrun_core.errors import ExitCode, JobError
from zrun_core.sizes import parse_size
from zrun_core.spine.config import JobConfig
from zrun_core.spine.sections.evaluation import EarlyStopConfig
from zrun_core.spine.sections.parallel import PipelineSchedule
from zrun_core.spine.sections.schedules import SCHEDULES
from zrun_core.spine.sections.section import Ref

EIGHT_LINES = """\
name: gpt-1b
model: train.py:build_model
data: train.py:build_data
loss: train.py:loss_fn
steps: 10000
batch: {global: 512, micro: 4}
precision: bf16
zero: 2
"""
FIVE_LINES = "".join(line for line in EIGHT_LINES.splitlines(True) if line[0] in "nmdsb")


class Folder:
    """Writes `job.yaml` into a folder that is the working directory, so that messages start with
    `job.yaml:`.
    """

    def load(self, text: str | bytes, *overrides: str, **environ: str) -> LoadedJob:
        raw = text if isinstance(text, bytes) else text.encode()
        Path("job.yaml").write_bytes(raw)
        return load_job(Path("job.yaml"), overrides, environ)

    def problems(self, text: str | bytes, *overrides: str, **environ: str) -> list[str]:
        with pytest.raises(JobError) as caught:
            self.load(text, *overrides, **environ)
        assert caught.value.exit_code == ExitCode.USAGE
        lines = str(caught.value).splitlines()
        if len(lines) > 1:
            assert lines.pop(0) == f"{len(lines)} problems in job.yaml"
        return lines


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folder:
    monkeypatch.chdir(tmp_path)
    return Folder()


def test_eight_lines_are_a_job(folder: Folder) -> None:
    job = folder.load(EIGHT_LINES).config
    assert job.model.call == "train.py:build_model"
    assert (job.batch.global_, job.batch.micro) == (512, 4)
    assert (job.precision.compute, job.zero.stage, job.steps) == ("bf16", 2, 10000)


def test_origin_of_every_value(folder: Folder) -> None:
    loaded = folder.load(EIGHT_LINES + "env: {A: x}\n", "zero.prefetch=2", "model.args.dim=64")
    origins = {key: str(origin) for key, origin in loaded.origins.items()}
    assert origins["batch.micro"] == "job.yaml:6:29"
    assert origins["zero.stage"] == "job.yaml:8:7"  # the short form holds the stage
    assert origins["zero.prefetch"] == "override"
    assert origins["zero.bucket"] == "default"
    assert origins["model.call"] == "job.yaml:2:8"
    assert origins["model.args.dim"] == "override"
    assert origins["env.A"] == "job.yaml:9:10"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "zero: {stag: 3}",
            'job.yaml:6:8: zero.stag: unknown key; did you mean "stage"? write stage: 3',
        ),
        ("zer: 3", 'job.yaml:6:1: zer: unknown key; did you mean "zero"? write zero: 3'),
        (
            "bucket: 1MiB",
            'job.yaml:6:1: bucket: unknown key; did you mean "zero.bucket"? write zero: {bucket: '
            "1MiB}",
        ),
        (
            "learning_rate: 1",
            'job.yaml:6:1: learning_rate: unknown key; did you mean "optim.lr"? write optim: {lr: '
            "1}",
        ),
        (
            "zero: {q: 3}",
            "job.yaml:6:8: zero.q: unknown key; "
            "zero has stage, bucket, units, leaf, shard_group, persist_below, prefetch, tile",
        ),
        (
            "optim: {lr: fast}",
            'job.yaml:6:13: optim.lr: expected number > 0, found "fast"; write for example lr: '
            "0.001",
        ),
        (
            "optim: {lr: .inf}",
            "job.yaml:6:13: optim.lr: expected number > 0, at most 1e+30, found .inf; write for "
            "example lr: 0.001",
        ),
        (
            "optim: {betas: [0.9]}",
            "job.yaml:6:16: optim.betas: expected [number >= 0 and < 1, number >= 0 and < 1] | "
            "null, found [0.9]; "
            "write for example betas: [0.9, 0.95]",
        ),
        (
            "optim: {betas: [0.9, x]}",
            'job.yaml:6:22: optim.betas[1]: expected number >= 0 and < 1, found "x"; '
            "write for example betas: [0.9, 0.95]",
        ),
        (
            "zero: 7",
            "job.yaml:6:7: zero: expected 0 | 1 | 2 | 3 | {stage, bucket, units, leaf, "
            "shard_group, persist_below, "
            "prefetch, tile}, found 7; write for example zero: 2",
        ),
        (
            "zero: [2]",
            "job.yaml:6:7: zero: expected 0 | 1 | 2 | 3 | {stage, bucket, units, leaf, "
            "shard_group, persist_below, "
            "prefetch, tile}, found [2]; write for example zero: 2",
        ),
        (
            "zero: {bucket: 7X}",
            'job.yaml:6:16: zero.bucket: expected size such as 64MiB | auto, found "7X"; '
            "write for example bucket: 64MiB",
        ),
        (
            "zero: {units: ['(']}",
            "job.yaml:6:16: zero.units[0]: '(' is not a regular expression: "
            "missing ), unterminated subpattern at position 0",
        ),
        (
            "precision: bf61",
            "job.yaml:6:12: precision: expected fp32 | bf16 | fp16 | {compute, reduce, master, "
            "loss_scale}, "
            'found "bf61"; did you mean "bf16"? write precision: bf16',
        ),
        (
            "device: gpu",
            'job.yaml:6:9: device: expected auto | cpu | cuda, found "gpu"; write for example '
            "device: auto",
        ),
        (
            "threads: true",
            "job.yaml:6:10: threads: expected whole number > 0 and <= 1024 | auto, found true; "
            "write for example threads: 4",
        ),
        (
            "env: {PORT: 80}",
            'job.yaml:6:13: env.PORT: expected text | null, found 80; write PORT: "80"',
        ),
        (
            "eval: {every: 5}",
            "job.yaml:6:1: eval.data: missing key (returns the validation Dataset; or a mapping "
            "of names to several); "
            "write data: train.py:build_val_data",
        ),
        (
            "lr: {schedule: {call: x}}",
            "job.yaml:6:23: lr.schedule.call: 'x' is not a reference: "
            'write "module:attr" or "file.py:attr"',
        ),
        (
            "lr: {schedule: {cal: a:b}}",
            'job.yaml:6:17: lr.schedule.cal: unknown key; did you mean "call"? write call: a:b',
        ),
        (
            "log: ",
            "job.yaml:6:5: log: expected {every, ranks, to, args}, found nothing; write for "
            "example log: {every: 1}",
        ),
        (
            "seed: 0\nseed: 1",
            "job.yaml:7:1: seed: duplicate key, first on line 6; keep one of them",
        ),
        ("1: x", 'job.yaml:6:1: 1: a key must be text; write "1" in quotes'),
        ("env: {A: &a x}", "job.yaml:6:10: env.A: anchors (&name) are not supported; remove it"),
        (
            "env: {A: *a }",
            "job.yaml:6:10: env.A: aliases (*name) are not supported; write the value again",
        ),
        (
            "env: {A: !!python/object:os.system x}",
            "job.yaml:6:10: env.A: tags (!name) are not supported; remove it, and quote a value "
            "that is text",
        ),
        (
            "env: {A: '${env:NO}'}",
            "job.yaml:6:10: env.A: environment variable NO is not set; export NO=... first",
        ),
        (
            "env: {A: '${env:a b}'}",
            "job.yaml:6:10: env.A: 'a b' is not the name of an environment variable; write "
            "${env:NAME}",
        ),
    ],
)
def test_one_mistake_one_line(folder: Folder, line: str, message: str) -> None:
    assert folder.problems(f"{FIVE_LINES}{line}\n") == [message]


def test_missing_batch(folder: Folder) -> None:
    text = EIGHT_LINES.replace("batch: {global: 512, micro: 4}\n", "")
    assert folder.problems(text) == [
        "job.yaml:1:1: batch: missing key (samples per step: {global, micro}); write batch: "
        "{global: 512, micro: 4}"
    ]


def test_empty_batch(folder: Folder) -> None:
    text = EIGHT_LINES.replace("{global: 512, micro: 4}", "{}")
    assert folder.problems(text) == [
        "job.yaml:6:8: batch: give batch.global, batch.micro or both: one of them must be a number"
    ]


def test_two_lengths_points_at_the_second(folder: Folder) -> None:
    assert folder.problems(EIGHT_LINES + "epochs: 3\n") == [
        "job.yaml:9:1: give exactly one of steps, tokens, epochs (found steps and epochs)"
    ]


def test_a_part_of_an_epoch_is_counted_in_steps(folder: Folder) -> None:
    text = EIGHT_LINES.replace("steps: 10000", "epochs: 0.5")
    (problem,) = folder.problems(text)
    assert "0.5 is not a whole number of epochs: for a part of one write" in problem


def test_no_length(folder: Folder) -> None:
    assert folder.problems(EIGHT_LINES.replace("steps: 10000\n", "")) == [
        "job.yaml:1:1: give exactly one of steps, tokens, epochs (found none of them)"
    ]


@pytest.mark.parametrize("reference", ["train", "train.py", "a b:c", "train.py:1x", "../x.sh:f"])
def test_bad_reference(folder: Folder, reference: str) -> None:
    assert folder.problems(EIGHT_LINES.replace("train.py:build_model", reference)) == [
        f'job.yaml:2:8: model: {reference!r} is not a reference: write "module:attr" or '
        '"file.py:attr"'
    ]


def test_misspelt_required_key_is_told_once(folder: Folder) -> None:
    assert folder.problems(EIGHT_LINES.replace("model:", "modle:")) == [
        'job.yaml:2:1: modle: unknown key; did you mean "model"? write model: train.py:build_model'
    ]


def test_every_mistake_is_told_in_the_order_of_the_file(folder: Folder) -> None:
    text = (
        "name: a b\nmodel: m:f\ndata: m:d\nsteps: fast\nepochs: 1\nbatch: 4\n"
        "zero: {stag: 1, bucket: x}\nseed: -1\n"
    )
    places = [line.split(": ")[0] for line in folder.problems(text)]
    assert places == [f"job.yaml:{at}" for at in ("1:7", "4:8", "5:1", "7:8", "7:25", "8:7")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "job.yaml:1:1: the file is empty; `zrun init -o -` prints a job to start from"),
        (
            "# only this\n",
            "job.yaml:1:1: the file is empty; `zrun init -o -` prints a job to start from",
        ),
        (
            "- a\n",
            "job.yaml:1:1: a job is a mapping of keys, such as name: gpt-1b, but this is [a]",
        ),
        (
            "zero:\n\tstage: 2\n",
            "job.yaml:2:1: not valid YAML: found character '\\t' that cannot start any token; "
            "indent with spaces, not with tabs",
        ),
        (
            "name: a: b\n",
            "job.yaml:1:8: not valid YAML: mapping values are not allowed here; "
            'put quotes around text that holds ": ", and check the indentation',
        ),
        (
            "name: [a\n",
            "job.yaml:2:1: not valid YAML: expected ',' or ']', but got '<stream end>'; "
            "close the bracket, or put a comma between the items",
        ),
        (
            "name: a\n---\nname: b\n",
            "job.yaml:2:1: a second document starts here; a job file holds one",
        ),
        ("[" * 5000, "job.yaml:1:65: not valid YAML: nested deeper than 64 levels"),
        ("name: 'a\x00'\n", "job.yaml:1:9: character U+0000 is not allowed in YAML"),
        ('name: "\\U99999999"\n', "job.yaml:1:10: not valid YAML: no such character"),
        (b"name: a\ndata: \xff\n", "job.yaml:2:7: not UTF-8 text; save the file as UTF-8"),
    ],
)
def test_what_is_no_job_file(folder: Folder, text: str | bytes, message: str) -> None:
    assert message in folder.problems(text)


def test_half_of_a_surrogate_pair(folder: Folder) -> None:
    assert folder.problems(EIGHT_LINES + 'env: {A: "\\ud800"}\n')[0].startswith(
        "job.yaml:9:10: env.A: half of"
    )


def test_alias_bomb_is_refused_at_once(folder: Folder) -> None:
    bomb = "a0: &a0 [x, x]\n" + "".join(f"a{i + 1}: &a{i + 1} [*a{i}, *a{i}]\n" for i in range(9))
    assert any("aliases (*name) are not supported" in line for line in folder.problems(bomb))


def test_a_file_that_is_no_job_at_all_is_told_in_a_hundred_lines(folder: Folder) -> None:
    with pytest.raises(JobError) as caught:
        folder.load("seed: 1\n" * 5000)
    head, *lines = str(caught.value).splitlines()
    assert head == "5004 problems in job.yaml, the first 100 of them"
    assert len(lines) == 100


def test_terminal_control_characters_are_escaped(folder: Folder) -> None:
    (line,) = folder.problems(EIGHT_LINES + '"\\e[31mred": 1\n')
    assert "\x1b" not in line
    assert "\\x1b[31mred: unknown key" in line


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda path: None,
            "job.yaml: no such file; `zrun init -o job.yaml` writes one, with its train.py",
        ),
        (lambda path: path.mkdir(), "job.yaml is a directory; name the job file in it"),
        (
            lambda path: path.write_bytes(b"#" * (MAX_FILE_BYTES + 1)),
            "job.yaml is larger than 1 MiB, which no job file needs; is it the right file?",
        ),
    ],
)
def test_unreadable_file(folder: Folder, make: object, message: str) -> None:
    assert callable(make)
    make(Path("job.yaml"))
    with pytest.raises(JobError, match=f"^{re.escape(message)}$"):
        load_job(Path("job.yaml"))


def test_byte_order_mark_is_skipped(folder: Folder) -> None:
    assert folder.load(b"\xef\xbb\xbf" + EIGHT_LINES.encode()).config.name == "gpt-1b"


def test_environment_substitution_is_read_as_yaml_where_it_is_plain(folder: Folder) -> None:
    text = EIGHT_LINES.replace("10000", "${env:N}") + 'env: {A: "${env:N}", B: "x${env:N}y"}\n'
    job = folder.load(text, N="7").config
    assert job.steps == 7
    assert job.env == {"A": "7", "B": "x7y"}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("1E5", 1e5),
        (".5", 0.5),
        ("5.", 5.0),
        ("-1", -1),
        ("+1", 1),
        ("0777", 777),
        ("0o777", 511),
        ("0x1F", 31),
        ("1_000", "1_000"),
        ("1:20", "1:20"),
        ("on", "on"),
        ("no", "no"),
        ("yes", "yes"),
        ("True", True),
        ("tRue", "tRue"),
        ("~", None),
        ("", None),
        ("Null", None),
        (".inf", float("inf")),
        ("-.INF", float("-inf")),
        ("2026-01-01", "2026-01-01"),
        ("0b1", "0b1"),
        ("e5", "e5"),
        (".", "."),
        ("1e", "1e"),
        ("=", "="),
        ("<<", "<<"),
    ],
)
def test_core_schema(text: str, value: object) -> None:
    found = resolve(text)
    assert found == value
    assert type(found) is type(value)


def test_absurd_number(folder: Folder) -> None:
    problems = folder.problems(EIGHT_LINES.replace("10000", "1" * 5000))
    assert "job.yaml:5:8: steps: a number of 5000 characters; the longest is 64" in problems


_SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False)
    | st.text()
)


@given(
    st.recursive(
        _SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=10
    )
)
def test_written_values_read_back(value: object) -> None:
    document = Document.parse(f"key: {write(value)}", "text", {})
    assert document.problems == []
    assert document.value == {"key": value}


def test_every_key_has_a_description_and_a_valid_example(folder: Folder) -> None:
    path = folder.load(EIGHT_LINES).path
    for key in keys():
        assert key.description, key
        around = [
            f"{'.'.join(key.path[:depth])}={_complete(key.path[:depth])}"
            for depth in range(1, len(key.path))
        ]
        length = ["steps=null"] if key.name in ("tokens", "epochs") else []
        held_out = ["eval={data: m:f}"] if "best" in key.path else []
        chunks = ["parallel.schedule=interleaved"] if key.name == "virtual" else []
        load_job(path, [*held_out, *around, *chunks, *length, f"{key}={write(key.example)}"])


def _complete(path: tuple[str, ...]) -> str:
    """What a section needs to hold one more key: its own example, where that is a section."""
    key = find_key(path)
    assert key is not None
    assert key.section is not None
    return "m:f" if "call" in key.section.model_fields else write(key.example)


def test_forms_and_origins_are_job_files_again(folder: Folder) -> None:
    loaded = folder.load(
        EIGHT_LINES, "model.args={dim: 3, name: 'a: b'}", "zero.bucket=32MiB", "lr=cosine"
    )
    for text in (render.with_origins(loaded), render.as_form(loaded.config)):
        assert folder.load(text).config == loaded.config


def test_form_mentions_every_key_and_loads_when_all_of_it_is_set(folder: Folder) -> None:
    form = render.as_form(folder.load(EIGHT_LINES).config)
    everything = re.sub(r"(?m)^( *)# ( *\w+:)", r"\1\2", form)
    assert len(everything.splitlines()) == len(form.splitlines())
    config = folder.load(everything).config
    absent = {
        "eval": None,
        "checkpoint": None,
        "init_from": None,
        "profile": None,
    }  # shown with an example of what they require
    assert all(getattr(config, key) is not None for key in absent)
    assert config.zero.tile is not None
    untiled = config.zero.model_copy(update={"tile": None})
    config = config.model_copy(update={**absent, "zero": untiled})
    assert config == folder.load(EIGHT_LINES).config
    for key in keys():
        if key.name not in (
            "call",
            "args",
        ):  # a reference without arguments is written in its short form
            assert re.search(rf"(?m)^[# ]*{key.name}:", form), key


def test_json_schema_allows_short_forms() -> None:
    definitions = job_schema()["$defs"]
    assert definitions["ZeroConfig"]["anyOf"][0]["enum"] == [0, 1, 2, 3]
    assert definitions["DataConfig"]["anyOf"][0]["type"] == "string"
    assert (
        JobConfig.model_json_schema()["$defs"]["ZeroConfig"].get("anyOf") is None
    )  # pydantic's own is left alone


def test_json_schema_allows_units_of_sizes() -> None:
    offload = job_schema()["$defs"]["OffloadConfig"]["anyOf"][-1]["properties"]
    size = offload["host_memory"]["anyOf"][0]
    assert size["type"] == ["integer", "string"]
    for text in ("64", "1.5 GB", " 96GiB ", "12tib", "1b", "5k", "GiB", "1 EiB", "", "1.GB", "-1"):
        try:
            parse_size(text)
        except ValueError:
            assert re.search(size["pattern"], text) is None, text
        else:
            assert re.search(size["pattern"], text) is not None, text


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (
            "optim: {name: adafactor}",
            "job.yaml:6:15: optim.name: adafactor cannot update slices of parameters: it keeps "
            "means over the rows and "
            "columns of whole matrices; write adamw with optim.moments: bf16 (4 bytes of state "
            "per parameter) or lion "
            "(4, or 2 with bf16)",
        ),
        (
            "optim: {name: lamb, args: {clampp: 1}}",
            "job.yaml:6:27: optim.args: lamb has no argument 'clampp'; did you mean norm_clamp?",
        ),
        (
            "optim: {name: sgd, moments: bf16}",
            "job.yaml:6:29: optim.moments: sgd keeps its state in fp32; bf16 is for adam, adamw, "
            "lamb, lion",
        ),
        (
            "zero: 1\nsync: server",
            "job.yaml:7:1: sync: server keeps all states on one rank, and zero 1 divides them "
            "over all; write zero: 0, "
            "or leave sync out",
        ),
        (
            "optim: {name: LAMB}\noffload: disk",
            "job.yaml:7:1: offload.optimizer: disk: lamb proposes the updates of all layers before "
            "it applies any, so each step would read its states from the disk twice; write "
            "optimizer: host, or optim.name: adamw",
        ),
        (
            "offload: {fraction: 0.5}",
            "job.yaml:6:10: offload: fraction changes nothing while every state stays on the "
            "device; write optimizer: host too, or leave fraction out",
        ),
        (
            "activations: {checkpoint: full, offload: disk}\noffload: {schedule: serial}",
            "job.yaml:7:10: offload: schedule changes nothing while every state stays on the "
            "device; write optimizer: host too, or leave schedule out",
        ),
    ],
)
def test_an_update_that_cannot_be_made_is_refused_with_the_job(
    folder: Folder, lines: str, message: str
) -> None:
    assert folder.problems(f"{FIVE_LINES}{lines}\n") == [message]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (
            "sync: server\nstaleness: 2",
            "staleness: 2 bounds how far ranks are apart under sync: async_server, and under sync: "
            "server they never are; write sync: async_server, or leave staleness out",
        ),
        (
            "sync: async_server\nzero: 1",
            "sync: async_server keeps all states on one rank, and zero 1 divides them over all; "
            "write zero: 0, or leave sync out",
        ),
        (
            "sync: async_server\nparallel: {tp: 2}",
            "sync: async_server has each rank compute gradients of the whole model by itself, and "
            "tp 2 x pp 1 = 2 ranks share one; leave sync or parallel out",
        ),
        (
            "sync: async_server\nparallel: {pp: 2}",
            "sync: async_server has each rank compute gradients of the whole model by itself, and "
            "tp 1 x pp 2 = 2 ranks share one; leave sync or parallel out",
        ),
        (
            "sync: async_server\nparallel: {schedule: layer_major}",
            "sync: async_server runs the micro-batches of a push one after the other; leave "
            "parallel.schedule: layer_major out, which saves nothing at zero 0",
        ),
        (
            "sync: async_server\noffload: {optimizer: host}",
            "sync: async_server keeps all states on a device; leave offload or sync out",
        ),
        (
            "sync: async_server\nprecision: fp16",
            "sync: async_server: updates are made without waiting for the other ranks, and the "
            "loss scale of fp16 needs to know of overflows on all of them; write precision: bf16, "
            "or sync: server",
        ),
        (
            "sync: async_server\noptim: {name: lamb}",
            "sync: async_server updates by one rank's gradient while others compute, and "
            "optim.name: lamb has all ranks sum the norms of layers first; take another "
            "optimizer, or sync: server",
        ),
        (
            "sync: async_server\nguards: {on_oom: skip}",
            "guards.on_oom: skip drops a batch on all ranks together, and under sync: "
            "async_server they make no step together; write on_oom: stop",
        ),
        (
            "sync: async_server\ndevice: cuda",
            "sync: async_server trains on CPUs: its server updates in threads beside the one that "
            "computes; write device: cpu, or sync: server",
        ),
    ],
)
def test_what_an_asynchronous_server_cannot_keep_is_refused_by_name(
    folder: Folder, lines: str, message: str
) -> None:
    (problem,) = folder.problems(f"{FIVE_LINES}{lines}\n")
    assert problem.partition(": ")[2] == message


def test_an_asynchronous_server_deals_out_what_no_process_reads_ahead(folder: Folder) -> None:
    with pytest.raises(JobError, match=r"data.workers: 2 processes cannot read them ahead"):
        folder.load(EIGHT_LINES, "sync=async_server", "zero=0", "data.workers=2")


PIPEDREAM = "parallel: {pp: 2, schedule: pipedream}"


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (
            "parallel: {pp: 2, virtual: 2}",
            "parallel.virtual: 2 chunks on each stage are for interleaved, and 1f1b has 1; write "
            "schedule: interleaved, or virtual: 1",
        ),
        (
            "parallel: {pp: 2, virtual: 1, schedule: interleaved}",
            "parallel.virtual: interleaved goes through several chunks on each stage; write "
            "virtual: 2 or more, or schedule: 1f1b",
        ),
        (
            "parallel: {schedule: interleaved}",
            "parallel.schedule: interleaved is an order of several stages; write pp: 2 or more",
        ),
        (
            "parallel: {schedule: pipedream_vertical}",
            "parallel.schedule: pipedream_vertical is an order of several stages; write pp: 2 or "
            "more",
        ),
        (
            "parallel: {pp: 2, schedule: layer_major}",
            "parallel.schedule: layer_major is an order of the whole model on each rank, and pp 2 "
            "divides it; write schedule: 1f1b, or pp: 1",
        ),
        (
            "parallel: {pp: 4, split: [h.3, h.6]}",
            "parallel.split: pp 4 x virtual 1 = 4 chunks have 3 borders, and it names 2; write the "
            "first block of each chunk but the first, or split: auto",
        ),
        (
            "parallel: {split: [h.3]}",
            "parallel.split: pp 1 x virtual 1 = 1 chunks have 0 borders, and it names 1; write the "
            "first block of each chunk but the first, or split: auto",
        ),
        (
            'parallel: {tp: 2, plan: {"*.qkv": fused}}',
            "parallel.plan: '*.qkv': 'fused' does not say what is fused: write fused 3 for three "
            "equal sections, or fused 4:1:1 for sections in these proportions",
        ),
        (
            'parallel: {tp: 2, plan: {"*.qkv": fused 4:0:1}}',
            "parallel.plan: '*.qkv': 'fused 4:0:1': a fused projection has 2 to 64 sections, none "
            "of them empty",
        ),
        (
            'parallel: {tp: 2, plan: {"*.qkv": columnwise}}',
            "parallel.plan: '*.qkv': there is no role 'columnwise': write one of colwise, rowwise, "
            "fused, vocabulary, head, summed, divide, whole, attention, experts, once, "
            "colwise_gather_output, rowwise_split_input",
        ),
        (
            'parallel: {tp: 2, plan: {"*.qkv": colwise 3}}',
            "parallel.plan: '*.qkv': colwise takes nothing behind it, and 'colwise 3' has '3'",
        ),
        (
            'parallel: {plan: {"*.qkv": colwise}}',
            "parallel.plan: tp 1 divides no layers; write tp: 2 or more, or plan: auto",
        ),
        (
            "parallel: {sequence: true}",
            "parallel.sequence: a sequence is divided over the ranks of tp, and tp is 1; write "
            "tp: 2 or more, or leave sequence out",
        ),
        (
            f"{PIPEDREAM}\noptim: {{clip: 1.0}}",
            "parallel.schedule: pipedream: a stage updates its weights without waiting for the "
            "others, and optim.clip needs the gradient norm of all of them; leave optim.clip out, "
            "or write schedule: 1f1b",
        ),
        (
            f"{PIPEDREAM}\nprecision: fp16",
            "parallel.schedule: pipedream: a stage updates its weights without waiting for the "
            "others, and the loss scale of fp16 needs to know of overflows in all of them; write "
            "precision: bf16, or schedule: 1f1b",
        ),
        (
            f"{PIPEDREAM}\noffload: {{optimizer: host}}",
            "parallel.schedule: pipedream updates each stage between its passes, and states "
            "elsewhere are updated beside them; leave offload out, or write schedule: 1f1b",
        ),
        (
            f"{PIPEDREAM}\nzero: 2",
            "parallel.schedule: pipedream keeps versions of the weights whose gradients are summed "
            "at each update: zero 2 would shard them; write zero: 1, or schedule: 1f1b",
        ),
        (
            "parallel: {pp: 2}\nsync: server",
            "sync: server keeps all states on one rank, and tp 1 x pp 2 = 2 ranks share a model; "
            "leave sync or parallel out",
        ),
        (
            "parallel: {pp: 2, tp: 2}\nguards: {on_oom: skip}",
            "guards.on_oom: skip is impossible where tp 2 x pp 2 = 4 ranks share a model: the "
            "others would wait for the one that ran out; write on_oom: stop",
        ),
        (
            "parallel: {pp: 2, schedule: zero_bubble}\ncompile: true",
            "parallel.schedule: zero_bubble makes the gradients of linears' weights apart from "
            "those of their inputs, and compile: true makes them in one graph; write schedule: "
            "1f1b, or compile: false",
        ),
        (
            "parallel: {pp: 2, draws: stream}",
            "parallel.draws: the stages of pp 2 draw apart from each other, and cannot draw one "
            "after the other; write draws: block, or leave it out",
        ),
        (
            "parallel: {schedule: layer_major, draws: block}",
            "parallel.draws: layer_major has a stream for each micro-batch; leave draws out, or "
            "write another schedule",
        ),
        (
            "parallel: {pp: 2}\nzero: {stage: 3, tile: 64MiB}",
            "zero.tile replaces linears of a whole model, and parallel.pp 2 leaves each rank a "
            "part of it; leave zero.tile out, or write pp: 1",
        ),
    ],
)
def test_a_pipeline_that_cannot_be_is_refused_with_the_job(
    folder: Folder, lines: str, message: str
) -> None:
    (found,) = folder.problems(f"{FIVE_LINES}{lines}\n")
    assert found.partition(": ")[2] == message


def test_the_old_spelling_of_a_schedule_is_no_schedule(folder: Folder) -> None:
    (found,) = folder.problems(f"{FIVE_LINES}parallel: {{schedule: layer-major}}\n")
    assert "parallel.schedule" in found
    assert "layer_major" in found


def test_interleaved_stages_have_two_chunks_unless_the_job_says_more(folder: Folder) -> None:
    text = f"{FIVE_LINES}parallel: {{pp: 2, schedule: interleaved}}\n"
    assert folder.load(text).config.parallel.virtual == 2
    assert folder.load(text, "parallel.virtual=4").config.parallel.virtual == 4
    assert folder.load(f"{FIVE_LINES}parallel: {{pp: 2}}\n").config.parallel.virtual == 1
    split = folder.load(text, "parallel.split=[h.2,h.4,h.6]").config.parallel.split
    assert split == ["h.2", "h.4", "h.6"]


def test_every_schedule_that_a_job_may_name_has_an_order() -> None:
    assert set(get_args(PipelineSchedule)) == SCHEDULES.keys()


def test_evaluation_data_is_one_reference_or_several_by_name(folder: Folder) -> None:
    one = folder.load(f"{FIVE_LINES}eval: {{data: {{call: a:val, args: {{n: 3}}}}}}\n").config
    assert one.eval is not None
    assert one.eval.sets == {"": Ref(call="a:val", args={"n": 3})}
    text = (
        f"{FIVE_LINES}eval:\n  data:\n    val: a:val\n    code: {{call: a:code, args: {{n: 3}}}}\n"
    )
    several = folder.load(text, "eval.data.val.args.n=5")
    assert several.config.eval is not None
    assert several.config.eval.sets == {
        "val": Ref(call="a:val", args={"n": 5}),
        "code": Ref(call="a:code", args={"n": 3}),
    }
    assert str(several.origins["eval.data.code.args.n"]) == "job.yaml:9:36"
    assert folder.load(render.with_origins(several)).config == several.config
    assert folder.load(render.as_form(several.config)).config == several.config


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            "{cal: a:b, args: {}}",
            'eval.data.cal: unknown key; did you mean "call"? write call: a:b',
        ),
        ("{v: {cal: a:b}}", 'eval.data.v.cal: unknown key; did you mean "call"? write call: a:b'),
        (
            "{v: x}",
            'eval.data.v: \'x\' is not a reference: write "module:attr" or "file.py:attr"',
        ),
        (
            "{a b: a:b}",
            "eval.data: 'a b' cannot name a dataset: write 1 to 32 letters, digits or ._-",
        ),
        (
            "{v: 3}",
            "eval.data.v: expected module:attr | {call, args}, found 3; "
            "write for example data: train.py:build_val_data",
        ),
    ],
)
def test_what_is_no_evaluation_data_is_told(folder: Folder, data: str, message: str) -> None:
    (problem,) = folder.problems(f"{FIVE_LINES}eval: {{data: {data}}}\n")
    assert problem.partition(": ")[2] == message


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (
            "{data: a:b, stop: 3}",
            "eval.stop needs eval.every: without it only the end is evaluated",
        ),
        (
            "{data: a:b, every: 1, stop: {metric: f1}}",
            "eval.stop.metric: f1 is not evaluated: without eval.metrics there is only loss",
        ),
        (
            "{data: {v: a:b, w: a:b}, metrics: a:b, every: 1, stop: {metric: f1}}",
            "eval.stop.metric: f1 is not evaluated: eval.data names several sets; write v/f1",
        ),
    ],
)
def test_a_stop_that_could_never_be_is_told(folder: Folder, section: str, message: str) -> None:
    (problem,) = folder.problems(f"{FIVE_LINES}eval: {section}\n")
    assert problem == f"job.yaml:6:7: eval: {message}"
    config = folder.load(f"{FIVE_LINES}eval: {{data: a:b, every: 1, stop: 3}}\n").config
    assert config.eval is not None
    assert config.eval.stop == EarlyStopConfig(metric="loss", patience=3)
