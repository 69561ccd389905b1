"""Offload a pool into a segment, from which another worker restores it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest
from tests.client.pool.offload.pages import digest, fill, sizes
from tests.support.daemons import Daemon, running, until
from tests.support.fake_lender import PAGE
from tests.support.processes import heard, worker
from tests.support.seeds import chosen_seed

import membroker
from membroker import Client, Model
from membroker.errors import AlreadyMapped, ClosedError, InvalidRequest, Offloaded


def run(offset: int) -> str:
    """The name of a run of pages in a segment's header."""
    return f"offset-{offset:020}"


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with running({"host_capacity": "64MiB", "settle_seconds": 1.0}) as daemon:
        yield daemon


@pytest.fixture
def client(daemon: Daemon) -> Iterator[Client]:
    """A client; at the end of the test the daemon is unused again."""
    with membroker.connect(daemon.endpoint()) as client:
        yield client
        for segment in client.segments():
            with suppress(membroker.MembrokerError):
                client.delete_segment(segment.name)
    until(lambda: not any(books.lent_bytes + books.releasing_bytes for books in daemon.device().locations))


@pytest.fixture
def model(client: Client) -> Model:
    return client.model("m")


def filled(model: Model, pages: int) -> membroker.VirtualMemoryPool:
    """Return a pool whose last page begins with a word."""
    pool = model.pool(page_size=PAGE)
    pool.allocate(0, pages * PAGE)
    fill(pool, (pages - 1) * PAGE, b"last")
    return pool


def is_whole(pool: membroker.VirtualMemoryPool, pages: int) -> bool:
    return bytes(pool.view((pages - 1) * PAGE, 4)) == b"last"


def room_for(pool: membroker.VirtualMemoryPool, model: Model, name: str = "s") -> membroker.Segment:
    """Return a segment at the host that the pool fits into."""
    return model.create_segment(name, pool.offload_size(), "host")


def offloaded(model: Model, pages: int = 4) -> tuple[membroker.VirtualMemoryPool, membroker.Segment]:
    """Return a pool, and the segment to which it was offloaded."""
    pool = filled(model, pages)
    segment = room_for(pool, model)
    pool.offload(to=segment)
    return pool, segment


