"""The spec by which kda-core lists this planner. Its import needs no GPU and no process group."""

from kda_core import install
from kda_core.backend import PlannerSpec

SPEC = PlannerSpec(
    name="cp",
    abi=(
        2,
        10,
    ),  # the ABI that this package was written for, which may differ from that of the installed kda-core
    target="kda_cp.planner:ContextParallelPlanner",
    install=install.command("kda-cp"),
)
