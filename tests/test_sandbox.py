"""What an untrusted program can reach, with all layers of the sandbox and without one of them."""

import ast
import concurrent.futures
import contextlib
import ctypes
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

from test_rewards import cells
from tools import ROOT

sandbox = pytest.importorskip("support.extras.sandbox")

FILES, CALLS = sandbox.LAYERS


PRELUDE = """
import contextlib, ctypes, fcntl, mmap, os, resource, signal, socket, struct, sys
import threading, time
libc, buffer = ctypes.CDLL(None), ctypes.create_string_buffer
def check(result):
    if result < 0:
        raise OSError
"""


def output_of(program):
    """The output of a program, which ends with `done` unless it fails."""
    return sandbox.run_program(f"{PRELUDE}{program}\nprint('done')")[1]


def those_done(programs):
    """Those of the programs that do not fail, one after the other in one process."""
    source = f"""
done = []
for program in {programs}:
    with contextlib.suppress(Exception):
        exec(program)
        done.append(program)
print(done)
"""
    return ast.literal_eval(output_of(source).splitlines()[-2])


@pytest.mark.parametrize("version, error", [(2, 0), (3, 0), (9, -1)])
def test_sandbox_opens_only_folders_of_python(version, error, tmp_path, monkeypatch):
    """Not a user's on the path. Landlock counts from version 3 on, which forbids truncation. In a
    kernel where every call succeeds, or all but that which restricts."""
    opened = []

    def syscall(call, ruleset, *arguments):
        if call == sandbox.LANDLOCK_ADD_RULE:
            folder = int.from_bytes(arguments[1][8:], sys.byteorder)
            opened.append(os.readlink(f"/proc/self/fd/{folder}"))
        if call == sandbox.LANDLOCK_RESTRICT_SELF:
            return error
        return version if ruleset is None else 0

    users = [str(tmp_path), f"{sys.prefix}-of-another"]
    monkeypatch.setattr(sys, "path", [*sys.path, *users])
    monkeypatch.setattr(sandbox, "LIBC", SimpleNamespace(syscall=syscall))
    assert sandbox.restrict_files() == (version >= 3 and error == 0)
    assert os.path.realpath(os.path.dirname(os.__file__)) in opened and "/usr/lib" in opened
    assert not {str(ROOT), *users} & set(opened)


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
        a, b = socket.socketpair(type=socket.SOCK_DGRAM)⏎a.connect('FOLDER/datagrams')
        socket.socket(1).connect('FOLDER/service') | socket.socket(1).connect('\\0ABSTRACT')
        check(libc.shmctl(libc.shmget(0, 4096, 0o1600), 0, None))  # removes its own memory
        check(libc.shmctl(SEGMENT, 2, buffer(200))) | check(libc.prctl(1, 0))  # may outlive us
        os.kill(PID, 0) | os.kill(PID, 19)
        a, b = socket.socketpair()⏎fcntl.fcntl(a, fcntl.F_SETOWN, PID)  # signals by a descriptor
        socket.create_connection(('127.0.0.1', PORT))
        socket.socket(type=2).sendto(b'x', ('127.0.0.1', UDP))""",
    (FILES, CALLS): "os.truncate('FOLDER/secret', 0)",
}
RARE = {  # not for every user, or not on every kernel, even without a sandbox
    (FILES,): """
        print(open('/proc/PID/environ').read()) | open('/proc/PID/mem', 'rb')
        os.open(os.__file__, os.O_WRONLY) | os.mkfifo('FOLDER/new')
        open('/dev/shm/of-a-program', 'w').write('x')""",
    (CALLS,): """
        os.setxattr('FOLDER/secret', 'user.a', b'1') | os.setsid() | os.setpgid(0, 0)
        if os.fork() == 0: os._exit(0)
        os.execv(sys.executable, ['python', '-c', 'print("done")'])
        check(libc.unshare(0x10000000)) | os.setpriority(os.PRIO_PROCESS, PID, 19)
        check(libc.fallocate(1, 1, 0, 2 << 20))  # fills a disk, behind the end of its output
        check(libc.syscall(425, 1, buffer(120)))  # io_uring_setup
        check(libc.syscall(452, -100, b'FOLDER/secret', 511, 0))  # fchmodat2
        check(libc.syscall(435, buffer(64), 64))  # clone3
        check(libc.syscall(434, PID, 0))  # pidfd_open
        resource.prlimit(PID, resource.RLIMIT_CORE, (0, 0)) | check(libc.tgkill(PID, PID, 0))
        check(libc.ptrace(0x4206, PID, 0, 0))""",
    (FILES, CALLS): "check(libc.mount(b'tmpfs', b'FOLDER', b'tmpfs', 0, None))",
}
OF_32_BITS = r"""
page = mmap.mmap(-1, 4096, prot=7)
page.write(b'\xb8\x14\0\0\0\xcd\x80\xc3')
start = ctypes.addressof(ctypes.c_char.from_buffer(page))
ctypes.CFUNCTYPE(ctypes.c_int)(start)()
"""
IS_X86 = os.uname().machine == "x86_64"
if IS_X86:  # the machine's queues, and a call by another table
    RARE[CALLS,] += " | check(libc.syscall(206, 9, buffer(8)))"
    RARE[CALLS,] += " | check(libc.syscall(0x40000000 + 39))"


@pytest.fixture
def outside(tmp_path):
    """Things on this machine that a program might reach, by the words of EFFECTS that name them."""
    (tmp_path / "secret").write_text("a secret")
    os.chmod(tmp_path, 0o755)
    libc = ctypes.CDLL(None)
    words = {"FOLDER": tmp_path, "ABSTRACT": f"test-of-the-sandbox-{os.getpid()}"}
    with contextlib.ExitStack() as stack:

        def serve(address, family=socket.AF_UNIX, kind=socket.SOCK_STREAM):
            service = stack.enter_context(socket.socket(family, kind))
            service.bind(address)
            if kind == socket.SOCK_STREAM:
                service.listen()
            return service.getsockname()

        victim = stack.enter_context(subprocess.Popen(["sleep", "600"]))
        stack.callback(victim.kill)
        segment = libc.shmget(0, 4096, 0o1600)
        stack.callback(libc.shmctl, segment, 0, None)  # removes it
        serve(f"{tmp_path}/datagrams", kind=socket.SOCK_DGRAM)
        serve(f"{tmp_path}/service")
        serve("\0" + words["ABSTRACT"])
        words |= {"PID": victim.pid, "SEGMENT": segment}
        words["PORT"] = serve(("127.0.0.1", 0), socket.AF_INET)[1]
        words["UDP"] = serve(("127.0.0.1", 0), socket.AF_INET, socket.SOCK_DGRAM)[1]
        yield words


def named(text, words):
    """Programs with the names of the things outside."""
    for word, value in words.items():
        text = text.replace(word, str(value))
    return text


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
            assert those_done(cells(named(table, outside))) == []
    if CALLS in there and IS_X86:
        assert output_of(OF_32_BITS) is None  # it is killed
    assert state(outside["FOLDER"]) == before


@pytest.mark.parametrize("program", cells("\n".join(EFFECTS.values())))
def test_sandbox_effects_happen_without_layers(program, monkeypatch, outside):
    """Otherwise the test above would show nothing."""
    monkeypatch.setattr(sandbox, "LAYERS", ())
    program = named(program, outside)
    assert those_done([program]) == [program]


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
def test_sandbox_runs_nothing_without_seccomp(old, new, mark):
    """On a kernel without it, or another machine: a program could leave processes behind."""
    assert output_of("") == "done\n"
    mark.write_text(mark.read_text().replace(old, new).replace('"aarch64"', '"none"'))
    layers, output = sandbox.run_program("print(1)")
    assert output is None and not layers.get(CALLS)


TRAINER = """
import sys
from support.extras import sandbox
sandbox.__file__ = sys.argv[1] + "/sandbox.py"
sandbox.run_program("import time; time.sleep(60)", seconds=60)
"""


def test_sandbox_ends_a_program_with_its_trainer(mark, monkeypatch):
    """And the test below finds the processes of the sandbox."""
    command = [sys.executable, "-c", TRAINER, mark.parent]
    with subprocess.Popen(command, cwd=ROOT) as trainer:
        assert are_running(mark, count=1)
        time.sleep(0.2)  # until it has begun
        trainer.kill()
    assert are_running(mark, count=0)
    monkeypatch.setattr(os, "getpid", lambda: 1)
    assert output_of("") is None  # as if the trainer had died before it began


# a fork bomb of sessions, threads, a program that stops itself, a busy loop, blocked signals
LASTING = cells("""
    while True:⏎    with contextlib.suppress(OSError): os.fork() or os.setsid() or libc.prctl(1, 0)
    threading.stack_size(32768)⏎while True: threading.Thread(target=time.sleep, args=(9,)).start()
    signal.raise_signal(signal.SIGSTOP) | while True: pass
    signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65)); time.sleep(60)
