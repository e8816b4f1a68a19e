"""Run an untrusted program. This file is also the child process that does it:

    python -I support/extras/sandbox.py FD      # an open file with the task, in JSON

For Linux on x86-64 and aarch64. A program is one process with limits on time, memory and output. It
can't reach the network, other processes or, with Landlock, files other than those of Python and of
system libraries. It can still read the name, size, times and extended attribute names of any file
(stat, listxattr), watch any folder for events (inotify), see which processes exist and how busy the
machine is, and exploit bugs in the kernel."""

import ctypes
import errno
import json
import os
import re
import resource
import signal
import struct
import sys
import time
from fcntl import F_DUPFD_CLOEXEC, F_SETLKW
from termios import FIOCLEX, FIONBIO, FIONCLEX, FIONREAD, TCGETS

CODE_SECONDS = 5  # wall-clock and CPU time of one run
START_SECONDS = 0.2  # on top of that, to start the interpreter
CODE_BYTES = 1 << 20  # of output; memory may be a thousand times that
MAX_THREADS = 256  # enforced by the parent: kernel limits can only forbid threads altogether
WATCH_SECONDS = 0.005  # between two such checks
LAYERS = ("landlock", "seccomp")  # guards files; refuses system calls, and is required
# with more than one arena, each thread would reserve too much of the memory
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}


def run_program(
    source: str, given: str = "", name: str = "__main__", seconds: float = 0
) -> tuple[dict[str, bool], str | None]:
    """Return which layers were active, and the program's output, or None if it failed: a signal, a
    non-zero exit status, a timeout (`seconds`, default CODE_SECONDS), or no seccomp. `given` is its
    standard input, `name` its `__name__`."""
    import subprocess  # here, because the child needs neither
    import tempfile

    task = {"source": source, "name": name, "seconds": seconds or CODE_SECONDS, "layers": LAYERS}
    with (
        tempfile.TemporaryDirectory() as folder,
        tempfile.TemporaryFile("w+") as file,
        tempfile.TemporaryFile() as stdin,
        tempfile.TemporaryFile() as stdout,  # not a pipe, which could be held open
    ):
        stdin.write(given.encode(errors="replace"))
        stdin.seek(0)
        json.dump(task | {"parent": os.getpid()}, file)
        end = file.tell()
        file.seek(0)
        child = subprocess.Popen(
            [sys.executable, "-I", __file__, str(file.fileno())],
            stdin=stdin,
            stdout=stdout,
            stderr=subprocess.DEVNULL,
            pass_fds=[file.fileno()],
            cwd=folder,
            env=ENVIRONMENT,
            start_new_session=True,  # without a terminal or Ctrl-C
        )
        deadline = time.monotonic() + START_SECONDS + task["seconds"]
        while child.poll() is None:
            threads = os.listdir(f"/proc/{child.pid}/task")
            if len(threads) > MAX_THREADS or time.monotonic() > deadline:
                child.kill()
            time.sleep(WATCH_SECONDS)
        stdout.seek(0)
        output = stdout.read().decode(errors="replace")
        file.seek(end)
        layers = json.loads(file.read() or "{}")  # empty if the child never got that far
    return layers, output if child.returncode == 0 else None


# ---- the child -----------------------------------------------------------------------------------

LIBC = ctypes.CDLL(None)
PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, SECCOMP_FILTER = 1, 22, 38, 2  # prctl(2)
CAPABILITY_VERSION_3 = 0x20080522  # capset(2)
LANDLOCK_CREATE_RULESET, LANDLOCK_ADD_RULE, LANDLOCK_RESTRICT_SELF = 444, 445, 446  # landlock(7)
LANDLOCK_READ = 0b1100  # the rights to read files and to list folders
# a seccomp(2) filter is a classic BPF program that reads a struct of the call
CALL, ARCHITECTURE, ARGUMENTS = 0, 4, 16  # offsets in the struct; an argument has 8 bytes
LOAD, EQUAL, AT_LEAST, HAS_BITS, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, KILL, FAIL = 0x7FFF0000, 0x80000000, 0x00050000  # FAIL: plus the error number
NEWER = 424  # calls from here on are refused: io_uring, clone3, pidfd_..., the x32 table
MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # the architectures with torch wheels
REFUSED = """
starts processes or programs: fork 57/-, vfork 58/-, execve 59/221, execveat 322/281
reaches other processes, or the network: socket 41/198, kill 62/129, tkill 200/130, tgkill 234/131,
    rt_sigqueueinfo 129/138, rt_tgsigqueueinfo 297/240, ptrace 101/117, process_vm_readv 310/270,
    process_vm_writev 311/271, kcmp 312/272, setpriority 141/140, ioprio_set 251/30,
    sched_setparam 142/118, sched_setscheduler 144/119, sched_setaffinity 203/122,
    sched_setattr 314/274, migrate_pages 256/238, move_pages 279/239
changes files without opening them, or beyond RLIMIT_FSIZE: fallocate 285/47, truncate 76/45,
    chmod 90/-, fchmod 91/52, fchmodat 268/53, chown 92/-, fchown 93/55, lchown 94/-,
    fchownat 260/54, utime 132/-, utimes 235/-, futimesat 261/-, utimensat 280/88, setxattr 188/5,
    lsetxattr 189/6, fsetxattr 190/7, removexattr 197/14, lremovexattr 198/15, fremovexattr 199/16
gets another view of the file system: mount 165/40, umount2 166/39, pivot_root 155/41,
    chroot 161/51, unshare 272/97, setns 308/268
shares memory, queues or keys: shmget 29/194, shmat 30/196, shmctl 31/195, semget 64/190,
    semop 65/193, semctl 66/191, semtimedop 220/192, msgget 68/186, msgsnd 69/189, msgrcv 70/188,
    msgctl 71/187, mq_open 240/180, mq_unlink 241/181, add_key 248/217, request_key 249/218,
    keyctl 250/219
exposes kernel bugs, and no honest program needs it: bpf 321/280, perf_event_open 298/241,
    userfaultfd 323/282, syslog 103/116, io_setup 206/0
depends on an argument, see HARMLESS: clone 56/220, prlimit64 302/261, ioctl 16/29,
    socketpair 53/199, fcntl 72/25, prctl 157/167
"""  # calls and their numbers on x86_64/aarch64
HARMLESS = {  # call -> index of an argument, and a test that it must pass for one of the values
    "clone": (0, HAS_BITS, [0x00010000]),  # CLONE_THREAD
    "prlimit64": (0, EQUAL, [0]),  # its own limits
    "prctl": (0, AT_LEAST, [PR_SET_PDEATHSIG + 1]),  # the program must die with the trainer
    # may copy, configure and lock descriptors, but not send signals to processes
    "fcntl": (1, EQUAL, [*range(F_SETLKW + 1), F_DUPFD_CLOEXEC]),
    # may test for a terminal, count readable bytes, set blocking and close-on-exec
    "ioctl": (1, EQUAL, [TCGETS, FIONREAD, FIONBIO, FIOCLEX, FIONCLEX]),
    # only stream sockets: datagram sockets could send to any service that has a path
    "socketpair": (1, EQUAL, [0x1, 0x801, 0x80001, 0x80801]),
}


