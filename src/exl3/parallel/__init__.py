"""A machine: what fits where. `planner`: memory needs from headers alone, on one device or several."""

from exl3.parallel.planner import DevicePlan, Plan, plan

__all__ = ["DevicePlan", "Plan", "plan"]
