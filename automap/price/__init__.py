"""What a plan costs: compiled tables of a problem, kernels over them, schedule, memory and the estimate.

The compiled kernels are kept in a folder of the user's cache that is named after all their sources: numba itself looks
only at the file of each function and would reuse a kernel whose callee has changed.
"""

import hashlib
from pathlib import Path

import numba
import platformdirs

_SOURCES = ("tables", "communication", "kernels", "schedule", "combine", "ahead")


def _digest() -> str:
    here = Path(__file__).parent
    sources = [here / f"{name}.py" for name in _SOURCES] + [here.parent.parent / "ir" / "factors.py"]
    text = b"".join(path.read_bytes() for path in sources)
    return hashlib.sha256(text + numba.__version__.encode()).hexdigest()[:16]


numba.config.CACHE_DIR = str(platformdirs.user_cache_path("automap") / f"kernels-{_digest()}")
