"""Who may do what: each cell of the table in docs/trust.md, by a process of that kind, at a real daemon.

The rows and their deeds are in `who_may`; with MEMBROKER_REWRITE=1 the page's tables are written from them. A cell that
takes another user, or a container, takes root (`make test-system`); all others are in `make test`.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support import raw
from tests.support.daemons import DEADLINE_SECONDS, running, until
from tests.support.raw import reason
from tests.system import who_may
from tests.system.who_may import BOTH, GROUPS, KINDS, MARK, PAGE, ROWS, WHO, Party, needs_root, obey

from membroker.v1 import admin_pb2 as apb
from membroker.v1 import broker_pb2 as bpb
from membroker.v1 import handoff_pb2 as pb
from membroker.wire import frames as handoff

ROOT = Path(__file__).parents[2]
PAGE_OF_DOCS = ROOT / "docs" / "trust.md"
RED, BLUE, STRANGER = 60_001, 60_002, 60_003
"""Users that no machine has: the owner of the tenant red, that of blue, and one that has no endpoint."""
ADMIN_SERVICE = apb.DESCRIPTOR.services_by_name["AdminService"]
LISTED = {"mode": "0666", "uids": [RED]}
PLAIN = {"red": {}, "blue": {}, "listed": LISTED}
OWNED = {"red": {"owner": RED, "mode": "0600"}, "blue": {"owner": BLUE, "mode": "0600"}, "listed": LISTED}

_CONTAINER = """
set -e
mount --bind "$1" "$2"
[ "$4" = rw ] || mount -o remount,ro,bind "$2"
mount -t tmpfs none "$3"
shift 4
exec setpriv --bounding-set=-all,+chown,+dac_override,+fowner,+fsetid,+kill,+setgid,+setuid,+net_raw,+mknod "$@"
"""
"""What an orchestrator does for a container: its own namespaces, one mount of the endpoint, no CAP_SYS_ADMIN."""


class Actor:
    """A process that does deeds when it is told to."""

    def __init__(self, stack: ExitStack, uid: int, door: Path, theirs: Path, before: tuple[str, ...] = ()) -> None:
        self._control, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(DEADLINE_SECONDS)
        with its:
            arguments = [sys.executable, "-m", "tests.system.who_may", str(its.fileno()), str(uid), door, theirs]
            path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
            environment = {**os.environ, "PYTHONPATH": path}
            self._process = subprocess.Popen([*before, *arguments], pass_fds=[its.fileno()], cwd=ROOT, env=environment)
        stack.callback(self._end)

    def tell(self, order: dict[str, Any], descriptors: tuple[int, ...] = ()) -> Any:
        socket.send_fds(self._control, [json.dumps(order).encode()], descriptors)
        answer = json.loads(self._control.recv(1 << 16) or b'{"failed": "it is dead"}')
        assert "answer" in answer, answer["failed"]
        return answer["answer"]

    def _end(self) -> None:
        self._control.close()
        assert self._process.wait(DEADLINE_SECONDS) == 0


class Scene:
    """A daemon, and who does deeds at it."""

    def __init__(self, stack: ExitStack, tenants: dict[str, Any]) -> None:
        # No idle model ends meanwhile: the books change by deeds alone.
        self.daemon = stack.enter_context(running({"tenants": tenants, "model_grace_seconds": 3600}))
        self.daemon.directory.chmod(0o755)
        self.tokens: set[str] = set()
        self._stack = stack
        self._uids = {who: tenants[of].get("owner", 0) for who, of in (("same", "red"), ("other", "blue"))}
        self._uids["user"] = STRANGER
        self._actors: dict[str, Actor] = {}

    def actor(self, who: str) -> Actor:
        if who not in self._actors:
            self._actors[who] = self._contained(who) if who in ("ro", "rw") else self._free(who)
        return self._actors[who]

    def _free(self, who: str) -> Actor:
        red = self.daemon.endpoint("red")
        doors = {"other": self.daemon.endpoint("blue"), "admin": self.daemon.admin}
        return Actor(self._stack, self._uids.get(who, 0), doors.get(who, red), red)

    def _contained(self, mode: str) -> Actor:
        inside = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="mb-in-")))
        namespaces = ("--mount", "--pid", "--net", "--ipc", "--uts", "--fork", "--mount-proc")
        places = (str(self.daemon.endpoint("red")), str(inside), str(self.daemon.directory), mode)
        before = ("unshare", *namespaces, "sh", "-c", _CONTAINER, "sh", *places)
        return Actor(self._stack, 0, inside, inside, before)

    @contextmanager
    def s(self) -> Iterator[tuple[raw.Session, SimpleNamespace, tuple[int, int]]]:
        """Yield S, what it has, and a descriptor each of its extent and of its sealed segment."""
        daemon = self.daemon
        with raw.Session(daemon.endpoint("red")) as session, ExitStack() as descriptors:
            model, idle = session.register("chat"), session.register("idle")
            _, (extent,), (lent,) = session.take(allocate=raw.allocation(model, PAGE))
            descriptors.callback(os.close, lent)
            sealed, _, (kept,) = session.take(create_segment=raw.segment_of(model, "weights", PAGE))
            descriptors.callback(os.close, kept)
            for descriptor in (lent, kept):
                with mmap.mmap(descriptor, PAGE) as memory:
                    memory[: len(MARK)] = MARK
            session.call(seal_segment=bpb.SealSegmentRequest(generation=sealed.generation))
            draft = session.call(create_segment=raw.segment_of(model, "draft", PAGE))
            self.tokens.add(session.token)
            target = SimpleNamespace(
                tenant=session.welcome.tenant,
                session=session.welcome.session,
                token=session.token,
                model=model,
                model_id="chat",
                idle=idle,
                extent=extent,
                label="weights",
                sealed=sealed.name,
                sealed_generation=sealed.generation,
                draft=draft.name,
                draft_generation=draft.generation,
                endpoint=str(daemon.endpoint("red")),
                listed=str(daemon.endpoint("listed")),
                admin=str(daemon.admin),
                state=str(daemon.root / "state"),
                pid=daemon.process.pid,
                metrics_url=daemon.device().metrics_url,
            )
            yield session, target, (lent, kept)

    def books(self) -> Any:
        """Return all that the admin sees, but for what a refusal may change: its count, and what the device shows."""
        device, models, sessions = self.daemon.device(), self.daemon.models(), self.daemon.sessions()
        with self.daemon.admin_stub() as stub:
            segments = list(stub.ListSegments(bpb.ListSegmentsRequest(page_size=1000)).segments)
            quotas = stub.ListQuotas(apb.ListQuotasRequest())
        for model in models:
            model.denials_total.clear()
        for one in (*sessions, *segments):
            one.ClearField("create_time")
        sums = [(one.lent_bytes, one.releasing_bytes, one.free_bytes) for one in device.locations]
        return device.revision, sums, models, sessions, segments, quotas

    def tidy(self) -> None:
        """Take back what the deeds left, and wait until the books are empty."""
        with self.daemon.admin_stub() as stub:
            for segment in stub.ListSegments(bpb.ListSegmentsRequest(page_size=1000)).segments:
                if segment.state in (segment.WRITING, segment.SEALED):
                    stub.DeleteSegment(bpb.DeleteSegmentRequest(name=segment.name))
            for quota in stub.ListQuotas(apb.ListQuotasRequest()).quotas:
                stub.SetQuota(apb.SetQuotaRequest(name=quota.name, location=quota.location))
            until(lambda: not stub.ListSegments(bpb.ListSegmentsRequest()).segments and not self.daemon.sessions())

    def said(self) -> dict[str, str]:
        """Return every text that the daemon lets anybody see, by what it is."""
        process = Path("/proc", str(self.daemon.process.pid))
        files = [path for path in self.daemon.directory.rglob("*") if path.is_file()]
        return {
            "the log": self.daemon.log(),
            "/metrics": self.daemon.metrics(),
            "the admin's listings": str(self.books()),
            **{f"/proc/PID/{name}": (process / name).read_text() for name in ("cmdline", "environ")},
            **{str(path): path.read_text(errors="replace") for path in files},
        }


@pytest.fixture(scope="module")
def plain() -> Iterator[Scene]:
    """A daemon whose tenants are all of its own user: what holds here is the broker's doing."""
    with ExitStack() as stack:
        yield Scene(stack, PLAIN)


