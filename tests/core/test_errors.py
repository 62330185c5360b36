"""Errors cross from a mover to the front and keep their kind, sentence and retry time."""

import pytest

from forebay_gateway.core import errors
from forebay_gateway.core.errors import CacheFull, Corrupt, ForebayError, Incomplete, MissingPart, from_record, to_record

TRAVELLERS = [
    errors.InvalidArgument,
    errors.NotFound,
    errors.AlreadyExists,
    errors.Incomplete,
    errors.Corrupt,
    errors.CacheFull,
    errors.Unavailable,
    errors.PermissionDenied,
    errors.DeadlineExceeded,
    errors.Unsupported,
]


def all_kinds(cls: type[ForebayError]) -> set[type[ForebayError]]:
    return {cls}.union(*(all_kinds(sub) for sub in cls.__subclasses__()))


def test_every_kind_of_the_module_is_tested_here() -> None:
    own = {cls for cls in all_kinds(ForebayError) if cls.__module__ == errors.__name__}
    assert own == {*TRAVELLERS, ForebayError, errors.StartupError, errors.Damaged, errors.DiskFull, errors.DiskFailed}
    assert len({cls.kind for cls in own}) == len(own) - 3
    assert errors.DiskFull.kind == errors.CacheFull.kind  # a caller acts on it as on any full cache
    assert errors.DiskFailed.kind == errors.Unavailable.kind  # as on anything that is away
    assert errors.Damaged.kind == errors.StartupError.kind  # what is to be done is said alike


@pytest.mark.parametrize("cls", TRAVELLERS)
@pytest.mark.parametrize("retry_after_s", [None, 2.5])
def test_round_trip(cls: type[ForebayError], retry_after_s: float | None) -> None:
    error = cls("the tier is away", retry_after_s=retry_after_s, tier="pfs", attempt=3)
    again = from_record(to_record(error))
    assert type(again) is cls
    assert str(again) == str(error) == "the tier is away tier=pfs attempt=3"
    assert (again.sentence, again.retry_after_s) == ("the tier is away", retry_after_s)
    assert again.details == {"tier": "pfs", "attempt": "3"}


def test_a_subclass_crosses_as_its_kind() -> None:
    class Full(errors.Unavailable):
        """No kind of its own."""

    assert type(from_record(to_record(Full("no space left", tier="pfs")))) is errors.Unavailable


@pytest.mark.parametrize("error", [KeyError("x"), OSError(5, "Input/output error"), ValueError("odd")])
def test_what_is_not_ours_becomes_internal_and_keeps_its_type_name(error: Exception) -> None:
    again = from_record(to_record(error))
    assert type(again) is ForebayError
    assert again.kind == "internal"
    assert type(error).__name__ in str(again)


def test_an_unknown_kind_is_internal() -> None:
    assert type(from_record(errors.ErrorRecord("of-tomorrow", "text"))) is ForebayError


def test_incomplete_names_what_is_missing() -> None:
    missing = (MissingPart(1), MissingPart(2, ("a", "b"), "open"))
    assert Incomplete("two parts are missing", missing=missing).missing == missing


def test_messages_are_a_sentence_and_then_pairs() -> None:
    assert str(CacheFull("no space", retry_after_s=1.0, wanted_bytes=5)) == "no space wanted_bytes=5"
    assert str(Corrupt("differs")) == "differs"
