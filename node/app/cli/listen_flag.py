"""HOST:PORT in a flag: the address of one of our HTTP servers.

    address = listen_flag("--http", "127.0.0.1:9100")

A wrong address is reported as a mistake in the command line (WrongUse), not in a settings file,
which may have the same text.
"""

from __future__ import annotations

from auth.server.settings import ListenAddress, listen_address
from node.core.wrong_use import WrongUse


def listen_flag(flag: str, text: str) -> ListenAddress:
    """The address; WrongUse for a wrong one."""
    try:
        return listen_address(text)
    except ValueError as error:
        raise WrongUse(
            f"{flag} {text} {error}.", advice="A port of 0 is any that is free."
        ) from None
