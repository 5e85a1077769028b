# SPDX-License-Identifier: Apache-2.0
"""The registry: which implementation serves a primitive, here and now, and why not the others.

sources   finds plugins; plugins loads them, each by itself, through the registrar
facts     says what a device is; machine keeps what was found out about it
probe     tries an implementation on the problems of tiny; judge names what is wrong with the answer
policy    holds what users demand, by layer
select    chooses: a pure function of all that
registry  ties them together; process keeps the one of this process
"""

from mla_portable.registry.plugins import PluginReport
from mla_portable.registry.policy import Policy, use
from mla_portable.registry.probe import ProbeReport
from mla_portable.registry.process import get_registry, reset_registry
from mla_portable.registry.registry import Registry

__all__ = ["PluginReport", "Policy", "ProbeReport", "Registry", "get_registry", "reset_registry", "use"]
