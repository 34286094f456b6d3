# SPDX-License-Identifier: Apache-2.0
"""Processes of Python that need not import torch first, which is most of what a short program does.

    subprocess.run([python(), "-m", "scripts.train", "--list"])

``python()`` is the path of a stand-in for this interpreter. It has a server fork, one that has imported what belongs to
others; modules of this repository are imported anew in each process, so that their order, their paths and what they do
at import are those of a new interpreter. ``warm_python()`` has a second server fork, which has imported our packages
from this checkout, too: for what programs do. A test of how an interpreter ends, of its flags, of processor time, of a
process's id or group, or of what is imported takes ``sys.executable``.
"""

import atexit
import contextlib
import fcntl
import functools
import gc
import importlib
import json
import multiprocessing.popen_spawn_posix
import os
import runpy
import select
import shlex
import signal
import socket
import subprocess
import sys
import threading
import traceback
import types
from collections.abc import Callable, Sequence
from multiprocessing import util
from pathlib import Path
from typing import Any, NoReturn

IMPORTED = (
    *("torch.distributed.tensor.parallel", "torch.distributed.checkpoint", "torch.distributed.fsdp", "torch._dynamo"),
    *("torch.utils.tensorboard", "torch.distributed.run", "hydra", "attrs", "av", "PIL.Image", "safetensors.torch"),
)
FROM_A_HUB = ("huggingface_hub", "transformers", "accelerate")  # their settings are those of the environment at import
OURS = (
    *("cosmos_predict2.pipelines.video2world", "cosmos_predict2.models.video2world_model", "examples.video2world"),
    *("cosmos_predict2.rl.clips.flow_grpo", "cosmos_predict2.rl.episodes.grpo", "cosmos_predict2.tools.plan.workload"),
)
NETWORKS = ("AutoTokenizer", "Dinov2WithRegistersModel", "GemmaModel", "LlamaForCausalLM", "SiglipVisionModel")
BASE = "cosmos_predict2/configs/base/config.py"
HANG_S = 900.0  # a test's wait for what comes at once on an idle machine: only a hang lasts longer on a busy one
SHARED = "COSMOS_TESTS_PROGRAMS"  # the server's folder, for the workers of a run
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


@functools.cache
def python() -> str:
    """A stand-in for ``sys.executable``, beside ``torchrun`` and ``cosmos-rl``. Its server ends with this process, or
    with the one that started this one as a worker."""
    if SHARED in os.environ:
        return f"{os.environ[SHARED]}/python"
    folder = Path(util.get_temp_dir())  # removed at the end
    command = [sys.executable, "-m", __name__, str(folder)]
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    root = Path(__file__).parent.parent
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
    server = subprocess.Popen(command, cwd=root, env={**os.environ, **one_thread}, **pipes)
    assert server.stdin is not None and server.stdout is not None
    assert [server.stdout.readline() for _ in range(2)] == [b"ready\n"] * 2
    server.stdout.close()
    atexit.register(lambda: (server.stdin.close(), server.wait()))
    commands = {"python": "", "torchrun": "-m torch.distributed.run", "cosmos-rl": "-m scripts.cosmos_rl"}
    for place in (folder, folder / "warm"):
        for name, words in commands.items():
            text = f'exec {shlex.quote(sys.executable)} -IS {__file__} {shlex.quote(f"{place}/programs")} {words} "$@"'
            (place / name).write_text(f"#!/bin/sh\n{text}\n")
            (place / name).chmod(0o700)
    return str(folder / "python")


def warm_python() -> str:
    """As `python`, with our packages imported, and the experiments that they register."""
    return f"{os.path.dirname(python())}/warm/python"


