# SPDX-License-Identifier: Apache-2.0
"""Sparse MLA attention of one layer: a spec, the route that serves it, buffers that layers share, and the layer itself."""

from mla_portable.attention.buffers import StepBuffers
from mla_portable.attention.layer import SparseMLAAttention
from mla_portable.attention.prompts import HeadDims, PromptAttention
from mla_portable.attention.route_decision import RouteDecision, RoutePart, RouteVerdict, UnsupportedRoute
from mla_portable.attention.selections import SelectionMerge
from mla_portable.attention.slots import SlotAttention
from mla_portable.attention.spec import AttentionSpec

__all__ = [
    "AttentionSpec",
    "HeadDims",
    "PromptAttention",
    "RouteDecision",
    "RoutePart",
    "RouteVerdict",
    "SelectionMerge",
    "SlotAttention",
    "SparseMLAAttention",
    "StepBuffers",
    "UnsupportedRoute",
]
