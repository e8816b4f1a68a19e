"""What an untrusted program can reach, with all layers of the sandbox and without one of them."""

import concurrent.futures
import contextlib
import multiprocessing
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from rewards import parse_reward
from support.errors import UserError
from test_rewards import cells
from tools import ROOT, watched

sandbox = pytest.importorskip("support.extras.sandbox")
FILES, CALLS = sandbox.LAYERS
PRELUDE = """
import contextlib, ctypes, fcntl, mmap, os, resource, signal, socket, struct, sys, threading, time
libc, buffer = ctypes.CDLL(None), ctypes.create_string_buffer
def check(result):
    if result < 0:
        raise OSError
"""


def output_of(program):
    """The output of a program, which ends with `done` unless it fails."""
    return sandbox.run_program(f"{PRELUDE}{program}\nprint('done')")[1]


def one_by_one(programs, words):
    """A program that runs those in turn and says which of them do not fail."""
    for word, value in words.items():
        programs = [program.replace(word, str(value)) for program in programs]
    return f"""
for program in {programs}:
    with contextlib.suppress(Exception):
        exec(program)
        print('it did', program)
"""


@pytest.mark.parametrize("version, error", [(2, 0), (3, 0), (9, -1)])  # of a kernel's answers
def test_sandbox_opens_only_folders_of_python(version, error, tmp_path, monkeypatch):
    """Not a user's on the path. Landlock counts from version 3 on, which forbids truncation."""

    def syscall(call, ruleset, *arguments):
        results = {sandbox.LANDLOCK_RESTRICT_SELF: error}
        return version if ruleset is None else results.get(call, 0)

    calls = watched(monkeypatch, os, "open")
    users = tmp_path / "venv-of-another"
    users.mkdir()
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "venv"))
    monkeypatch.setattr(sys, "path", [*sys.path, str(users)])
    monkeypatch.setattr(sandbox, "LIBC", SimpleNamespace(syscall=syscall))
    assert sandbox.restrict_files() == (version >= 3 and error == 0)
    opened = {arguments[0] for arguments, _, _ in calls}
    assert {os.path.dirname(os.__file__), "/usr/lib"} <= opened
    assert not {str(ROOT), str(users)} & opened


# programs that reach out of the sandbox, by the layers each of which stops them
EFFECTS = {
    (FILES,): """
        print(open('FOLDER/secret').read()) | assert 'secret' in os.listdir('FOLDER')
        print(open('/proc/PID/cmdline').read()) | open('FOLDER/new', 'w').write('x')
        open('new', 'w') | open('FOLDER/secret', 'a').write('x') | os.remove('FOLDER/secret')
        os.rename('FOLDER/secret', 'FOLDER/other') | os.link('FOLDER/secret', 'FOLDER/new')
        os.mkdir('FOLDER/new') | os.symlink('/', 'FOLDER/new')""",
    (CALLS,): """
        os.chmod('FOLDER/secret', 0o777) | os.chown('FOLDER/secret', -1, -1)
        os.utime('FOLDER/secret', (1, 1)) | socket.create_server(('127.0.0.1', 0))
        a, b = socket.socketpair(type=socket.SOCK_DGRAM)⏎a.sendto(b'x', 'FOLDER/datagrams')
        socket.create_connection(('127.0.0.1', PORT)) | socket.socket(1) | socket.socket(type=2)
        check(libc.shmctl(libc.shmget(0, 4096, 0o1600), 0, None))  # removes its own memory
        os.kill(PID, 19) | check(libc.prctl(1, 0))  # may outlive us
        a, b = socket.socketpair()⏎fcntl.fcntl(a, fcntl.F_SETOWN, PID)  # so it could signal""",
    (FILES, CALLS): "os.truncate('FOLDER/secret', 0)",
}
RARE = {  # not for every user, or not on every kernel, even without a sandbox
    (FILES,): """
        open('/proc/PID/environ') | open('/proc/PID/mem', 'rb') | os.open(os.__file__, os.O_WRONLY)
        os.mkfifo('FOLDER/new') | open('/dev/shm/of-a-program', 'w').write('x')""",
    (CALLS,): """
        if os.fork() == 0: os._exit(0)
        os.execv(sys.executable, ['python', '-c', 'print("done")'])
        check(libc.fallocate(1, 1, 0, 2 << 20))  # fills a disk, behind the end of its output
        check(libc.syscall(425, 1, buffer(120)))  # io_uring_setup
        check(libc.syscall(452, -100, b'FOLDER/secret', 511, 0))  # fchmodat2
        check(libc.syscall(0x40000000 + 39))  # by another table of calls
        os.setxattr('FOLDER/secret', 'user.a', b'1') | os.setpriority(os.PRIO_PROCESS, PID, 19)
        resource.prlimit(PID, resource.RLIMIT_CORE, (0, 0)) | check(libc.ptrace(0x4206, PID, 0, 0))
        check(libc.tgkill(PID, PID, 0)) | check(libc.unshare(0x10000000))""",
    (FILES, CALLS): "check(libc.mount(b'tmpfs', b'FOLDER', b'tmpfs', 0, None))",
}
OF_32_BITS = r"""
page = mmap.mmap(-1, 4096, prot=7)
page.write(b'\xb8\x14\0\0\0\xcd\x80\xc3')
start = ctypes.addressof(ctypes.c_char.from_buffer(page))
ctypes.CFUNCTYPE(ctypes.c_int)(start)()
"""


