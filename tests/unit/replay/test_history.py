"""Whatever happens in whatever order, with crashes in between: the log makes the same state, and every ticket ends exactly once."""

import dataclasses

import msgspec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

ACTORS = st.sampled_from(["a", "b"])
KINDS = st.sampled_from(["good"] * 4 + ["uniform", "fault"])
WORK = [
    st.tuples(st.just("lease"), ACTORS, st.integers(1, 5)),
    st.tuples(st.just("work"), ACTORS, st.lists(st.tuples(KINDS, st.integers(0, 2)), min_size=1, max_size=4)),
    st.tuples(st.just("put"), st.integers(0, 50), st.tuples(KINDS, st.integers(0, 2))),
    st.tuples(st.just("cut"), st.booleans(), st.just(0)),
    st.tuples(st.just("publish"), st.just(0), st.just(0)),
]
TROUBLE = [
    st.tuples(st.just("repeat"), st.integers(0, 50), st.booleans()),
    st.tuples(st.just("checkpoint"), st.integers(0, 2), st.just(0)),
    st.tuples(st.just("restart"), st.integers(0, 5), st.just(0)),
    st.tuples(st.just("wait"), st.integers(1, 12), st.just(0)),
    st.tuples(st.just("crash"), st.integers(0, 3), st.just(0)),
]
OPERATIONS = st.one_of(*WORK, *WORK, *WORK, *TROUBLE)
REWARDS = {"good": (1.0, 0.0), "uniform": (1.0, 1.0), "fault": (None, None)}


