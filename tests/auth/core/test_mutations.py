"""A token, request or response with any change is refused, and never causes another error.

Three thousand of each by default, two hundred thousand of each with `scripts/test --soak`.
Everything is judged by nodes that know the originals and have verified their tokens, which is
when a shortcut would be taken if there were one.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from auth.envelopes import Topic
from auth.nonces import NonceWindow
from auth.refusals import AccessRefused, Reason
from auth.roles import Role
from tests.auth.core.mutations import MUTATIONS, bit_flips, mutated
from tests.auth.core.people import (
    ALICE,
    ALICES_TOKEN,
    ANSWER,
    ANSWERED,
    BOB,
    BOBS_TOKEN,
    CONTENT,
    MALLORY,
    MALLORYS_TOKEN,
    NEXT_AUTH,
    NOW,
    OTHER_AUTH,
    TOPIC,
    YEAR,
    N,
    Side,
    nonce,
    request,
    response,
    token_of,
    tokens_known_to_nobody,
)

COUNTS = [
    pytest.param(3_000, id="short"),
    pytest.param(200_000, id="long", marks=pytest.mark.soak),
]
EXAMPLES = [
    pytest.param(300, id="short"),
    pytest.param(20_000, id="long", marks=pytest.mark.soak),
]

# valid ones of each kind, for splicing: of others, to others, and of Alice to Bob at other times
TOKENS = [
    BOBS_TOKEN,
    MALLORYS_TOKEN,
    token_of(ALICE, serial=7),
    token_of(ALICE, run="another"),
    token_of(ALICE, by=OTHER_AUTH),
    token_of(ALICE, by=NEXT_AUTH),
    token_of(ALICE, roles=tuple(Role), issued_ms=NOW - YEAR),
]
REQUESTS = [
    request(number=2),
    request(time_ms=NOW - N),
    request(recipient=MALLORY),
    request(content=b"another"),
    request(key=MALLORY, token=MALLORYS_TOKEN),
    request(key=MALLORY, token=MALLORYS_TOKEN, content=CONTENT, number=2),
    request(key=MALLORY),
    request(topic=Topic("opening", TOPIC.protocol, TOPIC.method)),
]
RESPONSES = [
    response(number=2),
    response(recipient=MALLORY),
    response(content=b"another"),
    response(key=MALLORY, token=MALLORYS_TOKEN),
    response(key=MALLORY),
    response(topic=Topic("error", ANSWER.protocol, ANSWER.method)),
]

Judge = Callable[[bytes], None]


def judge_of_tokens() -> Judge:
    tokens = tokens_known_to_nobody()
    tokens.verify(ALICES_TOKEN, NOW, shown_by=ALICE.public_key)

    def judge(data: bytes) -> None:
        tokens.verify(data, NOW, shown_by=ALICE.public_key)

    return judge


def judge_of_requests() -> Judge:
    bob = Side(BOB)
    bob.receive(request())

    def judge(data: bytes) -> None:
        bob.nonces = NonceWindow(NOW - YEAR)  # what is refused only as a replay was accepted
        bob.receive(data)

    return judge


def judge_of_responses() -> Judge:
    alice = Side(ALICE)
    alice.receive_answer(response(), asked=nonce(1))

    def judge(data: bytes) -> None:
        alice.receive_answer(data, asked=nonce(1))

    return judge


KINDS = [
    pytest.param(ALICES_TOKEN, TOKENS, judge_of_tokens, id="tokens"),
    pytest.param(request(), REQUESTS, judge_of_requests, id="requests"),
    pytest.param(response(), RESPONSES, judge_of_responses, id="responses"),
]


def refusal_of(judge: Judge, data: bytes) -> Reason:
    try:
        judge(data)
    except AccessRefused as refusal:
        return refusal.reason
    raise AssertionError(f"accepted: {data.hex()}")


@pytest.mark.parametrize(("original", "_others", "judge_of"), KINDS)
def test_the_original_is_accepted(
    original: bytes, _others: list[bytes], judge_of: Callable[[], Judge]
) -> None:
    judge_of()(original)


@pytest.mark.parametrize(("original", "_others", "judge_of"), KINDS)
def test_every_single_flipped_bit_is_refused(
    original: bytes, _others: list[bytes], judge_of: Callable[[], Judge]
) -> None:
    judge = judge_of()
    reasons = Counter(refusal_of(judge, flipped) for flipped in bit_flips(original))
    assert sum(reasons.values()) == 8 * len(original)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize(("original", "others", "judge_of"), KINDS)
def test_every_mutation_is_refused(
    original: bytes, others: list[bytes], judge_of: Callable[[], Judge], count: int
) -> None:
    chance = random.Random(20)
    judge = judge_of()
    reasons = Counter(refusal_of(judge, mutated(original, others, chance)) for _ in range(count))
    assert sum(reasons.values()) == count
    # it was not only the form that failed
    assert Reason.MALFORMED in reasons
    assert {Reason.SIGNATURE, Reason.TOKEN_SIGNATURE} & set(reasons)


@pytest.mark.slow
@pytest.mark.parametrize("examples", EXAMPLES)
@pytest.mark.parametrize(("original", "others", "judge_of"), KINDS)
def test_a_mutation_made_by_hypothesis_is_refused(
    original: bytes, others: list[bytes], judge_of: Callable[[], Judge], examples: int
) -> None:
    judge = judge_of()

    @settings(max_examples=examples, deadline=None, database=None)
    @given(
        some.one_of(
            some.binary(max_size=400),
            some.tuples(
                some.integers(0, len(original)),
                some.binary(max_size=12),
                some.integers(0, len(original)),
            ).map(lambda cut: original[: cut[0]] + cut[1] + original[cut[2] :]),
            some.tuples(some.randoms(use_true_random=False), some.sampled_from(MUTATIONS)).map(
                lambda drawn: drawn[1](original, drawn[0].choice(others), drawn[0])
            ),
        )
    )
    def refuse(data: bytes) -> None:
        if data != original and data not in others:  # those are valid themselves
            refusal_of(judge, data)

    refuse()


@pytest.mark.parametrize("count", COUNTS)
def test_a_changed_content_or_topic_is_refused(count: int) -> None:
    chance = random.Random(21)
    bob, alice = Side(BOB), Side(ALICE)
    asked, answered = request(), response()
    for _ in range(count // 10):
        content = mutated(CONTENT, [ANSWERED], chance)
        with pytest.raises(AccessRefused):
            bob.receive(asked, content=content)
        with pytest.raises(AccessRefused):
            alice.receive_answer(answered, asked=nonce(1), content=content)
        topic = Topic(
            *(mutated(field.encode(), [b""], chance).decode("latin-1") for field in TOPIC)
        )
        with pytest.raises(AccessRefused):
            bob.receive(asked, topic=topic)
