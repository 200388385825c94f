"""All checks of `potluck doctor`. To add one, write its function and add it to this list.

A check is an async function that is given the surroundings and returns findings. Those run side by
side. One that needs longer than others says so with `seconds`.
"""

from __future__ import annotations

from node.app.doctor.access import check_auth_server, check_clock, check_pass
from node.app.doctor.examination import Check
from node.app.doctor.home import check_disk, check_files, check_node, check_settings
from node.app.doctor.machine import TORCH_SECONDS, check_compute, check_memory
from node.app.doctor.network import check_ipv6, check_mtu, check_names, check_peers, check_ports
from node.app.doctor.reach import REACH_SECONDS, check_reach

CHECKS: tuple[Check, ...] = (
    Check("node", check_node),
    Check("settings", check_settings),
    Check("files", check_files),
    Check("disk", check_disk),
    Check("memory", check_memory),
    Check("gpu", check_compute, TORCH_SECONDS),
    Check("dns", check_names),
    Check("ipv6", check_ipv6),
    Check("mtu", check_mtu),
    Check("ports", check_ports),
    Check("peers", check_peers),
    Check("reach", check_reach, REACH_SECONDS),
    Check("pass", check_pass),
    Check("auth server", check_auth_server),
    Check("clock", check_clock),
)
