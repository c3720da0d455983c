"""What the library does is what it did when golden.json was written; see README.md."""

import pytest

from tests.golden.cases import CASES
from tests.golden.common import Case, has_compiler
from tests.golden.digest import difference, digests, read

PINNED = read()


def test_every_case_is_pinned_and_nothing_else():
    names = [case.name for case in CASES]
    assert len(names) == len(set(names))
    assert not set(names) - PINNED.keys(), "cases that golden.json lacks"
    assert not PINNED.keys() - set(names), "cases that are in golden.json only"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_as_before(case: Case):
    if case.compiled and not has_compiler():
        pytest.skip("needs a C++ compiler")
    what = difference(PINNED.get(case.name, {}), digests(case.run()))
    assert what is None, f"{case.name}: {what}"
