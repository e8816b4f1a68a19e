"""The reach of a program that nobody trusts, with every layer and without any one of them."""

import concurrent.futures
import contextlib
import ctypes
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

sandbox = pytest.importorskip("support.extras.sandbox")

ALL = sandbox.LAYERS
SPACES, FILES, CALLS = ALL


def run_program(source):
    """Output of a program, which must end in time."""
    start = time.monotonic()
    output = sandbox.run_program(textwrap.dedent(source))[1]
    assert time.monotonic() - start < sandbox.CODE_SECONDS + 5
    return output


@pytest.mark.parametrize("version, error", [(1, 0), (2, 0), (3, 0), (9, 0), (9, -1)])
def test_sandbox_counts_on_landlock_only_where_it_forbids_to_truncate(version, error):
    """In a kernel where every call succeeds, or all but that which restricts."""

    def syscall(call, attributes, *arguments):
        if call == sandbox.LANDLOCK_RESTRICT_SELF:
            return error
        return version if attributes is None else 0

    child = sandbox.Sandbox({"layers": ["landlock"]})
    child.libc = SimpleNamespace(syscall=syscall)
    child.restrict_files()
    assert child.layers == {"landlock": version >= 3 and error == 0}


def test_sandbox_reads_no_folder_that_a_user_put_on_the_path(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path), sys.prefix + "-of-another"])
    found = sandbox.Sandbox({"layers": []}).readable_folders()
    assert os.path.dirname(os.__file__) in found and "/usr/lib" in found
    assert not {str(tmp_path), sys.prefix + "-of-another"} & set(found)


def test_sandbox_runs_nothing_without_seccomp(monkeypatch):
    """A program could start processes that outlive it."""
    monkeypatch.setattr(sandbox, "LAYERS", tuple(x for x in ALL if x != CALLS))
    found, output = sandbox.run_program("print(1)")
    assert output is None and CALLS not in found


