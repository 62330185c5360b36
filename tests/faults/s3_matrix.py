"""Every call to an object store against every fault: what must come of it. Pure tables; the tests run them.

A cell is tried twice. `lasts`: the fault stays; the act fails with the class given here, after as many requests as are given.
`once`: the fault strikes one request; the act succeeds where a retry may help.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from aiohttp import web

from faults.proxy import FOREVER, Fault, call_of
from faults.results import SOAK
from forebay_gateway.core.errors import (
    AlreadyExists,
    Corrupt,
    ForebayError,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    Unavailable,
)

ATTEMPTS = 3  # of every retry policy in these tests


@dataclass(frozen=True)
class Outcome:
    """`error` None: the act succeeds. `requests` None: they cannot all be seen at the proxy."""

    error: type[ForebayError] | None
    requests: int | None
    helps: bool = False  # whether the same fault, striking once, is overcome by a retry


PASSES = Outcome(None, 1, True)
RETRIED = Outcome(Unavailable, ATTEMPTS, True)


def refused_with(error: type[ForebayError]) -> Outcome:
    """No use in asking again."""
    return Outcome(error, 1)


@dataclass(frozen=True)
class Kind:
    """A fault by name, and what it means to a call that is not told otherwise."""

    name: str
    group: str
    make: dict[str, object]
    outcome: Outcome = RETRIED
    only: frozenset[str] = frozenset()  # calls; empty: all
    but: frozenset[str] = frozenset()

    def fault(self, when: Callable[[web.Request], bool], times: int) -> Fault:
        """To be given to the proxy."""
        return Fault(when=when, times=times, **{"kind": self.name, **self.make})  # type: ignore[arg-type]


HEADS = frozenset({"HeadObject", "HeadBucket"})
NO_BODY_SENT = frozenset({"HeadObject", "HeadBucket", "GetObject", "DeleteObject", "AbortMultipartUpload"})
NO_BODY_SENT |= {"ListObjectsV2", "ListMultipartUploads", "CreateMultipartUpload"}
XML_ANSWERED = frozenset({"CreateMultipartUpload", "CompleteMultipartUpload", "ListObjectsV2", "ListMultipartUploads"})
XML_ANSWERED |= {"DeleteObjects"}
WITH_ETAG = frozenset({"PutObject", "UploadPart", "CompleteMultipartUpload", "HeadObject", "GetObject"})


def _answer(name: str, group: str, status: int, code: str, outcome: Outcome = RETRIED, after: bool = False) -> Kind:
    return Kind(name, group, {"kind": "answer", "status": status, "code": code, "after": after}, outcome)


KINDS = (
    Kind("refused", "connection", {}, Outcome(Unavailable, None, True)),
    Kind("reset-before", "connection", {}),
    Kind("reset-inside", "connection", {}, but=NO_BODY_SENT),
    Kind("reset-after", "connection", {}),
    Kind("lose", "silence", {}),
    Kind("stall", "silence", {}),
    Kind("stall-inside", "silence", {}, but=NO_BODY_SENT),
    Kind("slow", "silence", {}, PASSES),
    _answer("400", "refusal", 400, "InvalidRequest", refused_with(InvalidArgument)),
    _answer("403", "refusal", 403, "AccessDenied", refused_with(PermissionDenied)),
    _answer("404", "refusal", 404, "NoSuchKey"),
    _answer("409", "refusal", 409, "OperationAborted"),
    _answer("412", "refusal", 412, "PreconditionFailed"),
    _answer("429", "overload", 429, "TooManyRequests"),
    _answer("500", "overload", 500, "InternalError"),
    _answer("503", "overload", 503, "SlowDown"),
    _answer("500-after", "overload", 500, "InternalError", after=True),
    Kind("200-error", "broken answer", {"kind": "answer", "status": 200, "code": "InternalError"}, but=HEADS),
    Kind("cut", "broken answer", {}, only=XML_ANSWERED | {"GetObject"}),
    Kind("empty", "broken answer", {}, only=XML_ANSWERED | WITH_ETAG),
    Kind("foreign", "broken answer", {}, only=XML_ANSWERED | WITH_ETAG),
    Kind("bare", "broken answer", {}, only=XML_ANSWERED),
    Kind("etag", "wrong answer", {}, PASSES, only=WITH_ETAG),
    Kind("checksum", "wrong answer", {}, PASSES, only=WITH_ETAG),
    Kind("undeleted", "per key", {"code": "InternalError"}, PASSES, only=frozenset({"DeleteObjects"})),
    Kind("damage", "wrong answer", {}, only=frozenset({"GetObject"})),
    Kind("stale-absent", "wrong answer", {}, refused_with(NotFound), only=frozenset({"HeadObject"})),
    Kind("stale-size", "wrong answer", {}, refused_with(Corrupt), only=frozenset({"HeadObject"})),
    Kind("stale-bytes", "wrong answer", {}, refused_with(Corrupt), only=frozenset({"HeadObject"})),
)


@dataclass(frozen=True)
class Act:
    """A verb of the tier that makes the call; `special`: where its outcome is not the usual one."""

    name: str
    call: str
    special: dict[str, Outcome] = field(default_factory=dict)
    where: Callable[[web.Request], bool] = lambda request: True

    def hits(self, request: web.Request) -> bool:
        """Whether the fault is meant for this request."""
        return call_of(request) == self.call and self.where(request)


ACTS = (
    # A store that echoes another checksum than was sent has received other bytes.
    Act("put", "PutObject", {"checksum": refused_with(Corrupt)}),
    Act("document", "PutObject", {"checksum": refused_with(Corrupt)}),
    Act(
        "create",
        "PutObject",
        {
            "412": refused_with(AlreadyExists),
            "checksum": refused_with(Corrupt),
            # Done by the first request, and found so when looked at.
            "lose": Outcome(None, 1, True),
            "500-after": Outcome(None, 1, True),
        },
    ),
    Act("large", "CreateMultipartUpload"),
    Act(
        "large",
        "UploadPart",
        # What is wrong shows at the completion, and the whole put begins anew.
        {"etag": Outcome(Unavailable, 1, True), "checksum": refused_with(Corrupt)},
        where=lambda request: request.query.get("partNumber") == "2",
    ),
    Act(
        "large",
        "CompleteMultipartUpload",
        {
            "lose": PASSES,
            "500-after": PASSES,
            "cut": PASSES,
            "bare": PASSES,
            "empty": RETRIED,
            "checksum": refused_with(Corrupt),
        },
    ),
    Act("abort", "AbortMultipartUpload"),
    Act("verify", "HeadObject", {"404": refused_with(NotFound), "checksum": refused_with(Corrupt)}),
    Act("get", "GetObject", {"404": refused_with(NotFound), "checksum": RETRIED}),
    Act(
        "read",
        "GetObject",
        # Bytes come with every try, so the count begins anew. A chunk is asked for twice before it is called bad.
        {"404": refused_with(NotFound), "cut": Outcome(Unavailable, None, True), "damage": Outcome(Corrupt, 2, True)},
    ),
    Act("delete", "DeleteObject"),
    Act(
        "delete many",
        "DeleteObjects",
        # What the answer does not call deleted is deleted one by one; so is all where the store has no such call.
        {"400": PASSES, "403": PASSES, "empty": PASSES, "foreign": PASSES, "bare": PASSES},
    ),
    Act("list", "ListObjectsV2"),
    Act("sweep", "ListMultipartUploads"),
    Act("first write", "HeadBucket", {"404": refused_with(InvalidArgument)}),
)


@dataclass(frozen=True)
class Cell:
    act: Act
    kind: Kind

    @property
    def outcome(self) -> Outcome:
        """What must come of it while the fault lasts."""
        return self.act.special.get(self.kind.name, self.kind.outcome)

    def fault(self, lasts: bool) -> Fault:
        """For the proxy."""
        return self.kind.fault(self.act.hits, FOREVER if lasts else 1)

    def __str__(self) -> str:
        return f"{self.act.call}({self.act.name}) x {self.kind.name}"


def _applies(kind: Kind, call: str) -> bool:
    return call not in kind.but and (not kind.only or call in kind.only)


def cells() -> list[Cell]:
    """All; without FOREBAY_SOAK=1 one fault of each group for each act, another one for each."""
    found = []
    for number, act in enumerate(ACTS):
        fitting = [kind for kind in KINDS if _applies(kind, act.call)]
        if not SOAK:
            groups: dict[str, list[Kind]] = {}
            for kind in fitting:
                groups.setdefault(kind.group, []).append(kind)
            fitting = [kinds[number % len(kinds)] for kinds in groups.values()]
        found += [Cell(act, kind) for kind in fitting]
    return found


PROBED = ("ListObjectsV2", "HeadBucket", "PutObject", "GetObject", "CreateMultipartUpload", "UploadPart")
PROBED += ("CompleteMultipartUpload", "HeadObject", "DeleteObject", "ListMultipartUploads")


def probe_cells() -> list[tuple[str, Kind]]:
    """Each call of a probe with each fault; without FOREBAY_SOAK=1 one that can only be told by looking at the answer for each
    that has one, and a few others."""
    found = [(call, kind) for call in PROBED for kind in KINDS if _applies(kind, call)]
    if SOAK:
        return found
    broken = {call: (call, kind) for call, kind in found if kind.group == "broken answer" and kind.name in ("empty", "bare")}
    return [*broken.values(), *[each for each in found if each[1].group in ("connection", "refusal")][::9]]
