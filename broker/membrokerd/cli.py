"""The command `membrokerd`: read the configuration, open the device, serve until SIGTERM.

Nothing slow is imported before `main` runs: Ctrl-C is quiet from then on, and `--help` needs no package of the extra.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from membroker.wire import paths
from membroker.wire.build import version_text
from membroker.wire.ownership import namespace_trouble, stranger_in
from membroker.wire.standard import forget_inheritance, import_quietly
from membroker.wire.system_calls import refused
from membroker.wire.threads import shortage

from . import __version__
from .system.log_writer import complain

if TYPE_CHECKING:
    import argparse

    from .config.config import Config
    from .core.names import Location
    from .runtime.reload import Reloader

SWITCH_SECONDS = 0.0005
GUARANTEE_STEP = 64 << 20
"""Engines take pages of up to this size."""
RECALL_ROUNDS = 3
"""How many times recall_seconds a guaranteed request should wait: one program does not answer, the next one does."""
MAX_HOST_DEVICES = 64
PR_SET_PDEATHSIG = 1
THREADS = 24
"""A daemon has some ten threads of its own; gRPC starts up to 16 and ends the process where it cannot."""

_FOREIGN_FILE = "who can change the configuration decides what this daemon does, and that is not this user alone"

_EPILOG = """\
examples:
  membrokerd                                   a usable GPU, else the host driver; one endpoint, each uid a tenant
  membrokerd --driver host --capacity 8GiB     no GPU: the host driver, for trying things out
  membrokerd --config /etc/membroker/membrokerd.toml
  membrokerd --config FILE --device 1          the second GPU's daemon, from the same file
  membrokerd --config FILE --all               a daemon for each GPU of the machine; one metrics port for all
  membrokerd --config FILE --check-config      what is wrong with FILE, and what a reload would do
  membrokerd --config FILE --reload            have the daemon read FILE again, as SIGHUP does; fails if it refuses

