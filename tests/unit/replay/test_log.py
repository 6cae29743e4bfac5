"""The trajectory log: frames, segments, torn ends, damage, recovery."""

import asyncio
import os
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_search_rl.codec import encode_group
from async_search_rl.errors import ConfigError, LogCorruptError
from async_search_rl.http import OverloadedError
from async_search_rl.replay.journal import Journal
from async_search_rl.replay.log import FRAME_BYTES, Log
from async_search_rl.replay.records import Acknowledged, Issued, Published, Started
from async_search_rl.replay.state import Identity

IDENTITY = Identity(run="r", seed=0, shuffle=True, train="t", evaluation="e")


def payloads(log):
    return [payload for payload, _ in log.recover()]


def written(folder, batches):
    """A log of one segment; each batch is one sync."""
    log = Log(folder, 1 << 30)
    assert log.recover() == []
    log.roll(b"snapshot")
    log.flush()
    for batch in batches:
        for payload in batch:
            log.append(payload)
        log.flush()
    log.close()
    return folder / "segment-00000001.log"


def test_what_was_flushed_is_recovered_and_can_be_read_by_location(tmp_path):
    log = Log(tmp_path, 1 << 30)
    log.recover()
    log.roll(b"s")
    locations = [log.append(bytes([i]) * i) for i in range(5)]
    log.flush()
    log.append(b"never flushed")
    assert [log.read(location) for location in locations] == [bytes([i]) * i for i in range(5)]
    assert payloads(Log(tmp_path, 1 << 30)) == [b"s", *(bytes([i]) * i for i in range(5))]


@given(cut=st.integers(0, 10_000))
def test_a_log_cut_anywhere_recovers_the_whole_records_before(tmp_path_factory, cut):
    folder = tmp_path_factory.mktemp("log")
    path = written(folder, [[b"a" * 10, b"b" * 20], [b"c"]])
    size = cut % path.stat().st_size
    os.truncate(path, size)
    whole, end = [], 0
    for payload in (b"snapshot", b"a" * 10, b"b" * 20, b"c"):
        end += FRAME_BYTES + len(payload)
        if end <= size:
            whole.append(payload)
    assert payloads(Log(folder, 1 << 30)) == whole


