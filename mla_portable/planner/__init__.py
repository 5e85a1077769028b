# SPDX-License-Identifier: Apache-2.0
"""The planner: one frozen StepPlan per engine step, shared by all layers, made without reading anything back."""

from mla_portable.planner.config import PlannerConfig
from mla_portable.planner.planner import Planner

__all__ = ["Planner", "PlannerConfig"]
