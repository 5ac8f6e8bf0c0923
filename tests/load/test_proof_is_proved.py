"""The proof of a load is proved: code that is broken in many ways is noticed, with every other test off."""

import pytest

from tests.load.proof_edits import EDITS, NOTHING, PROOF, Edit, noticed, outcome

_JOBS = sorted({edit.job for edit in EDITS})


@pytest.mark.one_in(10)
@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.what.replace(" ", "-"))
def test_broken_code_is_noticed(edit: Edit) -> None:
    """By the proof, or for what a save loses by the names; or nothing does, for the reason that is given."""
    assert noticed(edit) in edit.noticed.split("|")
    assert (edit.noticed == NOTHING) == bool(edit.why)


@pytest.mark.one_in(10)
@pytest.mark.parametrize("job", _JOBS)
def test_sound_code_is_not_blamed(job: str) -> None:
    """The same saves and loads, with nothing broken, raise nothing."""
    assert outcome(None, job) == ("", "")


def test_nearly_all_of_many_edits_are_noticed_by_the_proof() -> None:
    """At least 60 edits, of which the proof of the load itself notices at least 57."""
    by_proof = [edit for edit in EDITS if PROOF in edit.noticed.split("|")]
    assert (len(EDITS) >= 60, len(by_proof) >= 57) == (True, True)
