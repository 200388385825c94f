"""HOST:PORT as a flag names it: where an HTTP server of ours listens.

    address = listen_flag("--http", "127.0.0.1:9100")

Easy to get wrong: what cannot be right is a mistake in the command line (WrongUse), and not one in
a settings file, which the same text could also come from.
"""

from __future__ import annotations

from auth.server.settings import ListenAddress, listen_address
from node.wrong_use import WrongUse


def listen_flag(flag: str, text: str) -> ListenAddress:
    """The address; WrongUse if it is none."""
    try:
        return listen_address(text)
    except ValueError as error:
        raise WrongUse(
            f"{flag} {text} {error}.", advice="A port of 0 is any that is free."
        ) from None
