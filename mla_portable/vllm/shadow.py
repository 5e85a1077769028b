# SPDX-License-Identifier: Apache-2.0
# pyright: basic, reportMissingImports=false
"""Shadow mode: a stock implementation computes every layer of every step a second time, and the difference is recorded.

MLA_PORTABLE_VLLM_SHADOW=1 runs vLLM's FLASHMLA_SPARSE, or the backend whose class path it names. What goes on to the next
layer is always ours, so each difference is that of one layer on equal inputs. For finding out, not for serving: it takes
the time of both, and waits for the device once a layer (once a step where layers run inside of CUDA graphs).

The numbers are made on the device, into tensors with fixed addresses, so that a replayed graph updates them as well. The
host reads them after a layer that ran outside of capture, and otherwise when the next step is built.
"""

from __future__ import annotations

import atexit
import json
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Final

import torch
from torch import Tensor

from mla_portable.accelerator import accelerator
from mla_portable.vllm import settings
from mla_portable.vllm.metadata import MLAPortableMetadata

LIMIT: Final = 1e-2
"""Relative error of a layer above which the log warns: bfloat16 output differs by about 4e-3 of its size at most."""

COMPUTING: Final = frozenset(
    {"do_kv_cache_update", "forward_mha", "forward_mqa", "fused_output_quant_supported", "get_impl_variants"}
)
"""Methods of an implementation that write or answer something, and so are called on one implementation alone. vLLM calls all
others to say what happens (`record_logical_topk_ready`, `prepare_for_batch`, ...): both implementations must hear of it."""

_ROWS_AT_ONCE: Final = 512

_FIELDS: Final = ("runs", "rows", "relative", "worst_row", "max_abs")


def difference(ours: Tensor, theirs: Tensor, topk_indices: Tensor) -> Tensor:
    """How far two outputs [T, H, 512] are apart over the tokens that attend to something; graph-safe, on their device.

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


class _Recorder:
    """The records of this process: reads what layers left on the device, and writes a line for each run that is new."""

    def __init__(self, path: str | None) -> None:
        self._path = None if path is None else Path(path)
        self.step = 0
        self.layers: dict[str, Tensor] = {}
        """Layer -> its numbers [5], as _FIELDS."""
        self._seen: dict[str, int] = {}

    def flush(self, *names: str) -> None:
        """Record what ran since it was last read; every layer where none is named. Waits for the device."""
        wanted = list(names or self.layers)
        lines: list[str] = []
        found = torch.stack([self.layers[name] for name in wanted]).tolist() if wanted else []
        for name, (runs, rows, *values) in zip(wanted, found, strict=True):
            is_new, self._seen[name] = runs != self._seen.get(name, 0), runs
            if is_new and rows:
                numbers = {"rows": int(rows), **dict(zip(_FIELDS[2:], values, strict=True))}
                lines.append(json.dumps({"step": self.step, "layer": name, **numbers, "pid": os.getpid()}))
                if not numbers["relative"] <= LIMIT:  # NaN warns too
                    settings.logger.warning("shadow: layer %s differs from stock: %s", name, lines[-1])
        if lines and self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:  # whole lines, so that ranks may share a file
                file.write("".join(f"{line}\n" for line in lines))
        elif lines:
            settings.logger.info("shadow: %s", "\nshadow: ".join(lines))


@cache
def _recorder(path: str | None) -> _Recorder:
    recorder = _Recorder(path)
    atexit.register(recorder.flush)
    return recorder


def _stock() -> Any | None:
    path = settings.shadow_backend()
    return None if path is None else resolve_name(":".join(path.rsplit(".", 1)))


class ShadowSteps:
    """Beside a builder of ours: the stock builder, and the count of steps."""

    def __init__(self, builder: Any) -> None:
        self._builder = builder
        self._recorder = _recorder(settings.shadow_file())

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool) -> Any:
        """Record the step before, then the stock metadata of this one."""
        self._recorder.flush()
        self._recorder.step += 1
        return self._builder.build(common_prefix_len, common_attn_metadata, fast_build)


class ShadowLayer:
    """Beside a layer of ours: the stock implementation, and the numbers of its last run."""

    def __init__(self, impl: Any) -> None:
        self._impl = impl
        self._recorder = _recorder(settings.shadow_file())
        self._numbers: Tensor | None = None

    def compare(self, q: Any, kv_cache: Tensor, metadata: Any, layer: Any, ours: Tensor, topk_indices: Tensor) -> None:
        """Run the stock implementation on the inputs that gave `ours`, and note the difference. Graph-safe."""
        name = getattr(layer, "layer_name", f"layer {id(self)}")
        # The first run is vLLM's warm-up: outside of capture, so these numbers are no part of a graph's memory.
        if self._numbers is None:
            self._numbers = torch.zeros(len(_FIELDS), dtype=torch.float32, device=ours.device)
            self._recorder.layers[name] = self._numbers
        theirs = self._impl.forward_mqa(q, kv_cache, metadata, layer)
        if not isinstance(theirs, Tensor):  # (out, lse); Iluvatar's returns out alone
            theirs = theirs[0]
        self._numbers[1:].copy_(difference(ours, theirs, topk_indices))
        self._numbers[0] += 1
        if not accelerator(ours.device).is_capturing():
            self._recorder.flush(name)

    def follow(self, ours: Any) -> None:
        """From now on, every hook that vLLM calls on `ours` reaches the stock implementation as well."""
        for name in hooks(type(ours), type(self._impl)):
            setattr(ours, name, _both(getattr(ours, name), getattr(self._impl, name)))

    def use_topk(self, buffer: Tensor | None) -> None:
        self._impl.topk_indices_buffer = buffer


def hooks(ours: type, theirs: type) -> list[str]:
    """Public methods that both implementations have, but for those of COMPUTING."""
    shared = (name for name in dir(theirs) if not name.startswith("_") and name not in COMPUTING)
    return [name for name in shared if callable(getattr(theirs, name)) and callable(getattr(ours, name, None))]


def _both(ours: Callable[..., Any], theirs: Callable[..., Any]) -> Callable[..., Any]:
    """Call both, each with its own metadata; the result is that of `ours`."""

    def its_own(argument: Any) -> Any:
        return argument.shadow if isinstance(argument, MLAPortableMetadata) else argument

    def call(*arguments: Any, **named: Any) -> Any:
        result = ours(*arguments, **named)
        theirs(*map(its_own, arguments), **{name: its_own(value) for name, value in named.items()})
        return result

    return call


def layer(**arguments: Any) -> ShadowLayer | None:
    """The shadow of a layer with these arguments of its constructor; None unless shadow mode is on."""
    stock = _stock()
    return None if stock is None else ShadowLayer(stock.get_impl_cls()(**arguments))


def steps(kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> ShadowSteps | None:
    """The shadow of a builder; None unless shadow mode is on."""
    stock = _stock()
    return None if stock is None else ShadowSteps(stock.get_builder_cls()(kv_cache_spec, layer_names, vllm_config, device))
