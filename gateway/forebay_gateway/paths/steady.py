"""A background step that outlives what may pass: a full disk, a file that cannot be removed, a catalog without space.

Owns which errors those are, the pause after one, and how an operator sees it. A defect (any other exception), a damaged catalog
and one that failed still end the process (base/tasks): the next start recovers.
"""

import logging
from collections.abc import Awaitable, Callable

from forebay_gateway.catalog import is_damage
from forebay_gateway.core.errors import ForebayError
from forebay_gateway.paths.node import Node

log = logging.getLogger("forebay.steady")

RETRY_S_MIN, RETRY_S_MAX = 0.5, 15.0

Step = Callable[[], Awaitable[float | None]]


def steady(node: Node, name: str, step: Step) -> Step:
    """`step`, repeated after a growing pause where it fails by a known error; an alarm says so until it succeeds again."""
    alarm = f"work-{name}"
    pause_s = RETRY_S_MIN

    async def run() -> float | None:
        nonlocal pause_s
        try:
            answer = await step()
        except (ForebayError, OSError) as error:
            if is_damage(error) or node.catalog.is_failed:
                raise
            if alarm not in node.alarms:
                log.warning("background work fails and is tried again work=%s error=%s", name, error)
            node.alarms[alarm] = (f"background work {name!r} fails: {error}", "it is tried again by itself once that is mended")
            failed_s, pause_s = pause_s, min(RETRY_S_MAX, 2 * pause_s)
            return failed_s
        if node.alarms.pop(alarm, None) is not None:
            log.info("background work goes on work=%s", name)
        pause_s = RETRY_S_MIN
        return answer

    return run
