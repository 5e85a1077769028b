# SPDX-License-Identifier: Apache-2.0
# pyright: basic
"""From SGLang's backend object to an AttentionSpec of its layers, or to the reasons why they are not served."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from mla_portable.attention import AttentionSpec
from mla_portable.engines.sglang import settings
from mla_portable.engines.sglang.seams import FA3, KV, SPARSE
from mla_portable.kit.defaults import neutral_defaults
from mla_portable.layouts import BF16, BF16_NOPE, FP8_DS_MLA, FP8_NOPE, KV_LORA_RANK, LAYOUTS, QK_ROPE_HEAD_DIM

PAGE: Final = 64
"""Tokens of a page; SGLang's own kernels assert it."""
_POOLS: Final[Mapping[tuple[int, bool], str]] = {
    (QK_ROPE_HEAD_DIM, False): BF16.name,
    (QK_ROPE_HEAD_DIM, True): FP8_DS_MLA.name,
    (0, False): BF16_NOPE.name,
    (0, True): FP8_NOPE.name,
}
"""(width of the rotary part, FP8 rows with scales) -> layout."""
METHOD_OF: Final = {"flashmla_sparse": SPARSE, "flashmla_kv": KV, "fa3": FA3}
"""Values of --dsa-prefill-backend and --dsa-decode-backend -> the method that serves them."""
_HISPARSE: Final = {"flashmla_sparse": False, "flashmla_kv": True}
"""Those of them that SGLang combines with --enable-hisparse -> FP8 rows."""


def methods_in_use(backend: Any) -> tuple[str, ...]:
    """The hooked methods that the backend's two implementations call; `flashmla_auto` becomes one of two in each step."""
    return tuple(dict.fromkeys((*methods_of_prefill(backend), *_methods_of(backend.dsa_decode_impl))))


def methods_of_prefill(backend: Any) -> tuple[str, ...]:
    """Those that extends call."""
    return _methods_of(backend.dsa_prefill_impl)


def _methods_of(name: str) -> tuple[str, ...]:
    names = ("flashmla_sparse", "flashmla_kv") if name == "flashmla_auto" else (name,)
    return tuple(METHOD_OF[each] for each in names if each in METHOD_OF)


def pool_layout(backend: Any) -> str:
    """The layout of the rows in SGLang's cache."""
    return _POOLS[backend.qk_rope_head_dim, backend.dsa_kv_cache_store_fp8]


def layouts_of(method: str, backend: Any) -> str:
    """The layout of the rows that a method reads: those of the cache, but for rows that SGLang gathers in BF16."""
    pool = pool_layout(backend)
    return pool if method == KV else LAYOUTS[pool].workspace.name


def keys_of_pool(backend: Any) -> int:
    """Keys of which the indexer scores one mean (GLM-5.3-Flash), 1 where it scores each; then a row's list has up to so many
    slots less one beside the top-k: keys behind the last whole pool."""
    return getattr(backend, "dsa_index_kpool", 1)


def in_host_memory(backend: Any) -> bool:
    """The KV cache is in host memory (--enable-hisparse). Slots are of a buffer on the device, into which SGLang copies rows
    that a decode selects before it calls a method; those of an extend are there."""
    return backend.hisparse_coordinator is not None


def _against_hisparse(backend: Any) -> str | None:
    """Why a KV cache in host memory is not served, in words; None where there is none, or where it is served."""
    if not in_host_memory(backend):
        return None
    if not settings.hisparse():
        return f"HiSparse, a KV cache in host memory (experimental: {settings.ENV_HISPARSE}=on has it served)"
    if keys_of_pool(backend) > 1:
        return (
            "HiSparse, a KV cache in host memory, with an indexer that scores pools of keys (supports one that scores each key)"
        )
    fp8 = bool(backend.dsa_kv_cache_store_fp8)
    asked = dict.fromkeys((backend.dsa_prefill_impl, backend.dsa_decode_impl))
    wrong = [each for each in asked if each == "flashmla_auto" or (each in METHOD_OF and _HISPARSE.get(each) != fp8)]
    if not wrong:
        return None
    got = f"{'an FP8' if fp8 else 'a BF16'} cache and {', '.join(wrong)}"
    return f"HiSparse, a KV cache in host memory, with {got} (supports flashmla_kv with FP8, flashmla_sparse with BF16)"


def has_sinks(model_runner: Any) -> bool:
    """The model's layers have attention sinks."""
    return bool(getattr(model_runner.model_config.hf_config, "learnable_sink", False))


def refusals(backend: Any, model_runner: Any) -> list[str]:
    """What of the configuration this project does not serve, in words."""
    arguments = getattr(model_runner, "server_args", None)
    page = getattr(backend, "physical_page_size", None) or backend.real_page_size
    widths = backend.kv_lora_rank, backend.qk_rope_head_dim
    checks = (
        (
            widths[0] != KV_LORA_RANK or (widths[1], False) not in _POOLS,
            f"a latent of {widths[0]} and {widths[1]} of rope (supports {KV_LORA_RANK}, and {QK_ROPE_HEAD_DIM} or 0)",
        ),
        (page != PAGE, f"pages of {page} tokens (supports {PAGE})"),
        (getattr(backend, "dcp_size", 1) > 1, "decode context parallelism (supports 1 rank)"),
        (
            getattr(arguments, "enable_pdmux", False),
            "prefills and decodes on two streams, --enable-pdmux (supports one)",
        ),
        (getattr(backend, "_kv_shard_pool", None) is not None, "a cache sharded over ranks (supports whole caches)"),
    )
    hisparse = _against_hisparse(backend)
    return [*(words for refused, words in checks if refused), *([] if hisparse is None else [hisparse])]


@neutral_defaults()
def make_spec(backend: Any, model_runner: Any, layout: str, *, attn_sink: bool) -> AttentionSpec:
    """The spec of the backend's layers on rows of `layout`. A query token is a request, as it is to SGLang's kernels."""
    tokens = max(getattr(backend, "speculative_num_draft_tokens", 0) or 0, getattr(backend, "topk", 0) or 0, 1)
    rows = backend.req_to_token_pool.size * tokens
    return AttentionSpec(
        num_heads=backend.num_q_heads,
        softmax_scale=LAYOUTS[layout].key_width ** -0.5,  # of a spec; each call brings its layer's
        max_num_tokens=rows,
        max_num_reqs=rows,
        max_model_len=backend.max_context_len,
        kv_layout=layout,
        block_size=PAGE,
        topk=backend.dsa_index_topk + keys_of_pool(backend) - 1,
        scale_format=None,
        need_lse=False,
        attn_sink=attn_sink,
        concat_query=False,
        graph=True,
        batch_invariant=backend.num_splits == 1,
    )
