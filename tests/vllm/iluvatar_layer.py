# SPDX-License-Identifier: Apache-2.0
"""vLLM as Iluvatar's 0.17 has it: the layer around an implementation, and the vendor's ops on a CPU under the vendor's name.

The layer calls what the vendor's own implementation offers: `process_weights_after_loading`, `_k_up_proj`, a `forward_mqa` that
returns out alone, `_v_up_proj`. It reads no weights of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from vllm.model_executor.layers.attention import mla_attention
from vllm.v1.attention.backends.mla import flashmla_sparse

from mla_portable.choose import registry as registry_module
from mla_portable.engines.vllm import compat

sys.path.append(str(Path(__file__).parents[1] / "iluvatar"))


class IluvatarMLAAttention(mla_attention.MLAAttention):
    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        self.impl.process_weights_after_loading(act_dtype)

    def forward_impl(
        self, q: Tensor, kv_c: Tensor, k_pe: Tensor, kv_cache: Tensor, attn_metadata: Any, output: Tensor, **unused: Any
    ) -> Tensor:
        if attn_metadata is None:
            return output.fill_(0)
        tokens = attn_metadata.num_actual_tokens
        assert attn_metadata.req_id_per_token.shape == (tokens,)
        assert attn_metadata.fp8_extra_metadata is None and attn_metadata.fp8_use_mixed_batch in (False, True)
        q_nope, q_pe = q[:tokens].split([self.qk_nope_head_dim, self.qk_rope_head_dim], dim=-1)
        ql_nope = self.impl._k_up_proj(q_nope)
        attn_out = self.impl.forward_mqa((ql_nope, q_pe), kv_cache, attn_metadata, self)
        output[:tokens] = self.impl._v_up_proj(attn_out).view(tokens, -1)
        return output


class FlashMLASparseImpl(flashmla_sparse.FlashMLASparseImpl):
    """As the vendor's, as far as it tells how the layer calls an implementation."""

    def _k_up_proj(self, q_nope: Tensor) -> Tensor:
        raise NotImplementedError


@contextmanager
def layer() -> Iterator[None]:
    """Layers are Iluvatar's, and the stock implementation beside ours says so."""
    with (
        mock.patch.object(mla_attention, "MLAAttention", IluvatarMLAAttention),
        mock.patch.object(flashmla_sparse, "FlashMLASparseImpl", FlashMLASparseImpl),
    ):
        assert compat.impl_projects()
        yield


@contextmanager
def device() -> Iterator[None]:
    """The CPU is a BI-V150 with the ops of that generation; plain torch serves what they leave open."""
    import corex_machine

    with ExitStack() as patches:
        for place, op in corex_machine.COREX_42.items():
            name, _, attribute = place.partition(":")
            module = import_module(name) if name.startswith("vllm.") else _stand_in(name)
            patches.enter_context(mock.patch.object(module, attribute, op, create=True))
        patches.enter_context(mock.patch.object(registry_module, "_registry", corex_machine.registry()))
        yield


def _stand_in(name: str) -> ModuleType:
    """The stand-in module `name` and its parents."""
    if name not in sys.modules:
        sys.modules[name] = module = ModuleType(name)
        module.__path__ = []
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(_stand_in(parent), last, module)
    return sys.modules[name]
