"""Silence: pinged after a while, given up after a deadline, and never blamed for our own sleep."""

from __future__ import annotations

from node.net.transport.keep_alive import (
    DOUBTED_SECONDS,
    EARLY_MEASUREMENTS,
    MEASURE_EVERY_SECONDS,
    PROGRESS_BYTES,
    STUCK_SECONDS,
    UNACKNOWLEDGED_SECONDS,
    KeepAlive,
    LifeVerdict,
)


def beats_until(keep_alive: KeepAlive, verdict: LifeVerdict, slowest: float | None = None) -> int:
    """How many beats of silence until this verdict."""
    for count in range(1, 10_000):
        if keep_alive.beat(100, slowest) is verdict:
            return count
    raise AssertionError(f"never {verdict}")


def settled() -> KeepAlive:
    """A keep-alive of 5 and 8 seconds behind its early measurements."""
    keep_alive = KeepAlive(5.0, 8.0)
    for count in range(EARLY_MEASUREMENTS):
        assert keep_alive.beat(count + 1, None) is LifeVerdict.PING
    assert keep_alive.beat(100, None) is LifeVerdict.FINE
    return keep_alive


def test_a_silent_peer_is_pinged_and_then_given_up_within_ten_odd_seconds() -> None:
    keep_alive = settled()
    pinged_after = beats_until(keep_alive, LifeVerdict.PING) * keep_alive.beat_seconds
    given_up_after = beats_until(keep_alive, LifeVerdict.GONE) * keep_alive.beat_seconds
    assert 4.0 <= pinged_after <= 6.0
    assert pinged_after + given_up_after <= 14.0


