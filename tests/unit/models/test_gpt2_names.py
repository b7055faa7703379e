"""The bundled GPT-2 is the one of `transformers`: same weights, same logits, both ways."""

from __future__ import annotations

import pytest
import torch

from zrun_core.models.gpt import gpt
from zrun_core.models.gpt2_names import from_transformers, to_transformers

transformers = pytest.importorskip("transformers")
HEADS = 4


@pytest.fixture
def theirs() -> torch.nn.Module:
    torch.manual_seed(1)
    config = transformers.GPT2Config(
        vocab_size=61, n_embd=32, n_layer=2, n_head=HEADS, n_positions=24
    )
    return transformers.GPT2LMHeadModel(config).eval()


def ours() -> torch.nn.Module:
    torch.manual_seed(2)
    model = gpt("gpt2", vocab_size=61, dim=32, depth=2, heads=HEADS, seq_len=24).eval()
    for param in model.parameters():  # no bias is zero, no scale is one
        torch.nn.init.normal_(param, std=0.2)
    return model


def test_our_weights_give_the_same_logits_there(theirs: torch.nn.Module) -> None:
    model, ids = ours(), torch.randint(61, (3, 24))
    theirs.load_state_dict(to_transformers(model.state_dict(), HEADS))
    with torch.no_grad():
        torch.testing.assert_close(theirs(ids).logits, model(ids), rtol=1e-5, atol=1e-5)


def test_their_weights_give_the_same_logits_here(theirs: torch.nn.Module) -> None:
    model, ids = ours(), torch.randint(61, (3, 24))
    model.load_state_dict(from_transformers(theirs.state_dict(), HEADS))
    with torch.no_grad():
        torch.testing.assert_close(model(ids), theirs(ids).logits, rtol=1e-5, atol=1e-5)


def test_there_and_back(theirs: torch.nn.Module) -> None:
    state = theirs.state_dict()
    back = to_transformers(from_transformers(state, HEADS), HEADS)
    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], value) for name, value in state.items())
    headless = {name: value for name, value in state.items() if name.startswith("transformer.")}
    assert "head.weight" not in from_transformers(headless, HEADS)
