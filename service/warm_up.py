"""Compiles the kernels that Python calls, or reads them from their cache; run once by `make setup`."""

from automap import compile_all
from automap.phases import listening
from service.slow_phases import SlowPhases


def main() -> None:
    """Makes all kernels ready, and says what is done where that takes long."""
    with listening(SlowPhases()):
        compile_all.main()


if __name__ == "__main__":
    main()
