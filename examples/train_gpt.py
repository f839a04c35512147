"""Trains a small GPT by a plan, on the source text of a module of the standard library.

    automap search zoo:gpt:layers=4,hidden=128,heads=4,seq_len=128,vocab_size=256 --cluster 2xcpu --precision fp32 \\
        --global-batch 32 --target automap -o plan.json
    torchrun --standalone --nproc-per-node=2 examples/train_gpt.py plan.json checkpoint 100

The arguments are the plan, a folder for the checkpoint, and the number of steps. When it is run again, it continues
from the checkpoint. The plan decides everything about parallelism: the model below is written for one device.
"""

import collections
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from automap.plan import Plan
from automap.runtime.trainer import parallelize


class Attention(nn.Module):
    """Causal self-attention, whose queries, keys and values come from one product."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.size = hidden // heads
        self.c_attn, self.c_proj = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, sequence, hidden] to the same shape.

        The number of heads is written as -1, because a rank may have only some of them.
        """
        q, k, v = (y.unflatten(2, (-1, self.size)).transpose(1, 2) for y in self.c_attn(x).chunk(3, dim=2))
        return self.c_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """One transformer layer: attention and MLP, each after a norm and added to its input."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(hidden), Attention(hidden, heads), nn.LayerNorm(hidden)
        up, down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)
        self.mlp = nn.Sequential(collections.OrderedDict(c_fc=up, act=nn.GELU("tanh"), c_proj=down))

    def forward(self, x: Tensor) -> Tensor:
        """[batch, sequence, hidden] to the same shape."""
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Gpt(nn.Module):
    """A decoder whose modules are named as in `zoo:gpt`; the output layer shares the weight of the embedding."""

    def __init__(self, layers: int, hidden: int, heads: int, seq_len: int, vocab_size: int) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab_size, hidden), nn.Embedding(seq_len, hidden)
        self.h = nn.Sequential(*(Block(hidden, heads) for _ in range(layers)))
        self.ln_f, self.lm_head = nn.LayerNorm(hidden), nn.Linear(hidden, vocab_size, bias=False)
        self.lm_head.weight = self.wte.weight
        nn.init.normal_(self.wte.weight, std=0.02)
        self.register_buffer("positions", torch.arange(seq_len), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        """[batch, sequence] token ids to [batch, sequence, vocabulary] logits."""
        return self.lm_head(self.ln_f(self.h(self.wte(ids) + self.wpe(self.positions))))


def main(plan_file: str, folder: str, steps: int) -> None:
    """Trains for `steps` steps, from the checkpoint in `folder` if there is one, and writes a checkpoint there."""
    plan = Plan.from_json(json.loads(Path(plan_file).read_text()))
    sizes = {key: int(value) for key, value in (pair.split("=") for pair in plan.model.name.split(":")[1].split(","))}
    torch.manual_seed(0)
    trainer = parallelize(Gpt(**sizes), plan, f"zoo:{plan.model.name}")
    optimizer = torch.optim.AdamW(trainer.parameters(), lr=1e-3)
    done = trainer.load(folder, optimizer, done=0)["done"] if Path(folder).exists() else 0
    text = torch.frombuffer(bytearray(Path(collections.__file__).read_bytes()), dtype=torch.uint8)

    def batch(number: int) -> tuple[Tensor, Tensor]:
        """Inputs and labels of this process, of a random batch."""
        generator = torch.Generator().manual_seed(number)
        starts = torch.randint(len(text) - sizes["seq_len"], (plan.training.global_batch,), generator=generator)
        samples = text[starts[trainer.rows][:, None] + torch.arange(sizes["seq_len"] + 1)].long()
        return samples[:, :-1], samples[:, 1:]

    for step in range(done, done + steps):
        loss = trainer.step(*batch(step))
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0 and dist.get_rank() == 0:
            print(f"step {step}: loss {loss:.3f}", flush=True)
    loss, _ = trainer.evaluate(*batch(done + steps))
    if dist.get_rank() == 0:
        print(f"evaluated after {done + steps} steps: loss {loss:.3f}", flush=True)
    trainer.save(folder, optimizer, done=done + steps)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
