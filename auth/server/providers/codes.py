"""Enrolment codes as a provider: where there is no provider, a moderator's word is the identity.

A code is looked up, counted and turned into a pass in one transaction of the store, so nothing is
asked and no session is kept: this is only how such a provider shows itself among the others.
"""

from __future__ import annotations

from typing import Final

from auth.server.providers.settings import CodeSettings

DEFAULT_TITLE: Final = "Enrolment code"


class CodeProvider:
    flows: tuple[str, ...] = ("code",)
    trouble = ""
    outages = 0

    def __init__(self, settings: CodeSettings) -> None:
        self.id = settings.id
        self.title = settings.title or DEFAULT_TITLE