@given(where=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_a_flipped_bit_is_a_torn_end_in_the_last_batch_and_damage_before(tmp_path_factory, where, bit):
    folder = tmp_path_factory.mktemp("log")
    path = written(folder, [[b"first batch"], [b"x" * 30, b"y" * 30]])
    data = bytearray(path.read_bytes())
    where %= len(data)
    data[where] ^= 1 << bit
    path.write_bytes(data)
    last_batch = len(data) - 2 * (FRAME_BYTES + 30)
    if where < last_batch:
        with pytest.raises(LogCorruptError, match="damaged at byte"):
            Log(folder, 1 << 30).recover()
    else:
        kept = [b"snapshot", b"first batch"] + ([b"x" * 30] if where >= len(data) - FRAME_BYTES - 30 else [])
        assert payloads(Log(folder, 1 << 30)) == kept


def test_a_log_goes_on_after_a_torn_end(tmp_path):
    path = written(tmp_path, [[b"kept"], [b"torn"]])
    os.truncate(path, path.stat().st_size - 1)
    log = Log(tmp_path, 1 << 30)
    log.recover()
    location = log.append(b"after")
    log.close()
    assert log.read(location) == b"after"
    assert payloads(Log(tmp_path, 1 << 30)) == [b"snapshot", b"kept", b"after"]


def test_damage_in_an_earlier_segment_and_a_missing_one_are_refused(tmp_path):
    log = Log(tmp_path, 1)
    log.recover()
    for _ in range(3):
        log.roll(b"snapshot")
        log.append(b"record")
        assert log.full
    log.close()
    assert log.segments() == [1, 2, 3]
    assert payloads(Log(tmp_path, 1)) == [b"snapshot", b"record"]
    middle = tmp_path / "segment-00000002.log"
    data = middle.read_bytes()
    middle.write_bytes(data[:-1])
    with pytest.raises(LogCorruptError, match=r"00000002.*later segments"):
        Log(tmp_path, 1).recover()
    middle.unlink()
    with pytest.raises(LogCorruptError, match=r"\[1, 3\]"):
        Log(tmp_path, 1).recover()


def test_a_segment_whose_snapshot_is_torn_is_given_up_for_the_one_before(tmp_path):
    written(tmp_path, [[b"record"]])
    (tmp_path / "segment-00000002.log").write_bytes(b"ASRL torn")
    log = Log(tmp_path, 1 << 30)
    assert payloads(log) == [b"snapshot", b"record"]
    assert log.segments() == [1]


def test_a_damaged_record_is_not_read(tmp_path):
    path = written(tmp_path, [[b"record"]])
    log = Log(tmp_path, 1 << 30)
    location = log.recover()[-1][1]
    path.write_bytes(path.read_bytes()[:-2] + b"xx")
    with pytest.raises(LogCorruptError, match="damaged at byte"):
        log.read(location)


def changes(count):
    yield Started(incarnation=1, step=0, cut=0, weights_url="w")
    yield Published(incarnation=1, step=0, cut=0, evaluate=False)
    for i in range(count):
        yield Issued(ticket=i, attempt=1, actor="a", question=i, cursor=i + 1)


def test_a_journal_recovers_from_the_snapshot_of_its_last_segment(tmp_path):
    journal = Journal.open(tmp_path, 300, IDENTITY)
    for record in changes(30):
        journal.commit(record)
    journal.close()
    segments = sorted(tmp_path.glob("segment-*.log"))
    assert len(segments) > 3
    again = Journal.open(tmp_path, 300, IDENTITY)
    assert again.state == journal.state
    again.prune()
    assert sorted(tmp_path.glob("segment-*.log")) == segments[-1:], "nothing waits for a batch: only the last one is needed"
    assert Journal.open(tmp_path, 300, IDENTITY).state == journal.state


def test_segments_are_kept_for_groups_that_may_still_be_cut(tmp_path, bench, make_group):
    b = bench(replay={"max_staleness": 9, "max_inflight": 99})
    b.use(Journal.open(tmp_path, 2000, b.state.identity))
    b.running()
    groups = {}
    for ticket in b.tickets(20):
        groups[ticket.ticket] = make_group(ticket, (1.0, 0.0))
        b.put(groups[ticket.ticket])
    for cut in range(5):
        b.cut(cut)
        b.publish(cut + 1)
    b.journal.flush()
    everything = b.journal.segments
    b.acknowledge(5, oldest_cut=3)
    b.journal.prune()
    assert 1 < len(b.journal.segments) < len(everything)
    b.journal.close()
    b.use(Journal.open(tmp_path, 2000, b.state.identity))
    b.start(step=3, cut=3)
    for cut, batch in ((cut, b.cut(cut)) for cut in range(3, 10)):
        for entry in batch.entries:
            assert b.journal.read_group(entry.location) == encode_group(groups[entry.ticket]), cut
    b.journal.close()


@pytest.mark.parametrize(
    ("changed", "key"),
    [({"run": "x"}, "run.name"), ({"seed": 1}, "run.seed"), ({"shuffle": False}, "data.shuffle"), ({"train": "x"}, "data.train")],
)
def test_a_log_of_another_run_is_refused_by_key(tmp_path, changed, key):
    journal = Journal.open(tmp_path, 300, IDENTITY)
    journal.commit(next(changes(0)))
    journal.close()
    other = Identity(**{**{name: getattr(IDENTITY, name) for name in IDENTITY.__struct_fields__}, **changed})
    with pytest.raises(ConfigError, match=key):
        Journal.open(tmp_path, 300, other)


def test_many_waiters_share_a_sync(tmp_path, monkeypatch):
    syncs = []
    sync = os.fdatasync
    monkeypatch.setattr(os, "fdatasync", lambda descriptor: (syncs.append(threading.get_ident()), sync(descriptor)))

    async def commit_and_wait(journal, number):
        journal.commit(Acknowledged(oldest_cut=number))
        await journal.durable()
        return journal.queued_bytes

    async def go():
        journal = Journal.open(tmp_path, 1 << 30, IDENTITY)
        await asyncio.gather(*(commit_and_wait(journal, number) for number in range(100)))
        await journal.durable()
        journal.close()

    asyncio.run(go())
    assert 1 <= len(syncs) <= 3
    assert threading.get_ident() not in syncs[:1], "the event loop goes on meanwhile"
    assert Journal.open(tmp_path, 1 << 30, IDENTITY).state.buffer.oldest_cut == 99


def test_a_disk_that_refuses_fails_every_waiter_from_then_on(tmp_path, monkeypatch):
    def refuse(descriptor):
        raise OSError(28, "No space left on device")

    async def go():
        journal = Journal.open(tmp_path, 1 << 30, IDENTITY)
        journal.commit(Acknowledged(oldest_cut=1))
        monkeypatch.setattr(os, "fdatasync", refuse)
        for _ in range(2):
            with pytest.raises(OverloadedError, match="No space left"):
                await journal.durable()
            journal.commit(Acknowledged(oldest_cut=2))
        journal.close()

    asyncio.run(go())