class History:
    """Actors, a learner and crashes, in the order a list of operations says."""

    def __init__(self, bench, make_group, bound=1):
        self.b = bench(
            train=7,
            evaluation=2,
            replay={"max_staleness": bound, "max_attempts": 2, "eval_every": 2, "lease_s": 10.0},
            run={"max_steps": 6},
        ).running()
        self.make_group, self.bound = make_group, bound
        self.held = {"a": {}, "b": {}}
        self.answered = []
        self.cuts = {}
        self.checkpoints = [0]
        self.answered_up_to = len(self.b.records)
        self.last, self.before_last = "", self._model()

    def step(self, operation):
        """One request at a time, for a crash can lose only what was not answered."""
        name, *arguments = operation
        if name == "work":
            actor, outcomes = arguments
            self.step(("lease", actor, len(outcomes)))
            for index, outcome in enumerate(outcomes):
                self.step(("put", index, outcome))
            return
        if name == "restart":
            self.step(("start", *arguments))
            self.step(("announce", 0, 0))
            return
        model, records = self._model(), len(self.b.records)
        getattr(self, name)(*arguments)
        self.last, self.before_last, self.answered_up_to = name, model, min(records, len(self.b.records))
        self.check()

    def _model(self):
        """What the actors and the learner were told so far."""
        held = {actor: dict(tickets) for actor, tickets in self.held.items()}
        return held, list(self.answered), dict(self.cuts), list(self.checkpoints)

    def lease(self, actor, want):
        held = self.held[actor]
        running = [(ticket, oldest) for ticket, oldest in held.values()]
        reply = self.b.lease(want, actor=actor, running=running, want_evaluations=1, version=self.b.state.policy.version)
        for ticket in reply.cancelled if reply else ():
            held.pop(ticket, None)
        for ticket in reply.tickets if reply else ():
            held[ticket.ticket] = (ticket, self.b.state.policy.version & 0xFFFFFFFF)

    def put(self, index, outcome):
        held = [(actor, ticket) for actor in ("a", "b") for ticket, _ in self.held[actor].values()]
        if not held:
            return
        kind, age = outcome
        actor, ticket = held[index % len(held)]
        step = self.held[actor].pop(ticket.ticket)[1]
        rewards = REWARDS[kind] if ticket.kind == "train" else REWARDS[kind][:1]
        oldest = max(0, step - age) if ticket.kind == "train" else step
        group = self.make_group(ticket, rewards, step=oldest, incarnation=self.b.state.incarnation, actor=actor)
        self.answered.append((group, self.b.put(group)))

    def repeat(self, index, differently):
        """A put whose answer was lost comes again, or another actor's group of the same ticket comes later."""
        if not self.answered:
            return
        group, answer = self.answered[index % len(self.answered)]
        if differently:
            late = dataclasses.replace(group, actor="late")
            self.answered.append((late, self.b.put(late)))
        else:
            assert self.b.put(group) == answer

    def cut(self, again, _):
        """The next batch, possibly ahead of the publication of the one before, or the last one again."""
        state = self.b.state
        asked = [cut for cut in self.cuts if cut in state.buffer.batches and cut >= state.buffer.position]
        number = asked[-1] if again and asked else max([state.buffer.position, *(cut + 1 for cut in asked)])
        step = state.step + number - state.buffer.position
        batch = self.b.cut(number, step)
        if batch is not None:
            tickets = [entry.ticket for entry in batch.entries]
            assert self.cuts.setdefault(number, tickets) == tickets
            assert len(tickets) == 2
            assert all(entry.lag(step) <= self.bound for entry in batch.entries)

    def publish(self, _, __):
        buffer = self.b.state.buffer
        if buffer.position < buffer.next_cut and buffer.position in self.cuts:
            self.b.publish(self.b.state.step + 1, buffer.position + 1)

    def checkpoint(self, back, _):
        position = self.b.state.buffer.position
        self.checkpoints.append(position)
        self.checkpoints = [c for c in self.checkpoints if c >= min(self.checkpoints[-1 - back :] or [position])]
        self.b.acknowledge(position, min(self.checkpoints))

    def start(self, which, _):
        cut = self.checkpoints[which % len(self.checkpoints)]
        self.checkpoints = [c for c in self.checkpoints if c <= cut]
        self.b.start(step=cut, cut=cut)

    def announce(self, _, __):
        self.b.publish(self.b.state.step, self.b.state.buffer.position)

    def wait(self, seconds, _):
        self.b.now += seconds
        self.b.actors.expire(self.b.now)
        if self.b.rounds.is_over(self.b.now):
            self.b.rounds.close(self.b.rounds.result(self.b.now), self.b.now)

    def crash(self, lost, _):
        """Lose up to ``lost`` records of the last operation; what was not answered is as if not asked, a put is asked again."""
        lost = min(lost, len(self.b.records) - self.answered_up_to)
        self.b.crash(max(0, lost))
        if lost > 0:
            unanswered = self.answered[len(self.before_last[1]) :]
            self.held, self.answered, self.cuts, self.checkpoints = self.before_last
            for group, _ in unanswered:
                self._pop(group)
                self.answered.append((group, self.b.put(group)))

    def progress(self):
        """Whether well-behaved actors and a learner train one more batch from here, if one is still to be trained."""
        state = self.b.state
        if state.step >= 6 or state.stop is not None or len(state.ledger.parked) == 7:
            return True
        target = state.step + 1
        for _ in range(30):
            for actor in ("a", "b"):
                self.lease(actor, 4)
            self._play_everything()
            self.cut(again=False, _=0)
            self.publish(0, 0)
            if self.b.state.step >= target or self.b.state.stop is not None:
                return True
            self.wait(11, 0)
        return False

    def _play_everything(self):
        step = self.b.state.policy.version & 0xFFFFFFFF
        for actor in ("a", "b"):
            for ticket, _ in list(self.held[actor].values()):
                if ticket.min_step <= step:
                    del self.held[actor][ticket.ticket]
                    rewards = REWARDS["good"] if ticket.kind == "train" else (1.0,)
                    self.b.put(self.make_group(ticket, rewards, step=step, incarnation=self.b.state.incarnation, actor=actor))

    def _pop(self, group):
        for tickets in self.held.values():
            if group.ticket in tickets and tickets[group.ticket][0].attempt == group.attempt:
                del tickets[group.ticket]

    def check(self):
        state = self.b.state
        assert self.b.encoded() == msgspec.msgpack.encode(self.b.replayed())
        count = {name: int(value) for name, value in state.counters().items()}
        accepted = [entry.ticket for batch in state.buffer.batches.values() for entry in batch.entries]
        accepted += list(state.buffer.groups)
        places = accepted + [t.ticket for t in state.ledger.open.values() if t.round is None]
        assert len(set(places)) == len(places), "no ticket is in two places"
        ended = sum(count[f"groups_{end}"] for end in ("trained", "stale", "filtered", "failed"))
        assert count["tickets_issued"] == ended + count["running"] + count["buffered"] + count["training"]
        assert count["groups_dropped"] == 0
        assert count["max_lag"] <= self.bound
        kept = {group.ticket for group, (result, _) in self.answered if result == "accepted"}
        assert set(accepted) <= kept
        assert count["groups_accepted"] == len(kept)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(operations=st.lists(OPERATIONS, min_size=5, max_size=50), bound=st.integers(0, 2))
def test_every_history_is_replayed_and_every_ticket_ends_once(bench, make_group, operations, bound):
    history = History(bench, make_group, bound)
    history.check()
    for operation in operations:
        history.step(operation)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(operations=st.lists(OPERATIONS, max_size=50), bound=st.integers(0, 2))
def test_the_run_goes_on_after_any_history(bench, make_group, operations, bound):
    history = History(bench, make_group, bound)
    for operation in operations:
        history.step(operation)
    while history.b.state.step < 6 and history.b.state.stop is None:
        assert history.progress()


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(operations=st.lists(OPERATIONS, min_size=20, max_size=60))
def test_every_prefix_of_the_log_is_a_state_one_can_go_on_from(bench, make_group, operations):
    history = History(bench, make_group)
    for operation in operations:
        history.step(operation)
    b = history.b
    for count in range(2, len(b.records) + 1):
        state = b.replayed(count)
        totals = state.counters()
        assert totals["groups_dropped"] == 0
        ended = sum(totals[f"groups_{end}"] for end in ("trained", "stale", "filtered", "failed"))
        assert totals["tickets_issued"] == ended + totals["running"] + totals["buffered"] + totals["training"]