@pytest.fixture(scope="module")
def owned() -> Iterator[Scene]:
    """A root's daemon whose tenants are users: what holds here may be the kernel's doing."""
    with ExitStack() as stack:
        yield Scene(stack, OWNED)


@pytest.fixture
def scene(request: pytest.FixtureRequest) -> Scene:
    scene: Scene = request.getfixturevalue("owned" if request.node.get_closest_marker("root") else "plain")
    return scene


# --- The rows ---


def _rows() -> Iterator[Any]:
    """Yield each row with the cells that run together, as who does it by which way.

    `make test` takes one cell of each outcome of a row, `make test-deep` the others, and `make test-system` what takes
    root.
    """
    for row in ROWS.values():
        cells: dict[str, list[tuple[str, str]]] = {"": [], "deep": [], "root": []}
        seen: set[str] = set()
        for who, expected in row.cells.items():
            for transport in () if expected == "-" else row.transports_of(who):
                if needs_root(row, who):
                    cells["root"].append((who, transport))
                else:
                    cells["deep" if expected in seen else ""].append((who, transport))
                    seen.add(expected)
        for mark, some in cells.items():
            if some:
                marks = [getattr(pytest.mark, mark)] if mark else []
                yield pytest.param(row, some, id=f"{row.number} {mark}".strip(), marks=marks)


