"""`potluck doctor`: what is wrong with this machine, and what to do about it.

`checks` has the list of all checks; a new one is a function and its line there. `examination` runs
them side by side. `finding` is what a check returns, `surroundings` what it is given. The checks
are in `home` (files, disk, the running node), `access` (pass, auth server, clock), `network`
(names, IPv6, MTU, ports, the run's peers) and `machine` (memory, GPU, torch). `view` shows the
findings to a person, `report` writes all of it into a file for a bug report, and `redaction` takes
out what is nobody else's business.
"""

from __future__ import annotations

from protocols.faces import lazily

TYPE_CHECKING = False
if TYPE_CHECKING:
    from node.app.doctor.checks import CHECKS
    from node.app.doctor.examination import DoctorCheck, examine
    from node.app.doctor.finding import Finding, FindingLevel
    from node.app.doctor.report import new_report_file, write_report
    from node.app.doctor.surroundings import Surroundings, look_around
    from node.app.doctor.torch_probe import loading_torch
    from node.app.doctor.view import show_findings

__all__ = [
    "CHECKS",
    "DoctorCheck",
    "Finding",
    "FindingLevel",
    "Surroundings",
    "examine",
    "loading_torch",
    "look_around",
    "new_report_file",
    "show_findings",
    "write_report",
]

__getattr__ = lazily(
    __name__,
    {
        "checks": ("CHECKS",),
        "examination": ("DoctorCheck", "examine"),
        "finding": ("Finding", "FindingLevel"),
        "report": ("new_report_file", "write_report"),
        "surroundings": ("Surroundings", "look_around"),
        "torch_probe": ("loading_torch",),
        "view": ("show_findings",),
    },
)
