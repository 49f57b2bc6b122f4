"""What the planner of a job stores for its successor after a restart of the scheduler."""

from typing import Literal

from pydantic import BaseModel, ConfigDict

from collapipe.allocation import RoundPlan
from collapipe.planning.knowledge import Knowledge


class PlannerState(BaseModel):
    """The stored state of a planner."""

    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="constants")

    version: Literal[5] = 5
    """Format version. Increase it when an older document can no longer be read."""
    strategy: str
    knowledge: Knowledge
    current_plans: RoundPlan
    """The plans of the last committed round; empty before the first one."""
