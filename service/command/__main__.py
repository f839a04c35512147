"""The program `automap`, from its start until its libraries are loaded, which takes a third of a second."""

from __future__ import annotations

import os
import signal
import sys

from service.command.collection import uncollected


def main() -> int:
    """Runs the command of the process's own words; returns the exit code."""
    _open_standard_streams()
    # Ctrl-C while libraries are loaded ends the program as it does others, without a traceback. Where it is ignored, as
    # behind nohup, it stays so.
    is_heard = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_heard:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    with uncollected():
        from service.command.main import main as run

    if is_heard:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return run()


def _open_standard_streams() -> None:
    """Opens /dev/null where the process has no stdin, stdout or stderr (`2>&-`).

    Python has None there, which cannot be written to; and the next file that is opened would get the number of the
    stream, so that what children write there would go into that file.
    """
    for name, flags, mode in (("stdin", os.O_RDONLY, "r"), ("stdout", os.O_WRONLY, "w"), ("stderr", os.O_WRONLY, "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, flags), mode))


if __name__ == "__main__":
    sys.exit(main())
