"""All cases: small runs of what the library does, by its public names only."""

from tests.golden import blocks, deployed, maths, networks, recurrent, zoo
from tests.golden.common import Case

CASES: list[Case] = [
    case for part in (maths, blocks, networks, recurrent, deployed, zoo) for case in part.CASES
]