@pytest.mark.parametrize(("row", "cells"), list(_rows()))
def test_row(scene: Scene, row: who_may.Row, cells: list[tuple[str, str]]) -> None:
    """What the table says comes of it; what is refused changes nothing; and nothing that is said has S's token."""
    found = {(who, transport): _outcome(scene, row, who, transport) for who, transport in cells}
    expected = {(who, transport): row.cells[who] for who, transport in cells}
    assert {cell: outcome for cell, (outcome, _) in found.items()} == expected, found


def _outcome(scene: Scene, row: who_may.Row, who: str, transport: str) -> tuple[str, str]:
    """Have the deed done, and return what came of it; afterwards nothing is left of it."""
    try:
        with scene.s() as (session, target, descriptors):
            if who == "itself":
                oneself = Party(session.endpoint, session.endpoint)
                oneself.session = session
                tell = partial(obey, oneself)
            else:
                tell = scene.actor(who).tell
                scene.tokens.add(tell({"do": "begin"}))
            order = {"row": row.number, "transport": transport, "target": vars(target)}
            try:
                if row.before:
                    tell({"do": "before", **order})
                before = scene.books()
                outcome, said = tell({"do": "deed", **order}, descriptors)
                assert target.token not in said
                if outcome not in ("yes", "its-own", "S-gets-it"):
                    assert scene.books() == before, f"{who} was refused ({said}), and the books changed"
                if outcome == "S-gets-it":
                    delivered = handoff.receive(session.sock)
                    handoff.close_all(delivered.descriptors)
                    assert len(delivered.descriptors) == 1
            finally:
                if who != "itself":
                    tell({"do": "end"})
    finally:
        scene.tidy()
    return outcome, said


# --- Beside the cells ---


