# SPDX-License-Identifier: Apache-2.0
"""Measurements: a whole step (`step`), kernels side by side (`kernels`), configurations (`tune`); `timing` is their clock."""
