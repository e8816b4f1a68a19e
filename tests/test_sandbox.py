"""The reach of a program that nobody trusts, with every layer and without any one of them."""

import concurrent.futures
import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from support.extras import sandbox

ALL = sandbox.LAYERS
SPACES, FILES, CALLS = ALL


def layers():
    return sandbox.run_program("")[0]


def run_program(source):
    """Output of a program, which must end in time."""
    start = time.monotonic()
    output = sandbox.run_program(textwrap.dedent(source))[1]
    assert time.monotonic() - start < sandbox.CODE_SECONDS + 5
    return output


@pytest.mark.parametrize("version, protects", [(1, False), (2, False), (3, True), (9, True)])
def test_sandbox_counts_on_landlock_only_where_it_forbids_to_truncate(version, protects):
    class Kernel:
        """One where every call succeeds."""

        def syscall(self, call, attributes, *arguments):
            return version if attributes is None else 0

    child = sandbox.Sandbox({"layers": ["landlock"], "folder": ""})
    child.libc, child.allow = Kernel(), lambda *arguments: None
    child.restrict_files()
    assert child.layers == {"landlock": protects}


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


IN_A_CHILD = """
child = os.fork()
if child == 0:
    {}
    os._exit(0)
check(-os.waitpid(child, 0)[1])
"""  # the program itself leads a session
STREAMS = "a, b = socket.socketpair()\n"
PAIR = "a, b = socket.socketpair(type=socket.SOCK_DGRAM)\n"
# programs that reach out of the sandbox, under the layers each of which stops them
EFFECTS = {
    (FILES,): {
        "reads a file": "print(open('FOLDER/secret').read())",
        "lists a folder": "assert 'secret' in os.listdir('FOLDER')",
        "writes a file": "open('FOLDER/new', 'w').write('x')",
        "appends": "open('FOLDER/secret', 'a').write('x')",
        "removes a file": "os.remove('FOLDER/secret')",
        "renames": "os.rename('FOLDER/secret', 'FOLDER/other')",
        "makes a folder": "os.mkdir('FOLDER/new')",
        "makes a link": "os.link('FOLDER/secret', 'FOLDER/new')",
        "makes a symbolic link": "os.symlink('/', 'FOLDER/new')",
    },
    (CALLS,): {
        "changes a mode": "os.chmod('FOLDER/secret', 0o777)",
        "changes times": "os.utime('FOLDER/secret', (1, 1))",
        "listens": "socket.create_server(('127.0.0.1', 0))",
        "sends to a service by a pair": f"{PAIR}a.sendto(b'x', 'FOLDER/datagrams')",
        "connects a pair to a service": f"{PAIR}a.connect('FOLDER/datagrams')",
        "calls a service": "socket.socket(1).connect('FOLDER/service')",
        "shares memory": "check(libc.shmget(0, 4096, 0o1600))",
    },
    (FILES, CALLS): {"truncates": "os.truncate('FOLDER/secret', 0)"},
    (SPACES, CALLS): {
        "signals": "os.kill(PID, 0)",
        "stops a process": "os.kill(PID, 19)",
        "signals by a descriptor": f"{STREAMS}fcntl.fcntl(a, fcntl.F_SETOWN, PID)",
        "connects": "socket.create_connection(('127.0.0.1', PORT))",
        "sends a datagram": "socket.socket(type=2).sendto(b'x', ('127.0.0.1', UDP))",
        "calls an abstract service": "socket.socket(1).connect('\\0ABSTRACT')",
    },
}
RARE = {  # not for every user, or not on every kernel, even without a sandbox
    (FILES,): {
        "reads an environment": "print(open('/proc/PID/environ').read())",
        "reads memory": "open('/proc/PID/mem', 'rb')",
        "makes a device": "os.mkfifo('FOLDER/new')",
        "fills memory that is a disk": "open('/dev/shm/of-a-program', 'w').write('x')",
    },
    (CALLS,): {
        "changes an owner": "os.chown('FOLDER/secret', UID, GID)",
        "sets an attribute": "os.setxattr('FOLDER/secret', 'user.a', b'1')",
        "starts a process": "if os.fork() == 0: os._exit(0)",
        "becomes a program": "os.execv(PYTHON, ['python', '-c', 'print(\"done\")'])",
        "leaves its session": IN_A_CHILD.format("os.setsid()"),
        "leaves its group": IN_A_CHILD.format("os.setpgid(0, 0)"),
        "makes namespaces": "check(libc.unshare(0x10000000))",
        "calls by a ring": "check(libc.syscall(425, 1, ctypes.create_string_buffer(120)))",
        "changes a mode by a new call": "check(libc.syscall(452, -100, b'FOLDER/secret', 511, 0))",
        "calls clone3": "check(libc.syscall(435, ctypes.create_string_buffer(64), 64))",
    },
    (FILES, CALLS): {"mounts": "check(libc.mount(b'tmpfs', b'FOLDER', b'tmpfs', 0, None))"},
    (SPACES, CALLS): {
        "changes a priority": "os.setpriority(os.PRIO_PROCESS, PID, 19)",
        "changes a limit": "resource.prlimit(PID, resource.RLIMIT_CORE, (0, 0))",
        "traces": "check(libc.ptrace(0x4206, PID, 0, 0))",
        "opens a process": "check(libc.syscall(434, PID, 0))",
    },
}
if os.uname().machine == "x86_64":
    RARE[CALLS,] |= {
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
import ctypes, fcntl, os, resource, socket
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
    abstract = f"test-of-the-sandbox-{os.getpid()}"
    with contextlib.ExitStack() as stack:
        victim = subprocess.Popen(["sleep", "600"])
        stack.callback(victim.wait)
        stack.callback(victim.kill)
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        datagrams = stack.enter_context(socket.socket(type=socket.SOCK_DGRAM))
        datagrams.bind(("127.0.0.1", 0))
        letters = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
        letters.bind(str(tmp_path / "datagrams"))
        for name in (str(tmp_path / "service"), "\0" + abstract):
            service = stack.enter_context(socket.socket(socket.AF_UNIX))
            service.bind(name)
            service.listen()
        yield {
            "FOLDER": str(tmp_path),
            "PYTHON": repr(sys.executable),
            "PID": str(victim.pid),
            "PORT": str(server.getsockname()[1]),
            "UDP": str(datagrams.getsockname()[1]),
            "UID": str(os.getuid()),
            "GID": str(os.getgid()),
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


ONE_OFF = [None, *[pytest.param(layer, marks=pytest.mark.slow) for layer in ALL]]


@pytest.mark.parametrize("off", ONE_OFF)
def test_sandbox_has_no_effect_outside(off, monkeypatch, outside):
    """With every layer, and with one switched off: the others still stop their programs."""
    monkeypatch.setattr(sandbox, "NEEDED", ())
    there = {name for name, works in layers().items() if works and name != off}
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


def test_sandbox_keeps_the_environment(monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "a secret")
    assert "a secret" not in run_program("import os\nprint(dict(os.environ))")


@pytest.fixture
def mark(tmp_path, monkeypatch):
    """The path of the sandbox's file, a copy: it distinguishes its processes from other tests'."""
    path = tmp_path / "sandbox.py"
    shutil.copy(sandbox.__file__, path)
    monkeypatch.setattr(sandbox, "__file__", str(path))
    return str(path)


def processes(mark):
    """Ids of the children of `run_program`."""
    found = set()
    for process in Path("/proc").iterdir():
        with contextlib.suppress(OSError):  # it may end meanwhile
            if mark in (process / "cmdline").read_text():
                found.add(process.name)
    return found


def test_processes_of_the_sandbox_are_found(mark):
    """The tests below rely on it."""
    source = "import time\ntime.sleep(1)"
    runner = threading.Thread(target=sandbox.run_program, args=(source,))
    runner.start()
    found = set()
    while len(found) < 2 and runner.is_alive():  # a busy machine starts them late
        found = processes(mark)
    runner.join()
    assert len(found) == 2 and not processes(mark)


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
    "ignores signals in a session of its own": """
        import ctypes, os, signal, time
        ctypes.CDLL(None).prctl(1, 0)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        try:
            os.setsid()
        except OSError:
            pass
        time.sleep(60)""",
    "stops itself": "import os, signal\nsignal.raise_signal(signal.SIGSTOP)",
    "blocks signals": """
        import signal, time
        signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
        time.sleep(60)""",
    "thread": "import threading, time\nthreading.Thread(target=time.sleep, args=[60]).start()",
    "busy loop": "while True: pass",
}


def left_running(mark):
    """Children of `run_program`, which get five seconds to be gone."""
    for _ in range(100):
        if not processes(mark):
            break
        time.sleep(0.05)
    return processes(mark)


@pytest.mark.parametrize("off", [None, pytest.param(SPACES, marks=pytest.mark.slow)])
def test_sandbox_leaves_nothing_running(off, mark, monkeypatch):
    """With namespaces, or by seccomp alone."""
    monkeypatch.setattr(sandbox, "CODE_SECONDS", 1)
    monkeypatch.setattr(sandbox, "LAYERS", tuple(x for x in ALL if x != off))
    start = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        outputs = list(pool.map(run_program, LASTING.values()))
    assert not any(outputs)
    assert time.monotonic() - start < 20
    assert left_running(mark) == set()


@pytest.mark.parametrize("layers", [ALL, (CALLS,)], ids=["all", "seccomp alone"])
def test_sandbox_counts_threads(layers, mark, monkeypatch):
    """It ends long before its time is over."""
    monkeypatch.setattr(sandbox, "LAYERS", layers)
    monkeypatch.setattr(sandbox, "CODE_SECONDS", 20)
    start = time.monotonic()
    assert sandbox.run_program(LASTING["threads without end"])[1] is None
    assert time.monotonic() - start < 10
    assert left_running(mark) == set()


HONEST = {  # a program, and its output
    "pair of streams": """
        import socket
        a, b = socket.socketpair()
        a.send(b'done')
        print(b.recv(9).decode())""",
    "dozens of threads": """
        import threading
        barrier = threading.Barrier(33)
        for _ in range(32):
            threading.Thread(target=barrier.wait).start()
        barrier.wait()
        print('done')""",
    "no capabilities": """
        import ctypes, struct
        header, found = struct.pack("Ii", 0x20080522, 0), ctypes.create_string_buffer(24)
        assert ctypes.CDLL(None).capget(header, found) == 0 and not any(found.raw)
        print('done')""",
    "files that are bounded without landlock": f"""
        import resource
        assert resource.getrlimit(resource.RLIMIT_FSIZE) == ({sandbox.CODE_BYTES},) * 2
        print('done')""",
}


@pytest.mark.parametrize("name", HONEST)
def test_sandbox_lets_a_program_have(name):
    assert run_program(HONEST[name]) == "done\n"


GENERIC_CALLS = """
    fcntl 25 mq_unlink 181 msgctl 187 msgrcv 188 msgsnd 189 semctl 191 semtimedop 192 semop 193
    shmctl 195 shmat 196
    setxattr 5 lsetxattr 6 fsetxattr 7 removexattr 14 lremovexattr 15 fremovexattr 16 ioctl 29
    ioprio_set 30 umount2 39 mount 40 pivot_root 41 truncate 45 chroot 51 fchmod 52 fchmodat 53
    fchownat 54 fchown 55 utimensat 88 unshare 97 syslog 116 ptrace 117 sched_setparam 118
    sched_setscheduler 119 sched_setaffinity 122 kill 129 tkill 130 tgkill 131 rt_sigqueueinfo 138
    setpriority 140 setpgid 154 setsid 157 mq_open 180 msgget 186 semget 190 shmget 194 socket 198
    socketpair 199 add_key 217 request_key 218 keyctl 219 clone 220 execve 221 migrate_pages 238
    move_pages 239 rt_tgsigqueueinfo 240 perf_event_open 241 prlimit64 261 setns 268
    prctl 167 process_vm_readv 270 process_vm_writev 271 kcmp 272 sched_setattr 274 bpf 280 execveat 281
    userfaultfd 282
"""  # of Linux's table for newer architectures, scripts/syscall.tbl, which aarch64 has


def test_sandbox_knows_the_numbers_of_calls_on_aarch64():
    words = GENERIC_CALLS.split()
    expected = dict(zip(words[::2], map(int, words[1::2])))
    found = sandbox.numbers_of_calls("aarch64")
    assert found == expected
    missing = sandbox.numbers_of_calls("x86_64").keys() - found.keys()
    assert missing == {"fork", "vfork", "chmod", "chown", "lchown", "utime", "utimes", "futimesat"}


def test_sandbox_knows_the_numbers_of_calls_on_this_machine():
    """As far as the headers of the system's own C library are there, and know them."""
    if os.uname().machine != "x86_64" or not Path("/usr/include").is_dir():
        pytest.skip("no headers")
    headers = Path("/usr/include").glob("**/asm/unistd_64.h")
    known = dict(re.findall(r"#define __NR_(\w+) (\d+)", "".join(p.read_text() for p in headers)))
    for name, number in sandbox.numbers_of_calls("x86_64").items():
        assert number == int(known.get(name, number)), name


EXCESSIVE = {
    "output": "while True: print('x' * 100_000)",
    "memory": "import mmap\nmmap.mmap(-1, 3 << 30)",
    "open files": "import os\nfiles = [os.dup(1) for _ in range(100)]",
    "time inside one operation": "while True: 9 ** 9 ** 9",
}


@pytest.mark.parametrize("resource", EXCESSIVE)
def test_sandbox_bounds_resources(resource, monkeypatch):
    monkeypatch.setattr(sandbox, "CODE_SECONDS", 2)
    assert run_program(EXCESSIVE[resource]) is None
