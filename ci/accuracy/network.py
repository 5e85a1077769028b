# SPDX-License-Identifier: Apache-2.0
"""A decoder with MLA and an indexer in plain torch, whose modules have the names of a checkpoint's tensors."""

from __future__ import annotations

import math
from typing import Any, Final, Literal

import torch
from chosen_keys import attend, choose, loss_on_all, loss_on_chosen
from forms import Form
from torch import Tensor, nn
from torch.nn import functional

Mode = Literal["dense", "warm", "sparse", "chosen"]
"""dense: attention over all keys, the indexer unused. warm: the same, and the indexer's loss against it.
sparse: over the chosen keys, with the indexer's loss on them. chosen: the same without a loss, as it is served."""

_EPSILON: Final = 1e-6


class Norm(nn.Module):
    """RMS norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), _EPSILON)


def linear(columns: int, rows: int, gain: float = 1.0) -> nn.Linear:
    """Without a bias; what comes out is `gain` times as large as what goes in."""
    made = nn.Linear(columns, rows, bias=False)
    nn.init.normal_(made.weight, std=gain / math.sqrt(columns))
    return made


def rotation(form: Form, length: int, device: torch.device) -> Tensor:
    """[length, rope / 2, 2] float32: cosine and sine of each pair's angle at a position."""
    frequencies = form.theta ** (-torch.arange(0, form.rope, 2, device=device) / form.rope)
    angles = torch.arange(length, device=device)[:, None] * frequencies
    return torch.stack([angles.cos(), angles.sin()], -1)


def rotated(x: Tensor, table: Tensor, *, pairs: bool) -> Tensor:
    """x [..., T, heads, rope] by its position: neighbours are a pair, or an element and its counterpart in the other half."""
    one, other = (x[..., 0::2], x[..., 1::2]) if pairs else x.chunk(2, -1)
    cos, sin = table[: x.shape[-3], None].unbind(-1)
    # products of queries with keys are the same in any order of elements that both have
    return torch.cat([one * cos - other * sin, other * cos + one * sin], -1).to(x.dtype)