""")


def test_sandbox_leaves_nothing_running(mark, monkeypatch):
    monkeypatch.setattr(sandbox, "CODE_SECONDS", 0.5)
    with concurrent.futures.ThreadPoolExecutor(len(LASTING)) as pool:
        assert not any(pool.map(output_of, LASTING))
    assert are_running(mark, count=0)


HONEST = {
    "dozens of threads": """
barrier = threading.Barrier(33)
for _ in range(32): threading.Thread(target=barrier.wait).start()
time.sleep(0.1)  # until they are counted
barrier.wait()""",
    "no file of the sandbox, such as its report of the layers": """
for number in range(3, 64):
    with contextlib.suppress(OSError):
        os.write(number, b'x')""",
    "limits that it cannot raise": """
for name in ('AS', 'CPU', 'FSIZE', 'NOFILE'):
    soft, hard = resource.getrlimit(getattr(resource, f'RLIMIT_{name}'))
    assert soft == hard != resource.RLIM_INFINITY""",
    "no capabilities": """
header, found = struct.pack('Ii', 0x20080522, 0), buffer(24)
assert libc.capget(header, found) == 0 and not any(found.raw)""",
    "no environment or terminal of ours": """
os.write(2, b'x')
assert 'SECRET_TOKEN' not in os.environ""",
}


@pytest.mark.parametrize("name", HONEST)
def test_sandbox_runs_honest_programs(name, monkeypatch, capfd):
    monkeypatch.setenv("SECRET_TOKEN", "a secret")
    assert output_of(HONEST[name]) == "done\n"
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    "program",
    cells("""
        for _ in range(20): print('x' * 100_000) | mmap.mmap(-1, 3 << 30)
        for _ in range(300): threading.Thread(target=time.sleep, args=(1,)).start()
        files = [os.dup(1) for _ in range(100)]"""),
)
def test_sandbox_bounds_output_memory_threads_and_files(program):
    assert output_of(f"threading.stack_size(32768)\n{program}") is None


@pytest.mark.parametrize("machine, calls", [("x86_64", 74), ("aarch64", 66)])
def test_sandbox_knows_the_numbers_of_calls(machine, calls):
    """They are those of the C library's headers, if these are there and know them."""
    found = sandbox.numbers_of_calls(machine)
    assert len(found) == calls
    header = {"x86_64": "**/asm/unistd_64.h", "aarch64": "asm-generic/unistd.h"}[machine]
    text = "".join(path.read_text() for path in Path("/usr/include").glob(header))
    known = dict(re.findall(r"#define __NR(?:3264)?_(\w+) (\d+)", text))
    assert {name: int(known.get(name, number)) for name, number in found.items()} == found
