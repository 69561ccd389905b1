"""`membroker segments`: list segments, load a checkpoint into one, show its tensors, delete it.

Owns these commands and what they print. The loading is in `loading`.
"""

from __future__ import annotations

import argparse
import sys

from .. import Client
from ..admin import Admin
from ..errors import BrokerAbsent
from ..ext import arguments
from ..ext import endpoint as endpoints
from ..safetensors import InvalidTensorIndex
from ..types import SegmentStatus
from ..vmm.sizes import format_size
from . import commands, loading, tables
from .books import is_admin, open_books
from .commands import Commands, add, listing
from .loading import open_worker
from .segment_name import SegmentPath

# --- Commands ---


def _load(options: argparse.Namespace) -> int:
    if is_admin(options.endpoint, options.admin):
        options.parser.error("a segment is loaded at its tenant's endpoint, not at the admin endpoint")
    name: SegmentPath = options.name
    if bool(options.model) == bool(name.model):
        options.parser.error("name the segment and its model once: as MODEL/SEGMENT, or as SEGMENT with --model MODEL")
    if options.model:
        name = SegmentPath("", options.model, name.segment)
    sizes = {"virtual_capacity": options.virtual_capacity, "limit": options.limit}
    try:
        loaded = loading.load(
            options.endpoint, options.file, name, options.location, sizes, sys.stderr, replace=options.replace
        )
    except KeyboardInterrupt:
        print("membroker: interrupted: no segment was made", file=sys.stderr)
        raise
    shown = tables.short_name(loaded.name)
    return tables.answer(
        options.json,
        loaded,
        f"{shown}: {format_size(loaded.size)} at the {loaded.location}, "
        f"{_count(loaded.tensors, 'tensor')}, in {loaded.seconds:.1f} s ({format_size(int(loaded.rate))}/s)",
        "it stays until it is deleted; any process of this tenant can attach it:",
        f'  with membroker.connect() as client, client.attach("{shown.partition("/")[2]}") as segment:',
        "      print(segment.index())",
    )


def _show(options: argparse.Namespace) -> int:
    if is_admin(options.endpoint, options.admin):
        options.parser.error("the contents of a segment are read at its tenant's endpoint, not at the admin endpoint")
    with (
        _reader(options) as client,
        client.attach(str(options.name.within(client.tenant)), timeout=0) as segment,
    ):
        try:
            index = segment.index()
        except InvalidTensorIndex as error:
            raise InvalidTensorIndex(f"{segment.resource_name} has no readable header: {error}") from error
    tensors = tuple(index.values())
    contents = {
        "name": segment.resource_name,
        "generation": segment.generation,
        "location": segment.location,
        "size": segment.size,
        "metadata": index.metadata,
        "tensors": tensors,
    }
    return tables.answer(
        options.json,
        contents,
        f"{tables.short_name(segment.resource_name)}: {format_size(segment.size)} at the {segment.location}, "
        f"{_count(len(tensors), 'tensor')}",
        *([tables.metadata_table(index.metadata)] if index.metadata else []),
        tables.tensors_table(tensors),
    )


def _reader(options: argparse.Namespace) -> Client:
    """Return a session that can attach. If none was chosen, say which endpoint the segment's tenant has."""
    try:
        return open_worker(options.endpoint)
    except BrokerAbsent as error:
        chosen = endpoints.find_endpoint(options.endpoint)
        own = chosen.with_name(options.name.tenant or chosen.name)
        if own != chosen and (own / "handoff.sock").exists() and not (chosen / "handoff.sock").exists():
            raise BrokerAbsent(
                f"the contents of a segment are read at its tenant's endpoint: give --endpoint {own}"
            ) from error
        raise


