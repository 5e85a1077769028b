# SPDX-License-Identifier: Apache-2.0
"""Shadow mode: every layer of every step is computed a second time, and the difference is recorded.

    shadow.install(Path("shadow.jsonl"))     # before the engine is built, in the process that runs its layers
    LLM(..., attention_backend="CUSTOM")

The plugin's backend then makes implementations and builders of the classes below, which have vLLM's FLASHMLA_SPARSE beside
them: it computes what `forward_mqa` does, over latent rows. What `forward_mha` does, over keys of each head, stock has for few
selections; some of its rows are compared with float32 arithmetic (`shadow_prompts`). What goes on to the next layer is always
ours, so each difference is that of one layer on equal inputs. It takes the time of both, and waits for the device once a layer
(once a step where layers run inside of CUDA graphs).

The numbers are made on the device, into tensors with fixed addresses, so that a replayed graph updates them as well. The
host reads them after a layer that ran outside of capture, and otherwise when the next step is built.
"""

from __future__ import annotations

import atexit
import copy
import json
import os
from collections.abc import Callable
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, ClassVar, Final

import torch
from shadow_prompts import PerHead, Prompts, decodes_of
from torch import Tensor

from mla_portable.accelerator import accelerator
from mla_portable.contracts import InvalidArgument
from mla_portable.engines.vllm import compat, settings
from mla_portable.engines.vllm.backend import MLAPortableBackend
from mla_portable.engines.vllm.builder import MLAPortableMetadataBuilder
from mla_portable.engines.vllm.impl import MLAPortableImpl
from mla_portable.engines.vllm.metadata import MLAPortableMetadata

STOCK: Final = "vllm.v1.attention.backends.mla.flashmla_sparse.FlashMLASparseBackend"

LIMIT: Final = 1e-2
"""Relative error of a layer above which the log warns: bfloat16 output differs by about 4e-3 of its size at most."""

_LATENT_ROWS, _PER_HEAD = "forward_mqa", "forward_mha"
"""The methods whose results are compared; a record says which."""

COMPUTING: Final = frozenset(
    {
        "do_kv_cache_update",
        _PER_HEAD,
        _LATENT_ROWS,
        "fused_output_quant_supported",
        "get_impl_variants",
        "masked_mha_workspace_fits",
    }
)
"""Methods of an implementation that write or answer something, and so are called on one implementation alone. vLLM calls all
others to say what happens (`record_logical_topk_ready`, `prepare_for_batch`, ...): both implementations must hear of it."""

_ROWS_AT_ONCE: Final = 512
_SHADOW: Final = "shadow"
"""The attribute of the plugin's metadata that holds stock's, of the tokens that go through `forward_mqa`."""
_PROMPTS: Final = "shadow_prompts"
"""The attribute that holds the Prompts, of those that go through `forward_mha`."""

_FIELDS: Final = ("runs", "rows", "relative", "worst_row", "max_abs")


def difference(ours: Tensor, theirs: Tensor, topk_indices: Tensor) -> Tensor:
    """How far two outputs [T, H, D] are apart over the tokens that attend to something; graph-safe, on their device.

    Args:
        topk_indices: [T, K] int32; a token whose row is all negative, as padding is, counts for nothing.
    Returns: [4] float32: how many tokens count; the norm of the difference over that of `theirs`, of all of them together;
        the same of the token that is worst; and the largest absolute difference. The last three are 0 where nothing counts.
    """
    counts = (topk_indices >= 0).any(dim=1)
    rows: list[tuple[Tensor, Tensor, Tensor]] = []
    # A number of rows at a time: in float32 a whole step of many tokens may not fit beside the model.
    for a, b, kept in zip(*(tensor.split(_ROWS_AT_ONCE) for tensor in (ours, theirs, counts[:, None, None])), strict=True):
        # Rows that do not count may hold anything, NaN as well: they are replaced, not multiplied.
        apart, size = torch.where(kept, a.float() - b.float(), 0.0), torch.where(kept, b.float(), 0.0)
        rows.append((apart.square().sum(dim=(1, 2)), size.square().sum(dim=(1, 2)), apart.abs().amax(dim=(1, 2))))
    rows_apart, rows_size, largest = (torch.cat(column) for column in zip(*rows, strict=True))
    tiny = torch.finfo(torch.float32).tiny
    return torch.stack(
        [
            counts.sum().float(),
            (rows_apart.sum() / rows_size.sum().clamp(min=tiny)).sqrt(),
            (rows_apart / rows_size.clamp(min=tiny)).amax().sqrt(),
            largest.amax(),
        ]
    )