STREAMS = "a, b = socket.socketpair()\n"
PAIR = "a, b = socket.socketpair(type=socket.SOCK_DGRAM)\n"
# programs that reach out of the sandbox, under the layers each of which stops them
EFFECTS = {
    (FILES,): {
        "reads a file": "print(open('FOLDER/secret').read())",
        "lists a folder": "assert 'secret' in os.listdir('FOLDER')",
        "reads a command line": "print(open('/proc/PID/cmdline').read())",
        "writes a file": "open('FOLDER/new', 'w').write('x')",
        "writes into its working directory": "open('new', 'w')",
        "appends": "open('FOLDER/secret', 'a').write('x')",
        "removes a file": "os.remove('FOLDER/secret')",
        "renames": "os.rename('FOLDER/secret', 'FOLDER/other')",
        "makes a folder": "os.mkdir('FOLDER/new')",
        "makes a link": "os.link('FOLDER/secret', 'FOLDER/new')",
        "makes a symbolic link": "os.symlink('/', 'FOLDER/new')",
    },
    (CALLS,): {
        "changes a mode": "os.chmod('FOLDER/secret', 0o777)",
        "changes an owner": "os.chown('FOLDER/secret', -1, -1)",
        "changes times": "os.utime('FOLDER/secret', (1, 1))",
        "listens": "socket.create_server(('127.0.0.1', 0))",
        "sends to a service by a pair": f"{PAIR}a.sendto(b'x', 'FOLDER/datagrams')",
        "connects a pair to a service": f"{PAIR}a.connect('FOLDER/datagrams')",
        "calls a service": "socket.socket(1).connect('FOLDER/service')",
        "shares memory": "check(libc.shmctl(libc.shmget(0, 4096, 0o1600), 0, None))",  # removes it
        "may outlive its parent": "check(libc.prctl(1, 0))",
        "leaves its session": "os.setsid()",
        "leaves its group": "os.setpgid(0, 0)",
    },
    (FILES, CALLS): {"truncates": "os.truncate('FOLDER/secret', 0)"},
    (SPACES, CALLS): {
        "signals": "os.kill(PID, 0)",
        "stops a process": "os.kill(PID, 19)",
        "signals by a descriptor": f"{STREAMS}fcntl.fcntl(a, fcntl.F_SETOWN, PID)",
        "connects": "socket.create_connection(('127.0.0.1', PORT))",
        "sends a datagram": "socket.socket(type=2).sendto(b'x', ('127.0.0.1', UDP))",
        "shares its memory": "check(libc.shmctl(SEGMENT, 2, ctypes.create_string_buffer(200)))",
        "calls an abstract service": "socket.socket(1).connect('\\0ABSTRACT')",
    },
}
RARE = {  # not for every user, or not on every kernel, even without a sandbox
    (FILES,): {
        "reads an environment": "print(open('/proc/PID/environ').read())",
        "reads memory": "open('/proc/PID/mem', 'rb')",
        "opens a module to write": "os.open(os.__file__, os.O_WRONLY)",
        "makes a device": "os.mkfifo('FOLDER/new')",
        "fills memory that is a disk": "open('/dev/shm/of-a-program', 'w').write('x')",
    },
    (CALLS,): {
        "sets an attribute": "os.setxattr('FOLDER/secret', 'user.a', b'1')",
        "starts a process": "if os.fork() == 0: os._exit(0)",
        "becomes a program": "os.execv(sys.executable, ['python', '-c', 'print(\"done\")'])",
        "makes namespaces": "check(libc.unshare(0x10000000))",
        "fills a disk, behind the end of its output": "check(libc.fallocate(1, 1, 0, 2 << 20))",
        "calls by a ring": "check(libc.syscall(425, 1, ctypes.create_string_buffer(120)))",
        "changes a mode by a new call": "check(libc.syscall(452, -100, b'FOLDER/secret', 511, 0))",
        "calls clone3": "check(libc.syscall(435, ctypes.create_string_buffer(64), 64))",
    },
    (FILES, CALLS): {"mounts": "check(libc.mount(b'tmpfs', b'FOLDER', b'tmpfs', 0, None))"},
    (SPACES, CALLS): {
        "changes a priority": "os.setpriority(os.PRIO_PROCESS, PID, 19)",
        "changes a limit": "resource.prlimit(PID, resource.RLIMIT_CORE, (0, 0))",
        "signals a thread": "check(libc.tgkill(PID, PID, 0))",
        "traces": "check(libc.ptrace(0x4206, PID, 0, 0))",
        "opens a process": "check(libc.syscall(434, PID, 0))",
    },
}
if os.uname().machine == "x86_64":
    RARE[CALLS,] |= {
        "takes the machine's queues": "check(libc.syscall(206, 9, ctypes.create_string_buffer(8)))",
        "calls by another table": "check(libc.syscall(0x40000000 + 39))",
        "calls as 32 bits do": (
            "import mmap\n"
            "page = mmap.mmap(-1, 4096, prot=7)\n"
            "page.write(bytes([0xB8, 20, 0, 0, 0, 0xCD, 0x80, 0xC3]))\n"  # getpid(), int 0x80
            "start = ctypes.addressof(ctypes.c_char.from_buffer(page))\n"
            "check(ctypes.CFUNCTYPE(ctypes.c_int)(start)())"
        ),
    }
PREPARED = """
import ctypes, fcntl, os, resource, socket, sys
libc = ctypes.CDLL(None)
def check(result):
    if result < 0:
        raise OSError
"""