@pytest.fixture
def outside(tmp_path):
    """Things on this machine that a program might reach, by the words of EFFECTS that name them."""
    (tmp_path / "secret").write_text("a secret")
    with (
        subprocess.Popen(["sleep", "600"]) as victim,
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as datagrams,
    ):
        datagrams.bind(f"{tmp_path}/datagrams")
        yield {"FOLDER": tmp_path, "PID": victim.pid, "PORT": server.getsockname()[1]}
        victim.kill()


def state(folder):
    """Everything outside, as far as a test can see it."""
    found = [(path, path.lstat()[:7], path.lstat().st_mtime_ns) for path in folder.iterdir()]
    return sorted(found), (folder / "secret").read_text(), os.listxattr(folder / "secret")


@pytest.mark.parametrize(
    "off", [None, *[pytest.param(layer, marks=pytest.mark.slow) for layer in sandbox.LAYERS]]
)
def test_sandbox_has_no_effect_outside(off, monkeypatch, outside):
    """With all layers, and with one switched off: the other still stops its programs."""
    there = {name for name, works in sandbox.run_program("")[0].items() if works and name != off}
    monkeypatch.setattr(sandbox, "LAYERS", tuple(x for x in sandbox.LAYERS if x != off))
    before = state(outside["FOLDER"])
    for guards, table in [*EFFECTS.items(), *RARE.items()]:
        if there & set(guards):
            assert output_of(one_by_one(cells(table), outside)) == "done\n"
    assert CALLS not in there or output_of(OF_32_BITS) is None  # it is killed
    assert state(outside["FOLDER"]) == before


@pytest.mark.parametrize("program", cells("\n".join(EFFECTS.values())))
def test_sandbox_effects_happen_without_layers(program, monkeypatch, outside):
    """Otherwise the test above would show nothing."""
    monkeypatch.setattr(sandbox, "LAYERS", ())
    assert "it did" in output_of(one_by_one([program], outside))


@pytest.fixture
def mark(tmp_path, monkeypatch):
    """The path of a copy of the sandbox's file, which tells its processes from other tests'."""
    path = shutil.copy(sandbox.__file__, tmp_path)
    monkeypatch.setattr(sandbox, "__file__", path)
    return Path(path)


def are_running(mark, count):
    """Whether there are so many children of `run_program`, or will be within five seconds."""
    for _ in range(100):
        found = 0
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):  # it may have ended meanwhile
                found += str(mark) in path.read_text()
        if found == count:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("old, new", [("FILTER, program", "99, program"), ('"x86_64"', '"mips"')])
