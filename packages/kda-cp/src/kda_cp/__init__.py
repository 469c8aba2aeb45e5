"""Context parallelism for Kimi Delta Attention, a planner of kda-core.

Users call `kda_core.chunk_kda`; kda-core finds this package through `kda_cp.plugin` and asks it where a call would gain by
being split. A `Plan`, made by hand or by `make_plan`, is forced by ``context_parallel=plan``.
"""

from kda_cp.constants import Constants, Pass
from kda_cp.plan import Plan, Prediction, make_plan, predict

__all__ = ["Constants", "Pass", "Plan", "Prediction", "make_plan", "predict"]
