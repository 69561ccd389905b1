"""What the agent does for each claim: tenants at the daemons, the record, and the file for the container runtime.

Owns the order of both calls, each of which can be repeated, and can follow a crash of the agent, a daemon or the node.
The record comes first and goes last. It must never change or delete a tenant without a record.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from ..admin import Admin
from ..errors import BrokerAbsent, MembrokerError
from . import claims
from .api_server import ApiError, ApiServer, ClaimGone
from .claims import ClaimError, Wanted
from .files import DeviceFiles, Records, cdi_id
from .v1 import kubelet_pb2 as pb

MAX_CLAIMS = 64
"""Claims of one call. A pod can have 32."""
PODS_SHOWN = 8
_EXISTS, _ABSENT = "TENANT_EXISTS", "TENANT_NOT_FOUND"


class Agent:
    """The service of a DRA driver. `say` gets a line for each claim that was prepared, unprepared or refused."""

    def __init__(
        self,
        node: str,
        runtime: Path,
        api: ApiServer,
        records: Records,
        files: DeviceFiles,
        say: Callable[[str], None],
    ) -> None:
        self._node = node
        self._runtime = runtime
        self._api = api
        self._records = records
        self._files = files
        self._say = say
        self._lock = threading.Lock()
        self._busy: set[str] = set()
        """The uids of the claims that a call works at now: the kubelet repeats a call that takes long."""

    def restore(self) -> None:
        """Write the runtime's files again, which a reboot takes away. The kubelet does not prepare a claim twice."""
        for uid in self._records.uids():
            try:
                wanted = self._records.read(uid)
                if wanted is not None:
                    self._files.write(uid, claims.tenant_of(uid), wanted)
            except (MembrokerError, OSError) as error:
                self._say(f"cannot write the runtime's file of the claim {claims.shown(uid)}: {error}")

    def collect(self) -> None:
        """Take away what is left of claims that do not exist any more: a kubelet that lost its state asks for nothing.

        A claim exists as long as a pod uses it: Kubernetes protects it from deletion.
        """
        for uid in self._records.uids():
            try:
                with self._alone(uid):
                    wanted = self._records.read(uid)
                    if wanted is not None and self._is_gone(uid, wanted):
                        self._remove(uid, wanted)
                        self._say(f"the claim {uid} does not exist any more: its tenant {claims.tenant_of(uid)} ends")
            except ApiError:
                return  # the next time is soon enough, and the slices say what is wrong
            except (MembrokerError, OSError) as error:
                self._say(f"cannot take away what is left of the claim {claims.shown(uid)}: {error}")

    def _is_gone(self, uid: str, wanted: Wanted) -> bool:
        try:
            found = self._api.claim(*wanted.place)
        except ClaimGone:
            return True
        metadata = found.get("metadata")
        other = metadata.get("uid") if isinstance(metadata, dict) else None
        return isinstance(other, str) and other != uid  # one of the same name

    def prepare(self, request: pb.ClaimsRequest) -> pb.PrepareResponse:
        """Answer NodePrepareResources: the devices of each claim, or why it has none."""
        answer = pb.PrepareResponse()
        for claim in _bounded(request.claims):
            prepared = answer.claims[claim.uid]
            try:
                with self._alone(claim.uid):
                    prepared.devices.extend(self._prepare(claim))
            except (MembrokerError, OSError) as error:
                prepared.error = self._refusal("cannot prepare", claim, error)
        return answer

    def unprepare(self, request: pb.ClaimsRequest) -> pb.UnprepareResponse:
        """Answer NodeUnprepareResources: for each claim that nothing is left of it, or why not."""
        answer = pb.UnprepareResponse()
        for claim in _bounded(request.claims):
            unprepared = answer.claims[claim.uid]
            try:
                with self._alone(claim.uid):
                    self._unprepare(claim)
            except (MembrokerError, OSError) as error:
                unprepared.error = self._refusal("cannot unprepare", claim, error)
        return answer

    def _prepare(self, claim: pb.Claim) -> list[pb.Device]:
        tenant = claims.tenant_of(claim.uid)
        wanted = self._records.read(claim.uid)
        is_new = wanted is None
        if wanted is None:
            wanted = claims.read(self._api.claim(claim.namespace, claim.name), claim.uid, self._node)
            for directory in wanted.tenants:  # before there is a record: another's tenant of that name stays so
                self._create(directory, tenant, wanted, dry_run=True)
            uuids = tuple(map(self._uuid, wanted.tenants))
            wanted = replace(wanted, uuids=uuids, place=(claim.namespace, claim.name))
            self._records.write(claim.uid, wanted)
        try:
            for directory in wanted.tenants:
                self._create(directory, tenant, wanted)
            self._files.write(claim.uid, tenant, wanted)
        except (MembrokerError, OSError):
            if is_new:  # a claim that cannot have all holds nothing; if this fails, too, the kubelet unprepares it
                with suppress(MembrokerError, OSError):
                    self._remove(claim.uid, wanted)
            raise
        if is_new:
            self._say(f"{_name(claim)} has the tenant {tenant} ({', '.join(wanted.tenants)}) for {_pods(wanted)}")
        return [
            pb.Device(
                request_names=device.requests,
                pool_name=device.pool,
                device_name=device.device,
                cdi_device_ids=[cdi_id(claim.uid, device.directory)],
            )
            for device in wanted.devices
        ]

    def _create(self, directory: str, tenant: str, wanted: Wanted, *, dry_run: bool = False) -> None:
        """Make a tenant at a daemon, unless it is there."""
        try:
            with self._admin(directory) as admin:
                admin.create_tenant(f"tenants/{tenant}", wanted.tenants[directory], dry_run=dry_run)
        except MembrokerError as error:
            if error.reason != _EXISTS:
                raise
            if dry_run:
                raise ClaimError(f"{directory} has a tenant {tenant} that this agent has not made") from error

    def _uuid(self, directory: str) -> str:
        with self._admin(directory) as admin:
            return admin.device().uuid

    def _unprepare(self, claim: pb.Claim) -> None:
        wanted = self._records.read(claim.uid)
        if wanted is None:
            self._files.remove(claim.uid)
            return
        self._remove(claim.uid, wanted)
        self._say(f"{_name(claim)}: its tenant {claims.tenant_of(claim.uid)} is deleted when nothing of it is lent")

    def _remove(self, uid: str, wanted: Wanted) -> None:
        """Take all of a claim away. The daemon drains each tenant before it is gone, also after a restart."""
        self._files.remove(uid)
        for directory in wanted.tenants:
            try:
                with self._admin(directory) as admin:
                    admin.delete_tenant(f"tenants/{claims.tenant_of(uid)}")
            except MembrokerError as error:
                if error.reason != _ABSENT:
                    raise
        self._records.remove(uid)

    @contextmanager
    def _admin(self, directory: str) -> Iterator[Admin]:
        try:
            with Admin(self._runtime / directory / "admin" / "grpc.sock") as admin:
                yield admin
        except BrokerAbsent as error:
            raise ClaimError(f"the daemon of {directory} does not run on {self._node}") from error

    @contextmanager
    def _alone(self, uid: str) -> Iterator[None]:
        """Refuse a second call for the same claim."""
        claims.check_uid(uid)
        with self._lock:
            if uid in self._busy:
                raise ClaimError("an earlier call for this claim has not ended: ask again")
            self._busy.add(uid)
        try:
            yield
        finally:
            self._busy.discard(uid)

    def _refusal(self, what: str, claim: pb.Claim, error: Exception) -> str:
        self._say(f"{what} {_name(claim)}: {error}")
        return f"membroker: {error}"


def _bounded(found: Sequence[pb.Claim]) -> Sequence[pb.Claim]:
    if len(found) > MAX_CLAIMS:
        raise ClaimError(f"{len(found)} claims in one call, more than {MAX_CLAIMS}")
    return found


def _name(claim: pb.Claim) -> str:
    return f"ResourceClaim {claims.shown(f'{claim.namespace}/{claim.name}')} ({claims.shown(claim.uid)})"


def _pods(wanted: Wanted) -> str:
    rest = len(wanted.pods) - PODS_SHOWN
    return ", ".join(wanted.pods[:PODS_SHOWN]) + f" and {rest} more" * (rest > 0) or "no pod"
