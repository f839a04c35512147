"""What the trainer must know of the modules of a network."""

from torch import nn

from automap.runtime.trainer.module_tree import unshared


class Network(nn.Module):
    """Blocks between an embedding and a head."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(4, 4), nn.Linear(4, 4, bias=False)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(4))


def test_blocks_that_share_a_weight_are_told_from_others():
    """FSDP2 takes each weight once: a block that shares one is left to the network around it."""
    network = Network()
    blocks = list(network.blocks)
    assert unshared(network, blocks) == blocks
    blocks[0][0].weight = blocks[0][1].weight
    assert unshared(network, blocks) == blocks, "a weight that one block has twice is its own"
    network.head.weight = network.table.weight
    assert unshared(network, blocks) == blocks, "so is one that no block has"
    blocks[1][0].weight = blocks[2][0].weight
    assert unshared(network, blocks) == [blocks[0], blocks[3]]
    network.head.weight = blocks[3][1].weight
    assert unshared(network, blocks) == [blocks[0]]
