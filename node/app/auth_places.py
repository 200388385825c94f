"""Where an auth server keeps its files, and the lock that a running server holds.

| file | with POTLUCK_HOME (or --home) | otherwise, on Linux |
|---|---|---|
| settings | `HOME/auth.toml` | `~/.config/potluck/auth.toml` |
| database, signing keys, lock | `HOME/auth/` | `~/.local/share/potluck/auth/` |
| control socket | `HOME/run/auth.sock` | `~/.local/state/potluck/run/auth.sock` |

Looking creates nothing. The moderators' commands write into the database themselves when no server
runs. They hold the same lock while they do, so that no server starts in the middle of an act, and
an act never misses a running server.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from node.core.places import find_places
from node.core.running_lock import AlreadyRunning, hold_lock, make_private_folder

SETTINGS_NAME = "auth.toml"


@dataclass(frozen=True)
class AuthPlaces:
    settings_file: Path
    folder: Path
    socket: Path

    @property
    def database(self) -> Path:
        return self.folder / "auth.sqlite"

    @property
    def lock_file(self) -> Path:
        return self.folder / "auth.lock"


def find_auth_places(
    environment: Mapping[str, str],
    *,
    home: str | None = None,
    settings_file: str | None = None,
) -> AuthPlaces:
    """The places for this environment; `home` and `settings_file` come from the flags."""
    places = find_places(environment, home=home)
    if settings_file:
        settings = Path(settings_file).expanduser().absolute()
    else:
        # not beside POTLUCK_CONFIG, which is a node's: a server has settings of its own
        settings = find_places({**environment, "POTLUCK_CONFIG": ""}, home=home).config_file
        settings = settings.with_name(SETTINGS_NAME)
    return AuthPlaces(settings, places.data_folder / "auth", places.run_folder / "auth.sock")


@contextlib.contextmanager
def hold_auth_lock(places: AuthPlaces) -> Iterator[None]:
    """Be the only writer in this server's folder. AlreadyRunning if there is another."""
    make_private_folder(places.folder)
    with hold_lock(places.lock_file, lambda holder: _held(places, holder)):
        yield


def _held(places: AuthPlaces, holder: str) -> AlreadyRunning:
    who = f"with pid {holder}" if holder.isdigit() else "and is just starting"
    return AlreadyRunning(
        f"An auth server already runs in this folder, {who}.",
        why=f"It holds {places.lock_file}.",
        advice="Moderators' commands find it by themselves. A second server needs a home of its "
        "own (POTLUCK_HOME or --home).",
    )
