"""Python processes that start in a tenth of the time: forks of one that has imported the library and the daemon.

An interpreter needs 0.1 s of CPU time to import the library and 0.2 s for the daemon, and the tests start two thousand
of them. So a test process has a template, which imports both once and then only forks. A fork is a child of the test
process, and ends as an interpreter does. Its command line in /proc is the template's.
"""

from __future__ import annotations

import atexit
import ctypes
import errno
import gc
import importlib
import json
import os
import platform
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
OPTIONS = {"stdin", "stdout", "stderr", "cwd", "env", "text", "process_group"}
EARLY = ("LD_", "OMP_", "HF_", "TORCH_", "VLLM_", "SGLANG_")
"""How the names of variables begin that are read when something is linked or imported."""
CLONE_PARENT = 0x8000
CLONE = {"x86_64": 56, "aarch64": 220}.get(platform.machine())
"""The number of the system call. Its arguments after the flags are zeros, so their order does not matter."""
MAX_REQUEST = 1 << 20
STARTED = ("membroker.cli.main", "membrokerd.cli", "tests.support.workers")
"""What is started with -m: all that these import is there before the fork."""
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1"}
"""NumPy must not start threads when it is imported: a fork would be without them."""
_THREADS = Path("/proc/self/task")
started: dict[int, str] = {}
"""The test that has started each fork: its environment in /proc is the template's."""


class PythonProcess(subprocess.Popen[Any]):
    """As `subprocess.Popen([sys.executable, *arguments])`; the first arguments are `-m MODULE`, `-c CODE` or a script.

    It is a fork of a template that has imported `imports`, too: PyTorch takes an interpreter 1.6 s. `subprocess` starts
    a process in a method of its own, with the same arguments since Python 3.11; all else is as it is there.
    """

    def __init__(self, arguments: Sequence[str], *, imports: Sequence[str] = (), **options: Any) -> None:
        assert options.keys() <= OPTIONS, "start an interpreter with subprocess.Popen"
        self._imported = tuple(imports)
        super().__init__([sys.executable, *arguments], **options)

    def _execute_child(self, args: list[str], *rest: Any) -> None:  # type: ignore[override]
        _, _, _, _, cwd, env, _, _, _, *streams = rest[:15]
        environment = os.environ if env is None else env
        if CLONE is None or _needs_exec(environment):
            super()._execute_child(args, *rest)  # type: ignore[misc]
            return
        stdin, _, _, stdout, _, stderr = streams
        inherited = [number if given == -1 else given for number, given in enumerate((stdin, stdout, stderr))]
        early = tuple(sorted(item for item in environment.items() if item[0].startswith(EARLY)))
        self.pid = _template(self._imported, early).fork(args[1:], environment, cwd or os.getcwd(), inherited)
        started[self.pid] = os.environ.get("PYTEST_CURRENT_TEST", "")
        if rest[-1] >= 0:
            os.setpgid(self.pid, rest[-1])
        self._child_created = True
        self._close_pipe_fds(*streams)  # type: ignore[attr-defined]


def run(arguments: Sequence[str], timeout: float = 100.0, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a `PythonProcess` to its end, and return its status and what it wrote."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with PythonProcess(arguments, text=True, **{**pipes, **options}) as process:
        try:
            out, error = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, error)


def _needs_exec(environment: Mapping[str, str]) -> bool:
    """Say whether these variables tell the interpreter something that a fork would hear too late."""
    names = {name for name in (*environment, *os.environ) if name.startswith("PYTHON")} - {"PYTHONPATH"}
    return any(environment.get(name) != os.environ.get(name) for name in names)


class _Template:
    """The test's side of a template, which ends with this process."""

    def __init__(self, modules: Sequence[str], early: Sequence[tuple[str, str]]) -> None:
        self._socket, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._forking = threading.Lock()
        self._owner = os.getpid()
        with other:
            command = [sys.executable, "-c", "from tests.support.template import serve; serve()", *modules]
            self._process = subprocess.Popen(
                command, stdin=other, cwd=ROOT, env={**os.environ, **ONE_THREAD, **dict(early)}
            )

    def fork(self, arguments: list[str], environment: Mapping[str, str], cwd: str | Path, streams: list[int]) -> int:
        """Start a process with these arguments of the interpreter, and return its pid."""
        request = json.dumps([arguments, dict(environment), str(cwd)]).encode()
        with self._forking:
            while True:
                try:
                    socket.send_fds(self._socket, [request], streams)
                    break
                except OSError as error:  # another test has as many descriptors on their way as this user may have
                    if error.errno != errno.ETOOMANYREFS:
                        raise
                    time.sleep(0.01)
            answer = self._socket.recv(16)
        assert answer, "the template has ended"
        return int(answer)

    def end(self) -> None:
        """End the template; in a fork of its owner this does nothing."""
        if os.getpid() == self._owner:
            self._socket.close()
            with suppress(subprocess.TimeoutExpired):  # a process that a test has left has its socket, too
                self._process.wait(30)


