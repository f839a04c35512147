"""Imported once by the process that ranks are forked from: with the compiled price, which takes seconds to load."""

import runtime_ranks

from automap.price.plan_reader import lower_plan
from ir import zoo

_problem = runtime_ranks.make_problem(
    zoo.build("vgg:convolutions=1,width=4,ffn=4,image_size=4"), 1, 1, {"fix": {"pp": 1}}
)
lower_plan(runtime_ranks.expert_plan(_problem, count=1), runtime_ranks.Evaluator(_problem))
