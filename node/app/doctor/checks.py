"""All checks of `potluck doctor`. To add one, write its function and add it to this list.

A check is an async function that is given the surroundings and returns findings. Those run side by
side. One that needs longer than others says so with `seconds`.
"""

from __future__ import annotations

from node.app.doctor.access import check_auth_server, check_clock, check_pass
from node.app.doctor.examination import DoctorCheck
from node.app.doctor.home import check_disk, check_files, check_node, check_settings
from node.app.doctor.machine import TORCH_SECONDS, check_compute, check_memory
from node.app.doctor.network import check_ipv6, check_mtu, check_names, check_peers, check_ports
from node.app.doctor.reach import REACH_SECONDS, check_reach

CHECKS: tuple[DoctorCheck, ...] = (
    DoctorCheck("node", check_node),
    DoctorCheck("settings", check_settings),
    DoctorCheck("files", check_files),
    DoctorCheck("disk", check_disk),
    DoctorCheck("memory", check_memory),
    DoctorCheck("gpu", check_compute, TORCH_SECONDS),
    DoctorCheck("dns", check_names),
    DoctorCheck("ipv6", check_ipv6),
    DoctorCheck("mtu", check_mtu),
    DoctorCheck("ports", check_ports),
    DoctorCheck("peers", check_peers),
    DoctorCheck("reach", check_reach, REACH_SECONDS),
    DoctorCheck("pass", check_pass),
    DoctorCheck("auth server", check_auth_server),
    DoctorCheck("clock", check_clock),
)