def test_code_is_refused_without_seccomp(old, new, mark, capsys):
    """On a kernel without it, or another machine: a program could leave processes behind."""
    parse_reward("code")
    assert "--reward code: sandbox layers: {'landlock': " in capsys.readouterr().err
    mark.write_text(mark.read_text().replace(old, new).replace('"aarch64"', '"none"'))
    layers, output = sandbox.run_program("print(1)")
    assert output is None and not layers.get(CALLS)
    with pytest.raises(UserError, match="--reward code needs seccomp"):
        parse_reward("code")


def test_sandbox_ends_a_program_with_its_trainer(mark, monkeypatch):
    """And the test below finds the processes of the sandbox."""
    trainer = multiprocessing.get_context("fork").Process(
        target=output_of, args=("time.sleep(60)",)
    )
    trainer.start()
    assert are_running(mark, count=1)
    time.sleep(0.2)  # until it has begun
    trainer.kill()
    trainer.join()
    assert are_running(mark, count=0)
    monkeypatch.setattr(os, "getpid", lambda: 1)
    assert output_of("") is None  # as if the trainer had died before it began


FLOODING = cells("""
    for _ in range(20): print('x' * 100_000) | mmap.mmap(-1, 3 << 30)
    for _ in range(300): threading.Thread(target=time.sleep, args=(1,)).start()
    files = [os.dup(1) for _ in range(100)]
""")
# a fork bomb of sessions, threads, a program that stops itself, a busy loop, blocked signals
LASTING = cells("""
    while True:⏎    with contextlib.suppress(OSError): os.fork() or os.setsid() or libc.prctl(1, 0)
    while True: threading.Thread(target=time.sleep, args=(9,)).start()
    signal.raise_signal(signal.SIGSTOP) | while True: pass
    signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65)); time.sleep(60)
""")


def test_sandbox_bounds_a_program_and_leaves_nothing_running(mark, monkeypatch):
    """What was printed before does not count."""

    def outputs_of(programs):
        begin = "threading.stack_size(32768)\nprint(3, flush=True)\n"
        return {*pool.map(output_of, [begin + program for program in programs])}

    with concurrent.futures.ThreadPoolExecutor(len(LASTING)) as pool:
        assert outputs_of(FLOODING) == {None}
        monkeypatch.setattr(sandbox, "CODE_SECONDS", 0.5)
        assert outputs_of(LASTING) == {None}
    assert are_running(mark, count=0)


HONEST = """
barrier = threading.Barrier(33)
for _ in range(32): threading.Thread(target=barrier.wait).start()
time.sleep(0.1)  # until they are counted
barrier.wait()
assert 'SECRET_TOKEN' not in os.environ
header, capabilities = struct.pack('Ii', 0x20080522, 0), buffer(24)
assert libc.capget(header, capabilities) == 0 and not any(capabilities.raw)
for name in ('AS', 'CPU', 'FSIZE', 'NOFILE'):
    soft, hard = resource.getrlimit(getattr(resource, f'RLIMIT_{name}'))
    assert soft == hard != resource.RLIM_INFINITY
for number in range(2, 64):  # a terminal, or the sandbox's report of its layers
    with contextlib.suppress(OSError):
        os.write(number, b'x')
"""


def test_sandbox_runs_a_program_of_many_threads_that_gets_nothing_of_ours(monkeypatch, capfd):
    """No file, variable or capability, and limits that it cannot raise."""
    monkeypatch.setenv("SECRET_TOKEN", "a secret")
    assert output_of(HONEST) == "done\n"
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("machine, calls", [("x86_64", 74), ("aarch64", 66)])
def test_sandbox_knows_the_numbers_of_calls(machine, calls):
    """They are those of the C library's headers, if these are there and know them."""
    found = sandbox.numbers_of_calls(machine)
    assert len(found) == calls
    header = {"x86_64": "**/asm/unistd_64.h", "aarch64": "asm-generic/unistd.h"}[machine]
    text = "".join(path.read_text() for path in Path("/usr/include").glob(header))
    known = dict(re.findall(r"#define __NR(?:3264)?_(\w+) (\d+)", text))
    assert {name: int(known.get(name, number)) for name, number in found.items()} == found
