"""Models and data as users write them, of a size at which activations weigh as much as states.
Nothing knows zrun.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Samples(torch.utils.data.Dataset[Any]):
    """`count` samples: "text" dicts, "pairs" of sequences, or "images" with their classes."""

    def __init__(self, kind: str, length: int = 128, vocab: int = 1024, count: int = 64) -> None:
        self.kind, self.length, self.vocab, self.count = kind, length, vocab, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        generator = torch.Generator().manual_seed(index)
        if self.kind == "images":
            image = torch.randn(3, self.length, self.length, generator=generator)
            return image, int(torch.randint(10, (), generator=generator))
        tokens = torch.randint(self.vocab, (2 * self.length + 1,), generator=generator)
        if self.kind == "pairs":
            return tokens[: self.length], tokens[self.length : -1], tokens[self.length + 1 :]
        return {"input_ids": tokens[: self.length], "labels": tokens[1 : self.length + 1]}


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)), inplace=True)
        return F.relu(x + self.norm2(self.conv2(y)))


class ConvNet(nn.Module):
    """A small residual network with its loss."""

    def __init__(self, channels: int = 96, depth: int = 4) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, channels, 3, padding=1),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
        )
        self.blocks = nn.Sequential(*(Residual(channels) for _ in range(depth)))
        self.head = nn.Linear(channels, 10)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.blocks(self.stem(x)).mean((2, 3))).float(), y)


class EncoderDecoder(nn.Module):
    """torch's own layers, with dropout and one embedding for both sides and the head."""

    def __init__(self, dim: int = 256, depth: int = 3, heads: int = 4, vocab: int = 1024) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        options = {
            "dim_feedforward": 4 * dim,
            "dropout": 0.1,
            "batch_first": True,
            "norm_first": True,
        }
        self.encoder = nn.ModuleList(
            nn.TransformerEncoderLayer(dim, heads, **options) for _ in range(depth)
        )
        self.decoder = nn.ModuleList(
            nn.TransformerDecoderLayer(dim, heads, **options) for _ in range(depth)
        )
        self.head = nn.Linear(dim, vocab, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, source: Tensor, target: Tensor, labels: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1]).to(
            self.embed.weight.dtype
        )
        memory, x = self.embed(source), self.embed(target)
        for layer in self.encoder:
            memory = layer(memory)
        for layer in self.decoder:
            x = layer(x, memory, tgt_mask=mask)
        return F.cross_entropy(self.head(x).float().flatten(0, 1), labels.flatten())


class Experts(nn.Module):
    """The best of several feed-forward layers for each token."""

    def __init__(self, dim: int, count: int) -> None:
        super().__init__()
        self.norm, self.gate = nn.LayerNorm(dim), nn.Linear(dim, count)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
            for _ in range(count)
        )

    def forward(self, x: Tensor) -> Tensor:
        flat = self.norm(x).flatten(0, 1)
        weight, best = self.gate(flat).softmax(-1).max(-1)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            chosen = (best == number).nonzero()[:, 0]
            if len(chosen):
                out = out.index_add(
                    0, chosen, (expert(flat[chosen]) * weight[chosen, None]).to(out.dtype)
                )
        return x + out.view_as(x)


class Mixture(nn.Module):
    """A language model of experts: which tokens each gets depends on values."""

    def __init__(self, dim: int = 192, depth: int = 3, count: int = 4, vocab: int = 1024) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(Experts(dim, count) for _ in range(depth))
        self.head = nn.Linear(dim, vocab)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).float().flatten(0, 1), labels.flatten())


class Recurrent(nn.Module):
    """Two layers of an LSTM over tokens."""

    def __init__(self, dim: int = 256, depth: int = 2, vocab: int = 1024) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.lstm = nn.LSTM(dim, dim, depth, batch_first=True)
        self.head = nn.Linear(dim, vocab)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.lstm(self.embed(input_ids))[0]
        return F.cross_entropy(self.head(x).float().flatten(0, 1), labels.flatten())


