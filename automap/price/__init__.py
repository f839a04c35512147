"""What a plan costs: compiled tables of a problem, kernels over them, schedule, memory and the estimate.

The compiled kernels are kept in a folder of the user's cache that is named after all their sources: numba itself looks
only at the file of each function and would reuse a kernel whose callee has changed.
"""

import hashlib
import os
import tempfile
from pathlib import Path

import numba
import platformdirs

_SOURCES = (
    "tables",
    "shapes",
    "compiled",
    "vectors",
    "communication",
    "gemm",
    "attention",
    "placements",
    "operators",
    "kept",
    "gradients",
    "host",
    "measured",
    "sharded",
    "exchanges",
    "unit",
    "schedule",
    "combine",
    "arrays",
    "legality",
    "memo",
    "cuts",
    "ties",
    "desk",
    "laid",
    "batch",
    "floors",
    "walk",
    "draw",
    "moves",
)


def _digest() -> str:
    here = Path(__file__).parent
    sources = [here / f"{name}.py" for name in _SOURCES] + [
        here.parent / "order.py",
        here.parent.parent / "ir" / "factors.py",
    ]
    text = b"".join(path.read_bytes() for path in sources)
    return hashlib.sha256(text + numba.__version__.encode()).hexdigest()[:16]


def _cache_folder() -> Path:
    """NUMBA_CACHE_DIR, else the user's cache; a temporary folder where that cannot be written."""
    name = f"kernels-{_digest()}"
    roots = [Path(numba.config.CACHE_DIR or platformdirs.user_cache_path("automap")), Path(tempfile.gettempdir())]
    for root in roots:
        folder = root / name
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        # numba unpickles what lies here: a folder that somebody else made is not trusted.
        if os.access(folder, os.W_OK) and folder.stat().st_uid in (os.getuid(), 0):
            return folder
    return Path(tempfile.mkdtemp(prefix="automap-kernels-"))


numba.config.CACHE_DIR = str(_cache_folder())
