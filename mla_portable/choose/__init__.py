# SPDX-License-Identifier: Apache-2.0
"""The registry: which implementation serves a primitive, here and now, and why not the others."""

from mla_portable.choose.plugins import PluginReport
from mla_portable.choose.policy import Policy, use
from mla_portable.choose.probe import ProbeReport
from mla_portable.choose.registry import Registry, get_registry, reset_registry

__all__ = ["PluginReport", "Policy", "ProbeReport", "Registry", "get_registry", "reset_registry", "use"]