class Indexer(nn.Module):
    """What scores keys: its queries, keys and weights of heads."""

    def __init__(self, form: Form) -> None:
        super().__init__()
        self.form = form
        self.wq_b = linear(form.q_rank, form.index_heads * form.index_dim)
        self.wk = linear(form.hidden, form.index_dim)
        self.k_norm = nn.LayerNorm(form.index_dim, eps=_EPSILON)
        self.weights_proj = linear(form.hidden, form.index_heads)

    def forward(self, x: Tensor, q_low: Tensor, table: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """An Index. x: [B, T, hidden]. q_low: [B, T, q_rank]."""
        form = self.form
        q = self.wq_b(q_low).unflatten(-1, (form.index_heads, form.index_dim))
        k = self.k_norm(self.wk(x)).unsqueeze(-2)
        q, k = (
            torch.cat([rotated(each[..., : form.rope], table, pairs=form.index_pairs), each[..., form.rope :]], -1)
            for each in (q, k.to(q.dtype))
        )
        return q, k.squeeze(-2), self.weights_proj(x).float() * (form.index_heads * form.index_dim) ** -0.5


Index = tuple[Tensor, Tensor, Tensor]
"""An indexer's q [B, T, Hi, D], k [B, T, D] and weights [B, T, Hi]."""
Chosen = tuple[Index, list[tuple[Tensor, Tensor]]]
"""An indexer's results, and for each sequence what it chose; no choice where attention is dense."""


def _sequence(index: Index, number: int) -> Index:
    """Of one sequence."""
    q, k, weights = index
    return q[number], k[number], weights[number]


class Attention(nn.Module):
    """Multi-head latent attention over keys of each head."""

    def __init__(self, form: Form, *, indexed: bool) -> None:
        super().__init__()
        self.form = form
        self.q_a_proj, self.q_a_layernorm = linear(form.hidden, form.q_rank), Norm(form.q_rank)
        self.q_b_proj = linear(form.q_rank, form.heads * (form.nope + form.rope))
        self.kv_a_proj_with_mqa, self.kv_a_layernorm = linear(form.hidden, form.latent + form.rope), Norm(form.latent)
        self.kv_b_proj = linear(form.latent, form.heads * (form.nope + form.value))
        self.o_proj = linear(form.heads * form.value, form.hidden, 0.5 / math.sqrt(2 * form.layers))
        if indexed:
            self.indexer = Indexer(form)

    def forward(
        self, x: Tensor, table: Tensor, mode: Mode, before: Chosen | None, stretch: float
    ) -> tuple[Tensor, Tensor | None, Chosen | None]:
        """x: [B, T, hidden]. before: of the layer before. stretch: factor on the scores.

        Returns: [B, T, hidden]; the indexer's loss, None in a mode without one; what the indexer chose, or the one before it.
        """
        form, scale = self.form, self.form.scale * stretch
        q_low = self.q_a_layernorm(self.q_a_proj(x))
        q = self.q_b_proj(q_low).unflatten(-1, (form.heads, form.nope + form.rope))
        q = torch.cat([q[..., : form.nope], rotated(q[..., form.nope :], table, pairs=True)], -1).transpose(1, 2)
        latent, turned = self.kv_a_proj_with_mqa(x).split([form.latent, form.rope], -1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (form.heads, form.nope + form.value))
        turned = rotated(turned.unsqueeze(-2), table, pairs=True).expand(-1, -1, form.heads, -1).to(kv.dtype)
        k = torch.cat([kv[..., : form.nope], turned], -1).transpose(1, 2)
        q, v = q.to(k.dtype), kv[..., form.nope :].transpose(1, 2)
        chosen = before if mode == "dense" else self._chosen(x.detach(), q_low.detach(), table, mode, before)
        loss: Tensor | None = None
        if mode in ("dense", "warm") or chosen is None:
            out = _dense(q, k, v, scale)
            if chosen is not None and mode == "warm":
                own = [loss_on_all(q[n].detach(), k[n].detach(), *_sequence(chosen[0], n), scale) for n in range(len(x))]
                loss = torch.stack(own).mean()
        else:
            index, choices = chosen
            several, losses = list[Tensor](), list[Tensor]()
            for n, (keys, seen) in enumerate(choices):
                found, shares = attend(q[n], k[n], v[n], keys, seen, scale)
                several.append(found)
                if mode == "sparse":
                    losses.append(loss_on_chosen(*_sequence(index, n), keys, seen, shares))
            out = torch.stack(several)
            loss = torch.stack(losses).mean() if losses else None
        return self.o_proj(out.transpose(1, 2).flatten(2)), loss, chosen

    def _chosen(self, x: Tensor, q_low: Tensor, table: Tensor, mode: Mode, before: Chosen | None) -> Chosen | None:
        if not hasattr(self, "indexer"):
            return before
        q, k, weights = self.indexer(x, q_low, table)
        k = k.to(q.dtype)
        choices = [] if mode == "warm" else [choose(q[n], k[n], weights[n], self.form.topk) for n in range(len(x))]
        return (q, k, weights), choices


def _dense(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Causal attention. On a GPU values are padded to the keys' width, which the fused kernels demand."""
    width = v.shape[-1]
    wide = functional.pad(v, (0, q.shape[-1] - width)) if v.is_cuda else v
    return functional.scaled_dot_product_attention(q, k, wide, is_causal=True, scale=scale)[..., :width]


class Layer(nn.Module):
    def __init__(self, form: Form, number: int) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = Norm(form.hidden), Norm(form.hidden)
        self.self_attn = Attention(form, indexed=form.indexed[number])
        self.mlp = nn.ModuleDict(
            {
                "gate_proj": linear(form.hidden, form.inner),
                "up_proj": linear(form.hidden, form.inner),
                "down_proj": linear(form.inner, form.hidden, 1 / math.sqrt(2 * form.layers)),
            }
        )

    def forward(self, x: Tensor, *given: Any) -> tuple[Tensor, Tensor | None, Chosen | None]:
        """As `Attention.forward`."""
        out, loss, chosen = self.self_attn(self.input_layernorm(x), *given)
        x = x + out
        y = self.post_attention_layernorm(x)
        return x + self.mlp["down_proj"](functional.silu(self.mlp["gate_proj"](y)) * self.mlp["up_proj"](y)), loss, chosen


class Network(nn.Module):
    """The whole model. Its parameters' names are those of the checkpoint."""

    def __init__(self, form: Form) -> None:
        super().__init__()
        self.form = form
        self.model = nn.ModuleDict(
            {
                "embed_tokens": nn.Embedding(form.vocab, form.hidden),
                "layers": nn.ModuleList(Layer(form, number) for number in range(form.layers)),
                "norm": Norm(form.hidden),
            }
        )
        nn.init.normal_(self.model["embed_tokens"].weight, std=0.5)
        self.lm_head = linear(form.hidden, form.vocab, 0.5)

    def forward(self, tokens: Tensor, mode: Mode, *, stretch: float = 1.0) -> tuple[Tensor, Tensor | None]:
        """tokens [B, T] -> logits [B, T, vocabulary], and the mean of the layers' losses of the indexer."""
        x, losses, chosen = self.model["embed_tokens"](tokens), list[Tensor](), None
        table = rotation(self.form, tokens.shape[1], tokens.device)
        for layer in self.model["layers"]:
            x, loss, chosen = layer(x, table, mode, chosen, stretch)
            if loss is not None:
                losses.append(loss)
        return self.lm_head(self.model["norm"](x)), torch.stack(losses).mean() if losses else None

    def parts(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """The parameters of everything but the indexers, and those of the indexers."""
        named = list(self.named_parameters())
        return [p for n, p in named if ".indexer." not in n], [p for n, p in named if ".indexer." in n]
