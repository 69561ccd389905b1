"""Real transformers over a real broker on the host driver: the tokens are those of its own continuous batching.

A block that is used without memory ends the test process, as it would end the context on a GPU.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.docs.test_docs import program, run_page
from tests.support.daemons import Daemon, hold_still, running, until
from tests.support.sizes import MIB
from tests.support.sleeping import command, done, refused

import membroker
from membroker import InvalidRequest

pytest.importorskip("torch", reason="PyTorch is not installed here: pip install torch")
pytest.importorskip("transformers", reason="transformers is not installed here: pip install transformers")
import torch
from tests.support.engine_batches import batch_of
from tests.support.tiny_transformers import (
    AT_REST,
    BATCHES,
    BURST,
    HAS_SECTORS,
    answer,
    collect,
    peak,
    serving,
    settings,
    stock,
    tiny_model,
    tokens_of,
    used,
)

from membroker.kv.seams import load
from membroker.kv.transformers import ElasticManager, seams

pytestmark = [pytest.mark.timeout(600), pytest.mark.deep]

Expected = dict[str, list[list[int]]]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Several processes test at a time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model()


@pytest.fixture(scope="module")
def expected(model: Any) -> Expected:
    return stock(model, BATCHES)


@pytest.fixture(scope="module")
def roomy() -> Iterator[Daemon]:
    with running({"capacity": "512MiB"}) as daemon:
        yield daemon


@pytest.mark.parametrize("shares", [False, True], ids=["no prefix cache", "prefix cache"])
def test_the_tokens_are_the_same_while_memory_comes_and_goes(
    shares: bool, roomy: Daemon, model: Any, expected: Expected
) -> None:
    """A small request, a burst that borrows 100 MiB, shared prefixes, and rest: the memory goes, and comes again."""
    at_rest = AT_REST + shares * 32 * MIB
    with serving(roomy.endpoint(), model, "chat", batching={"allow_block_sharing": shares}, keep="32MiB") as manager:
        assert answer(manager, "one") == expected["one"]
        until(lambda: used(roomy, "chat") <= at_rest)
        assert answer(manager, "burst") == expected["burst"]
        assert peak(roomy, "chat") >= BURST
        until(lambda: used(roomy, "chat") <= at_rest)
        assert not shares or used(roomy, "chat") > AT_REST, "cached prefixes stay"
        for name in ("shared", "few", "shared", "burst", "one"):
            assert answer(manager, name) == expected[name], name
        until(lambda: used(roomy, "chat") <= at_rest)
    until(lambda: used(roomy, "chat") == 0)


def test_a_request_of_one_step_leaves_nothing(roomy: Daemon, model: Any, expected: Expected) -> None:
    """It comes while the cache rests, and is over after the step that it wakes it for."""
    with serving(roomy.endpoint(), model, "brief", keep=0) as manager:
        until(lambda: manager.cache.is_resting)
        first = tokens_of(manager.generate_batch(BATCHES["few"][0], 1))
        assert first == [tokens[:1] for tokens in expected["few"]]
        assert peak(roomy, "brief") > AT_REST
        until(lambda: used(roomy, "brief") <= AT_REST)


def test_prefixes_are_found_again(roomy: Daemon, model: Any, expected: Expected) -> None:
    """With room for both, requests between do not take them away."""
    with serving(roomy.endpoint(), model, "prefix", floor="128MiB") as manager:
        until(lambda: used(roomy, "prefix") >= 128 * MIB)
        cache, found = manager.batch_processor.cache, list[int]()
        search = cache.search_prefix_match
        cache.search_prefix_match = lambda *given: found.append(search(*given)) or found[-1]
        for name in ("shared", "one"):
            assert answer(manager, name) == expected[name], name
        found.clear()
        assert answer(manager, "shared") == expected["shared"]
        assert min(found) >= 320, "the same prompts as before"


@pytest.mark.parametrize("kind", ["fifo", "prefill_first"])
def test_a_tight_limit_queues(kind: str, roomy: Daemon, model: Any, expected: Expected) -> None:
    """A burst of 100 MiB with 32, and requests that outgrow it together: they wait, or are preempted, and finish."""
    with serving(roomy.endpoint(), model, kind, limit="32MiB", batching={"scheduler_type": kind}) as manager:
        for name in ("burst", "long", "shared", "one"):
            assert answer(manager, name) == expected[name], name
        assert peak(roomy, kind) == 32 * MIB


def test_a_ceiling_is_a_limit_too(roomy: Daemon, model: Any, expected: Expected) -> None:
    """Nothing is asked of the broker above it, so transformers preempts at once."""
    with serving(roomy.endpoint(), model, "low", ceiling="32MiB") as manager:
        assert answer(manager, "long") == expected["long"]
        assert (peak(roomy, "low"), manager.cache.stats().refusals) == (32 * MIB, 0)


def test_what_fits_is_served_while_the_broker_is_away(roomy: Daemon, model: Any, expected: Expected) -> None:
    """The thread that generates does not wait for it."""
    with serving(roomy.endpoint(), model, "floor", floor="32MiB") as manager:
        until(lambda: used(roomy, "floor") >= 32 * MIB)
        with hold_still(roomy):
            assert answer(manager, "few") == expected["few"]


def test_nobody_is_preempted_while_memory_is_on_its_way(roomy: Daemon, model: Any, expected: Expected) -> None:
    """The broker takes long to answer. Requests that outgrow their blocks wait for it, and go on where they were."""
    with serving(roomy.endpoint(), model, "slow", floor="24MiB") as manager:
        until(lambda: used(roomy, "slow") >= 24 * MIB)
        processor = manager.batch_processor
        offload, offloaded = processor.offloading_manager.offload_requests, list[None]()
        processor.offloading_manager.offload_requests = lambda: offloaded.append(None) or offload()
        prompts, tokens = BATCHES["long"]
        with hold_still(roomy):
            asked = manager.add_requests(prompts, max_new_tokens=tokens)
            until(lambda: processor.scheduler._refusals is not None and processor.scheduler.active_requests)
        assert collect(manager, asked) == expected["long"]
        assert not offloaded


def test_a_request_that_can_never_run_is_refused(roomy: Daemon, model: Any, expected: Expected) -> None:
    """transformers would end with all of its requests, or wait indefinitely."""
    long, _ = batch_of(9, 1, 3000, 8)
    with serving(roomy.endpoint(), model, "small", limit="32MiB") as manager:
        with pytest.raises(InvalidRequest, match=r"3008 tokens, .* can never run: .* has \d+ at most"):
            manager.generate_batch([*BATCHES["few"][0], *long])
        with pytest.raises(InvalidRequest, match="3000 tokens"):
            manager.add_request(long[0], max_new_tokens=0)
        assert answer(manager, "one") == expected["one"]
    with serving(roomy.endpoint(), model, "large", limit="64MiB") as manager:
        assert len(tokens_of(manager.generate_batch(long))[0]) == 8
    for limits in ({"capacity": "32MiB"}, {"tenants": {"red": {"limit": "32MiB"}}}):
        with (
            running(limits) as daemon,
            serving(daemon.endpoint(), model, "any") as manager,
            pytest.raises(InvalidRequest, match="3008 tokens"),
        ):
            manager.generate_batch(long)
        manager.stop()
        with pytest.raises(InvalidRequest, match="start the manager"):
            manager.generate_batch(long)


def test_a_recall_takes_memory_from_an_idle_manager_and_from_a_busy_one(model: Any, expected: Expected) -> None:
    """Another tenant wants what it is guaranteed. It gets it from cached prefixes, from a burst, and from a request
    that holds 30 MiB and is far from its end: it is preempted, and goes on when the memory is back.
    """
    tenants = {"red": {}, "blue": {"guarantee": "112MiB"}}
    with (
        running({"capacity": "128MiB", "tenants": tenants, "recall_seconds": 30.0}) as daemon,
        serving(daemon.endpoint(), model, "chat", keep="1GiB") as manager,
        membroker.connect(daemon.endpoint("blue")) as blue,
    ):
        assert answer(manager, "burst") == expected["burst"]
        assert used(daemon, "chat") >= BURST
        owner = blue.register_model("owner")
        with owner.allocate("96MiB", wait=60.0):
            assert used(daemon, "chat") <= 32 * MIB
            assert answer(manager, "few") == expected["few"]
        for name, least, size in (("burst", 64, 96), ("deep", 28, 112)):
            prompts, tokens = BATCHES[name]
            asked = manager.add_requests(prompts, max_new_tokens=tokens)
            until(lambda least=least: used(daemon, "chat") > least * MIB)
            with owner.allocate(size * MIB, wait=60.0):
                assert used(daemon, "chat") <= (128 - size) * MIB
                assert manager.batch_processor.has_pending_requests(), "the memory came when the requests had ended"
            assert collect(manager, asked) == expected[name]
        assert answer(manager, "burst") == expected["burst"]


def test_two_managers_trade_memory(model: Any, expected: Expected) -> None:
    """Two bursts of 100 MiB over 144 MiB: each has most of it when the other is idle, and both at once finish."""
    other = tiny_model()
    with (
        running({"capacity": "144MiB"}) as daemon,
        serving(daemon.endpoint(), model, "left", keep=0) as left,
        serving(daemon.endpoint("blue"), other, "right", keep=0) as right,
    ):
        for manager, name in ((left, "left"), (right, "right"), (left, "left")):
            assert answer(manager, "burst") == expected["burst"]
            assert peak(daemon, name) >= BURST
            until(lambda name=name: used(daemon, name) <= AT_REST)
        prompts, tokens = BATCHES["burst"]
        asked = [manager.add_requests(prompts, max_new_tokens=tokens) for manager in (left, right)]
        assert collect(left, asked[0]) == expected["burst"]
        assert collect(right, asked[1]) == expected["burst"]
        until(lambda: used(daemon, "left") + used(daemon, "right") <= 2 * AT_REST)


def test_a_manager_is_stopped_and_started_again(roomy: Daemon, model: Any, expected: Expected) -> None:
    """Kept for the next session it rests, and gives its memory back by itself. Else its memory is released."""
    with serving(roomy.endpoint(), model, "again", keep="1GiB") as manager:
        for restart in (False, True):
            assert answer(manager, "burst") == expected["burst"]
            manager.stop(keep_for_next_session=True)
            if restart:
                manager.start()
            assert used(roomy, "again") > AT_REST, "cached prefixes stay"
            manager.cache.shrink("1GiB")
            until(lambda: used(roomy, "again") <= AT_REST)
            manager.start()
        assert answer(manager, "few") == expected["few"]
        manager.stop()
        assert used(roomy, "again") == 0
        with pytest.raises(InvalidRequest, match="no cache before start"):
            _ = manager.cache
        manager.start()
        assert answer(manager, "few") == expected["few"]
        manager.stop(block=False)
        until(lambda: used(roomy, "again") == 0)
        manager.start()
        manager.add_request(BATCHES["few"][0][0], max_new_tokens=1000)
        until(lambda: manager.batch_processor.scheduler.active_requests)
        manager.stop(keep_for_next_session=True, hard_stop=True)
        manager.cache.shrink("1GiB")
        until(lambda: used(roomy, "again") <= AT_REST)
    assert not hasattr(model, "_cached_continuous_batching_manager")
    assert not [one for one in threading.enumerate() if one.name.startswith("membroker-kv")]


def test_an_operator_puts_an_idle_manager_to_sleep(model: Any, expected: Expected) -> None:
    """It releases all of its cache, prefixes and padding included. A request wakes it, also of the next session, and
    waits inside transformers while there is no memory for it.
    """
    with running({"capacity": "128MiB"}) as daemon, serving(daemon.endpoint(), model, "chat", keep="1GiB") as manager:

        def sleep() -> None:
            assert "weights kept: they are torch's own memory" in done(command(daemon, "sleep", "chat"))
            assert used(daemon, "chat") == 0

        assert answer(manager, "burst") == expected["burst"]
        sleep()
        assert answer(manager, "few") == expected["few"]
        sleep()
        done(command(daemon, "wake", "chat"))
        assert used(daemon, "chat") > 0
        prompts, tokens = BATCHES["few"]
        long = manager.add_request(prompts[0], max_new_tokens=1000)
        until(lambda: manager.batch_processor.scheduler.active_requests)
        assert "its engine has requests" in refused(command(daemon, "sleep", "chat", "--timeout", "0.5"))
        manager.cancel_request(long)
        sleep()
        manager.stop(keep_for_next_session=True)
        manager.start()
        with membroker.connect(daemon.endpoint("blue")) as blue, blue.register_model("other").allocate("128MiB"):
            asked = manager.add_requests(prompts, max_new_tokens=tokens)
            until(lambda: manager.batch_processor.scheduler.waiting_requests)
            assert "waits for memory: " in refused(command(daemon, "wake", "chat", "--timeout", "1.5"))
        assert collect(manager, asked) == expected["few"]
        sleep()


def test_requests_that_branch_and_requests_that_are_cancelled(roomy: Daemon, model: Any, expected: Expected) -> None:
    """Several answers to one prompt share its blocks, and what a cancelled request had is free again."""
    generation, batching = settings()
    generation.num_return_sequences = 3
    with membroker.connect(roomy.endpoint()) as client:
        lender = client.register_model("branch", virtual_capacity="1GiB")
        with lender.pool(page_size="2MiB") as pool, ElasticManager(model, pool, generation, batching, keep=0) as one:
            assert answer(one, "few") == [tokens for tokens in expected["few"] for _ in range(3)]
            long = one.add_request(BATCHES["few"][0][0], max_new_tokens=1000)
            until(lambda: one.batch_processor.scheduler.active_requests)
            one.cancel_request(long)
            until(lambda: not one.batch_processor.has_pending_requests())
            until(lambda: used(roomy, "branch") <= AT_REST)


@pytest.mark.skipif(not HAS_SECTORS, reason="this transformers keeps blocks of all kinds of layers in one list")
def test_sliding_windows_cut_sectors_in_another_way(roomy: Daemon) -> None:
    """A model with both kinds of layers: sectors go from one kind to the other, and back to the broker."""
    mixed = tiny_model(layer_types=["sliding_attention", "full_attention"], use_sliding_window=True, sliding_window=64)
    expected = stock(mixed, {name: BATCHES[name] for name in ("burst", "few")})
    with serving(roomy.endpoint(), mixed, "mixed", limit="48MiB") as manager:
        for name in ("few", "burst", "few"):
            assert answer(manager, name) == expected[name], name
        until(lambda: used(roomy, "mixed") <= AT_REST)


class TestWhatIsRefused:
    def test_a_safety_margin(self, roomy: Daemon, model: Any) -> None:
        with (
            pytest.raises(InvalidRequest, match="safety_margin"),
            serving(roomy.endpoint(), model, "m", batching={"safety_margin": 0.1}),
        ):
            pass

    def test_another_device(self, roomy: Daemon, model: Any) -> None:
        with (
            pytest.raises(InvalidRequest, match="the model is on meta"),
            serving(roomy.endpoint(), tiny_model("meta"), "m"),
        ):
            pass

    def test_a_cache_of_less_than_a_page(self, roomy: Daemon, model: Any) -> None:
        with (
            pytest.raises(InvalidRequest, match="smaller than a page"),
            serving(roomy.endpoint(), model, "m", batching={"num_blocks": 1}),
        ):
            pass
        assert used(roomy, "m") == 0

    def test_a_cache_that_is_larger_than_the_pool(self, roomy: Daemon, model: Any) -> None:
        with (
            pytest.raises(membroker.OutOfVirtualMemory, match="larger pool"),
            serving(roomy.endpoint(), model, "m", batching={"num_blocks": 5000}),
        ):
            pass


class TestSeams:
    def test_this_transformers_has_all_that_is_used(self) -> None:
        assert list(seams.differences(seams.version())) == []
        seams.check()

    @pytest.mark.parametrize(("place", "method", "given"), [*seams.METHODS, *seams.version().methods])
    def test_a_method_with_other_parameters_is_found(
        self, place: str, method: str, given: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, model: Any
    ) -> None:
        """The manager then says so, with the version and the method."""
        monkeypatch.setattr(load(place), method, lambda self, other, *rest: None)
        with pytest.raises(
            InvalidRequest, match=rf"5\.17\.x and 5\.23\.x, and transformers .* differs: .*{method} takes"
        ):
            ElasticManager(model, None)  # type: ignore[arg-type]

    def test_a_list_that_is_gone_is_found(self, monkeypatch: pytest.MonkeyPatch) -> None:
        gone = seams.version()._replace(attributes=((seams.METHODS[0][0], ("nothing_like_it",)),))
        assert list(seams.differences(gone)) == [f"{seams.METHODS[0][0]} has no nothing_like_it"]

    def test_another_version_with_the_same_methods_is_named(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr("transformers.__version__", "5.99.0")
        seams.check()
        assert "not with transformers 5.99.0" in caplog.text


def test_the_page_runs(tmp_path: Path) -> None:
    """docs/transformers.md, as a reader runs it."""
    page = Path(__file__).parents[2] / "docs" / "transformers.md"
    script = tmp_path / "page.py"
    script.write_text(program(page.read_text()))
    with running({"capacity": "1GiB"}) as daemon:
        done = run_page(script, daemon)
        assert (done.returncode, done.stderr) == (0, "")
        until(lambda: not daemon.sessions())