def spawn_by(stand_in: Callable[[], str]) -> None:
    """Let a server fork what multiprocessing would spawn: workers of environments import torch where a package does."""

    def spawn(path: bytes, words: Sequence[str], fds: Sequence[int]) -> int:
        command = [stand_in(), *words[words.index("-c") :]]  # without flags of the interpreter
        return util.spawnv_passfds(os.fsencode(command[0]), command, fds)

    own = types.SimpleNamespace(**{**vars(util), "spawnv_passfds": spawn})
    multiprocessing.popen_spawn_posix.util = own  # type: ignore[attr-defined]


def exit_code(main: Callable[[list[str]], int], *arguments: object) -> int:
    """The exit code of a program's ``main`` in this process, also where a wrong flag ends it."""
    try:
        return main([str(word) for word in arguments])
    except SystemExit as error:
        return int(error.code or 0)


def call(script: types.ModuleType, *arguments: object) -> int:
    """The exit code of a program of `scripts` in this process."""
    from imaginaire import command_line

    return exit_code(functools.partial(command_line.main, script.parser, script.run), *arguments)


def finished(*words: object, cwd: Path | None = None, **environment: str | None) -> subprocess.CompletedProcess[str]:
    """The process of these words at its end, with what it printed. A variable that is None is not inherited."""
    variables = {name: value for name, value in {**os.environ, **environment}.items() if value is not None}
    command = [str(word) for word in words]
    return subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True, timeout=HANG_S)


def _client(path: str, words: list[str]) -> NoReturn:
    """Have the server run the words, hand signals through, and leave as the program left."""
    for number in FORWARDED:
        signal.signal(number, lambda number, frame: os.kill(program, number))
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)  # until there is a program to hand them to
    with socket.socket(socket.AF_UNIX) as server:
        fds = [fd for fd in map(int, os.listdir("/proc/self/fd")) if _is_open(fd) and fd != server.fileno()]
        server.connect(path)
        request = json.dumps([words, os.getcwd(), dict(os.environ), fds]).encode()
        socket.send_fds(server, [len(request).to_bytes(8, "big")], fds)
        server.sendall(request)
        answers = server.makefile()
        program = int(answers.readline())
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
        status = int(answers.readline())
    if os.WIFSIGNALED(status):
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.waitstatus_to_exitcode(status))


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def _hub_settings() -> dict[str, str]:
    """The environment that packages of FROM_A_HUB read."""
    names = ("HF_", "HUGGING", "TRANSFORMERS_", "ACCELERATE_", "HOME", "XDG_CACHE_HOME")
    return {name: value for name, value in os.environ.items() if name.startswith(names)}


def _import_ours() -> None:
    root = str(Path(__file__).parent.parent)
    sys.path.insert(0, root)
    for name in OURS:
        importlib.import_module(name)
    from imaginaire.config.compose import compose

    compose(BASE, ["experiment=predict2_video2world_training_tiny_groot_gr1_480"])  # Hydra looks for its plugins
    with contextlib.suppress(ImportError):  # of an extra; half of the time of a short run of a policy
        transformers = importlib.import_module("transformers")
        for name in NETWORKS:
            getattr(transformers, name)
    sys.path.remove(root)


def _serve(folder: str) -> list[str]:
    """Fork for each request; returns in the forked process, with the words that it is to run."""
    for name in IMPORTED:
        try:
            importlib.import_module(name)
        except ImportError:  # of an extra
            continue
    os.fsync = lambda descriptor: None  # as in conftest.py
    os.mkdir(f"{folder}/warm")
    if os.fork() == 0:
        folder = f"{folder}/warm"
        try:
            _import_ours()
        except BaseException:  # tests of programs fail, and all others tell
            traceback.print_exc()
            os.write(1, b"ready\n")
            os._exit(1)
    gc.freeze()  # a collection in a fork would copy the pages of all that is imported
    assert len(os.listdir("/proc/self/task")) == 1, "a thread would not live on in a fork"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(f"{folder}/programs")
        listening.listen(64)
        os.write(1, b"ready\n")
        while True:
            ready, _, _ = select.select([listening, 0], [], [])
            if 0 in ready:  # its end: that of the tests
                os._exit(0)
            while _reap():
                pass
            connection, _ = listening.accept()
            if os.fork() == 0:
                listening.close()
                return _attend(connection, f"{folder}/python")
            connection.close()