def test_every_call_has_a_row() -> None:
    """A call that is added to a service, or a frame, needs a row. Ack and Goodbye name nothing but their connection.

    An answer to a recall of another session is in test_recalls.py, and one to its operator in test_sleep.py.
    """
    for service, admin in ((bpb.DESCRIPTOR.services_by_name["BrokerService"], False), (ADMIN_SERVICE, True)):
        rows = [row for row in ROWS.values() if row.number.startswith("A") == admin]
        for method in service.methods:
            called = [row for row in rows if method.name in row.calls]
            assert called, f"no row is about {service.name}.{method.name}"
            assert method.name not in KINDS or admin or any(row.transports == BOTH for row in called)
    kinds = {kind.name for kind in pb.Frame.DESCRIPTOR.oneofs_by_name["kind"].fields}
    assert kinds - {"welcome", "delivery", "reply", "notice"} == {
        "hello",
        "holds",
        "ack",
        "goodbye",
        "cancel",  # of a request of its own session, by that session's number
        "recall_answer",
        "sleep_answer",
        *KINDS.values(),
    }


def test_no_number_that_is_guessed_is_anybodys(plain: Scene, transport: str) -> None:
    """Ids and generations come from one counter, so S's can be guessed: the answer is that of a free one."""
    for tenant in ("red", "blue"):
        with plain.s() as (_, target, _), raw.Session(plain.daemon.endpoint(tenant)) as stranger:
            me = Party(stranger.endpoint, stranger.endpoint)
            me.session, me.transport = stranger, transport
            middle, before = target.extent, plain.books()
            for number in range(middle - 12, middle + 12):
                request = bpb.ReleaseExtentsRequest(extent_ids=[number])
                assert reason(me.ask(target, "ReleaseExtents", request)) == "EXTENT_NOT_FOUND"
                for method, kind in (("Seal", bpb.SealSegmentRequest), ("Detach", bpb.DetachSegmentRequest)):
                    answer = me.ask(target, f"{method}Segment", kind(generation=number))
                    assert reason(answer) == "SEGMENT_NOT_FOUND"
            assert plain.books() == before
        plain.tidy()


def test_a_name_that_is_anothers_is_as_unknown_as_none(plain: Scene, transport: str) -> None:
    """What another tenant has, and what nobody has, get the same answer, to the letter but for the name asked for."""
    with plain.s() as (_, target, _), raw.Session(plain.daemon.endpoint("blue")) as stranger:
        me = Party(stranger.endpoint, stranger.endpoint)
        me.session, me.transport = stranger, transport
        for method, there in (
            ("AllocateExtents", raw.allocation(target.model, PAGE)),
            ("AttachSegment", bpb.AttachSegmentRequest(name=target.sealed)),
            ("AttachSegment", bpb.AttachSegmentRequest(name=target.draft)),
            ("DeleteSegment", bpb.DeleteSegmentRequest(name=target.sealed)),
        ):
            nowhere = type(there).FromString(there.SerializeToString())
            name = "model" if method == "AllocateExtents" else "name"
            setattr(nowhere, name, getattr(there, name).replace("/red/", "/nil/"))
            answers = [str(me.ask(target, method, request)) for request in (there, nowhere)]
            assert answers[0].replace("/red/", "/nil/") == answers[1].replace("/red/", "/nil/")
    plain.tidy()


def test_who_mapped_a_segment_before_its_seal_still_writes(plain: Scene) -> None:
    """The seal forbids writable mappings from then on; the writer's is from before, and others see what it writes."""
    with raw.Session(plain.daemon.endpoint("red")) as writer, raw.Session(plain.daemon.endpoint("red")) as reader:
        segment, _, (lent,) = writer.take(create_segment=raw.segment_of(writer.register("chat"), "weights", PAGE))
        with mmap.mmap(lent, PAGE) as memory:
            writer.call(seal_segment=bpb.SealSegmentRequest(generation=segment.generation))
            _, _, (read_only,) = reader.take(attach_segment=bpb.AttachSegmentRequest(name=segment.name))
            memory[: len(MARK)] = MARK
            assert os.pread(read_only, len(MARK), 0) == MARK
        handoff.close_all((lent, read_only))
    plain.tidy()


