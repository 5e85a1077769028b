# SPDX-License-Identifier: Apache-2.0
"""Baselines for `mla-portable bench kernels`: libraries called directly. The plugin loads them only when a benchmark asks."""
