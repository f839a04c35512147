"""The end of a process that trains: it waits for gloo's threads."""

import hashlib
import threading
import time
from pathlib import Path

from automap.runtime.trainer.entry import GLOO_THREAD, LOOK_S, MOST_LOOKS, await_gloo


def test_a_process_waits_until_the_threads_of_gloo_are_at_rest():
    ready, done = threading.Event(), []

    def work() -> None:
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(GLOO_THREAD)
        data = bytes(100_000_000)
        ready.set()
        # It runs without the interpreter, as gloo's threads do.
        done.append(hashlib.sha256(data).digest())

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    assert ready.wait(60), "the thread has not begun its work"
    await_gloo()
    assert done
    thread.join()


def test_threads_that_wait_do_not_delay_the_end():
    stop = threading.Event()

    def work() -> None:
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(GLOO_THREAD)
        stop.wait()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    began = time.perf_counter()
    await_gloo()
    took_s = time.perf_counter() - began
    stop.set()
    thread.join()
    assert took_s < MOST_LOOKS * LOOK_S / 2
