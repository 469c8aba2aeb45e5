"""What kda-core reads to list this planner. Importing it needs no GPU and no process group."""

from kda_core import install
from kda_core.backend import PlannerSpec

SPEC = PlannerSpec(
    name="cp",
    abi=(2, 0),  # what this package was written for, not what kda-core happens to have
    target="kda_cp.planner:ContextParallelPlanner",
    install=install.command("kda-cp"),
)
