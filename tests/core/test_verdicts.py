"""The document that says for all nodes what goes to a tier: what follows on what, how long it gets, and what is none."""

import msgspec
import pytest

from forebay_gateway.core.errors import Unsupported
from forebay_gateway.core.verdicts import VERDICTS_MAX, RunVerdicts, Verdict, read_verdicts

RUN = "team/run"
GOES = Verdict(1, "s" * 8, True, node="a")
SKIPPED = Verdict(1, "s" * 8, False, "cadence", "b")


def test_only_a_skip_is_taken_back() -> None:
    assert SKIPPED.yields_to(GOES)
    assert not GOES.yields_to(SKIPPED)
    assert not GOES.yields_to(GOES)
    assert not SKIPPED.yields_to(SKIPPED)


def test_a_session_has_one_verdict() -> None:
    both = RunVerdicts(run=RUN).plus(SKIPPED).plus(Verdict(2, "t" * 8, True)).plus(GOES)
    assert [each.name for each in both.verdicts] == [(2, "t" * 8), (1, "s" * 8)]
    assert both.of((1, "s" * 8)) == GOES
    assert both.of((1, "t" * 8)) is None
    assert both.without([(1, "s" * 8)]).of((1, "s" * 8)) is None


def test_the_oldest_go_so_that_the_document_stays_short() -> None:
    many = RunVerdicts(run=RUN)
    for step in range(VERDICTS_MAX + 3):
        many = many.plus(Verdict(step, "s" * 8, False, "cadence: step 12345678 is newer and complete", "n" * 64))
    assert len(many.verdicts) == VERDICTS_MAX
    assert many.of((2, "s" * 8)) is None
    assert many.of((3, "s" * 8)) is not None
    assert len(many.to_json()) < 64 << 10


def test_it_is_read_as_it_was_written() -> None:
    written = RunVerdicts(run=RUN).plus(SKIPPED)
    assert read_verdicts(written.to_json(), RUN) == written


@pytest.mark.parametrize(
    "document",
    [
        b"",
        b"{",
        b"[" * 100_000,
        b"null",
        msgspec.json.encode({"format": "forebay.verdicts", "run": "another", "verdicts": []}),
        msgspec.json.encode({"format": "forebay.ledger", "run": RUN, "verdicts": []}),
        msgspec.json.encode({"format": "forebay.verdicts", "run": RUN, "verdicts": [[-1, "s", True]]}),
        msgspec.json.encode({"format": "forebay.verdicts", "run": RUN, "verdicts": [[1, "s", "goes"]]}),
    ],
)
def test_what_is_none_of_the_run_says_nothing(document: bytes) -> None:
    assert read_verdicts(document, RUN) is None


def test_a_newer_release_s_is_not_read() -> None:
    with pytest.raises(Unsupported, match="newer release"):
        read_verdicts(b'{"format": "forebay.verdicts.2", "run": "team/run", "verdicts": {}}', RUN)
