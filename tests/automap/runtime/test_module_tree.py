"""What the trainer must know of the modules of a network."""

from torch import nn

from automap.runtime.trainer.module_tree import is_called, unit_paths, unshared


class Network(nn.Module):
    """Blocks between an embedding and a head."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(4, 4), nn.Linear(4, 4, bias=False)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(4))


def test_blocks_in_lists_of_lists_and_in_dictionaries_are_found():
    """Neither is called, so that neither is a block: hooks of FSDP2 and code that runs again would never run there."""
    network = Network()
    assert unit_paths(network) == [f"blocks.{number}" for number in range(4)]
    inner = nn.ModuleDict({"wte": network.table, "h": network.blocks, "act": nn.GELU()})
    decoder = nn.ModuleDict({"transformer": inner, "lm_head": network.head})
    assert unit_paths(decoder) == ["lm_head", "transformer.wte", *(f"transformer.h.{number}" for number in range(4))]
    lists = nn.ModuleList(nn.ModuleList(nn.Linear(4, 4) for _ in range(2)) for _ in range(2))
    assert unit_paths(nn.ModuleList([lists])) == ["0.0.0", "0.0.1", "0.1.0", "0.1.1"]
    assert [is_called(part) for part in (network.blocks, inner, network.head)] == [False, False, True]


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
