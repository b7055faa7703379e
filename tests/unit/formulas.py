"""A transformer as a handful of numbers, by formula: an oracle for what is traced.

    TransformerShape.from_model_args("zrun_core.models.gpt:gpt", {"flavour": "llama"})

Parameters and operations are counted matrix by matrix; for GPT-2's layers they are those of
Narayanan et al. 2021 ("Efficient Large-Scale Language Model Training on GPU Clusters"), sections
5.1 and appendix. Activations follow Korthikanti et al. 2022 ("Reducing Activation Recomputation in
Large Transformer Models"), tables 1 and 2, term by term.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal

from zrun_core.errors import JobError

# What backward finds of a block: none: everything is kept | full: its input | every_n: the inputs
# of one block in n | selective: matrix products and attention are kept, as activations.checkpoint:
# selective does | attention: everything but the inside of attention, which is the "selective" of
# Korthikanti et al.
Recompute = Literal["none", "full", "every_n", "selective", "attention"]
_LOGIT_BYTES = 8  # beside the logit itself: its fp32 copy, and the fp32 gradient of that
_BUNDLED = ("zrun_core.models.gpt:gpt", "zrun_core.models.bert:bert")


@dataclass(frozen=True)
class TransformerShape:
    """A stack of equal blocks between an embedding and a head.

    Attributes:
        kv_heads: key and value heads; 0: `heads`.
        ffn: width inside the feed-forward layer; 0: 4 * hidden.
        head_dim: 0: hidden / heads.
        seq: tokens per sample.
        tied: whether the head is the embedding.
        gated: SwiGLU instead of GELU: three matrices.
        positions: rows of a learned table of positions; 0: none.
        qkv_bias, out_bias, ffn_bias: whether the products before attention, after it, and of the
            feed-forward layer add a bias.
        norm_params: vectors of each norm: 2 of LayerNorm, 1 of RMSNorm.
        extra: parameters beside the blocks, such as BERT's masked head.
        dropout: whether masks are kept for backward.
        flash: whether attention keeps its output and a number per row, not its matrix.
        loss_chunk: positions whose logits exist at a time; None: all.
        causal: fused attention skips positions that must not be seen.
    """

    layers: int
    hidden: int
    heads: int
    vocab: int
    seq: int
    kv_heads: int = 0
    ffn: int = 0
    head_dim: int = 0
    tied: bool = True
    gated: bool = False
    positions: int = 0
    qkv_bias: bool = False
    out_bias: bool = False
    ffn_bias: bool = False
    norm_params: int = 1
    extra: int = 0
    dropout: bool = False
    flash: bool = True
    loss_chunk: int | None = None
    causal: bool = True
    name: str = "transformer"

    def __post_init__(self) -> None:
        for key, value in (("kv_heads", self.heads), ("ffn", 4 * self.hidden)):
            if not getattr(self, key):
                object.__setattr__(self, key, value)
        for key in ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq"):
            value = getattr(self, key)
            if type(value) is not int or value < 1:
                raise JobError(f"{self.name}: {key} is {value!r}: it must be a whole number from 1")
        if not self.head_dim:
            if self.hidden % self.heads:
                raise JobError(
                    f"{self.name}: a width of {self.hidden} does not divide into {self.heads} heads"
                )
            object.__setattr__(self, "head_dim", self.hidden // self.heads)
        if self.heads % self.kv_heads:
            raise JobError(
                f"{self.name}: {self.heads} heads do not divide over {self.kv_heads} key heads"
            )

    # Where shapes come from

    @classmethod
    def gpt(
        cls,
        layers: int,
        hidden: int,
        heads: int,
        *,
        vocab: int = 51200,
        seq: int = 2048,
        **more: Any,
    ) -> TransformerShape:
        """Return GPT-2's layers with dropout, as Narayanan 2021 and Korthikanti 2022 count them."""
        return cls(
            layers,
            hidden,
            heads,
            vocab,
            seq,
            positions=more.pop("positions", seq),
            qkv_bias=True,
            out_bias=True,
            ffn_bias=True,
            norm_params=2,
            dropout=more.pop("dropout", True),
            name=more.pop("name", "GPT"),
            **more,
        )

    @classmethod
    def llama(
        cls,
        layers: int,
        hidden: int,
        heads: int,
        *,
        kv_heads: int,
        ffn: int,
        vocab: int,
        seq: int,
        tied: bool = False,
        **more: Any,
    ) -> TransformerShape:
        """Return Llama's layers: RMSNorm, SwiGLU, grouped queries, no biases."""
        return cls(
            layers,
            hidden,
            heads,
            vocab,
            seq,
            kv_heads,
            ffn,
            tied=tied,
            gated=True,
            name=more.pop("name", "Llama"),
            **more,
        )

    @classmethod
    def from_model_args(cls, call: str, args: Mapping[str, Any]) -> TransformerShape:
        """Return the model that a job makes of a factory of `zrun_core.models`: a GPT or BERT.

        Args:
            call: the factory, as `module:attr`.

        Raises:
            JobError: it is none of these, or the arguments do not fit it.
        """
        if call not in _BUNDLED:
            raise JobError(f"{call} is none of {', '.join(_BUNDLED)}: its shape is not known")
        module, _, attr = call.partition(":")
        try:
            given = inspect.signature(getattr(import_module(module), attr)).bind(**args)
        except TypeError as error:
            raise JobError(f"{call}: {error}") from None
        given.apply_defaults()
        found = given.arguments
        dim = found["dim"]
        seq = found["seq_len"]
        depth = found["depth"]
        heads = found["heads"]
        if attr == "bert":
            return _bert(
                depth,
                dim,
                heads,
                found["vocab_size"],
                found["ffn_dim"] or 4 * dim,
                seq,
                positions=seq,
                dropout=bool(found["dropout"]),
                loss_chunk=found["loss_chunk"],
            )
        if found["flavour"] not in ("gpt2", "llama"):
            raise JobError(f"{call}: there is no flavour {found['flavour']!r}")
        is_gpt2 = found["flavour"] == "gpt2"
        default_ffn = 4 * dim if is_gpt2 else -(-8 * dim // 3 // 256) * 256
        return cls(
            depth,
            dim,
            heads,
            found["vocab_size"],
            seq,
            kv_heads=found["kv_heads"] or heads,
            ffn=found["ffn_dim"] or default_ffn,
            tied=found["tied"],
            gated=not is_gpt2,
            positions=seq if is_gpt2 else 0,
            qkv_bias=is_gpt2,
            out_bias=is_gpt2,
            ffn_bias=is_gpt2,
            norm_params=2 if is_gpt2 else 1,
            dropout=bool(found["dropout"]),
            loss_chunk=found["loss_chunk"],
            name=f"{found['flavour']} of {depth} x {dim}",
        )

    # Parameters

    @property
    def num_params(self) -> int:
        """Parameters by the formula, matrix by matrix."""
        return self.embedding_params + self.layers * self.layer_params + self.head_params

    @property
    def embedding_params(self) -> int:
        """Parameters of the tables of tokens and positions."""
        return (self.vocab + self.positions) * self.hidden

    @property
    def head_params(self) -> int:
        """Parameters after the blocks; the head has none of its own where it is the embedding."""
        head = 0 if self.tied else self.vocab * self.hidden
        return self.norm_params * self.hidden + head + self.extra

    @property
    def layer_params(self) -> int:
        """Parameters of one block."""
        matrices = self.qkv_width * self.hidden + self.attention_width * self.hidden
        matrices += self.num_ffn_matrices * self.hidden * self.ffn
        biases = self.qkv_bias * self.qkv_width
        biases += self.out_bias * self.hidden
        biases += self.ffn_bias * ((self.num_ffn_matrices - 1) * self.ffn + self.hidden)
        return matrices + biases + 2 * self.norm_params * self.hidden

    @property
    def attention_width(self) -> int:
        """Width of all queries together."""
        return self.heads * self.head_dim

    @property
    def qkv_width(self) -> int:
        """Width of queries, keys and values together."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def num_ffn_matrices(self) -> int:
        return 3 if self.gated else 2

    # Operations: a multiply-add is two. Attention is counted whole, also where a mask leaves half
    # of it out.

    def block_flops(self, tokens: float, seq: int | None = None) -> float:
        """Return the operations of one block's forward pass over `tokens` in samples of `seq`."""
        return self.product_flops(tokens) + self.attention_flops(tokens, seq)

    def product_flops(self, tokens: float) -> float:
        """Return the operations of the products with one block's weights."""
        width = self.qkv_width + self.attention_width + self.num_ffn_matrices * self.ffn
        return 2.0 * tokens * self.hidden * width

    def attention_flops(self, tokens: float, seq: int | None = None) -> float:
        """Return the operations of the two products inside one block's attention."""
        return 4.0 * tokens * (seq or self.seq) * self.attention_width

    def head_flops(self, tokens: float) -> float:
        """Return the operations of the logits' forward pass."""
        return 2.0 * tokens * self.hidden * self.vocab

    def model_flops(self, samples: float) -> float:
        """Return the operations that a step over `samples` needs: three times those of forward.

        Recomputation does not count.
        """
        tokens = samples * self.seq
        return 3 * (self.layers * self.block_flops(tokens) + self.head_flops(tokens))

    def hardware_flops(
        self, samples: float, recompute: Recompute = "none", every: int = 2
    ) -> float:
        """Return the operations that a step makes, with recomputation.

        With "full" it is equation 3 of Narayanan et al. Products and attention count, and
        "selective" keeps their results; "attention" makes the two products inside of attention
        again.

        Args:
            every: of "every_n".
        """
        tokens = samples * self.seq
        again = 0.0
        if recompute == "full":
            again = self.layers * self.block_flops(tokens)
        elif recompute == "every_n":
            again = math.ceil(self.layers / every) * self.block_flops(tokens)
        elif recompute == "attention":
            again = self.layers * self.attention_flops(tokens)
        return self.model_flops(samples) + again

    # Activations

    def block_activations(
        self,
        micro: float,
        *,
        tp: int = 1,
        sequence_parallel: bool = False,
        recompute: Recompute = "none",
        every: int = 2,
        element: int = 2,
    ) -> float:
        """Return the bytes that one block keeps for backward on each rank.

        Args:
            sequence_parallel: the rest, which tp does not divide, is divided along the sequence.
            every: "every_n" is the mean of a recomputed block and of every - 1 that keep
                everything.
            element: bytes of an activation.
        """
        if recompute == "every_n":
            one, others = (
                self.block_activations(
                    micro,
                    tp=tp,
                    sequence_parallel=sequence_parallel,
                    recompute=policy,
                    element=element,
                )
                for policy in ("full", "none")
            )
            return (one + (every - 1) * others) / every
        whole, divided = self._kept(recompute, element)
        return micro * self.seq * (whole / (tp if sequence_parallel else 1) + divided / tp)

    def _kept(self, recompute: Recompute, element: int) -> tuple[float, float]:
        """Return the bytes per token that a block keeps: undivided, and divided by tp."""
        hidden = self.hidden
        if recompute == "full":
            return element * hidden, 0.0
        up = (self.num_ffn_matrices - 1) * self.ffn
        if recompute == "selective":  # its input, and what products and attention made
            return element * 3 * hidden, element * (
                self.qkv_width + self.attention_width + up
            ) + 4 * self.heads
        # Inputs of two norms, of the first and of the second half; masks after each half.
        whole = element * 4 * hidden + self.dropout * 2 * hidden
        # Queries, keys, values; the output of attention; what is before and after the activation
        # function.
        products = (2 if self.gated else 1) * self.ffn
        divided = float(element * (self.qkv_width + self.attention_width + up + products))
        if self.flash:
            divided += 4.0 * self.heads  # log of the sums of each row, fp32
        elif recompute != "attention":  # softmax, and with dropout its mask and its result
            divided += self.heads * self.seq * (element + self.dropout * (1 + element))
        return whole, divided

    def weight_inputs(
        self, micro: float, *, tp: int = 1, sequence_parallel: bool = False, element: int = 2
    ) -> float:
        """Return the bytes that a block keeps until its weights' gradients are made.

        They are the inputs of its products, and the gradients of their outputs.

        Args:
            sequence_parallel: what tp does not divide is divided along the sequence.
            element: bytes of an activation.
        """
        up = (self.num_ffn_matrices - 1) * self.ffn
        whole = 4 * self.hidden  # inputs of two products, gradients of the outputs of two
        divided = self.attention_width + self.ffn + self.qkv_width + up
        undivided = whole / (tp if sequence_parallel else 1)
        return element * micro * self.seq * (undivided + divided / tp)

    def logit_bytes(self, micro: float, *, tp: int = 1, element: int = 2) -> float:
        """Return the bytes at the loss: logits, their copy in fp32, and its gradient.

        Args:
            tp: tensor-parallel ranks, which divide the vocabulary.
            element: bytes of a logit.
        """
        tokens = min(micro * self.seq, self.loss_chunk or math.inf)
        return tokens * self.vocab * (element + _LOGIT_BYTES) / tp


def _bert(
    layers: int,
    hidden: int,
    heads: int,
    vocab: int,
    ffn: int,
    seq: int,
    *,
    positions: int,
    dropout: bool,
    loss_chunk: int | None = None,
) -> TransformerShape:
    """Return BERT with its masked head.

    Beside the blocks it has embeddings of two segments, a product with its bias, a norm, and a bias
    of the vocabulary.
    """
    return TransformerShape(
        layers,
        hidden,
        heads,
        vocab,
        seq,
        ffn=ffn,
        positions=positions,
        qkv_bias=True,
        out_bias=True,
        ffn_bias=True,
        norm_params=2,
        extra=hidden**2 + 5 * hidden + vocab,
        dropout=dropout,
        loss_chunk=loss_chunk,
        causal=False,
        name="bert",
    )
