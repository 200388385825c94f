"""Where potluck keeps its files: in the platform's folders, or all in one if configured.

| file | with POTLUCK_HOME (or --home) | otherwise, on Linux |
|---|---|---|
| settings | `HOME/potluck.toml` | `~/.config/potluck/potluck.toml` |
| key | `HOME/identity.key` | `~/.local/share/potluck/identity.key` |
| access pass, newest revocations | `HOME/access.pass`, `HOME/revocations` | beside the key |
| organiser's key, and what is kept of runs | `HOME/organiser.key`, `HOME/runs/` | beside the key |
| peers known, and a backbone's slots | `HOME/peers.json`, `HOME/dht.sqlite` | beside the key |
| the history of a run, for its page | `HOME/runs/` | beside the key |
| records of who gave what to runs | `HOME/credit/` | beside the key |
| what was sent and received this month | `HOME/traffic.json` | beside the key |
| what was relayed for others this month | `HOME/relayed.json` | beside the key |
| lock and control socket of the running node | `HOME/run/` | `~/.local/state/potluck/run/` |

Finding the places creates nothing. The running node's files are *not* in the runtime folder of the
login session, because `sudo`, cron and systemd have another one or none: a second node would then
start beside the first without noticing it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

APPLICATION = "potluck"


@dataclass(frozen=True)
class Places:
    config_file: Path
    config_file_origin: str
    data_folder: Path
    run_folder: Path

    @property
    def pass_file(self) -> Path:
        return self.data_folder / "access.pass"

    @property
    def revocations_file(self) -> Path:
        return self.data_folder / "revocations"

    @property
    def peers_file(self) -> Path:
        return self.data_folder / "peers.json"

    @property
    def dht_file(self) -> Path:
        return self.data_folder / "dht.sqlite"

    @property
    def credit_folder(self) -> Path:
        return self.data_folder / "credit"

    @property
    def traffic_file(self) -> Path:
        return self.data_folder / "traffic.json"

    @property
    def relayed_file(self) -> Path:
        return self.data_folder / "relayed.json"

    @property
    def pause_file(self) -> Path:
        return self.data_folder / "pause.json"

    @property
    def runs_folder(self) -> Path:
        """The files of each run: its definition, fetched data, the place in the data."""
        return self.data_folder / "runs"

    @property
    def lock_file(self) -> Path:
        return self.run_folder / "node.lock"

    @property
    def control_socket(self) -> Path:
        return self.run_folder / "control.sock"


def find_places(
    environment: Mapping[str, str],
    *,
    home: str | None = None,
    config_file: str | None = None,
) -> Places:
    """The places for this environment; `home` and `config_file` are the values of the flags."""
    chosen_home = home or environment.get("POTLUCK_HOME")
    if chosen_home:
        root = Path(chosen_home).expanduser().absolute()
        usual_config, data, run = root, root, root / "run"
    else:
        import platformdirs

        usual_config = platformdirs.user_config_path(APPLICATION, appauthor=False)
        data = platformdirs.user_data_path(APPLICATION, appauthor=False)
        run = platformdirs.user_state_path(APPLICATION, appauthor=False) / "run"
    if config_file:
        chosen, origin = config_file, "--config"
    elif environment.get("POTLUCK_CONFIG"):
        chosen, origin = environment["POTLUCK_CONFIG"], "POTLUCK_CONFIG"
    else:
        chosen, origin = str(usual_config / "potluck.toml"), "default"
    return Places(Path(chosen).expanduser().absolute(), origin, data, run)