@pytest.fixture
def outside(tmp_path):
    """Things on this machine that a program might reach, by the words of EFFECTS that name them."""
    (tmp_path / "secret").write_text("a secret")
    os.chmod(tmp_path, 0o755)
    listens, hears = socket.SOCK_STREAM, socket.SOCK_DGRAM
    abstract = f"test-of-the-sandbox-{os.getpid()}"

    def serve(family, kind, address):
        service = stack.enter_context(socket.socket(family, kind))
        service.bind(address)
        if kind == listens:
            service.listen()
        return service.getsockname()

    with contextlib.ExitStack() as stack:
        victim = stack.enter_context(subprocess.Popen(["sleep", "600"]))
        stack.callback(victim.kill)
        libc = ctypes.CDLL(None)
        segment = libc.shmget(0, 4096, 0o1600)
        stack.callback(libc.shmctl, segment, 0, None)  # removes it
        serve(socket.AF_UNIX, hears, str(tmp_path / "datagrams"))
        serve(socket.AF_UNIX, listens, str(tmp_path / "service"))
        serve(socket.AF_UNIX, listens, "\0" + abstract)
        yield {
            "FOLDER": str(tmp_path),
            "PID": str(victim.pid),
            "SEGMENT": str(segment),
            "PORT": str(serve(socket.AF_INET, listens, ("127.0.0.1", 0))[1]),
            "UDP": str(serve(socket.AF_INET, hears, ("127.0.0.1", 0))[1]),
            "ABSTRACT": abstract,
        }


def state(folder):
    """All that is outside, as far as a test can see it."""
    files = {}
    for path in sorted(Path(folder).iterdir()):
        found = path.lstat()
        files[path.name] = (found.st_mode, found.st_uid, found.st_mtime_ns, found.st_nlink)
    return files, (Path(folder) / "secret").read_text(), os.listxattr(Path(folder) / "secret")


def reached(programs, words):
    """Names of the programs that say that they have done it."""

    def run(name):
        source = f"{PREPARED}{programs[name]}\nprint('done')"
        for word, value in words.items():
            source = source.replace(word, value)
        return "done" in (sandbox.run_program(source)[1] or "")

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        return [name for name, done in zip(programs, pool.map(run, programs)) if done]


SLOW = [pytest.param(layer, marks=pytest.mark.slow) for layer in ALL]


@pytest.mark.parametrize("off", [None, *SLOW])
def test_sandbox_has_no_effect_outside(off, monkeypatch, outside):
    """With every layer, and with one switched off: the others still stop their programs."""
    monkeypatch.setattr(sandbox, "NEEDED", ())
    there = {name for name, works in sandbox.run_program("")[0].items() if works and name != off}
    monkeypatch.setattr(sandbox, "LAYERS", tuple(x for x in ALL if x != off))
    before = state(outside["FOLDER"])
    for guards, programs in [*EFFECTS.items(), *RARE.items()]:
        if there & set(guards):
            assert reached(programs, outside) == []
    assert state(outside["FOLDER"]) == before


POSSIBLE = {name: source for programs in EFFECTS.values() for name, source in programs.items()}


@pytest.mark.parametrize("name", POSSIBLE)
def test_sandbox_effects_happen_without_layers(name, monkeypatch, outside):
    """Else the test above would show nothing."""
    monkeypatch.setattr(sandbox, "LAYERS", ())
    monkeypatch.setattr(sandbox, "NEEDED", ())
    assert reached({name: POSSIBLE[name]}, outside) == [name]


def test_sandbox_keeps_the_environment_and_the_terminal(monkeypatch, capfd):
    monkeypatch.setenv("SECRET_TOKEN", "a secret")
    assert "a secret" not in run_program("import os\nprint(os.environ, os.write(2, b'x'))")
    assert capfd.readouterr() == ("", "")


@pytest.fixture
def mark(tmp_path, monkeypatch):
    """The path of the sandbox's file, a copy: it distinguishes its processes from other tests'."""
    path = tmp_path / "sandbox.py"
    shutil.copy(sandbox.__file__, path)
    monkeypatch.setattr(sandbox, "__file__", str(path))
    return str(path)


def processes(mark, count):
    """Ids of the children of `run_program`, once there are `count`, or after five seconds."""
    for _ in range(100):
        found = []
        for process in Path("/proc").iterdir():
            with contextlib.suppress(OSError):  # it may end meanwhile
                if mark in (process / "cmdline").read_text():
                    found.append(int(process.name))
        if len(found) == count:
            break
        time.sleep(0.05)
    return sorted(found)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_sandbox_ends_a_program_with_the_process_that_watches_it(number, mark, monkeypatch):
    """And the test below finds the processes of the sandbox."""
    monkeypatch.setattr(sandbox, "STOP_SECONDS", 0)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        result = pool.submit(sandbox.run_program, "import time\ntime.sleep(60)", seconds=2)
        watcher, program = processes(mark, count=2)
        time.sleep(0.2)  # until it has begun
        os.kill(watcher, number)
        assert result.result(timeout=4)[1] is None and processes(mark, count=0) == []


