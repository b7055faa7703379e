"""Mistakes in a stranger's code: each ends with a message from which they know what to do."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from runs import PoolWorker, make_spec

CODE = """\
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 3))
    def forward(self, x):
        return self.net(x)

def build_model():
    return Net()

class Data(Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        return torch.ones(20), index % 3

def build_data():
    return Data()

def loss_fn(model, batch):
    x, label = batch
    return nn.functional.cross_entropy(model(x), label)
"""
JOB = {
    "name": "first",
    "model": "train.py:build_model",
    "data": "train.py:build_data",
    "loss": "train.py:loss_fn",
    "steps": 3,
    "batch": {"global": 4, "micro": 2},
}
WITHOUT_LOSS = {"loss": None}
LOADING = {"data": {"call": "train.py:build_data", "workers": 1}}
Edit = tuple[str, str]

# name: what is written instead of what; keys of the job; exit code; what the message says
MISTAKES: dict[str, tuple[list[Edit], dict[str, Any], int, list[str]]] = {
    # The loss
    "a loss function that runs backward": (
        [
            (
                "    return nn.functional.cross_entropy(model(x), label)\n",
                "    loss = nn.functional.cross_entropy(model(x), label)\n"
                "    loss.backward()\n"
                "    return loss\n",
            )
        ],
        {},
        5,
        ["the loss function, or forward, ran backward(): return the loss, and the step runs it"],
    ),
    # The file
    "an import that is not installed": (
        [("import torch\n", "import torch\nimport sklearnn\n")],
        {},
        5,
        ["train.py:build_model: importing ", "line 2, in <module>", "No module named 'sklearnn'"],
    ),
    "a syntax error": (
        [("def build_data():", "def build_data()")],
        {},
        5,
        ["line 21", "SyntaxError: expected ':'"],
    ),
    "a script that reads its arguments": (
        [
            (
                "\ndef loss_fn",
                "\nimport argparse\np = argparse.ArgumentParser()\n"
                "p.add_argument('--x', required=True)\np.parse_args(['--y'])\n\ndef loss_fn",
            )
        ],
        {},
        5,
        [
            "it ended the process, as sys.exit() and argparse do",
            'below if __name__ == "__main__"',
        ],
    ),
    "a script that trains where it is imported": (
        [("\ndef loss_fn", "\nbuild_model()(torch.ones(3))\n\ndef loss_fn")],
        {},
        5,
        ["importing ", "in net.0 (Linear)", "mat1 and mat2 shapes cannot be multiplied"],
    ),
    "a model below the main guard": (
        [
            (
                "def build_model():\n    return",
                "if __name__ == '__main__':\n  def build_model():\n    return",
            )
        ],
        {},
        2,
        [
            "has no 'build_model': it is below if __name__ == \"__main__\", which an import leaves "
            "out"
        ],
    ),
    # The model
    "a factory without return": (
        [("    return Net()", "    Net()")],
        {},
        5,
        ["must return an nn.Module, train.py:build_model returned None"],
    ),
    "no super().__init__()": (
        [("        super().__init__()\n", "")],
        {},
        5,
        [
            "train.py:build_model failed in Net",
            "cannot assign module before Module.__init__() call",
        ],
    ),
    "a forward without return": (
        [("        return self.net(x)", "        self.net(x)")],
        {},
        5,
        ["in loss_fn", "must be Tensor, not NoneType"],
    ),
    "a wrong width": (
        [("nn.Linear(32, 3)", "nn.Linear(33, 3)")],
        {},
        5,
        ["forward failed in net.2 (Linear)\n", "in loss_fn", "in forward", "(2x32 and 33x3)"],
    ),
    "layers in a plain list": (
        [
            (
                "self.net = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 3))",
                "self.net = [nn.Linear(20, 3)]",
            )
        ],
        {},
        5,
        ["the model has no parameters", "nn.ModuleList"],
    ),
    "a tensor on a device that is not there": (
        [("self.net(x)", "self.net(x.to('meta'))")],
        {},
        5,
        ["forward failed in net.0 (Linear)", "in forward"],
    ),
    "frozen parameters": (
        [("    return Net()", "    return Net().requires_grad_(False)")],
        {},
        5,
        ["the model has nothing to train"],
    ),
    # The loss
    "labels out of range": (
        [("index % 3", "index % 5")],
        {},
        5,
        ["in loss_fn", "is out of bounds"],
    ),
    "labels that are no classes": (
        [("index % 3", "0.5")],
        {},
        5,
        ["in loss_fn", "expected target dtype"],
    ),
    "no mean": (
        [("model(x), label)", "model(x), label, reduction='none')")],
        {},
        5,
        ["is not a scalar", "take its mean()"],
    ),
    "a detached loss": (
        [("model(x), label)", "model(x), label).detach()")],
        {},
        5,
        ["loss without gradient"],
    ),
    "a loss as a number": (
        [("model(x), label)", "model(x), label).item()")],
        {},
        5,
        ["returned is float, not a tensor"],
    ),
    "a loss without return": (
        [("    return nn.f", "    nn.f")],
        {},
        5,
        ["returned is None: does it lack a return?"],
    ),
    "a loss of another signature": (
        [("def loss_fn(model, batch)", "def loss_fn(output, target, weight)")],
        {},
        2,
        ["(model, batch)", "weight"],
    ),
    "a loss of outputs and targets": (
        [
            (
                "    x, label = batch\n    return nn.functional.cross_entropy(model(x), label)",
                "    return nn.functional.cross_entropy(model, batch)",
            )
        ],
        {},
        5,
        [
            "forward failed: a loss function is called with (model, batch), and calls the model "
            "itself\n"
        ],
    ),
    "no loss": (
        [],
        WITHOUT_LOSS,
        5,
        [
            "without loss in the job, the model is called with what a batch holds",
            "(forward takes x)",
            "write loss:",
        ],
    ),
    "a loss that is not a number": (
        [("model(x), label)", "model(x) / 0, label)")],
        {},
        7,
        ["step 3: ", "the loss is nan on rank 0", "(indices 8-9 of the dataset)"],
    ),
    "a parameter that is changed in place": (
        [
            (
                "    x, label = batch\n",
                "    x, label = batch\n    next(model.parameters()).mul_(2)\n",
            )
        ],
        {},
        5,
        ["next(model.parameters()).mul_(2)", "a leaf Variable that requires grad"],
    ),
    "an activation that is changed in place": (
        [
            (
                "        return self.net(x)",
                "        h = self.net(x).sigmoid()\n        y = h * h\n        h.add_(1)\n"
                "        return y",
            )
        ],
        {},
        5,
        [
            "backward failed: with torch.autograd.set_detect_anomaly(True) in your file",
            "inplace operation",
        ],
    ),
    "double inputs": (
        [("torch.ones(20)", "torch.ones(20).double()")],
        {},
        5,
        ["in net.0 (Linear)", "got Double and Float"],
    ),
    # The data
    "no samples": ([("return 64", "return 0")], {}, 5, ["the dataset is empty: Data has length 0"]),
    "a length that is too large": (
        [("torch.ones(20), index", "[torch.ones(20)][index], index")],
        {},
        5,
        ["reading the training data failed at index 1\n", "IndexError: list index out of range"],
    ),
    "a sample without return": (
        [("        return torch.ones(20), index", "        torch.ones(20), index")],
        {},
        5,
        ["the sample is None at index 0: does __getitem__ return it on every path?"],
    ),
    "samples of several lengths": (
        [("torch.ones(20)", "torch.ones(20 + index)")],
        {},
        5,
        ["[0] has shape (20,) at index 0 and (21,) at index 1", "data.collate"],
    ),
    "samples of no tensors": (
        [("torch.ones(20)", "object()")],
        {},
        5,
        ["[0] is object at index 0, which cannot become a tensor"],
    ),
    "texts": ([("torch.ones(20)", "'a cat'")], {}, 5, ["in net.0 (Linear)", "must be Tensor, not"]),
    "a DataLoader": (
        [("return Data()", "return DataLoader(Data())")],
        {},
        5,
        ["and returned a DataLoader", "return its .dataset"],
    ),
    "data without return": (
        [("    return Data()", "    Data()")],
        {},
        5,
        ["data must return a dataset, and returned None"],
    ),
    "a path that begins elsewhere": (
        [("return Data()", "return open('data/train.csv')")],
        {},
        5,
        ["train.py:build_data failed (paths begin at /", "in build_data", "'data/train.csv'"],
    ),
    "one more thing in a batch": (
        [("index % 3", "index % 3, 1")],
        {},
        5,
        ["x, label = batch", "too many values to unpack"],
    ),
    "a sample that cannot be read by a loader": (
        [("torch.ones(20), index", "[torch.ones(20)][index], index")],
        LOADING,
        5,
        ["reading the training data failed at index 1\n", "in __getitem__"],
    ),
    "a loader that dies": (
        [
            (
                "        return torch.ones",
                "        import os\n        os._exit(3)\n        return torch.ones",
            )
        ],
        LOADING,
        5,
        ["a data-loading process died; data.workers: 0 has the rank itself do its work"],
    ),
    # The rest
    "a hook that takes nothing": (
        [("\ndef loss_fn", "\ndef hook():\n    pass\n\ndef loss_fn")],
        {"hooks": {"on_step": "train.py:hook"}},
        2,
        ["train.py:hook", "(context)"],
    ),
    "a hook with a wrong name in it": (
        [("\ndef loss_fn", "\ndef hook(c):\n    c.modle\n\ndef loss_fn")],
        {"hooks": {"on_step": "train.py:hook"}},
        5,
        ["hooks.on_step failed\n", "in hook", "'modle'"],
    ),
    "weights that nobody saved": (
        [],
        {"init_from": "train.py"},
        9,
        ["init_from: "],
    ),
}


def ended(keys: dict[str, Any], folder: str) -> dict[str, Any]:
    """Run a job in a folder on this rank to its end, which is not a good one.

    Returns what it says of it.
    """
    modules, path = set(sys.modules), list(sys.path)
    spec = make_spec(keys, folder, None)
    worker = PoolWorker(spec.model_copy(update={"job_dir": folder}), 0)
    try:
        worker.prepare().run()
    except BaseException as error:
        worker.report(error)
    finally:
        sys.path[:] = path
        for name in set(sys.modules) - modules:
            if str(getattr(sys.modules[name], "__file__", "")).startswith(folder):
                del sys.modules[name]
        worker.close()
    note: dict[str, Any] = json.loads((Path(folder) / "failures" / "rank-0.json").read_text())
    return note


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_told_in_the_users_terms(ranks: Any, tmp_path: Path, name: str) -> None:
    edits, keys, code, says = MISTAKES[name]
    text = CODE
    for old, new in edits:
        assert old in text, name
        text = text.replace(old, new)
    (tmp_path / "train.py").write_text(text)
    job = {key: value for key, value in {**JOB, **keys}.items() if value is not None}
    note = ranks(1).run(ended, job, str(tmp_path))[0]
    told = note["traceback"]
    for part in says:
        assert part in told
    assert note["exit_code"] == code
    assert note["kind"] in ("user", "zrun"), "never a bug of ours"
    assert not [line for line in told.splitlines() if "zrun_core/" in line and "File " in line]
    assert not [line for line in told.splitlines() if "_call_impl" in line]
    if note["kind"] == "user" and "Traceback" in told:
        assert note["whole_traceback"].count("\n") >= told.count("\n") - 1
