"""What is done before the loop begins, in words for a person, in this order.

Whoever measures how long joining takes (`potluck bench join`) tells the stages apart by them.
"""

from __future__ import annotations

from typing import Final

LOGGING_IN: Final = "logging in with the enrolment code"
READING: Final = "reading a first batch of the data"  # of an organiser's peer, before its invite
STARTING: Final = "starting this node"
LOOKING: Final = "looking for the others"
ASKING: Final = "asking what the run is"
LOADING: Final = "waiting for torch to be loaded"
WORKING_OUT: Final = "working out what the run takes"
BUILDING: Final = "building the model"
MAKING_SURE: Final = "making sure that no other node uses this one's key"  # after a kill
MEASURING: Final = "measuring how fast this machine is"
ENTERING: Final = "entering the run"
