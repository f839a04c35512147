"""A plan as a sequence of decisions: gymnasium environments over `automap.space.space.PlanSpace`.

    gymnasium.make("automap/Hybrid-v0", problem=problem)

makes one of them by its name: `automap/Hybrid-v0`, `automap/Sharding-v0`, `automap/Replication-v0` or
`automap/Pipeline-v0`; and `automap/Placement-v0` over the placements of an `automap.gnn.problem.GnnProblem`. Each
stands in a module of its name, such as `envs.hybrid`, which is imported when one is made.
"""

import gymnasium

for _name in ("Hybrid", "Sharding", "Replication", "Pipeline", "Placement"):
    if f"automap/{_name}-v0" not in gymnasium.registry:
        gymnasium.register(f"automap/{_name}-v0", f"envs.{_name.lower()}:{_name}Env")