_templates: dict[tuple[tuple[str, ...], tuple[tuple[str, str], ...]], _Template] = {}


def _template(modules: tuple[str, ...], early: tuple[tuple[str, str], ...]) -> _Template:
    """Return the template with these modules, which were imported with these variables."""
    if (modules, early) not in _templates:
        _templates[modules, early] = _Template(modules, early)
    return _templates[modules, early]


def end_all() -> None:
    while _templates:
        _templates.popitem()[1].end()


atexit.register(end_all)


# --- The template's side ---


def serve() -> None:
    """Import what most processes need, and the modules on the command line; then fork for each request."""
    import membroker

    for module in (*sys.argv[1:], "membrokerd.daemon", "tests.support.daemons", "tests.support.raw"):
        importlib.import_module(module)
    for module in STARTED:
        importlib.import_module(module)
        del sys.modules[module]  # `runpy` warns of a program that was imported
    for name in membroker.__all__:
        getattr(membroker, name)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.collect()
    gc.freeze()
    assert len(list(_THREADS.iterdir())) == 1, "a fork would be without the other threads"
    requests = socket.socket(fileno=os.dup(0))
    while True:
        request, streams, _, _ = socket.recv_fds(requests, MAX_REQUEST, 3)
        if not request:
            return
        pid = _fork_a_sibling()
        if not pid:
            break
        requests.send(str(pid).encode())
        for stream in streams:
            os.close(stream)
    requests.close()
    _become(streams, *json.loads(request))


def _fork_a_sibling() -> int:
    """Fork as `os.fork` does, but the new process is a child of the parent of this one, which can wait for it."""
    python = ctypes.PyDLL(None)  # keeps the interpreter's lock
    python.PyOS_BeforeFork()
    pid: int = python.syscall(CLONE, CLONE_PARENT | signal.SIGCHLD, 0, 0, 0, 0)
    if pid:
        python.PyOS_AfterFork_Parent()
    else:
        python.PyOS_AfterFork_Child()
    assert pid >= 0, "no process can be started"
    return pid


def _end(status: int) -> None:
    """End as an interpreter does, but leave the memory to the kernel.

    To free each object would copy nearly every page of the template, which takes 25 ms of CPU time. An interpreter
    still ends scripts and code, and what cannot write. A test of an end starts an interpreter of its own.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    with suppress(OSError, ValueError):
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(status)


def _become(streams: list[int], arguments: list[str], environment: dict[str, str], cwd: str) -> None:
    """Run the arguments of an interpreter, as it would itself."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, (stream, name) in enumerate(zip(streams, ("stdin", "stdout", "stderr"), strict=True)):
        os.dup2(stream, number)
        os.close(stream)
        old = getattr(sys, name)
        by_line = 1 if number == 2 or os.isatty(number) else -1
        fresh = os.fdopen(number, "w" if number else "r", by_line, old.encoding, old.errors, closefd=False)
        setattr(sys, name, fresh)
        setattr(sys, f"__{name}__", fresh)
    os.chdir(cwd)
    if arguments[0] == "-W":
        warnings._setoption(arguments[1])  # type: ignore[attr-defined]
        arguments = arguments[2:]
    kind = arguments[0]
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:1] = [cwd if kind == "-m" else "" if kind == "-c" else os.path.dirname(kind)]
    sys.path[1:1] = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path not in sys.path]
    main = vars(sys.modules["__main__"])
    if kind == "-m":
        sys.argv[:] = [kind, *arguments[2:]]
        try:
            runpy._run_module_as_main(arguments[1])  # type: ignore[attr-defined]
        except SystemExit as end:
            if end.code is not None and not isinstance(end.code, int):
                raise
            _end(end.code or 0)
            raise
        _end(0)
    elif kind == "-c":
        sys.argv[:] = [kind, *arguments[2:]]
        exec(compile(arguments[1], "<string>", "exec"), main)
    else:
        sys.argv[:] = arguments
        main["__file__"] = kind
        exec(compile(Path(kind).read_bytes(), kind, "exec"), main)
