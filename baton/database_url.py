"""Database URLs as people may see them: logs, errors, printed configurations and the admin endpoint show no password."""

from __future__ import annotations

import re

# Up to the last @, for a password may hold what should have been escaped: rather a host too little than a character too much
_USERINFO = re.compile(r"(?<=://)([^/?#@:]*):.*@")
# As one of libpq's parameters
_PARAMETER = re.compile(r"(?<=[?&])((?:ssl)?password)=[^&#]*", re.IGNORECASE)


def without_password(text: str) -> str:
    """The same URL with `***` for its password; other text as it is."""
    if "://" not in text:
        return text
    return _PARAMETER.sub(r"\1=***", _USERINFO.sub(r"\1:***@", text, count=1))
