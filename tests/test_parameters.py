# SPDX-License-Identifier: Apache-2.0
"""How a plugin reads what a vendor's function takes."""

from __future__ import annotations

import pytest
import torch

from mla_portable.kit.parameters import parameter_names


def plain(a, b, *, c=None): ...


def anything(*args, **kwargs): ...


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (plain, ("a", "b", "c")),
        (anything, None),
        (torch.ops.aten.relu.default, ("self",)),
        (torch.ops.aten.relu, ("self",)),
        (torch.relu, None),  # compiled
    ],
)
def test_names_are_read_where_they_can_be(function, names):
    assert parameter_names(function) == names
