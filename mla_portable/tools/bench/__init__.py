# SPDX-License-Identifier: Apache-2.0
"""Measurements: a whole step (`step`), the planner (`plan`), the cost of dispatch (`dispatch`); `timing` is their clock."""