LASTING = {
    "fork bomb of sessions": """
        import ctypes, os
        while True:
            try:
                if os.fork() == 0:
                    os.setsid()
                    ctypes.CDLL(None).prctl(1, 0)
            except OSError:
                pass""",
    "threads without end": """
        import _thread, threading, time
        threading.stack_size(32768)
        while True:
            _thread.start_new_thread(time.sleep, (60,))""",
    "stops itself": "import os, signal\nsignal.raise_signal(signal.SIGSTOP)",
    "blocks signals": """
        import signal, time
        signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
        time.sleep(60)""",
    "busy loop": "while True: pass",
}


@pytest.mark.parametrize("off", [None, SPACES])
def test_sandbox_leaves_nothing_running(off, mark, monkeypatch):
    monkeypatch.setattr(sandbox, "LAYERS", tuple(x for x in ALL if x != off))
    monkeypatch.setattr(sandbox, "CODE_SECONDS", 1)
    start = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(len(LASTING)) as pool:
        outputs = list(pool.map(run_program, LASTING.values()))
    assert not any(outputs)
    assert time.monotonic() - start < 20
    assert processes(mark, count=0) == []


HONEST = {  # they say that they are done
    "dozens of threads": """
        import threading, time
        barrier = threading.Barrier(33)
        for _ in range(32):
            threading.Thread(target=barrier.wait).start()
        time.sleep(0.1)  # until they are counted
        barrier.wait()
        print('done')""",
    "no file of the sandbox, as its report of the layers": """
        import contextlib, os
        for number in range(3, 64):
            with contextlib.suppress(OSError):
                os.write(number, b'x')
        print('done')""",
    "limits that it cannot raise": """
        import resource
        for name in ('AS', 'CPU', 'FSIZE', 'NOFILE'):
            soft, hard = resource.getrlimit(getattr(resource, f'RLIMIT_{name}'))
            assert soft == hard != resource.RLIM_INFINITY
        print('done')""",
    "no capabilities": """
        import ctypes, struct
        header, found = struct.pack("Ii", 0x20080522, 0), ctypes.create_string_buffer(24)
        assert ctypes.CDLL(None).capget(header, found) == 0 and not any(found.raw)
        print('done')""",
}
EXCESSIVE = {
    "output": "for _ in range(20): print('x' * 100_000)",
    "threads": """
        import _thread, threading, time
        threading.stack_size(32768)
        for _ in range(300):
            _thread.start_new_thread(time.sleep, (1,))
        time.sleep(0.5)""",
    "memory": "import mmap\nmmap.mmap(-1, 3 << 30)",
    "open files": "import os\nfiles = [os.dup(1) for _ in range(100)]",
}


@pytest.mark.parametrize("name", [*HONEST, *EXCESSIVE])
def test_sandbox_bounds_resources(name):
    source, output = (HONEST[name], "done\n") if name in HONEST else (EXCESSIVE[name], None)
    assert run_program(source) == output


@pytest.mark.parametrize(
    "machine, calls, header",
    [("x86_64", 76, "**/asm/unistd_64.h"), ("aarch64", 68, "asm-generic/unistd.h")],
)
def test_sandbox_knows_the_numbers_of_calls(machine, calls, header):
    """They are those of the C library's headers, if these are there and know them."""
    found = sandbox.numbers_of_calls(machine)
    assert len(found) == calls
    text = "".join(path.read_text() for path in Path("/usr/include").glob(header))
    known = dict(re.findall(r"#define __NR(?:3264)?_(\w+) (\d+)", text))
    for name, number in found.items():
        assert number == int(known.get(name, number)), name