class Recorder:
    """The records of this process: reads what layers left on the device, and writes a line for each run that is new."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.step = 0
        self._numbers: dict[tuple[str, str], Tensor] = {}
        """(Layer, method) -> its numbers [5], as _FIELDS."""
        self._seen: dict[tuple[str, str], int] = {}

    def note(self, layer: str, method: str, found: Tensor) -> None:
        """Keep the `difference` of a layer on its device; graph-safe but for the first one, vLLM's warm-up.

        It is outside of capture, so its numbers are no part of a graph's memory.
        """
        key = layer, method
        if key not in self._numbers:
            self._numbers[key] = torch.zeros(len(_FIELDS), dtype=torch.float32, device=found.device)
        numbers = self._numbers[key]
        numbers[1:].copy_(found)
        numbers[0] += 1
        if not accelerator(found.device).is_capturing():
            self.flush(key)

    def flush(self, *keys: tuple[str, str]) -> None:
        """Record what ran since it was last read; every layer where none is named. Waits for the device."""
        wanted = list(keys or self._numbers)
        lines: list[str] = []
        found = torch.stack([self._numbers[key] for key in wanted]).tolist() if wanted else []
        for key, (runs, rows, *values) in zip(wanted, found, strict=True):
            is_new, self._seen[key] = runs != self._seen.get(key, 0), runs
            name, method = key
            if is_new and rows:
                numbers = {"rows": int(rows), **dict(zip(_FIELDS[2:], values, strict=True))}
                lines.append(json.dumps({"step": self.step, "layer": name, "method": method, **numbers, "pid": os.getpid()}))
                if not numbers["relative"] <= LIMIT:  # NaN warns too
                    settings.logger.warning("shadow: %s of layer %s differs: %s", method, name, lines[-1])
        if lines and self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:  # whole lines, so that ranks may share a file
                file.write("".join(f"{line}\n" for line in lines))
        elif lines:
            settings.logger.info("shadow: %s", "\nshadow: ".join(lines))


class ShadowBuilder(MLAPortableMetadataBuilder):
    """The plugin's builder with the stock one beside it, and the count of steps."""

    stock: ClassVar[Any]
    recorder: ClassVar[Recorder]

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        """Raises: InvalidArgument where stock reads other slots."""
        ranks = compat.context_ranks(vllm_config)
        if ranks > 1:
            got, expected = f"decode context parallelism {ranks}", "1: stock reads other slots"
            raise InvalidArgument("shadow", "decode_context_parallel_size", got=got, expected=expected)
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        layers = vllm_config.compilation_config.static_forward_context
        for name in layer_names:
            impl = getattr(layers.get(name), "impl", None)
            if isinstance(impl, ShadowImpl):
                impl.layer_name = name  # `forward_mha` is given no layer
        self._beside = self.stock.get_builder_cls()(kv_cache_spec, layer_names, _sparse_alone(vllm_config), device)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> MLAPortableMetadata:
        """Record the step before, then the metadata of this one, with stock's as its attribute `shadow`."""
        common = common_attn_metadata
        metadata = super().build(common_prefix_len, common, fast_build)
        self.recorder.flush()
        self.recorder.step += 1
        beside = None
        if metadata.num_prefills:
            setattr(metadata, _PROMPTS, Prompts.of(common, metadata.num_decodes))
            common = decodes_of(common, metadata.num_decodes)
        if common.num_reqs:
            beside = self._beside.build(common_prefix_len, common, fast_build)
        setattr(metadata, _SHADOW, beside)
        return metadata


