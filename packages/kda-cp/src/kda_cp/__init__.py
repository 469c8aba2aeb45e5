"""Context parallelism for Kimi Delta Attention: a planner of kda-core.

Users call `kda_core.chunk_kda`. kda-core discovers this package through `kda_cp.plugin` and asks it whether a call should be
split. ``context_parallel=plan`` forces a `Plan`, which the caller constructs or gets from `make_plan`.
"""

from kda_cp.choose import make_plan, predict
from kda_cp.constants import Constants, Pass
from kda_cp.plan import Plan, Prediction

__all__ = ["Constants", "Pass", "Plan", "Prediction", "make_plan", "predict"]
