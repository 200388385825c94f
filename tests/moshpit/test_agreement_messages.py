"""No message of the agreement is believed beyond what its sender may say."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest

from protocols.errors import MalformedMessage
from protocols.moshpit.agreement import Agreement
from protocols.moshpit.agreement_messages import (
    LONGEST_REASON,
    SUSPICIONS_PER_MESSAGE,
    Accept,
    Acceptance,
    Accepted,
    AgreementMessage,
    Attempt,
    BallotQuery,
    Decided,
    Forswear,
    GivenUp,
    Held,
    Holding,
    NotAnHonestMessage,
    Open,
    Opened,
    Outbid,
    Prepare,
    Progress,
    Promise,
    Result,
    Start,
    Trouble,
)
from protocols.moshpit.ballots import (
    LARGEST_BALLOT_NUMBER,
    LARGEST_GROUP,
    LONGEST_CODE,
    LONGEST_SUSPICION,
    MOST_BALLOTS_MISSED,
    Ballot,
    Statement,
    Suspicion,
    digest_of_result,
)
from protocols.moshpit.coordinator import BALLOTS_BEYOND_SIZE, MORE_WAITS
from protocols.moshpit.switchboard import Agree
from protocols.moshpit.verdicts import Send
from protocols.rpc import decode, encode
from tests.moshpit.agreement_group import TIMING, Group, plan, statements, verify
from tests.moshpit.interleavings import freeze

FIRST = Ballot(0, 0)
SHOWN = statements(FIRST, (0, 1, 2))
DIGEST = digest_of_result(SHOWN)
WHOLE = Result(FIRST, (0, 1, 2), DIGEST)

ONE_OF_EACH: list[AgreementMessage] = [
    Start(FIRST, (0, 1, 2), (0, 10, 20, 30)),
    Holding(FIRST, DIGEST, SHOWN),
    Trouble(FIRST, (Suspicion(1, "stalled", "for 4 s"),)),
    Prepare(Ballot(1, 2)),
    Promise(
        Ballot(1, 2),
        Attempt(FIRST, (0, 1, 2)),
        Acceptance(FIRST, WHOLE),
        Held(FIRST, DIGEST, SHOWN),
        (Suspicion(1, "cut"),),
        True,
    ),
    Open(Ballot(1, 2), (0, 2), (Suspicion(1, "silent", "did not answer in time"),)),
    Opened(Ballot(1, 2)),
    Accept(FIRST, WHOLE),
    Accept(Ballot(1, 2), None, "fewer than two members are left"),
    Accepted(FIRST),
    Decided(WHOLE),
    Decided(None, "too late"),
    Outbid(Ballot(2, 1)),
    BallotQuery(FIRST, FIRST),
    Progress(FIRST),
    Forswear(Ballot(1, 2)),
    GivenUp(Ballot(1, 2)),
]


def member(me: int = 1, size: int = 3) -> Agreement:
    return Agreement(me, size, range(size), TIMING, 0.0, plan=plan, verify=verify)


@pytest.mark.parametrize("message", ONE_OF_EACH, ids=lambda each: type(each).__name__)
def test_messages_survive_the_wire(message: AgreementMessage) -> None:
    whole = Agree(bytes(32), message)
    assert decode(Agree, encode(whole)) == whole


def test_the_largest_messages_fit_their_limit() -> None:
    members = tuple(range(256))
    ballot = Ballot(LARGEST_BALLOT_NUMBER, 255)
    shown = tuple(Statement(part, bytes(32), bytes(64)) for part in members)
    words = "\U0001f600" * 240
    suspicions = tuple(Suspicion(each, "x" * 24, words) for each in members)
    largest: list[AgreementMessage] = [
        Start(ballot, members, tuple(1 << 48 for _ in range(257))),
        Open(ballot, members, suspicions),
        Promise(
            ballot,
            Attempt(ballot, members),
            Acceptance(ballot, Result(ballot, members, bytes(32))),
            Held(ballot, bytes(32), shown),
            suspicions[:32],
            True,
        ),
    ]
    for message in largest:
        assert len(encode(Agree(bytes(32), message))) <= 1 << 19


@pytest.mark.parametrize(
    "message",
    [
        Start(FIRST, tuple(range(257)), (0, 1)),
        Start(FIRST, (), (0, 1)),
        Start(FIRST, (0, 256), (0, 1, 2)),
        Start(FIRST, (0, 1), (0, 1, (1 << 48) + 1)),
        Prepare(Ballot(LARGEST_BALLOT_NUMBER + 1, 0)),
        Prepare(Ballot(-1, 0)),
        Holding(FIRST, bytes(31), ()),
        Holding(FIRST, bytes(32), (Statement(0, bytes(33), bytes(64)),)),
        Holding(FIRST, bytes(32), (Statement(0, bytes(32), bytes(63)),)),
        Trouble(FIRST, (Suspicion(0, "cut"),) * 33),
        Trouble(FIRST, (Suspicion(0, ""),)),
        Trouble(FIRST, (Suspicion(0, "cut", "x" * 241),)),
        Decided(None, "x" * 201),
    ],
)
def test_messages_out_of_bounds_are_not_decoded(message: AgreementMessage) -> None:
    with pytest.raises(MalformedMessage):
        decode(Agree, encode(Agree(bytes(32), message)))


OTHER = Ballot(1, 2)

DISHONEST: list[tuple[int, AgreementMessage]] = [
    (3, BallotQuery(FIRST)),  # not in the round
    (1, BallotQuery(FIRST)),  # ourselves
    (2, Start(FIRST, (0, 1, 2), (0, 10, 20, 30))),  # not its ballot
    (0, Prepare(OTHER)),
    (0, Open(OTHER, (0, 1))),
    (0, Accept(OTHER, WHOLE)),
    (0, Forswear(OTHER)),
    (2, Prepare(Ballot(0, 2))),  # the first ballot is the leader's
    (2, Prepare(Ballot(1, 7))),  # of nobody
    (0, Start(FIRST, (0, 2), (0, 10, 20))),  # we are not in it
    (0, Start(FIRST, (0, 1, 3), (0, 10, 20, 30))),
    (0, Start(FIRST, (1, 0, 2), (0, 10, 20, 30))),  # out of order
    (0, Start(FIRST, (0, 1, 1), (0, 10, 20, 30))),  # twice
    (0, Start(FIRST, (0, 1, 2), (0, 10, 20))),  # a part less than members
    (0, Start(FIRST, (0, 1, 2), (0, 20, 10, 30))),  # backwards
    (0, Start(FIRST, (0, 1, 2), (1, 10, 20, 30))),  # without a beginning
    (2, Open(OTHER, (0, 3))),
    (2, Open(OTHER, (0, 1), (Suspicion(3, "silent"),))),
    (0, Accept(FIRST, Result(Ballot(1, 0), (0, 1), DIGEST))),  # of a later attempt
    (0, Accept(FIRST, Result(FIRST, (0, 3), DIGEST))),
    (0, Accept(FIRST, WHOLE)),  # we do not hold it
    (0, Decided(Result(FIRST, (2, 1), DIGEST))),
    (0, Holding(FIRST, DIGEST, SHOWN)),  # we do not coordinate
    (0, Trouble(FIRST, ())),
    (0, Promise(OTHER, Attempt(FIRST, (0, 1, 2)))),
    (0, Accepted(FIRST)),
    (0, Opened(OTHER)),
    (0, BallotQuery(FIRST, OTHER)),  # exchanges in a later ballot than it knows of
    (0, Promise(Ballot(1, 1), Attempt(FIRST, (0, 1, 2)))),
    (0, GivenUp(Ballot(1, 3))),
]


@pytest.mark.parametrize(("sender", "message"), DISHONEST)
def test_a_message_that_no_honest_member_sends_is_refused_and_changes_nothing(
    sender: int, message: AgreementMessage
) -> None:
    agreement = member()
    before = freeze(agreement)
    with pytest.raises(NotAnHonestMessage):
        agreement.receive(sender, message, 0.0)
    assert freeze(agreement) == before
    assert agreement.effects() == []


def _preparing() -> Agreement:
    """Member 1 of three coordinates ballot 1."""
    agreement = member()
    agreement.unreachable(0, 0.0)
    agreement.fire("takeover")
    agreement.effects()
    return agreement


def test_trouble_that_names_nobody_is_refused_and_costs_no_ballot() -> None:
    agreement = _preparing()
    with pytest.raises(NotAnHonestMessage, match="names nobody"):
        agreement.receive(2, Trouble(Ballot(1, 1), ()), 0.1)
    assert agreement.effects() == []


@pytest.mark.parametrize(
    "promise",
    [
        Promise(Ballot(2, 1), Attempt(FIRST, (0, 1, 2))),
        Promise(Ballot(1, 1), Attempt(Ballot(1, 2), (0, 1, 2))),
        Promise(Ballot(1, 1), Attempt(FIRST, (0, 3))),
        Promise(Ballot(1, 1), Attempt(FIRST, (0, 1)), Acceptance(Ballot(1, 2), None)),
        Promise(
            Ballot(1, 1),
            Attempt(FIRST, (0, 1)),
            Acceptance(FIRST, Result(Ballot(1, 0), (0, 1), DIGEST)),
        ),
        Promise(Ballot(1, 1), Attempt(Ballot(1, 0), (0, 1)), Acceptance(FIRST, WHOLE)),
        Promise(Ballot(1, 1), Attempt(FIRST, (0, 1)), None, Held(Ballot(1, 2), DIGEST, SHOWN)),
        Promise(Ballot(1, 1), Attempt(FIRST, (0, 1)), None, Held(FIRST, DIGEST, SHOWN[::-1])),
        Promise(Ballot(1, 1), Attempt(FIRST, (0, 1)), None, None, (Suspicion(9, "cut"),)),
    ],
)
def test_a_promise_that_contradicts_itself_is_refused(promise: Promise) -> None:
    agreement = _preparing()
    before = freeze(agreement)
    with pytest.raises(NotAnHonestMessage):
        agreement.receive(2, promise, 0.0)
    assert freeze(agreement) == before


@pytest.mark.parametrize("kind", [Outbid, BallotQuery, Progress, Prepare])
def test_a_ballot_far_above_all_that_are_known_is_refused(kind: type[AgreementMessage]) -> None:
    agreement = member()
    before = freeze(agreement)
    with pytest.raises(NotAnHonestMessage, match="the highest known here is 0"):
        agreement.receive(2, kind(Ballot(MOST_BALLOTS_MISSED + 1, 2)), 0.0)  # type: ignore[call-arg]
    assert freeze(agreement) == before
    agreement.receive(2, kind(Ballot(MOST_BALLOTS_MISSED, 2)), 0.0)  # type: ignore[call-arg]


def test_a_result_other_than_the_decided_one_changes_nothing_and_nobody_is_blamed() -> None:
    """Either may be the liar."""
    agreement = member()
    agreement.receive(0, Decided(None, "too late"), 0.0)
    before = freeze(agreement)
    agreement.receive(2, Decided(WHOLE), 0.0)
    assert freeze(agreement) == before


@pytest.mark.parametrize("kind", [Outbid, BallotQuery, Progress])
@pytest.mark.parametrize(
    "made_up",
    [Ballot(7, 1), Ballot(MOST_BALLOTS_MISSED + 1, 0)],
    ids=["of this member", "far above all"],
)
def test_a_ballot_that_a_liar_has_made_up_is_not_its_hearers_fault(
    kind: type[AgreementMessage], made_up: Ballot
) -> None:
    """They hand it on in good faith. Before, they were avoided for it, by all of the node."""
    agreement = member()
    agreement.receive(2, kind(made_up), 0.0)  # type: ignore[call-arg]
    told = [one.message for one in agreement.effects() if isinstance(one, Send)]
    assert told == ([Progress(FIRST)] if kind is BallotQuery else []), "they are told what is known"


@pytest.mark.parametrize(
    "holding",
    [
        Holding(FIRST, DIGEST, SHOWN[:2]),  # a part less
        Holding(FIRST, bytes(32), SHOWN),  # a digest of something else
    ],
)
def test_a_member_whose_report_is_not_whole_is_left_out_and_named(holding: Holding) -> None:
    group = Group(3)
    group.begin()
    group.run(until=0.5)
    group.members[0].receive(2, holding, group.now)
    group.carry_out(0)
    group.run(until=60.0)
    assert group.members[1].excluded[2].code == "malformed"


def test_a_plan_that_is_not_the_right_one_is_refused_by_name() -> None:
    def not_mine(members: tuple[int, ...], cuts: tuple[int, ...]) -> str:
        return "" if cuts == plan(members) else "its cuts take twice as long as ours"

    agreement = Agreement(
        1, 3, range(3), TIMING, 0.0, plan=plan, verify=verify, check_cuts=not_mine
    )
    agreement.receive(0, Start(FIRST, (0, 1, 2), (0, 0, 0, 30)), 0.0)
    (refusal,) = agreement.effects()
    trouble: Any = refusal.message  # type: ignore[union-attr]
    assert trouble.suspicions == (
        Suspicion(0, "wrong_plan", "its cuts take twice as long as ours"),
    )


def test_no_sequence_of_wild_messages_does_anything_but_be_refused_or_taken() -> None:
    """Any messages of a member, in any order, raise only NotAnHonestMessage."""
    for seed in range(150):
        random = Random(seed)
        agreement = member(random.randrange(3))
        if agreement._desk.me == 0:
            agreement.begin(0.0)
        for _ in range(30):
            message = _wild(random)
            with suppress(NotAnHonestMessage):
                agreement.receive(random.randrange(4), message, 0.0)
            if random.random() < 0.2 and agreement._desk.timers:
                agreement.fire(random.choice(sorted(agreement._desk.timers)))
            agreement.effects()


def _wild(random: Random) -> AgreementMessage:
    """A message with parts of others."""
    ballots = [FIRST, *(Ballot(number, who) for number in (1, 2) for who in range(3))]
    one = random.choice(ONE_OF_EACH)
    fields = {name: getattr(one, name) for name in one.__struct_fields__}
    if "ballot" in fields:
        fields["ballot"] = random.choice(ballots)
    if "members" in fields:
        fields["members"] = tuple(sorted(random.sample(range(3), random.randint(1, 3))))
    if "cuts" in fields:
        fields["cuts"] = plan(fields["members"])
    if fields.get("result") is not None:
        fields["result"] = Result(
            random.choice(ballots), (0, 1, 2), random.choice([DIGEST, bytes(32)])
        )
    return type(one)(**fields)


def test_the_page_says_what_the_messages_are() -> None:
    page = (Path(__file__).parents[2] / "docs" / "protocols.md").read_text(encoding="utf-8")
    section = page.partition("## The agreement of a round")[2].partition("\n## ")[0]
    for message in ONE_OF_EACH:
        assert f"| `{type(message).__struct_config__.tag}`" in section
    accept = encode(Accept(FIRST, Result(FIRST, (0, 1, 2), bytes(32))))
    shown = re.findall(r"^    ((?:[0-9a-f]{2} )+)", section, re.MULTILINE)
    told = bytes.fromhex("".join(shown))
    assert accept == told[:-1] + bytes(32) + told[-1:]
    for limit in (
        f"at most {LARGEST_GROUP}.",
        f"number (0 to {LARGEST_BALLOT_NUMBER:,})",
        f"code (1 to {LONGEST_CODE} characters), text (up to {LONGEST_SUSPICION})",
        f"{SUSPICIONS_PER_MESSAGE} suspicions in a message; a reason has up to {LONGEST_REASON}",
        f"answers within {TIMING.answer_seconds} s",
        f"gets up to {TIMING.answer_seconds * (1 + MORE_WAITS)} s",
        f"more than n + {BALLOTS_BEYOND_SIZE} ballots",
        f"waits {TIMING.stagger_seconds} s longer",
        f"a ballot more than {MOST_BALLOTS_MISSED} above",
    ):
        assert limit in " ".join(section.split()), limit
