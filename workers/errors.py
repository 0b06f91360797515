"""The errors that cross a process boundary, by what the driver does about them.

    DlmgridError
    ├── InputError          the grid, a file or an item is wrong: no retry, exit code 2 (or a row with its error)
    ├── OutOfMemoryError    retried with fewer samples in flight; the smaller number is recorded on the row
    └── TransientError      the worker is suspect: retried on a fresh actor

Anything else that escapes a worker is treated as transient: it counts towards the two deaths after which
an item is quarantined.
"""


class DlmgridError(Exception):
    """Base of every error this package raises on purpose. Its text is one line: what is wrong, then the remedy."""


class InputError(DlmgridError):
    """Something the user gave is wrong. Never retried."""


class OutOfMemoryError(DlmgridError):
    """The device has no room for this many samples in flight."""


class TransientError(DlmgridError):
    """The worker failed in a way that another attempt may not."""
