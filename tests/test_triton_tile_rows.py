# SPDX-License-Identifier: Apache-2.0
"""Tiles are chosen by the shared memory that a device reports: what is bound fits it, and is no smaller than it has to be.

`ci/compile` holds what every kernel takes against its device.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from machines import PROFILES

from mla_portable.contracts import DeviceFacts
from mla_portable_triton import index_forms
from mla_portable_triton.attention_configs import CONFIGS as ATTENTION
from mla_portable_triton.attention_configs import attention_config, shared_memory
from mla_portable_triton.kernels import index_keys, indexer_logits, masked_prefill
from mla_portable_triton.tile_rows import tile_arch

A100 = PROFILES["a100-80g"].device_facts()
KIB_99 = ("a10", "rtx3090", "l40s", "rtx4090")
TABLES = {
    "attention": ATTENTION,
    "masked_prefill": masked_prefill.CONFIGS,
    "indexer's decode": indexer_logits.DECODE,
    "indexer's prefill": indexer_logits.PREFILL,
}


@pytest.mark.parametrize("slug", ["a100-80g", *KIB_99, "h100", "b200", "rtx5090"])
def test_a_known_device_has_the_rows_of_its_architecture(slug: str) -> None:
    facts = PROFILES[slug].device_facts()
    assert tile_arch(facts) == facts.arch


@pytest.mark.parametrize(
    ("arch", "kib", "row"),
    [
        ("sm80", 163, "sm80"),
        ("sm80", 99, "sm86"),
        ("sm80", 64, "default"),
        ("sm87", 163, "sm80"),
        ("sm88", 99, "sm86"),
        ("sm121", 99, "sm120"),
        ("sm103", 227, "sm100"),
        ("sm70", 96, "default"),
        ("gfx950", 64, "default"),
        ("ivcore11", 128, "ivcore11"),
    ],
)
def test_the_reported_shared_memory_decides(arch: str, kib: int, row: str) -> None:
    assert tile_arch(replace(A100, arch=arch, shared_memory=kib << 10)) == row


def test_a_device_that_reports_nothing_has_its_own_rows() -> None:
    assert [tile_arch(replace(A100, arch=arch, shared_memory=0)) for arch in ("sm80", "sm90", "cpu")] == ["sm80", "sm90", "cpu"]


@pytest.mark.parametrize("table", TABLES)
def test_sm80_to_sm89_have_rows_of_their_own(table: str) -> None:
    assert {"sm80", "sm86", "sm89"} <= TABLES[table].keys(), "the default is made for 48 KiB"


@pytest.mark.parametrize("layout", ATTENTION["sm80"])
@pytest.mark.parametrize("heads", [16, 64, 128])
def test_attention_is_bound_with_what_the_device_holds(layout: str, heads: int) -> None:
    """Of an A100 with less shared memory as of an A100: never more bytes than are there, never one stage where two fit."""
    for kib in (99, 163):
        device = replace(A100, shared_memory=kib << 10)
        config = attention_config(tile_arch(device), layout, heads)
        assert shared_memory(config, layout, device.arch) <= device.shared_memory
        assert config.num_stages >= 2


@pytest.mark.parametrize("slug", KIB_99)
def test_a_multiprocessor_has_eight_warps_of_attention(slug: str) -> None:
    """By two programs of four or one of eight; of BF16 rows and 32 heads two do not fit, and eight warps take half as many
    instructions again."""
    device = PROFILES[slug].device_facts()
    for layout, rows in ATTENTION[device.arch].items():
        for _, config in rows:
            programs = (device.shared_memory + 1024) // (shared_memory(config, layout, device.arch) + 1024)
            if config.block_h < 32 or layout.startswith("fp8"):
                assert min(programs, 8 // config.num_warps) * config.num_warps == 8, (layout, config)


def indexer_tiles(device: DeviceFacts, form: int) -> list[index_keys.Tiles]:
    return [index_keys.tiles_of(table, tile_arch(device), form) for table in (indexer_logits.DECODE, indexer_logits.PREFILL)]


@pytest.mark.parametrize("slug", KIB_99)
def test_fp8_keys_of_the_indexer_have_more_positions_than_the_default(slug: str) -> None:
    device = PROFILES[slug].device_facts()
    form = index_forms.form_of(True, device.arch, device.has_fp8_conversion, 64)
    assert all(tiles.positions >= 128 for tiles in indexer_tiles(device, form))