class Dropping(nn.Module):
    """Later layers see only the tokens that a gate lets through."""

    def __init__(self, dim: int = 256, depth: int = 4, vocab: int = 1024) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.gate = nn.Linear(dim, 1)
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim)
            )
            for _ in range(depth)
        )
        self.head = nn.Linear(dim, vocab)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids).flatten(0, 1)
        score = self.gate(x)[:, 0]
        mask = score > 0
        kept = x[mask] * score[mask, None].sigmoid()
        for layer in self.layers:
            kept = kept + layer(kept)
        out = x.index_put((mask.nonzero()[:, 0],), kept.to(x.dtype))
        return F.cross_entropy(self.head(out).float(), labels.flatten())


class Bags(nn.Module):
    """A recommender: sums of looked-up rows, and a small network on them."""

    def __init__(self, dim: int = 64, vocab: int = 20000, hidden: int = 1024) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(vocab, dim, mode="sum", sparse=True)
        self.net = nn.Sequential(nn.Linear(dim, hidden), nn.ReLU(), nn.Linear(hidden, 1))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        return F.mse_loss(self.net(self.bag(input_ids))[:, 0].float(), labels.float().mean(1))


class Critic(nn.Module):
    """A network whose loss has the norm of its input's gradient in it."""

    def __init__(self, dim: int = 256, depth: int = 3, vocab: int = 1024) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        layers = [layer for _ in range(depth) for layer in (nn.Linear(dim, dim), nn.Tanh())]
        self.net = nn.Sequential(*layers, nn.Linear(dim, 1))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids).detach().requires_grad_()
        score = self.net(x).float()
        (grad,) = torch.autograd.grad(score.sum(), x, create_graph=True)
        penalty = (grad.float().norm(dim=-1) - 1).square().mean()
        return score.mean() + penalty + self.embed(labels).float().square().mean()


class Autoencoder(nn.Module):
    """A variational autoencoder of images."""

    def __init__(self, channels: int = 32, latent: int = 64, side: int = 48) -> None:
        super().__init__()
        inner = 2 * channels * (side // 4) ** 2
        self.encoder = nn.Sequential(
            nn.Conv2d(3, channels, 4, 2, 1),
            nn.ReLU(),
            nn.Conv2d(channels, 2 * channels, 4, 2, 1),
            nn.ReLU(),
            nn.Flatten(),
        )
        self.mean, self.log_var = nn.Linear(inner, latent), nn.Linear(inner, latent)
        self.widen = nn.Linear(latent, inner)
        self.decoder = nn.Sequential(
            nn.Unflatten(1, (2 * channels, side // 4, side // 4)),
            nn.ReLU(),
            nn.ConvTranspose2d(2 * channels, channels, 4, 2, 1),
            nn.ReLU(),
            nn.ConvTranspose2d(channels, 3, 4, 2, 1),
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.encoder(x)
        mean, log_var = self.mean(hidden), self.log_var(hidden)
        z = mean + torch.randn_like(mean) * (log_var / 2).exp()
        image = self.decoder(self.widen(z))
        divergence = -0.5 * (1 + log_var - mean.square() - log_var.exp()).sum(1).mean()
        return F.mse_loss(image.float(), x, reduction="sum") / len(x) + divergence


_DECODER = {
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}
_GROUPED = {**_DECODER, "num_key_value_heads": 2}
_SIZES: dict[str, dict[str, int]] = {
    "GPT2LMHeadModel": {"n_embd": 128, "n_layer": 4, "n_head": 4},
    "LlamaForCausalLM": _DECODER,
    "Qwen2ForCausalLM": _GROUPED,
    "MistralForCausalLM": _GROUPED,
    "Gemma2ForCausalLM": {**_GROUPED, "head_dim": 32},
    "MixtralForCausalLM": {**_GROUPED, "num_local_experts": 4},
    "BertForMaskedLM": _DECODER,
    "T5ForConditionalGeneration": {
        "d_model": 128,
        "d_ff": 352,
        "d_kv": 32,
        "num_heads": 4,
        "num_layers": 4,
        "decoder_start_token_id": 0,
    },
}


def pretrained(name: str, vocab: int = 1024) -> nn.Module:
    """A model of transformers, with all that its config says by default but its size."""
    import transformers

    kind = getattr(transformers, name)
    return kind(kind.config_class(vocab_size=vocab, **_SIZES[name]))  # type: ignore[no-any-return]