Workers find the endpoint through MEMBROKER_ENDPOINT, or at its default place. `membroker doctor` says whether this
machine can run a broker. `membroker status` shows what a running broker lends. deploy/membrokerd.toml explains every
key of FILE."""


def main(arguments: list[str] | None = None) -> int:
    """Run the daemon; returns its exit status.

    0 after SIGTERM or SIGINT, 1 when it cannot start, 2 for a wrong command line, 130 after a SIGINT during the start.
    With `--all` also 0 after every daemon was drained and has ended, and 1 if a daemon had to be killed at the stop.
    """
    forget_inheritance()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # it reloads the configuration, which is not read yet
    try:
        parser = _parser()
        known, unknown = parser.parse_known_args(arguments)
        if unknown:
            parser.error(f"unrecognized arguments: {' '.join(unknown)}{_meant(parser, unknown[0])}")
        options = vars(known)
        if options["all"] is not None and options["device"] is not None:
            parser.error("--all runs a daemon for every device: leave out --device")
        return _run(options)
    except KeyboardInterrupt:
        return 130
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("membroker"):
            raise
        missing = f"the Python module {error.name} is missing: pip install 'membroker[broker]'"
        complain(f"membrokerd: {missing}")
        return 1


def _run(options: dict[str, Any]) -> int:
    # A wrong configuration is reported before gRPC and a driver are imported.
    import_quietly("membrokerd.runtime.reload")
    from .config.config import ConfigError, load, load_place
    from .runtime.reload import Reloader
    from .system import logs

    path: Path | None = options.pop("config")
    only_check: bool = options.pop("check_config")
    only_reload: bool = options.pop("reload")
    count: int | None = options.pop("all")
    parent: int | None = options.pop("of_all")
    if parent is not None:  # the parent serves the metrics of all, and systemd keeps descriptors only for the parent
        options |= {"metrics.address": "127.0.0.1", "metrics.port": 0, "systemd_descriptors": 0}
        _end_with(parent)
    try:
        config = load(path, options)
    except ConfigError as error:
        complain(error)
        if only_reload:  # the daemon is to know, so that its metrics and `membroker status` say so
            with suppress(ConfigError):
                _ask_to_reload(load_place(path, options), count)
        return 1
    if only_reload:
        return _ask_to_reload(config, count)
    wrong = "" if count is None else _wrong_for_all(config, count)
    if wrong:
        complain(f"membrokerd: {wrong}")
        return 1
    if only_check:
        return _check(config, path)
    if why := shortage(THREADS):
        complain(f"membrokerd: {why}")
        return 1
    logs.configure(config.log.level, config.log.format, gpu="" if parent is None else _name(config))
    if path is not None and (stranger := stranger_in(path)):
        logs.warn(f"{_FOREIGN_FILE}: {stranger}", file=str(path))
    if namespace := namespace_trouble():
        logs.warn(namespace)
    if count is not None:
        return _serve_all(config, count, {"config": path, **options})
    return _serve(config, Reloader(path, lambda: load(path, options)))


def _check(config: Config, path: Path | None) -> int:
    """Say what is wrong with a configuration here and now; return 1 if the daemon would not start with it."""
    from .device.plan import DeviceError
    from .system.device_directory import DirectoryError

    where = paths.printable(path or "the defaults")
    try:
        for trouble in _troubles(config, path):
            complain(f"{where}: {trouble}")
    except (DirectoryError, DeviceError) as error:
        complain(f"{where}: {error}" if isinstance(error, DeviceError) else error)
        return 1
    print(f"{where}: good")
    return 0


def _ask_to_reload(config: Config, count: int | None) -> int:
    """Have the running daemon of this configuration, or with `--all` each, reload; return 1 if one refuses."""
    from .reload_check import ReloadFailed, admin_sockets, reload_now

    failed = False
    for endpoint in admin_sockets(config, of_all=count is not None):
        try:
            print(reload_now(endpoint))
        except ReloadFailed as error:
            complain(f"membrokerd: {paths.printable(endpoint.parent)}: {error}")
            failed = True
    return int(failed)


def _end_with(parent: int) -> None:
    """Have the kernel stop this process when its parent dies, or else the next parent would find the GPU taken.

    It is not done between fork and exec (`preexec_fn`): there it could wait forever for a lock of the dynamic linker
    that another thread of the parent had, and the parent's event loop with it.
    """
    import ctypes

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        sys.exit(1)


def _name(config: Config) -> str:
    """Return what the log calls the device: its UUID."""
    if isinstance(config.device, int):
        return f"host-{config.device}" if config.device else "host"
    return config.device


def _wrong_for_all(config: Config, count: int) -> str:
    """Return why `--all` cannot run with this configuration, or an empty text."""
    if count and config.driver != "host":
        return "--all takes a number only with --driver host: all GPUs are found by themselves"
    if config.descriptor_store == "systemd":
        return 'descriptor_store = "systemd" keeps descriptors for one daemon only; with --all write "keeper" or "auto"'
    return ""


def _serve_all(config: Config, count: int, options: dict[str, Any]) -> int:
    import asyncio

    from membroker.vmm import DriverError

    from .all_gpus import AllGpus, command_of, find
    from .system import logs
    from .system.device_directory import DirectoryError

    try:
        driver, uuids = find(config, count)
        return asyncio.run(AllGpus(config, uuids, command_of(options, driver)).run())
    except (DirectoryError, DriverError) as error:
        logs.flush()
        complain(f"membrokerd: {error}")
        return 1


def _troubles(config: Config, path: Path | None) -> Iterator[str]:
    """Yield what is not wrong in the file but would be here and now, for this user."""
    from .config import descriptor_limits as limits
    from .config import quotas
    from .device.plan import CUDA_HEADROOM, look_at_device
    from .device.suspects import CONTEXT_BYTES
    from .reload_check import reload_sentences
    from .restart.mirrors import check_keeper
    from .system.device_directory import try_runtime

    device, capacities, unasked = look_at_device(config)
    try_runtime(config.runtime_directory, device, config.endpoints)
    quotas.check_place(quotas.state_directory(config, device))
    check_keeper(config)
    if path is not None and (stranger := stranger_in(path)):
        yield f"{_FOREIGN_FILE}: {stranger}"
    if config.state_directory and (why := quotas.trouble(config.state_directory)):
        yield f"state_directory: {why}"
    if config.max_sessions and (why := limits.trouble(config.max_sessions, limits.raise_descriptor_limit())):
        yield why
    if namespace := namespace_trouble():
        yield namespace
    yield from _memory_troubles(config)
    yield from _guarantee_troubles(config, capacities, unasked)
    yield from reload_sentences(config, device, capacities)
    rounds = RECALL_ROUNDS * config.recall_seconds
    if 0 < config.guarantee_wait_seconds < rounds:
        yield (
            f"guarantee_wait_seconds: {config.guarantee_wait_seconds:g} is less than {RECALL_ROUNDS} times "
            f"recall_seconds, {rounds:g}: if a program does not answer a recall, a request within a guarantee may be "
            "refused before others have answered; raise it, or lower recall_seconds"
        )
    models = sum(1 for tenant in config.tenants.values() for model in tenant.models.values() if model.guarantee)
    headroom = CUDA_HEADROOM if config.headroom is None else config.headroom
    if config.driver != "host" and headroom < models * CONTEXT_BYTES["cuda"]:
        yield (
            f"headroom: {models} models have a guarantee, and each needs a CUDA context of about 600 MiB beside it: "
            "raise headroom, or let the workers declare their contexts"
        )
    if config.uid_tenants and config.default_limit is None:
        yield "there are no tenants and no default_limit: every local user may borrow the whole device"


def _memory_troubles(config: Config) -> Iterator[str]:
    """Yield why this machine has less memory than is lent of it: the kernel ends processes when it is used up."""
    from membroker.vmm import format_size

    lent = {"host_capacity": config.host_capacity}
    if config.driver == "host":
        lent["capacity"] = config.capacity or 0
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if sum(lent.values()) > memory:
        keys = " and ".join(sorted(key for key, size in lent.items() if size))
        yield (
            f"{keys}: {format_size(sum(lent.values()))} of host memory is more than the {format_size(memory)} of this "
            "machine: the kernel will end processes when it is used; lower it"
        )


def _guarantee_troubles(config: Config, capacities: Mapping[Location, int], unasked: str) -> Iterator[str]:
    """Yield what is odd about the guarantees in the file, and which quotas by command do not fit the file any more."""
    from membroker.vmm import format_size

    from .config import quotas
    from .config.checks import joined
    from .config.config import QUOTA_KEYS, quotas_of
    from .config.guarantees import misfit_sentences
    from .core import policy
    from .device.plan import changed_rules, check_guarantees

    for (tenant, model, location), quota in quotas_of(config.tenants):
        if quota.guarantee and quota.guarantee % GUARANTEE_STEP and config.driver != "host":
            key = ("tenants", tenant, *(("models", model) if model else ()), QUOTA_KEYS[location][1])
            yield (
                f"{joined(key)}: {format_size(quota.guarantee)} is not a multiple of {format_size(GUARANTEE_STEP)}: "
                "a pool with pages of that size cannot use the rest"
            )
    rules = changed_rules(policy.Rules(granularity=1, capacities=capacities), config)
    check_guarantees(rules)
    if unasked and config.capacity is None and rules.guarantees:
        yield f"the guarantees were not added up, since the device cannot be asked how much it has: {unasked}"
    for kept in quotas.kept_quotas(config):
        for sentence in misfit_sentences(quotas.read(kept), rules):
            yield f"{kept}: {sentence}: lower one by `membroker quota set`"


def _serve(config: Config, reloader: Reloader) -> int:
    signal.signal(signal.SIGHUP, lambda *_: reloader.ask())
    import_quietly("membrokerd.daemon")
    import asyncio

    from membroker.vmm import DriverError

    from .daemon import Daemon
    from .device.plan import DeviceError, plan
    from .system import logs
    from .system.device_directory import DirectoryError
    from .system.turns import Turns, TurnSelector

    # A thread that renders a scrape may keep the interpreter for 5 ms by default, and lending would wait that long.
    sys.setswitchinterval(SWITCH_SECONDS)
    try:
        if calls := refused(host_driver=False):  # that driver names its own
            raise DeviceError(f"this system refuses what a broker needs: {'; '.join(calls)}; allow it in the sandbox")
        made = plan(config)
        device = made.driver.device
        logs.log(
            "device",
            driver=f"{device.driver} {device.driver_version}".strip(),
            uuid=device.uuid,
            product=device.name,
            capacity_bytes=made.capacities["device"],
        )
        turns = Turns()
        with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(TurnSelector(turns))) as runner:
            runner.run(Daemon(config, made, reloader, turns).run())
    except (DirectoryError, DeviceError, DriverError) as error:
        logs.flush()  # this sentence is the last one
        complain(f"membrokerd: {error}")
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    import argparse

    from membroker.wire.help_text import HelpFormatter

    parser = argparse.ArgumentParser(
        prog="membrokerd",
        description="Own the memory of one GPU and lend it to the processes of many tenants.",
        epilog=_EPILOG,
        formatter_class=HelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"membrokerd {version_text(__version__)}")
    parser.add_argument("--config", type=Path, metavar="FILE", help="a TOML file; options given here override it")
    parser.add_argument(
        "--check-config", action="store_true", help="read the configuration, report what is wrong, exit"
    )
    parser.add_argument(
        "--reload", action="store_true", help="have the running daemon read its configuration again, and exit"
    )
    parser.add_argument("--driver", choices=("auto", "host", "cuda"), help="auto: a usable GPU, else the host driver")
    parser.add_argument("--device", type=_device, metavar="N|UUID", help="which GPU: its number or its UUID")
    parser.add_argument(
        "--all",
        type=_count,
        nargs="?",
        const=0,
        metavar="N",
        help="run one daemon per GPU and restart any that die; with the host driver: N daemons (default 1)",
    )
    # A daemon that --all has started, and the pid of its parent.
    parser.add_argument("--of-all", type=int, help=argparse.SUPPRESS)
    parser.add_argument(
        "--capacity",
        metavar="SIZE",
        help='how much may be lent, as in "64GiB"; default: the GPU without the headroom; with the host driver 1GiB',
    )
    parser.add_argument(
        "--headroom", metavar="SIZE", help="how much of the device is never lent; default: 2GiB of a GPU"
    )
    parser.add_argument(
        "--runtime-directory",
        metavar="DIR",
        help="where the sockets are; default: /run/membroker for root, else $XDG_RUNTIME_DIR/membroker",
    )
    parser.add_argument(
        "--metrics-port",
        type=int,
        dest="metrics.port",
        metavar="PORT",
        help="port of /metrics and the status page; 0: any free port; default: 9710 plus the number of the GPU",
    )
    parser.add_argument(
        "--log-format", choices=("text", "json"), dest="log.format", help="text for people, json for programs"
    )
    parser.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        dest="log.level",
        help="debug adds each loan, release and refusal",
    )
    return parser


def _meant(parser: argparse.ArgumentParser, argument: str) -> str:
    """Return the end of a sentence: the option that is most like `argument`, if one is."""
    import difflib
    import re

    options = ["--help", *re.findall(r"--[a-z-]+", parser.format_usage())]
    near = difflib.get_close_matches(argument.partition("=")[0], options, n=1)
    return f", did you mean {near[0]}?" if near else ""


def _count(text: str) -> int:
    from argparse import ArgumentTypeError

    if not (text.isdecimal() and 1 <= int(text) <= MAX_HOST_DEVICES):
        raise ArgumentTypeError(f"the number of the host driver's devices is 1 to {MAX_HOST_DEVICES}, not {text!r}")
    return int(text)


def _device(text: str) -> int | str:
    return int(text) if text.isdecimal() else text


if __name__ == "__main__":
    sys.exit(main())
