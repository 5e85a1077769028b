# SPDX-License-Identifier: Apache-2.0
"""docs/nvidia.md names what the plugin has: implementations, providers in their order, environment variables."""

from __future__ import annotations

from pathlib import Path

import mla_portable_nvidia
from mla_portable.choose import Registry
from mla_portable_nvidia.flashmla.discovery import LIBRARY_VARIABLE, PROVIDERS
from mla_portable_nvidia.flashmla.support import TRUNCATION_VARIABLE
from mla_portable_nvidia.machine import PROVIDER_VARIABLE
from mla_portable_nvidia.native.runtime.images import VARIABLE as CACHE_VARIABLE

PAGE = (Path(__file__).parents[2] / "docs" / "nvidia.md").read_text()


def test_every_implementation_is_in_the_table_of_its_primitive():
    rows = [line for line in PAGE.splitlines() if line.startswith("| `")]
    for implementation in Registry(plugins=[("nvidia", mla_portable_nvidia)], environ={}).implementations():
        mine = [line for line in rows if line.startswith(f"| `{implementation.primitive}`")]
        assert any(f"`{implementation.name}`" in row for row in mine), implementation.name


def test_providers_are_listed_in_the_order_of_asking():
    table = PAGE[PAGE.index("| name | found by |") :].split("\n\n")[0]
    assert tuple(line.split("`")[1] for line in table.splitlines()[2:]) == PROVIDERS


def test_every_variable_is_explained():
    for variable in (PROVIDER_VARIABLE, LIBRARY_VARIABLE, TRUNCATION_VARIABLE, CACHE_VARIABLE):
        assert f"| `{variable}` |" in PAGE
