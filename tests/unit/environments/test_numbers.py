"""Numbers as chat models write them."""

import pytest

from environments.numbers import last_number, numbers


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("7", [7]),
        ("7.", [7]),
        ("**7**", [7]),
        ("$7", [7]),
        ("\\boxed{12}", [12]),
        ("7,000", [7000]),
        ("1,234,567.5", [1234567.5]),
        ("1,2,3", [1, 2, 3]),
        ("12,34", [12, 34]),
        ("-7", [-7]),
        ("is \u22123", [-3]),
        ("(-4)", [-4]),
        ("+4", [4]),
        ("5-3", [5, 3]),
        ("5 - 3 = 2", [5, 3, 2]),
        ("3+4=7", [3, 4, 7]),
        ("9/3", [9, 3]),
        ("3.50", [3.5]),
        ("0.1.", [0.1]),
        (".5", [0.5]),
        ("1e3", [1000]),
        ("x7", []),
        ("none", []),
        ("", []),
    ],
)
def test_numbers_are_read_as_people_mean_them(text: str, found: list[float]):
    assert numbers(text) == found


def test_the_last_number_of_a_text_without_one_is_none():
    assert last_number("I do not know.") is None
