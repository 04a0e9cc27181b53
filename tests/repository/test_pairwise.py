"""The cases of tests with many parameters hold all pairs of values."""

from itertools import combinations, product

from tests.pairwise import cases


def test_each_two_values_meet_in_few_cases() -> None:
    values = [range(3), range(5), range(2), range(3)]
    found = cases(*values)
    assert found[0] == (0, 0, 0, 0) and len(found) <= 17
    for one, other in combinations(range(4), 2):
        met = {(case[one], case[other]) for case in found}
        assert met == set(product(values[one], values[other]))
