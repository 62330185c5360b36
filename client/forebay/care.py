"""An operator's care of what a gateway stores: checks, repairs, and what goes.

Owns the calls. They are sent once and never repeated: each takes the gateway's one maintenance lock, or is told who holds it.
"""

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import grpc

from forebay import cancel
from forebay.connection import Connection, Stubs
from forebay.convert import record
from forebay.retry import RetryPolicy
from forebay.types import CopyReport, Fate, Finding, Garbage, Moved, Quarantined, ScrubStatus
from forebay_wire.v1 import admin_pb2 as pb

_ONCE = RetryPolicy(admit_timeout_s=0.0, retry_timeout_s=0.0)
_LONG_S = 24 * 3600.0  # a large checkpoint comes in, or goes

_Record = TypeVar("_Record")


class Care:
    """Of one gateway. Iterators end their command at the gateway when they are closed."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def verify(self, run: str, step: int, source: str = "all") -> Iterator[CopyReport]:
        """Read every byte of a checkpoint at `source` ("cache", a tier, "all"); a report a copy. Raises NotFound."""
        request = pb.VerifyRequest(run=run, step=step, source=source)
        return self._stream(lambda stubs: stubs.care.Verify, request, f"verify {run}/{step}", CopyReport)

    def scrub(self, action: str = "status", tier: str = "") -> ScrubStatus:
        """Start or stop the background reading ("start", "stop") of the cache, or of a tier; or ask how far all are."""
        request = pb.ScrubRequest(action=action, tier=tier)
        return self._call(lambda stubs: stubs.care.Scrub, request, f"scrub: {action}", ScrubStatus)

    def fsck(self, *, deep: bool = False) -> Iterator[Finding]:
        """Compare the catalog with files and tiers; `deep` reads every byte. Changes nothing."""
        return self._stream(lambda stubs: stubs.care.Fsck, pb.FsckRequest(deep=deep), "fsck", Finding)

    def repair(self, *, apply: bool = False, deep: bool = False) -> Iterator[Finding]:
        """What fsck finds, with what a repair does; with `apply` it is done, and each finding has its outcome."""
        return self._stream(lambda stubs: stubs.care.Repair, pb.RepairRequest(apply=apply, deep=deep), "repair", Finding)

    def quarantine(self, id: str = "") -> Iterator[Quarantined]:
        """Bad copies, all of them or one. Raises NotFound."""
        request = pb.ListQuarantineRequest(id=id)
        return self._stream(lambda stubs: stubs.care.ListQuarantine, request, "look into the quarantine", Quarantined)

    def release(self, id: str, *, force: bool = False, dry_run: bool = False) -> Quarantined:
        """Drop a bad copy; where no good one is known only with `force`; `dry_run` only says which.

        Raises NotFound, InvalidArgument.
        """
        request = pb.ReleaseQuarantineRequest(id=id, force=force, dry_run=dry_run)
        return self._call(lambda stubs: stubs.care.ReleaseQuarantine, request, f"release {id}", Quarantined)

    def collect(self, *, apply: bool = False, older_than_s: float = 86400.0) -> Iterator[Garbage]:
        """What is left over on the tiers; with `apply` what is ours and older than `older_than_s` is deleted."""
        request = pb.CollectRequest(apply=apply, older_than_s=older_than_s)
        return self._stream(lambda stubs: stubs.care.Collect, request, "gc", Garbage)

    def retain(self, run: str = "", *, apply: bool = False) -> Iterator[Fate]:
        """What retention's rules keep of a run ("": of all) on each tier and what goes; with `apply` it goes now.

        Raises Unavailable where a tier cannot be reached, or another node works on the run.
        """
        return self._stream(lambda stubs: stubs.care.Retain, pb.RetainRequest(run=run, apply=apply), "retain", Fate)

    def evict(self, run: str, step: int, *, dry_run: bool = False) -> Moved:
        """Drop from the cache what every required tier holds; `dry_run` only says what that is.

        Raises NotFound, InvalidArgument (pinned).
        """
        request = pb.EvictRequest(run=run, step=step, dry_run=dry_run)
        return self._call(lambda stubs: stubs.care.Evict, request, f"evict {run}/{step}", Moved)

    def warm_up(self, run: str, step: int) -> Moved:
        """Fetch into the cache what is not there. Raises NotFound, Unavailable."""
        request = pb.WarmupRequest(run=run, step=step)
        return self._call(lambda stubs: stubs.care.Warmup, request, f"warm up {run}/{step}", Moved)

    def drain(self) -> int:
        """Try every waiting copy now; how many there are."""
        answer = self._connection.call(lambda stubs: stubs.care.Drain, pb.DrainRequest(), "drain", policy=_ONCE)
        return int(answer.copies)

    def _call(self, method: Callable[[Stubs], Any], request: object, doing: str, cls: type[_Record]) -> _Record:
        return record(self._connection.call(method, request, doing, timeout_s=_LONG_S, policy=_ONCE), cls)

    def _stream(self, method: Callable[[Stubs], Any], request: object, doing: str, cls: type[_Record]) -> Iterator[_Record]:
        call: Any = self._connection.start(method, request, doing)
        with cancel.watching(call):
            try:
                for message in call:
                    yield record(message, cls)
            except grpc.RpcError as error:
                raise self._connection.translate(error, doing) from error
            finally:
                call.cancel()
