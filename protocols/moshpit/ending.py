"""How a round ends for one member: what it learns, and the verdict that this makes, once.

Easy to get wrong: a verdict in doubt is final, too. The decision may become known afterwards, and
is then told to whoever asks; but this member has dropped its values.
"""

from __future__ import annotations

from protocols.moshpit import verdicts
from protocols.moshpit.acceptor import Acceptor, blocking_of
from protocols.moshpit.agreement_messages import Decided, GivenUp, Result
from protocols.moshpit.desk import Desk
from protocols.moshpit.own_exchange import OwnExchange
from protocols.moshpit.verdicts import Commit, Discard, LeftOut, Verdict

TIME_IS_OVER = "the round's time was over"


class Ending:
    """The decision, as far as it is known, and the verdict of one member."""

    def __init__(self, desk: Desk, acceptor: Acceptor, exchange: OwnExchange) -> None:
        self.verdict: Verdict | None = None
        self.decision: Decided | None = None
        self.why_discard = ""
        """Why no more attempts are to be made; "" if they are."""
        self._desk = desk
        self._acceptor = acceptor
        self._exchange = exchange

    def conclude(self, result: Result | None, reason: str) -> None:
        """Our ballot has decided: tell everybody."""
        decided = Decided(result, reason)
        self._desk.send_to_others(decided)
        self.learn(decided)

    def learn(self, decided: Decided) -> None:
        """This is decided."""
        self.decision = decided
        if self.verdict is not None:
            return  # in doubt it was, and stays: the values are dropped
        result = decided.result
        if result is None:
            self.end(Discard(decided.reason, in_doubt=False))
        elif self._exchange.holds(result) and not self._exchange.doubts(result):
            self.end(Commit(result.attempt, result.members, result.digest))
        else:
            self.end(LeftOut(result.attempt, result.members, result.digest))

    def give_up(self, reason: str) -> None:
        """No quorum is to be found: say so, and end."""
        self._desk.send_to_others(GivenUp(self._acceptor.promised))
        self.end_without_quorum(reason)

    def end_without_quorum(self, reason: str) -> None:
        """In doubt, unless our own vow alone makes a quorum impossible."""
        acceptor = self._acceptor
        alone_blocks = blocking_of(self._desk.size) == 1
        if alone_blocks and acceptor.vowed and not acceptor.has_accepted_a_result:
            self.learn(Decided(None, reason))
            return
        acceptor.close()
        self.end(Discard(reason, in_doubt=True))

    def end(self, verdict: Verdict) -> None:
        self.verdict = verdict
        self._desk.timers.clear()
        self._exchange.stop()
        self._desk.effects.append(verdicts.Decided(verdict))
