"""Any name becomes one that MLflow takes, no two become one, and it can be read back."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from infra.orchestration.metric_names import LONGEST, decode, encode

PIECES = st.sampled_from(["/", ".", "_x0040_", "_x005F_", "_", "@", "a", " ", "é", "😀", "\n", "_x0001F600_", "\ud800"])
NAMES = st.one_of(st.text(min_size=1, max_size=25), st.lists(PIECES, min_size=1, max_size=25).map("".join))


@pytest.mark.parametrize(
    ("name", "spelled"),
    [
        ("reward/mean", "reward/mean"),
        ("acc@1", "acc_x0040_1"),
        ("format (strict)", "format _x0028_strict_x0029_"),
        ("_x0040_", "_x005F_x0040_"),
        ("a//b/", "a_x002F_/b_x002F_"),
        ("a/../b", "a/_x002E_./b"),
        ("...", "_x002E_.."),
        ("..0", "_x002E_.0"),
        ("a/..b", "a/..b"),
    ],
)
def test_a_name_is_spelled_so_that_a_person_can_read_it(name: str, spelled: str):
    assert encode(name) == spelled
    assert decode(spelled) == name


@given(NAMES)
@example("..0")
def test_mlflow_takes_every_spelling_and_it_is_read_back(name: str):
    from mlflow.utils.validation import path_not_unique, validate_param_and_metric_name

    spelled = encode(name)
    assert validate_param_and_metric_name(spelled)
    assert not path_not_unique(spelled)
    assert len(spelled) <= LONGEST
    assert decode(spelled) == name


def test_long_names_stay_apart():
    one, other = encode("@" * 400), encode("@" * 401)
    assert len(one) == len(other) == LONGEST
    assert one != other
