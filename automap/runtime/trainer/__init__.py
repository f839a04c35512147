"""A plan applied to the user's own network, by the names of its modules.

    from automap.runtime.trainer import parallelize

    trainer = parallelize(module, plan, "model.onnx")
    optimizer = torch.optim.AdamW(trainer.parameters(), lr=3e-4)
    loss = trainer.step(ids[trainer.rows], labels[trainer.rows])
    optimizer.step()
    optimizer.zero_grad()

The modules of this package import only `ir` and `automap`: they run where the user trains.
"""

from automap.runtime.trainer.module_trainer import IGNORED, ModuleTrainer, parallelize
from automap.runtime.trainer.training_graph import training_graph

__all__ = ["IGNORED", "ModuleTrainer", "parallelize", "training_graph"]
