"""Problems to learn on: random models on random clusters, each from a seed.

A seed draws a family of models, a cluster of 1 to 1,024 devices, sizes that fill some share of its memory, a batch,
precision, optimizer, trainer and, in a minority, hints. Half of the problems are transformers of usual sizes on 4 to
512 devices. Nothing is filtered by what a search finds: some problems fit into no memory.

Each problem belongs to one split. What is held out was chosen before anything was trained:

- `unseen-family`: encoders of text (`bert`, `encoder`), mixtures of experts with a shared dense branch
  (`shared-experts`), and convolutional pyramids with skips (`pyramid`), in whatever size; encoders of
  images (`vit`) and encoders with a decoder (`t5`, `encoder-decoder`) are trained on;
- `unseen-size`: models of other families with more than 40 blocks, and clusters of more than 256 devices or of a prime
  number of devices above 7;
- `train`: all others.

No generated model has the family, depth and width of a model that the zoo names (`ir.zoo.NAMED`), so that real models
can be held out as well.
"""

from agents.learning.problems.generate import (
    SPLITS,
    VERSION,
    GeneratedProblem,
    Outline,
    Split,
    generate,
    outline,
    problem_digest,
)

__all__ = ["SPLITS", "VERSION", "GeneratedProblem", "Outline", "Split", "generate", "outline", "problem_digest"]
