"""A machine: what fits where. `planner`: memory needs from headers alone."""

from exl3.parallel.planner import Plan, plan

__all__ = ["Plan", "plan"]