def _reap() -> bool:
    try:
        return os.waitpid(-1, os.WNOHANG)[0] != 0
    except ChildProcessError:
        return False


def _attend(connection: socket.socket, interpreter: str) -> list[str]:
    """In a process of its own: fork the program, say its status, and end it when nobody waits for it any more."""
    size, fds, _, _ = socket.recv_fds(connection, 8, 64)
    with connection.makefile("rb") as stream:
        words, folder, environment, places = json.loads(stream.read(int.from_bytes(size, "big")))
    program = os.fork()
    if program == 0:
        connection.close()
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)  # tests in the background ignore it
        above = [fcntl.fcntl(fd, fcntl.F_DUPFD, max(places) + 1) for fd in fds]
        for place, fd in zip(places, above, strict=True):
            os.dup2(fd, place)
        for fd in {*fds, *above} - {*places}:
            os.close(fd)
        os.chdir(folder)
        at_import = _hub_settings()
        os.environ.clear()
        os.environ.update({"PYTHON_EXEC": interpreter, **environment})  # what torchrun starts its ranks with
        if _hub_settings() != at_import:
            for name in [name for name in sys.modules if name.split(".")[0] in FROM_A_HUB]:
                del sys.modules[name]
        return list(words)
    for fd in {0, 1, 2, *fds}:
        os.close(fd)
    try:
        connection.sendall(b"%d\n" % program)
        ended = os.pidfd_open(program)
        if ended in select.select([ended, connection], [], [])[0]:
            connection.sendall(b"%d\n" % os.waitpid(program, 0)[1])
        else:
            os.killpg(program, signal.SIGKILL)
    finally:
        os._exit(0)


def _run(words: list[str]) -> None:
    """Run the words to their end; without taking torch apart, which would take as long as a short program."""
    code: Any = 0
    try:
        _become(words)
    except SystemExit as left:
        code = left.code or 0
    if not isinstance(code, int):
        sys.exit(code)
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code & 0xFF)


def _become(words: list[str]) -> None:
    """Run the words as a new interpreter would."""
    is_unbuffered = "-u" in words[:1]
    words = words[1:] if is_unbuffered else words
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        mode = "r" if number == 0 else "w"
        buffered = dict(line_buffering=number == 2 or os.isatty(number), write_through=is_unbuffered) if number else {}
        stream: Any = open(number, mode, closefd=False)  # noqa: SIM115
        stream.reconfigure(**buffered)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = main
    importlib.invalidate_caches()
    spawn_by(lambda: os.environ["PYTHON_EXEC"])
    form, *arguments = words
    first = {"-m": os.getcwd(), "-c": "", "-": ""}.get(form, os.path.dirname(os.path.abspath(form)))
    given = [os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [first, *given, *sys.path]
    if form == "-m":
        sys.argv = ["-m", *arguments[1:]]
        runpy._run_module_as_main(arguments[0])
    elif form == "-c":
        sys.argv = ["-c", *arguments[1:]]
        exec(compile(arguments[0], "<string>", "exec"), main.__dict__)
    elif form == "-":
        sys.argv = words
        exec(compile(sys.stdin.read(), "<stdin>", "exec"), main.__dict__)
    else:
        sys.argv = words
        main.__file__ = form
        exec(compile(Path(form).read_text(), form, "exec"), main.__dict__)


if __name__ == "__main__":
    if sys.flags.isolated:
        _client(sys.argv[1], sys.argv[2:])
    else:
        sys.path.remove(str(Path(__file__).parent.parent))
        del sys.modules["tests"]
        _run(_serve(sys.argv[1]))