def _delete(options: argparse.Namespace) -> int:
    whole = bool(options.name.tenant)  # as the operator types it, and the list shows it: at no endpoint of a tenant
    if not whole and is_admin(options.endpoint, options.admin):
        options.parser.error("at the admin endpoint a segment is TENANT/MODEL/SEGMENT")
    with (
        open_books(options.endpoint, options.admin, observer=False) if whole else open_worker(options.endpoint)
    ) as books:
        name = options.name.within(books.tenant) if isinstance(books, Client) else options.name
        before = _known_by(books, name)
        books.delete_segment(str(name))
        left = {segment.generation: segment.sessions for segment in books.segments()}
    deleted, size, sessions = str(name), 0, 0  # it began, and was deleted, between two calls
    if before is not None:
        deleted, size, sessions = before.name, before.size_bytes, left.get(before.generation, 0)
    lines = [f"{tables.short_name(deleted)} is deleted: it can no longer be attached"]
    if sessions:
        holders = _count(sessions, "session")
        lines += [f"its {format_size(size)} become free when the last session closes it: {holders} now"]
    return tables.answer(options.json, {"name": deleted, "size": size, "sessions": sessions}, *lines)


def _known_by(books: Admin | Client, name: SegmentPath) -> SegmentStatus | None:
    """Return the segment that the broker will choose for this name, if there is one."""
    for found in books.segments():
        tenant, model, segment = arguments.parts_of(found.name)
        wanted = (name.tenant or tenant, name.model or model, name.segment)
        if wanted == (tenant, model, segment) and found.state in ("writing", "sealed"):
            return found
    return None


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" + ("" if number == 1 else "s")


# --- The command line ---


def add_commands(subparsers: Commands) -> None:
    """Add `membroker segments` and its actions."""
    group = add(
        subparsers,
        "segments",
        listing(lambda books: books.segments(), tables.segments_table),
        "memory that has a name: list, load, show and delete it",
        "segments\nsegments --admin\nsegments load model.safetensors llama-7b/weights\n"
        "segments show llama-7b/weights\nsegments delete llama-7b/weights",
        "\nWithout an ACTION it lists all segments.",
        admin=True,
    )
    actions = group.add_subparsers(metavar="[ACTION]")
    load = add(
        actions,
        "load",
        _load,
        "make a segment from a checkpoint",
        "segments load model.safetensors llama-7b/weights\n"
        "segments load ~/.cache/huggingface/hub/models--Qwen--Qwen3-8B Qwen/Qwen3-8B/weights\n"
        "segments load model.safetensors weights --model llama-7b --limit 8GiB",
        inherits=True,
    )
    files = "a safetensors file, an index of shards (.json), or a directory with either"
    load.add_argument("file", metavar="PATH", help=files)
    show = add(
        actions,
        "show",
        _show,
        "the tensors of a segment (names, dtypes, shapes, offsets) and its metadata",
        "segments show llama-7b/weights\nsegments show llama-7b/weights --json | jq '.tensors[].name'",
        inherits=True,
    )
    delete = add(
        actions,
        "delete",
        _delete,
        "end a segment: its memory becomes free when the last session closes it",
        "segments delete llama-7b/weights\nsegments delete acme/llama-7b/weights --admin     any tenant's segment",
        inherits=True,
    )
    anywhere = "SEGMENT, MODEL/SEGMENT or TENANT/MODEL/SEGMENT"
    own = "MODEL/SEGMENT, or SEGMENT with --model"
    for parser, named in ((load, own), (show, anywhere), (delete, anywhere)):
        parser.add_argument("name", metavar="NAME", type=_segment, help=named)
    load.add_argument("--model", metavar="MODEL", help="the model that is charged; or write it before the name")
    commands.add_location(load)
    for option, what in (("limit", "limit"), ("virtual-capacity", "virtual capacity")):
        help_ = f"the model's {what}, as its workers register it"
        load.add_argument(f"--{option}", metavar="SIZE", type=commands.size, help=help_)
    newest = "make it the newest version of a name that exists, and delete the others"
    load.add_argument("--replace", action="store_true", help=newest)
    delete.add_argument("--admin", action="store_true", default=argparse.SUPPRESS, help="any tenant's")


def _segment(text: str) -> SegmentPath:
    try:
        return SegmentPath.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
