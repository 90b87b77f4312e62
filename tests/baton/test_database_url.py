from string import ascii_letters

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.config_load import load
from baton.database_url import without_password
from baton.errors import ConfigError

PASSWORD = st.text("/:@%#?&=;+!.", max_size=4).map(lambda odd: f"hid{odd}den")


@given(PASSWORD, st.text(ascii_letters, max_size=5))
def test_no_password_is_shown_whatever_stands_in_it(password: str, user: str) -> None:
    shown = without_password(f"postgresql://{user}:{password}@db:5432/baton?sslmode=require")
    assert shown == f"postgresql://{user}:***@db:5432/baton?sslmode=require"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://db/x?password=a%20b&user=ann", "postgresql://db/x?password=***&user=ann"),
        ("postgresql://db/x?sslpassword=hidden", "postgresql://db/x?sslpassword=***"),
        ("postgresql:///x?host=/run/postgresql", "postgresql:///x?host=/run/postgresql"),
        ("sqlite:////var/lib/baton.sqlite", "sqlite:////var/lib/baton.sqlite"),
        ("smollm2", "smollm2"),
    ],
)
def test_the_rest_of_a_url_is_shown(url: str, shown: str) -> None:
    assert without_password(url) == shown


def test_printed_settings_and_their_errors_show_no_password() -> None:
    environ = {"BATON__CONTROLLER__DATABASE": "postgresql://ann:hidden@db/x"}
    printed = list(load(None, environ, {}).describe())
    assert any("postgresql://ann:***@db/x" in line for line in printed)
    assert not any("hidden" in line for line in printed)
    with pytest.raises(ConfigError) as refused:
        load(None, {"BATON__CONTROLLER__HEARTBEAT_S": "postgresql://ann:hidden@db/x"}, {})
    assert "hidden" not in refused.value.message
