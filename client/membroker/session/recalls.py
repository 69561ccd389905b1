"""Recalls: the broker asks a session for memory back, the program's callback releases what it can, and we answer.

Owns the callbacks by model, and the open recalls. For each recall, clean spare pages go first, then the callback is
called for what remains, then the broker gets the answer. The callbacks refer to the client and its pools. So only the
objects of the user may refer to this, and not the session, its memory or its threads: a client that is garbage must be
able to end. It must never wait for work on the device: that ends a CUDA graph capture in any thread of the process.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ..arguments import parts_of
from ..errors import InvalidRequest, ModelNotFound
from ..memory.lender import Tracked
from ..types import SleepRequest, SleepStatus
from ..v1 import broker_pb2, resources_pb2
from ..v1 import handoff_pb2 as pb
from ..v1.resources_pb2 import SleepStatus as SleepStatusMessage
from . import messages
from .connection import Connection
from .notices import UNSUPPORTED
from .rpc import CONTROL_SECONDS

if TYPE_CHECKING:
    from .reconnecting import ReconnectingConnection

logger: logging.Logger = logging.getLogger("membroker")

LIFECYCLE: Final[Mapping[str, Mapping[str, str]]] = {
    # The thread for callbacks is to call the program.
    "asked": {"called": "called", "answered": "ended", "over": "ended"},
    # The program may answer later.
    "called": {"raised": "asked", "answered": "ended", "over": "ended"},
    "ended": {},
}
"""`LIFECYCLE[state][cause]` is the next state of a recall. It is over when its connection is lost, when the session has
left the model, or when the broker has replaced it. A cause that has no entry changes nothing."""

_LOCATIONS = {resources_pb2.LOCATION_DEVICE: "device", resources_pb2.LOCATION_HOST: "host"}


class _Deferred:
    __slots__ = ()

    def __repr__(self) -> str:
        return "membroker.DEFERRED"


DEFERRED: Final = _Deferred()
"""What a callback of `Model.on_recall` returns when the program answers later, by `Recall.done`."""


class OpenRecall:
    """One recall that has no answer yet. `shown` is what the program gets for it, once spare pages have gone.

    The broker can raise `size`, and set `is_guaranteed` for a request within a guarantee, with a raise or without one.
    `called_for` is the size for which the program was called last: the answer is for that.
    """

    def __init__(self, recalls: SessionRecalls, message: pb.Recall, connection: Connection) -> None:
        self.state: str = "asked"
        self.recall_id: int = message.recall_id
        self.place: tuple[str, int] = (message.model, message.location)
        self.location: str = _LOCATIONS[message.location]
        self.size: int = message.bytes
        self.is_guaranteed: bool = message.guaranteed
        self.called_for = 0
        self.deadline: float = time.monotonic() + max(0.0, message.within.seconds + message.within.nanos / 1e9)
        self.connection = connection
        self.shown: Any = None
        self._recalls = recalls
        self._released_before = recalls.released_bytes[self.place]

    @property
    def remaining(self) -> int:
        """The size less what was released since, at least 0."""
        return max(0, self.size - self._recalls.released_bytes[self.place] + self._released_before)

    def done(self) -> None:
        """Answer, unless it is answered, or the connection that brought it is lost."""
        self._recalls.answer(self)


class _Answering(NamedTuple):
    """How the recalls of one model are answered: `show` makes what the callback gets."""

    show: Callable[[OpenRecall], Any]
    callback: Callable[[Any], object]


class SessionRecalls:
    """The recalls of one session, whose memory `memories` returns.

    Every method may be called by any thread. A dictionary's own steps are its only locks, but for what the thread of
    notices and the one for callbacks do to a recall: no other thread takes that lock.
    """

    def __init__(self, line: ReconnectingConnection, memories: Callable[[], Collection[Tracked]]) -> None:
        self.released_bytes: Mapping[tuple[str, int], int] = line.inventory.released_bytes
        self._line = line
        self._memories = memories
        self._answering: dict[str, _Answering] = {}
        self._open: dict[int, OpenRecall] = {}
        self._lock = threading.Lock()
        self._answered: dict[tuple[str, int], tuple[int, Connection]] = {}
        """The last recall of each model and location that was answered: the broker may have repeated it before that."""
        self._sleeping: dict[str, Callable[[SleepRequest], SleepStatus]] = {}
        line.notices.recalls = weakref.ref(self)

    # What the program does

    def answer_for(
        self, name: str, show: Callable[[OpenRecall], Any], callback: Callable[[Any], object] | None
    ) -> None:
        """Run `callback` for each recall of a model from now on; None: stop answering for it. Tells the broker.

        Raises `ModelNotFound` for a model that the session has left, and what a call raises. After an error everything
        is as before, except that a callback that was to be removed is not called any more, as the next resume says.
        """
        before = self._answering.get(name)
        if callback is None:
            self._answering.pop(name, None)
            if name in self._line.inventory.answering:
                frame = pb.Frame(register_model=self._registration(name, answers=False))
                self._line.say_less(frame, partial(self._line.inventory.answers, name, answers=False))
            for recall in self._of(name):
                recall.done()
            return
        self._line.start_callbacks()
        self._answering[name] = _Answering(show, callback)
        if before is None:
            try:
                note = partial(self._line.inventory.answers, name, answers=True)
                frame = pb.Frame(register_model=self._registration(name, answers=True))
                self._line.call(frame, timeout=CONTROL_SECONDS, note=note)
            except BaseException:
                self._answering.pop(name, None)
                raise

    def _registration(self, name: str, *, answers: bool) -> broker_pb2.RegisterModelRequest:
        if not self._line.inventory.models[name]:
            raise ModelNotFound(f"{name} was left by this session: register it again, with model()")
        return broker_pb2.RegisterModelRequest(model_id=parts_of(name)[1], answers_recalls=answers)

    def sleep_for(self, name: str, callback: Callable[[SleepRequest], SleepStatus] | None) -> None:
        """Run `callback` for each question of an operator about a model's sleep from now on; None: stop answering.

        Raises `ModelNotFound` for a model that the session has left, and `ClosedError`.
        """
        if callback is None:
            self._sleeping.pop(name, None)
            return
        if not self._line.inventory.models[name]:
            raise ModelNotFound(f"{name} was left by this session: register it again, with model()")
        self._line.start_callbacks()
        self._sleeping[name] = callback

    def say_sleep(self, name: str, status: SleepStatus) -> None:
        """Say how a guest is. Does nothing without a connection."""
        self._line.connection.answer_sleep(0, messages.sleep_status_to_wire(status), name)

    def sleep_callback_of(self, name: str) -> Callable[[SleepRequest], SleepStatus] | None:
        """Return the callback for questions about a model's sleep."""
        return self._sleeping.get(name)

    def callback_of(self, name: str) -> Callable[[Any], object] | None:
        """Return the callback for a model."""
        answering = self._answering.get(name)
        return None if answering is None else answering.callback

    def pending(self, name: str) -> Any:
        """Return what the program was given for the oldest open recall of a model, or None."""
        if self._open:
            for recall in self._of(name):
                if recall.shown is not None:
                    return recall.shown
        return None

    def answer(self, recall: OpenRecall) -> None:
        """Send the answer, after all releases until now. A recall that is no longer open is ignored."""
        if self._open.get(recall.recall_id) is recall:
            recall.connection.answer_recall(recall.recall_id, recall.called_for)
            self._answered[recall.place] = recall.recall_id, recall.connection
            self._end(recall, "answered")

    def forget(self, name: str) -> None:
        """Drop the callback and the recalls of a model that the session has left."""
        self._answering.pop(name, None)
        self._sleeping.pop(name, None)
        for recall in self._of(name):
            self._end(recall)

    def end(self) -> None:
        """Call nothing any more: the client is closed, or belongs to the parent of this process."""
        self._answering.clear()
        self._sleeping.clear()
        self.lost()

    def _of(self, name: str) -> list[OpenRecall]:
        return [recall for recall in list(self._open.values()) if recall.place[0] == name]

    def _end(self, recall: OpenRecall, cause: str = "over") -> None:
        recall.state = LIFECYCLE[recall.state].get(cause, recall.state)
        self._open.pop(recall.recall_id, None)

    # What the broker does

    def heard(self, message: pb.Recall, connection: Connection) -> None:
        """Enter a recall, or raise an open one. Skip what is repeated, or was answered on this connection."""
        place = message.model, message.location
        known = self._open.get(message.recall_id)
        if known is not None:
            self._heard_again(known, place, message)
            return
        if self._answered.get(place) == (message.recall_id, connection):
            return
        answering = self._answering.get(message.model)
        if answering is None or message.location not in _LOCATIONS or message.bytes <= 0:
            self._line.notices.call_back(partial(connection.answer_recall, message.recall_id, message.bytes))
            return
        for other in self._of(message.model):
            if other.place == place:  # the broker has ended it
                self._end(other)
        recall = OpenRecall(self, message, connection)
        self._open[recall.recall_id] = recall
        if not self._call_back(self.handle, recall.recall_id):
            self._end(recall)  # the broker will repeat it

    def _heard_again(self, recall: OpenRecall, place: tuple[str, int], message: pb.Recall) -> None:
        if place != recall.place:
            logger.warning(
                "ignored: the broker sent recall %d of %s again, but for other memory, of %s",
                recall.recall_id,
                recall.place[0],
                place[0],
            )
        elif message.bytes > recall.size or (message.guaranteed and not recall.is_guaranteed):
            with self._lock:
                recall.size = max(recall.size, message.bytes)  # of a late one, `bytes` is what the broker lacks
                recall.is_guaranteed = message.guaranteed
                recall.state = LIFECYCLE[recall.state].get("raised", recall.state)
            self._call_back(self.handle, recall.recall_id)

    def heard_sleep(self, message: pb.Sleep, connection: Connection) -> None:
        """Answer an operator's question: with the callback's answer, or that this program cannot sleep."""
        if message.model not in self._sleeping:
            self._line.notices.later(partial(connection.answer_sleep, message.sleep_id, UNSUPPORTED))
            return
        request = messages.sleep_request(message, time.monotonic())
        self._call_back(self.answer_sleep, message.model, message.sleep_id, request, connection)

    def answer_sleep(self, name: str, sleep_id: int, request: SleepRequest, connection: Connection) -> None:
        """Call the callback and answer. Runs in the thread for callbacks."""
        callback = self._sleeping.get(name)
        status = UNSUPPORTED
        if callback is not None:
            try:
                status = messages.sleep_status_to_wire(callback(request))
            except BaseException as error:  # sys.exit() too: the thread must go on, and the operator gets an answer
                logger.exception("a callback for sleep has failed at %r", request)
                status = SleepStatusMessage(
                    state=SleepStatusMessage.UNSUPPORTED, detail=f"the program failed: {error!r}"[: messages.MAX_DETAIL]
                )
        connection.answer_sleep(sleep_id, status)

    def _call_back(self, method: Callable[..., None], *arguments: Any) -> bool:
        """Call a method of this object in the thread for callbacks, if the object is still alive then.

        Return False if too much waits there.
        """
        living = weakref.WeakMethod(method)

        def work() -> None:
            if (call := living()) is not None:
                call(*arguments)

        return self._line.notices.call_back(work)

    def lost(self) -> None:
        """Drop the open recalls: the connection is lost. After the resume the broker asks again, if it still must."""
        for recall in list(self._open.values()):
            self._end(recall)

    def handle(self, recall_id: int) -> None:
        """Release what nobody uses, call the callback for the rest, and answer. Runs in the thread for callbacks."""
        recall = self._open.get(recall_id)
        if recall is None:
            return
        with self._lock:
            if recall.state != "asked":
                return
            recall.state = LIFECYCLE[recall.state]["called"]
            recall.called_for = recall.size
        self._give_spare(recall)
        answering = self._answering.get(recall.place[0])
        if recall.remaining and answering is not None:
            recall.shown = recall.shown or answering.show(recall)
            try:
                if answering.callback(recall.shown) is DEFERRED:
                    return
            except BaseException:  # sys.exit() too: the thread must go on, and the broker gets its answer
                logger.exception(
                    "a callback for recalls has failed at %r: this session keeps the memory that it did not release",
                    recall.shown,
                )
        recall.done()

    def _give_spare(self, recall: OpenRecall) -> None:
        """Release clean spare pages of the model at the location."""

        def is_asked_for(extent_id: int) -> bool:
            kind = self._line.inventory.kind_of(extent_id)
            return kind is not None and kind[:2] == recall.place

        for memory in list(self._memories()):
            if not recall.remaining:
                return
            try:
                memory.give_spare(recall.remaining, is_asked_for)
            except Exception:
                logger.exception("could not release spare pages that the broker recalls")


def borrows_in_a_callback() -> InvalidRequest:
    """Return the error for a callback that borrows."""
    return InvalidRequest(
        "a callback of on_recall or on_sleep cannot borrow memory, because the broker waits for its answer: borrow in "
        "another thread. In on_recall return membroker.DEFERRED, and call done() there. To offload, use memory that "
        "the process has already: a segment, or pinned memory that restore(keep_pinned=True) kept"
    )