def main(file_descriptor: int) -> None:
    """Read the task, drop all rights, write down which layers are active, and run the program."""
    with open(file_descriptor, "r+") as file:  # closed before the program begins
        task = json.load(file)
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != task["parent"]:  # the trainer has already died
            sys.exit(1)
        LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)  # required by landlock and seccomp
        LIBC.capset(struct.pack("Ii", CAPABILITY_VERSION_3, 0), bytes(24))  # drops all capabilities
        protections = {"landlock": restrict_files, "seccomp": refuse_calls}
        layers = {name: protections[name]() for name in task["layers"]}
        json.dump(layers, file)
    limit(resource.RLIMIT_AS, CODE_BYTES << 10)  # bytes of memory
    limit(resource.RLIMIT_CPU, int(task["seconds"]) + 1)
    limit(resource.RLIMIT_FSIZE, CODE_BYTES)  # of any file, and so of the output
    limit(resource.RLIMIT_NOFILE, 64)
    if layers.get("seccomp") is False:  # the program could leave processes behind
        sys.exit(1)
    sys.argv = ["program.py"]
    exec(compile(task["source"], "program.py", "exec"), {"__name__": task["name"]})


def limit(number: int, value: int) -> None:
    resource.setrlimit(number, (value, value))  # soft and hard: it cannot be raised again


def restrict_files() -> bool:
    """Landlock: allow reading the folders of Python and of system libraries, and nothing else."""
    version = LIBC.syscall(LANDLOCK_CREATE_RULESET, None, 0, 1)
    handled = (1 << min(12 + version, 15)) - 1  # versions 1, 2 and 3 have 13, 14 and 15 rights
    ruleset = LIBC.syscall(LANDLOCK_CREATE_RULESET, struct.pack("Q", handled), 8, 0)
    # sys.path may include a user's folder, too
    python = tuple(os.path.realpath(root) + os.sep for root in (sys.prefix, sys.base_prefix))
    modules = [path for path in sys.path if os.path.realpath(path).startswith(python)]
    for path in filter(os.path.isdir, [*modules, "/lib", "/lib64", "/usr/lib"]):
        folder = os.open(path, os.O_PATH)
        rule = struct.pack("=Qi", LANDLOCK_READ, folder)
        LIBC.syscall(LANDLOCK_ADD_RULE, ruleset, 1, rule, 0)
        os.close(folder)
    restricted = LIBC.syscall(LANDLOCK_RESTRICT_SELF, ruleset, 0) == 0
    return restricted and version >= 3  # older versions can't forbid truncating a file


def numbers_of_calls(machine: str) -> dict[str, int]:
    """Return call -> number, for the calls in REFUSED that the machine has."""
    column = list(MACHINES).index(machine)
    calls = re.findall(r"(\w+) ([\d-]+)/([\d-]+)", REFUSED)
    return {name: int(numbers[column]) for name, *numbers in calls if numbers[column] != "-"}


def refuse_calls() -> bool:
    """seccomp: refuse the calls in REFUSED and newer ones; kill on any 32-bit call."""
    machine = os.uname().machine
    lines = [  # (operation, lines to skip if true, if false, value)
        (LOAD, 0, 0, ARCHITECTURE),
        (EQUAL, 1, 0, MACHINES[machine]),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, CALL),
        (AT_LEAST, 0, 1, NEWER),
        (RETURN, 0, 0, FAIL | errno.ENOSYS),  # libraries fall back to older calls
    ]
    for name, call in numbers_of_calls(machine).items():
        argument, test, values = HARMLESS.get(name, (0, EQUAL, []))
        tests = [(LOAD, 0, 0, ARGUMENTS + 8 * argument)]
        for value in values:
            tests += [(test, 0, 1, value), (RETURN, 0, 0, ALLOW)]
        tests.append((RETURN, 0, 0, FAIL | errno.EPERM))
        lines += [(EQUAL, 0, len(tests), call), *tests]
    lines.append((RETURN, 0, 0, ALLOW))
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in lines))
    program = struct.pack("HP", len(lines), ctypes.addressof(code))
    return LIBC.prctl(PR_SET_SECCOMP, SECCOMP_FILTER, program) == 0


if __name__ == "__main__":
    main(int(sys.argv[1]))
