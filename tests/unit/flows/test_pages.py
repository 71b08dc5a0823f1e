"""Commands that a page shows can be copied into a shell."""

import shlex

import pytest

from flows.reporting.pages import setting
from flows.settings import apply_overrides


@pytest.mark.parametrize(
    "store",
    ["file:///a b", "file:///a #b", "file:///it's", 'file:///a"b', "file:///a$b?c%20", "s3://b/ü", "/a: b", "/a\\b"],
)
def test_a_setting_is_what_shell_and_flow_read(store: str):
    (word,) = shlex.split(setting("store", store))
    assert apply_overrides({}, [word]) == {"store": store}


def test_what_needs_no_quotes_has_none():
    assert setting("store", "file:///srv/store") == "store=file:///srv/store"
