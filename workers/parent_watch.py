"""Processes that end when the one that started them is gone, so that a killed command leaves nothing computing."""

from __future__ import annotations

import os
import threading
import time

SECONDS_BETWEEN_LOOKS = 1.0


def end_with_parent() -> None:
    """End this process, at once and with status 1, as soon as its parent has ended; looked at once a second."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(SECONDS_BETWEEN_LOOKS)
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