class TestSegments:
    def test_another_worker_goes_on_where_one_was_killed(self, daemon: Daemon, transport: str) -> None:
        """What is in a segment outlives its writer: the bytes are at the same offsets of another process's pool."""
        seed = chosen_seed()
        script = f"""
import hashlib, random
client = connect()
model = client.model('m', virtual_capacity='1GiB')
pool = model.pool(page_size=PAGE)
pool.allocate(PAGE, 3 * PAGE)
pool.allocate(10 * PAGE, 2 * PAGE)
data = random.Random({seed}).randbytes(5 * PAGE)
pool.view(PAGE, 3 * PAGE)[:] = data[:3 * PAGE]
pool.view(10 * PAGE, 2 * PAGE)[:] = data[3 * PAGE:]
segment = model.create_segment('sleeping', pool.offload_size(), 'host')
assert pool.offload(to=segment) == 5 * PAGE
assert not segment.writable
say(hashlib.sha256(data).hexdigest())
wait()
"""
        with worker(script, daemon, transport) as process:
            written = heard(process)
            process.kill()
            process.wait()
        until(lambda: not daemon.sessions())
        with membroker.connect(daemon.endpoint(), transport=transport) as client:
            pool = client.model("m", virtual_capacity="1GiB").pool(page_size=PAGE)
            told: list[tuple[int, int]] = []
            with client.attach("m/sleeping") as segment:
                copied = pool.restore_from(segment, progress=lambda *numbers: told.append(numbers))
                segment.delete()
            assert copied == 5 * PAGE
            assert told[-1] == (5 * PAGE, 5 * PAGE)
            found = bytes(pool.view(PAGE, 3 * PAGE)) + bytes(pool.view(10 * PAGE, 2 * PAGE))
            assert hashlib.sha256(found).hexdigest() == written
            assert sizes(pool) == (5, 0)
            until(lambda: not any(books.lent_bytes for books in daemon.device().locations[1:]))

    def test_segments_that_will_not_do(self, daemon: Daemon, client: Client, model: Model) -> None:
        """Too small, of the device, sealed, or another client's: refused, and nothing has changed."""
        with membroker.connect(daemon.endpoint()) as other:
            pool = model.pool(page_size=PAGE)
            pool.allocate(0, 2 * PAGE)
            small = model.create_segment("small", 2 * PAGE, "host")
            with pytest.raises(InvalidRequest):
                pool.offload(to=small)
            sealed = room_for(pool, model, "sealed")
            with pytest.raises(InvalidRequest, match="device"):
                pool.offload(to=model.create_segment("wrong", pool.offload_size()))
            sealed.seal()
            with pytest.raises(membroker.SegmentNotWritable):
                pool.offload(to=sealed)
            sealed.delete()
            theirs = other.model("m").create_segment("theirs", pool.offload_size(), "host")
            with pytest.raises(InvalidRequest):
                pool.offload(to=theirs)
            assert sizes(pool) == (2, 0)
            closed = room_for(pool, model, "closed")
            closed.close()
            with pytest.raises(ClosedError):
                pool.offload(to=closed)

    @pytest.mark.parametrize(
        ("tensors", "words"),
        [
            ({"weights": ("F32", (8,))}, "no offloaded pages"),
            ({run(0): ("I8", (PAGE,))}, "no offloaded pages"),
            ({"offset-" + "\u0661" * 20: ("U8", (PAGE,))}, "no offloaded pages"),
            ({run(1): ("U8", (PAGE,))}, "whole pages"),
            ({run(10**20 - 1): ("U8", (PAGE,))}, "whole pages"),
            ({run(2 * PAGE): ("U8", (3 * PAGE,))}, "whole pages"),
            ({run(0): ("U8", (2 * PAGE,)), run(PAGE): ("U8", (PAGE,))}, "twice"),
        ],
    )
    def test_what_another_wrote_is_not_believed(
        self, model: Model, tensors: dict[str, tuple[str, tuple[int]]], words: str
    ) -> None:
        """A segment of weights, or of lies, is restored by nobody."""
        segment = model.create_segment("s", "16MiB", "host")
        segment.lay_out(tensors)
        pool = model.pool(page_size=PAGE, virtual_capacity=4 * PAGE)
        with pytest.raises(InvalidRequest):
            pool.restore_from(segment)
        segment.seal()
        with pytest.raises(InvalidRequest, match=words):
            pool.restore_from(segment)
        assert sizes(pool) == (0, 0)
        segment.delete()

    def test_the_place_is_taken(self, model: Model) -> None:
        """A page of the range is in use, or offloaded: nothing has changed. Then it is freed, and all comes."""
        pool, (_, segment) = model.pool(page_size=PAGE, spare_pages=2), offloaded(model)
        pool.allocate(3 * PAGE, PAGE)
        with pytest.raises(AlreadyMapped):
            pool.restore_from(segment)
        pool.offload()
        with pytest.raises(Offloaded):
            pool.restore_from(segment)
        assert sizes(pool) == (0, 1)
        pool.restore()
        pool.free(3 * PAGE, PAGE)
        assert pool.stats().spare_pages == 1
        assert pool.restore_from(segment) == 4 * PAGE
        assert is_whole(pool, 4)
        segment.delete()

    def test_no_room_to_come_back(self, client: Client) -> None:
        """What has not come back is the new pool's, offloaded, and lies in the segment until there is room."""
        model = client.model("small", limit="8MiB")
        first, segment = offloaded(model)
        segment.delete()
        pool = model.pool(page_size=PAGE)
        with model.allocate(PAGE):
            with pytest.raises(membroker.OutOfMemory) as refused:
                pool.restore_from(segment)
            assert refused.value.metadata["restored_bytes"] == str(2 * PAGE)
        assert sizes(pool) == (2, 2)
        segment.close()
        first.close()
        assert pool.restore() == 2 * PAGE
        assert is_whole(pool, 4)

    def test_a_living_view_of_the_segment(self, model: Model) -> None:
        """It would refuse the seal, when all has been copied: so it is told before. Without it the same call goes."""
        pool = filled(model, 4)
        segment = room_for(pool, model)
        view = segment.view()
        with pytest.raises(BufferError):
            pool.offload(to=segment)
        assert sizes(pool) == (4, 0)
        assert bytes(view[:8]) == bytes(8), "a header was written"
        view.release()
        del view
        assert pool.offload(to=segment) == 4 * PAGE
        assert not segment.writable

    def test_what_lies_in_a_segment_is_not_written_over(
        self, model: Model, random_bytes: Callable[[int], bytes]
    ) -> None:
        """It stopped half way, and the next attempt takes the same segment: its first pages are nowhere else."""
        pool, other = model.pool(page_size=PAGE), model.pool(page_size=PAGE)
        other.allocate(0, PAGE)
        pool.allocate(0, 12 * PAGE)
        fill(pool, 0, random_bytes(12 * PAGE))
        every = range(0, 12 * PAGE, PAGE)
        before = digest(pool, *every)
        segment = room_for(pool, model)
        with pytest.raises(ZeroDivisionError):
            pool.offload(to=segment, progress=lambda *_: 1 / 0)
        mapped, offloaded = sizes(pool)
        assert mapped
        assert segment.writable, "another worker could take half of a pool for all of it"
        for again in (pool, other):
            with pytest.raises(InvalidRequest, match=r"restore\(\)"):
                again.offload(to=segment)
        assert (sizes(pool), sizes(other)) == ((mapped, offloaded), (1, 0))
        pool.restore()
        assert digest(pool, *every) == before
        assert pool.offload(to=segment) == 12 * PAGE
        with pytest.raises(membroker.SegmentNotWritable):
            other.offload(to=segment)
        pool.restore()
        assert digest(pool, *every) == before