def test_what_the_paths_are(plain: Scene) -> None:
    """Modes as docs/trust.md says them; the daemon's user owns every path that is not configured otherwise."""
    daemon = plain.daemon
    modes = {
        **{daemon.endpoint(tenant): 0o755 for tenant in ("red", "blue", "listed")},
        **{daemon.endpoint("red") / name: 0o660 for name in ("handoff.sock", "grpc.sock")},
        **{daemon.endpoint("listed") / name: 0o666 for name in ("handoff.sock", "grpc.sock")},
        daemon.admin: 0o700,
        daemon.admin / "grpc.sock": 0o600,
        daemon.root / "state": 0o700,
        daemon.root / "state" / "lock": 0o600,
        daemon.root / "state" / "journal": 0o600,
        daemon.root / "state" / "fdstore.sock": 0o600,
    }
    assert {path: stat.S_IMODE(path.stat().st_mode) for path in modes} == modes
    assert {path.stat().st_uid for path in modes} == {os.geteuid()}
    sockets = {path for path in daemon.root.rglob("*") if path.is_socket()}
    behind = set((daemon.root / "state").glob("grpc-*"))  # what the gRPC sockets lead to: `state/` is 0700
    assert sockets <= {*modes, *behind, *daemon.endpoint("blue").iterdir()}, "a socket that no rule is for"


@pytest.mark.root
def test_whose_the_paths_are(owned: Scene) -> None:
    """Only sockets are given away, never a directory: the owner of a socket cannot put another in its place."""
    daemon = owned.daemon
    for tenant, owner in (("red", RED), ("blue", BLUE)):
        for name in ("handoff.sock", "grpc.sock"):
            status = (daemon.endpoint(tenant) / name).stat()
            assert (status.st_uid, stat.S_IMODE(status.st_mode)) == (owner, 0o600)
    assert {path.stat().st_uid for path in daemon.root.rglob("*") if path.is_dir()} == {0}


def test_a_fault_tells_no_token(stack: ExitStack) -> None:
    """The traceback in the log, and the caller's INTERNAL, have where and what, and no secret that was at hand."""
    faulty = stack.enter_context(running(module="tests.support.faulty_daemon raise_at_tokens"))
    stack.callback(faulty.kill)  # it may not be well
    red, blue = (stack.enter_context(raw.Session(faulty.endpoint(tenant))) for tenant in ("red", "blue"))
    answers = [
        raw.grpc_call(red.endpoint, red.token, "ListModels", bpb.ListModelsRequest()),
        raw.grpc_call(red.endpoint, red.token, "DeclareMemory", bpb.DeclareMemoryRequest(model="x")),
        raw.grpc_call(blue.endpoint, blue.token, "ListSessions", bpb.ListSessionsRequest()),
        red.call(declare=bpb.DeclareMemoryRequest(model="x")),
    ]
    blue.send(pb.Frame(request_id=1 << 40, goodbye=pb.Goodbye()))
    answers.append(blue.last_words())
    assert [reason(answer) for answer in answers] == ["INTERNAL"] * 5
    # A thread of the daemon writes the log, after the answers.
    until(lambda: faulty.log().count("a fault of the broker") == 5)
    log = faulty.log()
    assert "find_or_fault" in log, "a token was at hand where the fault was"
    for token in (red.token, blue.token):
        assert not any(token in text for text in (log, faulty.metrics(), *map(str, answers)))


