"""A plan applied to the user's own network, by the names of its modules.

    from automap.runtime.trainer import parallelize

    trainer = parallelize(module, plan, "model.onnx")
    optimizer = torch.optim.AdamW(trainer.parameters(), lr=3e-4)
    loss = trainer.step(ids[trainer.rows], labels[trainer.rows])
    optimizer.step()
    optimizer.zero_grad()

The modules of this package import only `ir` and `automap`: they run where the user trains.
"""

from automap.runtime.trainer.entry import parallelize
from automap.runtime.trainer.graph_trainer import GraphTrainer
from automap.runtime.trainer.losses import IGNORED
from automap.runtime.trainer.module_trainer import ModuleTrainer
from automap.runtime.trainer.training_graph import training_graph

__all__ = ["IGNORED", "GraphTrainer", "ModuleTrainer", "parallelize", "training_graph"]