def test_any_byte_is_a_sign_of_life() -> None:
    keep_alive = settled()
    for count in range(1000):
        assert keep_alive.beat(100 + count // 10, None) is not LifeVerdict.GONE


def test_a_peer_that_takes_nothing_is_given_up_whatever_it_says() -> None:
    keep_alive = settled()
    verdicts = [
        keep_alive.beat(200 + beat, None, delivered_while_sending=10_000 + beat)
        for beat in range(int(STUCK_SECONDS / keep_alive.beat_seconds) + 1)
    ]
    assert not {LifeVerdict.GONE, LifeVerdict.STUCK} & {*verdicts[:-1]}
    assert verdicts[-1] is LifeVerdict.STUCK


def test_a_peer_that_takes_little_at_a_time_is_not_given_up() -> None:
    keep_alive = settled()
    beats = int(STUCK_SECONDS / keep_alive.beat_seconds)
    for beat in range(10 * beats):
        taken = beat // (beats - 1) * PROGRESS_BYTES
        verdict = keep_alive.beat(200 + beat, None, delivered_while_sending=taken)
        assert verdict not in (LifeVerdict.GONE, LifeVerdict.STUCK)


def test_sends_that_end_in_between_do_not_add_up() -> None:
    keep_alive = settled()
    for beat in range(int(10 * STUCK_SECONDS / keep_alive.beat_seconds)):
        taken = 10_000 if beat % 50 else None
        verdict = keep_alive.beat(200 + beat, None, delivered_while_sending=taken)
        assert verdict not in (LifeVerdict.GONE, LifeVerdict.STUCK)


def test_a_slow_link_gets_a_longer_deadline() -> None:
    keep_alive = settled()
    beats_until(keep_alive, LifeVerdict.PING)
    given_up_after = (
        beats_until(keep_alive, LifeVerdict.GONE, slowest=5.0) * keep_alive.beat_seconds
    )
    assert given_up_after >= 19.0


def test_a_busy_connection_is_measured_now_and_then() -> None:
    keep_alive = settled()
    beats = int(60 / keep_alive.beat_seconds)
    pings = sum(keep_alive.beat(1000 + beat, None) is LifeVerdict.PING for beat in range(beats))
    assert pings == 60 // MEASURE_EVERY_SECONDS


def test_shorter_settings_beat_faster() -> None:
    keep_alive = KeepAlive(0.2, 0.4)
    keep_alive.beat(100, None)
    beats = beats_until(keep_alive, LifeVerdict.GONE)
    assert 0.5 <= beats * keep_alive.beat_seconds <= 0.7


def test_of_two_that_hear_the_same_only_the_one_that_leads_pings() -> None:
    leading, following = KeepAlive(5.0, 8.0), KeepAlive(5.0, 8.0, leads=False)
    for count in range(EARLY_MEASUREMENTS):
        leading.beat(count + 1, None)
        following.beat(count + 1, None)
    heard, pings = 100, {"leading": 0, "following": 0}
    for _ in range(600):  # beats; an answer is there by the next one
        if leading.beat(heard, 0.1) is LifeVerdict.PING:
            pings["leading"] += 1
            heard += 12
        if following.beat(heard, 0.1) is LifeVerdict.PING:
            pings["following"] += 1
            heard += 12
    assert 80 <= pings["leading"] <= 100
    assert pings["following"] <= 600 // MEASURE_EVERY_SECONDS


def test_the_one_that_does_not_lead_notices_silence_by_itself_two_beats_later() -> None:
    keep_alive = KeepAlive(5.0, 8.0, leads=False)
    for count in range(EARLY_MEASUREMENTS):
        keep_alive.beat(count + 1, None)
    keep_alive.beat(100, None)
    assert beats_until(keep_alive, LifeVerdict.PING) == 5 + 2
    assert beats_until(keep_alive, LifeVerdict.GONE) == 8


# What the kernel knows: whether something waits to be acknowledged


def beats_without_acknowledgement(
    keep_alive: KeepAlive,
    *,
    idle_seconds: float = 0.0,
    slowest: float | None = None,
    elsewhere: float = 0.0,
    doubted: bool = False,
) -> int:
    """After how many beats a connection is given up, if what is sent just before the first of them
    is never acknowledged. `idle_seconds`: before that, nothing was sent for so long."""
    for count in range(1, 1000):
        waited = idle_seconds + count * keep_alive.beat_seconds
        verdict = keep_alive.beat(
            100,
            slowest,
            unacknowledged_seconds=waited,
            slowest_elsewhere=elsewhere,
            doubted=doubted and count == 1,
        )
        if verdict is LifeVerdict.GONE:
            return count
    raise AssertionError("it is never given up")


def test_a_link_that_acknowledges_nothing_is_given_up_in_half_the_time() -> None:
    beats = beats_without_acknowledgement(settled())
    assert UNACKNOWLEDGED_SECONDS <= beats * settled().beat_seconds <= UNACKNOWLEDGED_SECONDS + 1.0


def test_what_was_sent_a_moment_ago_after_a_long_rest_is_given_its_time() -> None:
    beats = beats_without_acknowledgement(settled(), idle_seconds=3600.0)
    assert (beats - 1) * settled().beat_seconds >= UNACKNOWLEDGED_SECONDS


def test_a_slow_link_gets_longer_for_acknowledgements_too() -> None:
    beats = beats_without_acknowledgement(settled(), slowest=2.0)
    assert beats * settled().beat_seconds >= 8.0


def test_a_link_beside_one_that_fills_the_line_gets_longer_too() -> None:
    beats = beats_without_acknowledgement(settled(), elsewhere=5.0)
    assert beats * settled().beat_seconds >= 10.0


def test_a_process_that_is_busy_while_its_kernel_acknowledges_keeps_its_whole_deadline() -> None:
    for waits in (None, 0.2):  # a full link always waits for some, and always gets some
        keep_alive = settled()
        for _ in range(5 + 8 - 1):
            verdict = keep_alive.beat(100, 0.1, unacknowledged_seconds=waits)
            assert verdict is not LifeVerdict.GONE
        assert keep_alive.beat(100, 0.1, unacknowledged_seconds=waits) is LifeVerdict.GONE


def test_bytes_that_arrive_count_more_than_missing_acknowledgements() -> None:
    keep_alive = settled()
    for count in range(100):
        verdict = keep_alive.beat(200 + count, None, unacknowledged_seconds=float(count))
        assert verdict is not LifeVerdict.GONE


# When another connection of this node was given up


def test_a_silent_connection_is_pinged_at_once_when_another_was_given_up() -> None:
    keep_alive = settled()
    assert keep_alive.beat(100, None) is LifeVerdict.FINE
    assert keep_alive.beat(100, None, doubted=True) is LifeVerdict.PING
    assert keep_alive.beat(100, None, doubted=True) is LifeVerdict.FINE  # once is enough


def test_a_doubted_connection_is_given_up_sooner_if_nothing_is_acknowledged() -> None:
    beats = beats_without_acknowledgement(settled(), doubted=True)
    assert DOUBTED_SECONDS <= beats * settled().beat_seconds <= DOUBTED_SECONDS + 1.0
    slow = beats_without_acknowledgement(settled(), slowest=2.0, doubted=True)
    assert slow * settled().beat_seconds >= 8.0


def test_a_doubted_connection_whose_kernel_answers_has_as_long_as_any() -> None:
    keep_alive = settled()
    assert keep_alive.beat(100, None, doubted=True) is LifeVerdict.PING
    assert beats_until(keep_alive, LifeVerdict.GONE) * keep_alive.beat_seconds == 8.0


def test_a_byte_ends_the_doubt() -> None:
    keep_alive = settled()
    keep_alive.beat(99, None)
    assert keep_alive.beat(99, None, doubted=True) is LifeVerdict.PING
    assert keep_alive.beat(100, None) is LifeVerdict.FINE
    assert beats_until(keep_alive, LifeVerdict.PING) == 5
