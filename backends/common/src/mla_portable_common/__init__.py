# SPDX-License-Identifier: Apache-2.0
"""Adapters of interfaces that libraries of several vendors have. No plugin: it owns no device and registers nothing."""

from mla_portable_common.libraries import Library

__all__ = ["Library"]
