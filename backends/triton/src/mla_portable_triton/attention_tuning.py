# SPDX-License-Identifier: Apache-2.0
"""The attention kernel's configuration for a request: those worth timing on its device, and the one that it is bound with.

`mla-portable tune` times the former and writes the fastest to a file of the user's own times. A request that is bound carries
it from there (`Request.configuration`); without one it is bound with what ships (`attention_configs`). Neither happens during a
call.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import asdict, astuple, fields
from typing import Final

from mla_portable.contracts import DeviceFacts, InvalidArgument, Request
from mla_portable.layouts import BF16, LAYOUTS
from mla_portable_triton.attention_configs import CONFIGS, AttentionConfig, attention_config, shared_memory
from mla_portable_triton.support import NAME
from mla_portable_triton.tile_rows import tile_arch

_MOST: Final = 24
"""Configurations to try: sparse_decode compiles each twice, whole and split, for every head count and layout."""
_NUM_STAGES: Final = (1, 2, 3)
"""One less is how many steps ahead rows are copied; with 2 there is one buffer, which is copied to between two steps."""
_ACCUMULATORS: Final = 128
"""Registers of a thread that [block_h, value width] float32 may take; with 256 every kernel spills."""
_TALLEST: Final = 64
_LEAST_TILE: Final = 16
_MOST_THREADS: Final = 1024
_NAMES: Final = tuple(field.name for field in fields(AttentionConfig))


def configurations(request: Request) -> list[dict[str, int]]:
    """What is worth a try for a request, at most 24, what ships first: tall tiles before flat ones, then those like it."""
    shipped = attention_config(tile_arch(request.device), request.kv_layout, request.num_heads)
    layout, device = request.kv_layout or BF16.name, request.device
    fitting = [config for config in _grid(device, layout, request.num_heads or 1) if _fits(config, layout, device)]
    fitting.sort(key=lambda config: (-config.block_h, _distance(config, shipped)))
    return [asdict(config) for config in dict.fromkeys([shipped, *fitting])][:_MOST]


def bound_config(request: Request) -> AttentionConfig:
    """What a primitive is bound with: the request's configuration, else what ships.

    Raises: InvalidArgument for a configuration that is none of this kernel, or does not fit the device.
    """
    if request.configuration is None:
        return attention_config(tile_arch(request.device), request.kv_layout, request.num_heads)
    configuration = dict(request.configuration)
    if set(configuration) != set(_NAMES):
        raise _refused(request, configuration, f"the names {', '.join(_NAMES)}")
    config, device, layout = AttentionConfig(**configuration), request.device, request.kv_layout or BF16.name
    tiles = (config.block_h, config.block_n)
    if not all(map(_is_power_of_two, (*tiles, config.num_warps))) or min(tiles) < _LEAST_TILE or config.num_stages < 1:
        limits = f"powers of two, tiles of at least {_LEAST_TILE}, and num_stages of at least 1"
        raise _refused(request, configuration, limits)
    if config.num_warps * device.warp_size > _MOST_THREADS:
        raise _refused(request, configuration, f"at most {_MOST_THREADS} threads, in warps of {device.warp_size}")
    if not _fits(config, layout, device):
        needs = f"at most {device.shared_memory} bytes of shared memory, not {shared_memory(config, layout, device.arch)}"
        raise _refused(request, configuration, needs)
    return config


def _grid(device: DeviceFacts, kv_layout: str, num_heads: int) -> list[AttentionConfig]:
    """Every cut that could be good: no taller than the heads, nor than the tallest that ships for a known architecture."""
    arch = tile_arch(device)
    tallest = CONFIGS[arch][kv_layout][-1][1].block_h if arch in CONFIGS and arch != "default" else _TALLEST
    heights = [height for height in (16, 32, 64) if height <= tallest and (height == 16 or height < 2 * num_heads)]
    if device.device_type == "cpu":  # the interpreter knows neither warps nor stages
        return [AttentionConfig(height, width, 1, 1) for height, width in itertools.product(heights, (64, 128, 256))]
    return [
        AttentionConfig(height, width, warps, stages)
        for height, width, warps, stages in itertools.product(heights, (16, 32, 64), (4, 8), _NUM_STAGES)
        if height * LAYOUTS[kv_layout].value_width <= _ACCUMULATORS * warps * device.warp_size
    ]


def _fits(config: AttentionConfig, kv_layout: str, device: DeviceFacts) -> bool:
    return not device.shared_memory or shared_memory(config, kv_layout, device.arch) <= device.shared_memory


def _distance(one: AttentionConfig, other: AttentionConfig) -> float:
    return sum(abs(math.log2(a / b)) for a, b in zip(astuple(one), astuple(other), strict=True))


def _is_power_of_two(value: int) -> bool:
    return value > 0 and value & (value - 1) == 0


def _refused(request: Request, configuration: Mapping[str, int], expected: str) -> InvalidArgument:
    return InvalidArgument(
        f"{NAME} / {request.primitive} on {request.device}",
        "tuned configuration",
        got=" ".join(f"{name}={value}" for name, value in configuration.items()) or "nothing",
        expected=expected,
    )
