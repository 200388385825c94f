"""In a group of 256, all messages between members fit into their limits."""

from __future__ import annotations

from protocols.accumulation.state_messages import (
    MOST_RESULTS,
    RESULT_LIMIT_BYTES,
    ResultAccepted,
    ResultLink,
    ResultPart,
)
from protocols.identity import LONGEST_PEER_ID, PeerId
from protocols.moshpit.agreement_messages import (
    LARGEST_CUT,
    SUSPICIONS_PER_MESSAGE,
    Acceptance,
    Attempt,
    Held,
    Open,
    Promise,
    Result,
    Start,
)
from protocols.moshpit.ballots import (
    LARGEST_BALLOT_NUMBER,
    LARGEST_GROUP,
    LONGEST_CODE,
    LONGEST_SUSPICION,
    Ballot,
    Statement,
    Suspicion,
)
from protocols.moshpit.butterfly import MOST_WAITING
from protocols.moshpit.group_search import ADDRESSES_IN_A_LIST
from protocols.moshpit.layout import MOST_VALUES
from protocols.moshpit.matchmaking_messages import (
    ANSWER_LIMIT_BYTES,
    LONGEST_ADDRESS,
    JoinAnswer,
    JoinReply,
    Place,
)
from protocols.moshpit.roster import LARGEST_RATE, LARGEST_WEIGHT, Entry, Roster, Terms
from protocols.moshpit.settings import GROUP_SIZE
from protocols.moshpit.switchboard import AGREE_LIMIT_BYTES, MOST_HELD, Agree, Show
from protocols.rpc import encode
from protocols.rpc.state import RpcLimits

OTHERS = LARGEST_GROUP - 1
PEERS = tuple(PeerId(f"{number:03}".ljust(LONGEST_PEER_ID, "x")) for number in range(LARGEST_GROUP))
ALL = tuple(range(LARGEST_GROUP))
BALLOT = Ballot(LARGEST_BALLOT_NUMBER, OTHERS)
SUSPICIONS = tuple(Suspicion(one, "c" * LONGEST_CODE, "ü" * LONGEST_SUSPICION) for one in ALL)
LIST = Roster(
    Terms("k" * 256, 1 << 62, bytes(32)),
    PEERS[0],
    1 << 53,
    bytes(16),
    tuple(
        Entry(
            peer,
            LARGEST_WEIGHT,
            LARGEST_RATE,
            LARGEST_RATE,
            True,
            4,
            0xFFFF,
            255,
            bytes(16),
            bytes(64),
        )
        for peer in PEERS
    ),
    bytes(64),
)


def test_groups_have_up_to_64_members_and_256_if_a_run_wants_them() -> None:
    assert LARGEST_GROUP == 256
    assert GROUP_SIZE == 64


def test_its_list_fits_into_an_answer_and_is_shown_to_others() -> None:
    places = tuple(
        Place(peer, True, ("a" * LONGEST_ADDRESS,) * ADDRESSES_IN_A_LIST) for peer in PEERS
    )
    assert len(encode(JoinAnswer(JoinReply.LISTED, LIST, places))) < ANSWER_LIMIT_BYTES
    assert len(encode(Show(LIST))) < AGREE_LIMIT_BYTES


def test_the_messages_of_its_agreement_fit() -> None:
    statements = tuple(Statement(one, bytes(32), bytes(64)) for one in ALL)
    promise = Promise(
        BALLOT,
        Attempt(BALLOT, ALL),
        Acceptance(BALLOT, Result(BALLOT, ALL, bytes(32))),
        Held(BALLOT, bytes(32), statements, ALL),
        SUSPICIONS[:SUSPICIONS_PER_MESSAGE],
    )
    start = Start(BALLOT, ALL, (LARGEST_CUT,) * (LARGEST_GROUP + 1))
    for message in (promise, start, Open(BALLOT, ALL, SUSPICIONS)):
        assert len(encode(Agree(bytes(32), message))) < AGREE_LIMIT_BYTES


def test_the_cuts_of_its_result_fit_into_the_answer_to_a_newcomer() -> None:
    links = (ResultLink("parameters", bytes(32)),) * MOST_RESULTS
    parts = tuple(ResultPart(one, MOST_VALUES, MOST_VALUES, bytes(32)) for one in ALL)
    assert len(encode(ResultAccepted(links, parts, 1 << 20, bytes(16)))) < RESULT_LIMIT_BYTES


def test_all_others_may_send_to_a_reducer_at_once_and_once_more_after_a_failed_attempt() -> None:
    assert RpcLimits().transfers_in_total > 2 * OTHERS
    assert MOST_WAITING >= 2 * OTHERS
    assert MOST_HELD > OTHERS