class ShadowImpl(MLAPortableImpl):
    """The plugin's implementation of a layer with the stock one beside it, and the numbers of its last run."""

    stock: ClassVar[Any]
    recorder: ClassVar[Recorder]

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.layer_name = f"layer {id(self)}"
        self._beside = self.stock.get_impl_cls()(**arguments)
        self._per_head = PerHead.of(arguments)
        # From now on, every hook that vLLM calls on this one reaches the stock implementation as well.
        for name in hooks(type(self), type(self._beside)):
            setattr(self, name, _both(getattr(self, name), getattr(self._beside, name)))

    @property
    def topk_indices_buffer(self) -> Tensor | None:
        """As MLAPortableImpl's; what is set reaches the stock implementation too."""
        return super().topk_indices_buffer

    @topk_indices_buffer.setter
    def topk_indices_buffer(self, buffer: Tensor | None) -> None:
        MLAPortableImpl.topk_indices_buffer.fset(self, buffer)  # pyright: ignore[reportOptionalCall]
        self._beside.topk_indices_buffer = buffer

    def forward_mqa(
        self, q: Any, kv_c_and_k_pe_cache: Tensor, attn_metadata: MLAPortableMetadata, layer: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Ours; then stock's on the same inputs, and the difference noted. Graph-safe."""
        result = super().forward_mqa(q, kv_c_and_k_pe_cache, attn_metadata, layer)
        beside, topk_indices = getattr(attn_metadata, _SHADOW, None), self.topk_indices_buffer
        if beside is not None:
            assert topk_indices is not None  # forward_mqa refuses a layer without
            theirs, _ = self._beside.forward_mqa(q, kv_c_and_k_pe_cache, beside, layer)
            self.recorder.note(self.layer_name, _LATENT_ROWS, difference(result[0], theirs, topk_indices[: len(theirs)]))
        return result

    def forward_mha(
        self,
        q: Tensor,
        kv_c_normed: Tensor,
        k_pe: Tensor,
        kv_c_and_k_pe_cache: Tensor,
        attn_metadata: MLAPortableMetadata,
        k_scale: Tensor,
        output: Tensor,
        output_scale: Tensor | None = None,
    ) -> None:
        """Ours; then some of its rows in float32, and the difference noted.

        Raises: InvalidArgument for a quantised output.
        """
        if output_scale is not None:
            raise InvalidArgument("shadow", "output_scale", got="a tensor", expected="None: outputs are compared in bfloat16")
        super().forward_mha(q, kv_c_normed, k_pe, kv_c_and_k_pe_cache, attn_metadata, k_scale, output=output)
        prompts, topk_indices = getattr(attn_metadata, _PROMPTS, None), self.topk_indices_buffer
        if prompts is None or self._per_head is None or topk_indices is None:
            return
        chosen = topk_indices[attn_metadata.num_decode_tokens :]
        tokens, wanted = self._per_head.rows(q, kv_c_normed, k_pe, kv_c_and_k_pe_cache, chosen, prompts)
        ours = output.view(len(output), *wanted.shape[1:])[tokens]
        # every token sees itself, so all of them count
        counts = torch.zeros((len(tokens), 1), dtype=torch.int32, device=output.device)
        self.recorder.note(self.layer_name, _PER_HEAD, difference(ours, wanted, counts))


def hooks(ours: type, theirs: type) -> list[str]:
    """Public methods that both implementations have, but for those of COMPUTING."""
    shared = (name for name in dir(theirs) if not name.startswith("_") and name not in COMPUTING)
    return [name for name in shared if callable(getattr(theirs, name)) and callable(getattr(ours, name, None))]


def _sparse_alone(vllm_config: Any) -> Any:
    """The configuration with every token on the sparse route: what stock computes beside ours goes through `forward_mqa`."""
    attention = getattr(vllm_config, "attention_config", None)
    if not hasattr(attention, "sparse_mla_force_mqa"):
        return vllm_config
    changed, sparse = copy.copy(vllm_config), copy.copy(attention)
    sparse.sparse_mla_force_mqa = True
    changed.attention_config = sparse
    return changed


def _both(ours: Callable[..., Any], theirs: Callable[..., Any]) -> Callable[..., Any]:
    """Call both, each with its own metadata; the result is that of `ours`."""

    def its_own(argument: Any) -> Any:
        return getattr(argument, _SHADOW) if isinstance(argument, MLAPortableMetadata) else argument

    def call(*arguments: Any, **named: Any) -> Any:
        result = ours(*arguments, **named)
        theirs(*map(its_own, arguments), **{name: its_own(value) for name, value in named.items()})
        return result

    return call


def install(file: Path | None = None, stock: str = STOCK) -> None:
    """Have the plugin's backend make layers and builders with the stock backend's beside them, in this process.

    Args:
        file: where records are appended, one JSON object a line; None sends them to the log. stock: path of the other
            backend's class.
    """
    recorder = Recorder(file)
    atexit.register(recorder.flush)
    given = {"stock": resolve_name(":".join(stock.rsplit(".", 1))), "recorder": recorder}
    impl, builder = type("ShadowImpl", (ShadowImpl,), given), type("ShadowBuilder", (ShadowBuilder,), given)
    MLAPortableBackend.get_impl_cls = staticmethod(lambda: impl)
    MLAPortableBackend.get_builder_cls = staticmethod(lambda: builder)
