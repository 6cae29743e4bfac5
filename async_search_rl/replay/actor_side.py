"""The actors' half of the service: leases renewed, tickets issued, groups judged. It decides, without clock or network."""

from __future__ import annotations

from async_search_rl.errors import SchemaError
from async_search_rl.replay.core import Core
from async_search_rl.replay.facts import wholly_of_version
from async_search_rl.replay.ledger import OpenTicket
from async_search_rl.replay.records import Cancelled, Expired, GroupFacts, Issued, Put, Stopped
from async_search_rl.replay.rounds import Rounds
from async_search_rl.replay.schema import LeaseReply, LeaseRequest, PutResult, Running, Ticket
from async_search_rl.trajectory import Group
from async_search_rl.version import PolicyVersion

_KEPT_IN_LOG = ("accepted", "filtered", "evaluated", "failed")


class ActorSide:
    """Answers lease requests and puts."""

    def __init__(self, core: Core, rounds: Rounds) -> None:
        self._core = core
        self._rounds = rounds

    def renew(self, request: LeaseRequest, now: float) -> None:
        """Note that the actor lives, and renew the leases of what it runs."""
        self._core.registry.saw(request, now)
        for running in request.running:
            ticket = self._core.state.ledger.open.get(running.ticket)
            if ticket is not None and not ticket.waiting and ticket.attempt == running.attempt:
                self._core.leases.grant(running.ticket, request.actor, now)

    def answer(self, request: LeaseRequest, now: float) -> LeaseReply | None:
        """The reply to a lease request, or ``None`` while there is nothing to say."""
        state = self._core.state
        cancelled = [running.ticket for running in request.running if self._must_drop(request.actor, running)]
        tickets = self.evaluation_tickets(request.actor, request.version, request.want_evaluations, now)
        tickets += self.training_tickets(request.actor, request.want, now)
        stop = self._core.over(joined=request.known_policy is not None)
        news = state.policy if state.policy is not None and state.policy.version != request.known_policy else None
        if stop is None and state.end is not None:
            news = None  # Of the learner that has left: the next one's are to come.
        if stop is None and not cancelled and not tickets and news is None:
            return None
        return LeaseReply(tickets=tickets, cancelled=cancelled, policy=news, stop=stop)

    def evaluation_tickets(self, actor: str, version: int | None, want: int, now: float) -> list[Ticket]:
        """Up to ``want`` tickets of the open round, if the actor's engine can still run its version."""
        state = self._core.state
        current = state.evaluations.open
        if current is None or state.stop is not None or not self._rounds.serves(version):
            return []
        tickets = self._issue_again(actor, want, now, evaluations=True)
        while len(tickets) < want and current.issued < current.asked:
            question = current.issued
            ticket = current.first_ticket + question
            self._core.commit(Issued(ticket=ticket, attempt=1, actor=actor, question=question, round=current.round))
            tickets.append(self._lease(state.ledger.open[ticket], actor, now, min_step=0))
        return tickets

    def training_tickets(self, actor: str, want: int, now: float) -> list[Ticket]:
        """Up to ``want`` training tickets: further attempts, questions that came back, then the question order."""
        state = self._core.state
        if state.policy is None or state.end is not None:
            return []
        tickets = self._issue_again(actor, want, now, evaluations=False)
        for _ in range(min(want - len(tickets), self._core.room)):
            question, cursor = self._next_question()
            if question is None:
                reason = f"all {len(self._core.train)} training questions are parked: every attempt failed, the last one by: "
                self._core.commit(Stopped(reason=reason + self._last_failure()))
                break
            min_step, ticket = self._core.min_step(), state.ledger.next_ticket
            self._core.commit(Issued(ticket=ticket, attempt=1, actor=actor, question=question, cursor=cursor))
            tickets.append(self._lease(state.ledger.open[ticket], actor, now, min_step))
        return tickets

    def put(self, actor: str, group: Group, facts: GroupFacts, digest: bytes, data: bytes) -> tuple[PutResult, str]:
        """Judge a group: the result, and the reason where it is not plain success.

        Raises:
            SchemaError: the group is not what its open ticket asked for; nothing changed.
        """
        ledger = self._core.state.ledger
        earlier = ledger.answer_to(group.ticket, group.attempt, digest)
        if earlier is not None:
            return earlier.result, earlier.reason
        ticket = ledger.open.get(group.ticket)
        late = ticket is None and ledger.ended_by_put(group.ticket)
        if ticket is None and not late:
            return "unknown", f"ticket {group.ticket} is not open: it was cancelled, failed, or never issued"
        if ticket is not None and group.attempt > ticket.attempt:
            return "unknown", f"attempt {group.attempt} at ticket {group.ticket} was never issued, the last one is {ticket.attempt}"
        result: PutResult = "duplicate"
        reason, final = f"another group of ticket {group.ticket} came first", False
        if ticket is not None:
            self._require_fits(group, ticket)
            result, reason = self._judge(group, facts, ticket)
            last = group.attempt == ticket.attempt and ticket.attempt >= self._core.config.replay.max_attempts
            final = result == "failed" and (last or self._version_vanished(ticket, group))
        self._core.commit(
            Put(
                ticket=group.ticket,
                attempt=group.attempt,
                actor=actor,
                digest=digest,
                result=result,
                reason=reason,
                facts=facts,
                final=final,
                group=data if result in _KEPT_IN_LOG else b"",
            )
        )
        self._settle(group.ticket)
        return result, reason

    def expire(self, now: float) -> bool:
        """Take back leases that ran out; a ticket without attempts left fails. Whether there were any."""
        self._core.registry.forget_silent(now)
        expired = self._core.leases.expired(now)
        for number in expired:
            if self._core.state.ledger.open[number].attempt < self._core.config.replay.max_attempts:
                self._core.leases.release(number)
            else:
                self._core.leases.forget(number)
                self._core.commit(Expired(ticket=number))
        return bool(expired)

    def _must_drop(self, actor: str, running: Running) -> bool:
        """Whether the group's ticket ended otherwise than by this actor's put, or the group can no longer be used."""
        ledger = self._core.state.ledger
        ticket = ledger.open.get(running.ticket)
        if ticket is None:
            return not ledger.ended_by(running.ticket, actor)
        if ticket.round is not None or not self._core.too_old(running.oldest_step):
            return False
        if running.attempt != ticket.attempt:
            return self._core.leases.holder(running.ticket) != actor
        self._core.commit(Cancelled(ticket=running.ticket))
        self._core.leases.forget(running.ticket)
        return True

    def _issue_again(self, actor: str, want: int, now: float, *, evaluations: bool) -> list[Ticket]:
        ledger = self._core.state.ledger
        waiting = [ledger.open[number] for number in self._core.leases.waiting]
        tickets = []
        for ticket in [t for t in waiting if (t.round is not None) == evaluations][: max(0, want)]:
            again = Issued(
                ticket=ticket.ticket, attempt=ticket.attempt + 1, actor=actor, question=ticket.question, round=ticket.round
            )
            self._core.commit(again)
            tickets.append(self._lease(ticket, actor, now, 0 if evaluations else self._core.min_step(again=True)))
        return tickets

    def _next_question(self) -> tuple[int | None, int | None]:
        """The next training question and the cursor after it; no cursor for a question that came back."""
        ledger = self._core.state.ledger
        if ledger.returned:
            return ledger.returned[0], None
        return self._core.order.next(ledger.cursor, ledger.parked) or (None, None)

    def _last_failure(self) -> str:
        failed = (entry for entry in reversed(self._core.state.ledger.ended.values()) if entry.end == "failed")
        return next((entry.answers[-1].reason for entry in failed if entry.answers), "a lease that ran out")

    def _lease(self, ticket: OpenTicket, actor: str, now: float, min_step: int) -> Ticket:
        self._core.leases.grant(ticket.ticket, actor, now)
        current = self._core.state.evaluations.open
        evaluation = current if ticket.round is not None else None
        questions = self._core.train if ticket.round is None else self._core.evaluation
        return Ticket(
            ticket=ticket.ticket,
            attempt=ticket.attempt,
            kind="train" if ticket.round is None else "evaluation",
            question=questions[ticket.question],
            group_size=self._group_size(ticket),
            min_step=min_step,
            evaluation=ticket.round,
            version=None if evaluation is None else evaluation.version,
        )

    def _group_size(self, ticket: OpenTicket) -> int:
        return self._core.config.rollout.group_size if ticket.round is None else 1

    def _require_fits(self, group: Group, ticket: OpenTicket) -> None:
        questions = self._core.train if ticket.round is None else self._core.evaluation
        wanted = {
            "evaluation": (ticket.round, group.evaluation),
            "question_id": (questions[ticket.question].id, group.question_id),
            "len(trajectories)": (self._group_size(ticket), len(group.trajectories)),
        }
        for field, (must, got) in wanted.items():
            if must != got:
                raise SchemaError(f"group.{field} must be {must!r} for ticket {ticket.ticket}, got {got!r} from {group.actor!r}")

    def _judge(self, group: Group, facts: GroupFacts, ticket: OpenTicket) -> tuple[PutResult, str]:
        config = self._core.config
        if ticket.round is not None:
            return self._judge_evaluation(group, facts)
        if facts.valid < config.min_valid_members:
            fault = next((t.fault for t in group.trajectories if t.fault), "none")
            return "failed", f"{facts.valid} valid trajectories, {config.min_valid_members} are needed; first fault: {fault}"
        if self._core.too_old(facts.oldest_step):
            bound = config.replay.max_staleness
            return (
                "stale",
                f"oldest token of step {facts.oldest_step}, next batch is of {self._core.state.next_step}, bound {bound}",
            )
        if config.filters_uniform_groups and group.uniform:
            return "filtered", f"all rewards are {facts.reward:g}: no gradient"
        return "accepted", ""

    def _judge_evaluation(self, group: Group, facts: GroupFacts) -> tuple[PutResult, str]:
        current = self._core.state.evaluations.open
        if facts.valid == 0:
            return "failed", f"the episode ended by a fault: {group.trajectories[0].fault}"
        if current is not None and not wholly_of_version(group, current.version):
            return "failed", f"every token must be of version {PolicyVersion.unpack(current.version)}"
        return "evaluated", ""

    def _version_vanished(self, ticket: OpenTicket, group: Group) -> bool:
        """Whether another attempt at an evaluation is vain, as the actors are moving on to newer weights."""
        current, policy = self._core.state.evaluations.open, self._core.state.policy
        if ticket.round is None or current is None or policy is None or policy.version <= current.version:
            return False
        return group.attempt == ticket.attempt and not wholly_of_version(group, current.version)

    def _settle(self, number: int) -> None:
        """Bring leases and the filter's guard in line with what a put changed."""
        state, replay = self._core.state, self._core.config.replay
        ticket = state.ledger.open.get(number)
        if ticket is None:
            self._core.leases.forget(number)
        elif ticket.waiting:
            self._core.leases.release(number)
        if state.filtered_in_row >= replay.max_filtered_in_row and state.stop is None:
            reason = (
                f"{state.filtered_in_row} groups in a row were filtered because all their rewards are equal: "
                "the questions are too hard or too easy for this policy, or the reward is constant (replay.max_filtered_in_row)"
            )
            self._core.commit(Stopped(reason=reason))
