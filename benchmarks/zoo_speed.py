"""How long the zoo takes to build graphs of a hundred layers.

    python benchmarks/zoo_speed.py [WORD]

Prints seconds of processor time on one core: the first build in the process, and the best of ten. If WORD is given,
only models with this word in their name are built.
"""

import argparse
import platform
import time

from ir import zoo

SPECS = (
    "gpt:layers=100,hidden=1024,heads=16",
    "gpt:layers=96,hidden=12288,heads=96,seq_len=2048,vocab_size=51200",
    "llama:layers=100,hidden=1024,heads=16,kv_heads=4",
    "bert:layers=100,hidden=1024,heads=16",
    "vit:layers=100,hidden=1024,heads=16",
    "t5:layers=50,hidden=1024,heads=16",
    "moe:layers=100,hidden=1024,heads=16,kv_heads=4,experts=64,top_k=6,shared_ffn=512",
    "mixtral-8x7b",
    "resnet152",
    "vgg19",
)


def main() -> None:
    """Builds each graph eleven times."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("word", nargs="?", default="", help="build only models with this word in their name")
    word = parser.parse_args().word
    print(f"{platform.processor() or platform.machine()}, Python {platform.python_version()}")
    for spec in (spec for spec in SPECS if word in spec):
        spent = []
        for _ in range(11):
            began = time.process_time()
            graph = zoo.build(spec)
            spent.append(time.process_time() - began)
        print(f"{spec:90} first {spent[0]:.3f} s  best {min(spent[1:]):.3f} s  {len(graph.operators)} operators")


if __name__ == "__main__":
    main()