def test_no_token_is_said_anywhere(plain: Scene) -> None:
    """Of none of the sessions that the cells had, nor of one that is open: at the level debug, refusals and all."""
    with plain.s() as (session, target, _):
        for transport in BOTH:
            me = Party(session.endpoint, session.endpoint)
            me.session, me.transport = session, transport
            refused = me.ask(target, "AllocateExtents", raw.allocation("tenants/red/models/none", PAGE))
            assert session.token not in str(refused)
        told = "method=AllocateExtents reason=MODEL_NOT_FOUND"
        until(lambda: told in plain.daemon.log())  # it is at the level debug
        said = plain.said()
        assert {"the log", "/metrics", "/proc/PID/environ"} <= said.keys()
        _nowhere(said, plain.tokens)
    plain.tidy()


@pytest.mark.root
def test_no_token_is_said_anywhere_to_other_users(owned: Scene) -> None:
    """The same of what users and containers did."""
    with owned.s():
        _nowhere(owned.said(), owned.tokens)
    owned.tidy()


def _nowhere(said: dict[str, str], tokens: set[str]) -> None:
    secrets = tokens - {""}
    assert secrets
    assert not [what for what, text in said.items() if any(token in text for token in secrets)]


# --- The page ---

BESIDE = {
    "test_no_number_that_is_guessed_is_anybodys": "a guessed id or generation is refused like one that does not exist",
    "test_a_name_that_is_anothers_is_as_unknown_as_none": "another tenant's name is refused like an unknown name",
    "test_every_call_has_a_row": "every call of both services, and every frame, has a row",
    "test_who_mapped_a_segment_before_its_seal_still_writes": "host driver: a writer's mapping outlives the seal",
    "test_what_the_paths_are": "the modes of sockets and directories",
    "test_whose_the_paths_are": "the owners of sockets and directories",
    "test_a_fault_tells_no_token": "a fault in the broker puts no token into the log or an answer",
    "test_no_token_is_said_anywhere": "no token is in the log (debug), `/metrics`, a listing, a file, `environ`",
    "test_no_token_is_said_anywhere_to_other_users": "the same, after calls by other users and containers",
}
"""What docs/trust.md says beside its cells, by the test that shows it."""


def tables() -> str:
    """Return the part of the page that is written from `who_may`."""
    lines: list[str] = []
    for letters, title in GROUPS.items():
        head = ["", "operation", *WHO.values(), "what enforces it"]
        lines += [f"### {title}", "", _line(head), _line(["---"] * len(head))]
        rows = [row for row in ROWS.values() if row.number[0] in letters]
        for row in sorted(rows, key=lambda row: (letters.index(row.number[0]), row.number)):
            lines.append(_line([row.number, row.what, *map(_word, row.cells.values()), row.enforced]))
        lines.append("")
    lines += ["### Further tests", "", _line(["what", "shown by"]), _line(["---"] * 2)]
    lines += [_line([what, f"`{test}`"]) for test, what in BESIDE.items()]
    return "\n".join(lines)


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _word(outcome: str) -> str:
    words = {"-": "–", "yes": "yes", "its-own": "gets its own", "not-shown": "not shown", "S-gets-it": "S gets it"}
    return words.get(outcome, f"`{outcome}`")


BEGIN, END = "<!-- written by tests/system/test_who_may.py: -->\n\n", "\n\n<!-- until here -->"


def test_the_page_is_what_the_table_says() -> None:
    """No cell of docs/trust.md without its test, and none that says otherwise. MEMBROKER_REWRITE=1 writes them."""
    assert BESIDE.keys() <= globals().keys()
    page = PAGE_OF_DOCS.read_text()
    assert page.count(BEGIN) == page.count(END) == 1, "the marks between which the tables stand"
    before, _, rest = page.partition(BEGIN)
    written, _, after = rest.partition(END)
    if os.environ.get("MEMBROKER_REWRITE") == "1":
        PAGE_OF_DOCS.write_text(before + BEGIN + tables() + END + after)
    else:
        assert written == tables(), "docs/trust.md differs; MEMBROKER_REWRITE=1 writes it again"
