"""The session that all writers of one launch share, where the caller names none.

Owns the rule: FOREBAY_SESSION, else torchelastic, else Slurm, else (one writer) a fresh ULID, else an error.
"""

import os
from collections.abc import Mapping

from ulid import ULID

from forebay.errors import InvalidArgument

ENVIRONMENT = "FOREBAY_SESSION"
# torchrun's run id where none was given: the same for every launch, so it tells two launches apart no better than nothing.
_TORCHELASTIC_UNSET = "none"


def launch_session(environ: Mapping[str, str] = os.environ) -> str | None:
    """What the environment calls this launch; None where it does not say."""
    if named := environ.get(ENVIRONMENT):
        return named
    run_id = environ.get("TORCHELASTIC_RUN_ID", "")
    if run_id and run_id != _TORCHELASTIC_UNSET:
        return f"torchelastic-{run_id}-{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    if job_id := environ.get("SLURM_JOB_ID"):
        return f"slurm-{job_id}-{environ.get('SLURM_RESTART_COUNT', '0')}"
    return None


def save_session() -> str:
    """A new one for each save, whose name begins with the launch's: a step that a launch saves again replaces what it saved."""
    launch = launch_session()
    return f"{launch}-{ULID()}" if launch else str(ULID())


def default_session(writers: int, environ: Mapping[str, str] = os.environ) -> str:
    """The session of this launch. Raises InvalidArgument where several writers have nothing to share."""
    if launch := launch_session(environ):
        return launch
    if writers == 1:
        return str(ULID())
    raise InvalidArgument(
        f"{writers} writers share one session and none is set: pass session=, or set {ENVIRONMENT} to the same value for every "
        "writer and a new one for each launch (torchrun with --rdzv-id, and Slurm, set it by themselves)"
    )
