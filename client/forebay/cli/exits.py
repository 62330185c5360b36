"""Exit codes: the one table from errors to codes, and one clear line on standard error for each.

Owns what a shell sees of a failure. Commands raise; only `guarded` catches.
"""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator

from forebay.cli.output import printable
from forebay.errors import ForebayError, os_text

DONE, FAILED, USAGE, NOT_FOUND, CORRUPT, UNAVAILABLE, FULL, DENIED, TIMED_OUT = range(9)
INTERRUPTED = 130

CODES = {
    "invalid_argument": USAGE,
    "not_found": NOT_FOUND,
    "corrupt": CORRUPT,
    "incomplete": CORRUPT,
    "unavailable": UNAVAILABLE,
    "cache_full": FULL,
    "permission_denied": DENIED,
    "deadline_exceeded": TIMED_OUT,
}

HELP = (
    "Exit codes: 0 done; 1 failed; 2 usage; 3 not found; 4 corrupt or incomplete; 5 unavailable; 6 cache full; 7 denied; "
    "8 timed out; 130 interrupted."
)


class UsageError(Exception):
    """Arguments that do not go together."""


class Interrupted(Exception):
    """Ctrl-C in the middle of a command that knows what this leaves behind."""


NOTHING_CHANGED = "nothing was changed"


@contextlib.contextmanager
def on_interrupt(left: str | Callable[[], str]) -> Iterator[None]:
    """Around a command, or what it does at length: what a Ctrl-C in there leaves, for its one line."""
    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted(left if isinstance(left, str) else left()) from None


def guarded(command: Callable[[], int | None]) -> int:
    """Run a command and give its exit code; an error becomes one line, never a traceback."""
    try:
        return command() or DONE
    except ForebayError as error:
        again = f"; try again in about {error.retry_after_s:.0f} s" if (error.retry_after_s or 0.0) >= 1 else ""
        return _tell(f"{error.message}{again}", CODES.get(error.kind, FAILED))
    except UsageError as error:
        return _tell(str(error), USAGE)
    except Interrupted as error:
        return _tell(f"interrupted: {error}", INTERRUPTED)
    except KeyboardInterrupt:
        return _tell("interrupted: what it had already asked for may have been done", INTERRUPTED)
    except BrokenPipeError:
        # The reader of our output has gone; nothing more can be said, also not at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except PermissionError as error:
        return _tell(os_text(error), DENIED)
    except OSError as error:
        return _tell(os_text(error), FAILED)


def _tell(line: str, code: int) -> int:
    say_error(line)
    return code


def say_error(line: str) -> None:
    """One line on standard error, in the command's name; that of this moment, whoever has it replaced."""
    print(f"forebay: {printable(' '.join(line.split()))}", file=sys.stderr)
