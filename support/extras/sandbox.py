"""Run a program that nobody trusts. This file is its own child process:

    python -I support/extras/sandbox.py FD      # a task in JSON, from an open file

For Linux on x86-64 and aarch64. A program is one process with limits on time, memory and output.
Its threads are counted every WATCH_SECONDS, and nothing of it is left running. Network, other
processes and all files but Python's own are out of reach if the kernel has every layer.

Not covered: a program can read the name, size and times of any file (stat), and the names and
values of its extended attributes (listxattr). It can see events in any folder (inotify), the
contents of Python's own folders, and how busy the machine is. It can exploit a bug of the kernel.
"""

import contextlib
import ctypes
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

CODE_SECONDS = 5  # of wall clock, and of CPU, for one run of a program
START_SECONDS = 0.2  # of a run that are its interpreter's, not the program's
STOP_SECONDS = 6  # after its time, for a run that did not end itself
CODE_BYTES = 1 << 20  # of a program's output. Its memory may be a thousand times that
LAYERS = ("namespaces", "landlock", "seccomp")  # hide processes, guard files, refuse calls
NEEDED = ("seccomp",)  # without it a program could start others that nobody ends


def run_program(
    source: str, given: str = "", name: str = "__main__", seconds: float = 0
) -> tuple[dict[str, bool], str | None]:
    """Return (layer -> whether it is there, output) of a program. Output is None if it failed.

    It fails if a signal ends it, if its exit status is not 0, at the end of its time (`seconds`, or
    CODE_SECONDS if 0), or without a layer that is NEEDED. `given` is its input, `name` __name__."""
    import subprocess  # the child needs neither
    import tempfile

    seconds = seconds or CODE_SECONDS
    with (
        tempfile.TemporaryDirectory() as folder,
        tempfile.TemporaryFile("w+") as task,
        tempfile.TemporaryFile() as stdout,
    ):
        settings = {"layers": LAYERS, "needed": NEEDED, "seconds": seconds}
        json.dump({"source": source, "name": name, **settings}, task)
        end = task.tell()
        task.seek(0)
        environment = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        environment["MALLOC_ARENA_MAX"] = "1"  # else each thread sets much of the memory aside
        child = subprocess.Popen(
            [sys.executable, "-I", __file__, str(task.fileno())],
            stdin=subprocess.PIPE,
            stdout=stdout,  # a file: a pipe can be held open
            stderr=subprocess.DEVNULL,
            pass_fds=[task.fileno()],
            cwd=folder,
            env=environment,
            start_new_session=True,  # a group that can be killed together
        )
        try:
            child.communicate(given.encode(errors="replace"), timeout=seconds + STOP_SECONDS)
        except subprocess.TimeoutExpired:  # it should have ended itself
            os.killpg(child.pid, signal.SIGKILL)
        failed = child.wait() != 0
        stdout.seek(0)
        output = stdout.read().decode(errors="replace")
        task.seek(end)
        layers = json.loads(task.read() or "{}")  # empty if it never came so far
    return layers, None if failed else output


# ---- the child -----------------------------------------------------------------------------------

# unshare(2): its own namespaces
CLONE_NEWIPC = 0x08000000  # shared memory and semaphores
CLONE_NEWUSER = 0x10000000  # users: an unprivileged process needs it for the others
CLONE_NEWPID = 0x20000000  # processes
CLONE_NEWNET = 0x40000000  # network
# prctl(2)
PR_SET_PDEATHSIG = 1  # a signal when the parent dies. The program may not undo it
PR_SET_SECCOMP = 22
PR_SET_NO_NEW_PRIVS = 38  # both Landlock and seccomp demand it
CAPABILITY_VERSION_3 = 0x20080522  # capset(2)
# landlock(7): the numbers are the same on every architecture
LANDLOCK_CREATE_RULESET = 444
LANDLOCK_ADD_RULE = 445
LANDLOCK_RESTRICT_SELF = 446
LANDLOCK_CREATE_RULESET_VERSION = 1
LANDLOCK_RULE_PATH_BENEATH = 1
LANDLOCK_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}  # version -> number of rights, in the latest 16
READ = 0b00_0000_0000_1100  # to read files, to list folders
# seccomp(2): programs of the classic packet filter, over a struct of the call
SECCOMP_MODE_FILTER = 2
CALL, ARCHITECTURE, ARGUMENTS = 0, 4, 16  # offsets in the struct. An argument has 8 bytes
LOAD, EQUAL, AT_LEAST, HAS_BITS, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW = 0x7FFF0000
KILL = 0x80000000
NOT_PERMITTED = 0x00050000 | 1  # the call fails with EPERM
NO_SUCH_CALL = 0x00050000 | 38  # with ENOSYS: libraries then use the older call
NEWER = 424  # no call from here on is known: io_uring, clone3, pidfd_..., the table of x32
MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
REFUSED = """
    # starts processes, or becomes another program
    fork 57/-, vfork 58/-, execve 59/221, execveat 322/281
    # leaves the processes that are ended together
    setpgid 109/154, setsid 112/157
    # reaches other processes
    kill 62/129, tkill 200/130, rt_sigqueueinfo 129/138, rt_tgsigqueueinfo 297/240, ptrace 101/117
    process_vm_readv 310/270, process_vm_writev 311/271, kcmp 312/272, setpriority 141/140
    ioprio_set 251/30, tgkill 234/131, sched_setparam 142/118, sched_setscheduler 144/119
    sched_setaffinity 203/122, sched_setattr 314/274, migrate_pages 256/238, move_pages 279/239
    # reaches the network, or a service by a socket in the file system
    socket 41/198
    # changes files that it cannot open
    truncate 76/45, chmod 90/-, fchmod 91/52, fchmodat 268/53, chown 92/-, fchown 93/55
    lchown 94/-, fchownat 260/54, utime 132/-, utimes 235/-, futimesat 261/-, utimensat 280/88
    setxattr 188/5, lsetxattr 189/6, fsetxattr 190/7
    removexattr 197/14, lremovexattr 198/15, fremovexattr 199/16
    # undoes the namespaces
    mount 165/40, umount2 166/39, pivot_root 155/41, chroot 161/51, unshare 272/97, setns 308/268
    # memory, queues and keys that are shared with other processes
    shmget 29/194, shmat 30/196, shmctl 31/195, semget 64/190, semop 65/193, semctl 66/191
    semtimedop 220/192, msgget 68/186, msgsnd 69/189, msgrcv 70/188, msgctl 71/187
    mq_open 240/180, mq_unlink 241/181, add_key 248/217, request_key 249/218, keyctl 250/219
    # takes space of a disk that no limit on a file's size counts
    fallocate 285/47
    # reaches bugs of the kernel, and no honest program needs it
    bpf 321/280, perf_event_open 298/241, userfaultfd 323/282, syslog 103/116, io_setup 206/0
    # some arguments are harmless: see refuse_calls
    clone 56/220, prlimit64 302/261, ioctl 16/29, socketpair 53/199, fcntl 72/25, prctl 157/167
"""  # calls, and their numbers on x86_64 and aarch64
MAX_THREADS = 256  # no limit of the kernel counts threads without forbidding them
WATCH_SECONDS = 0.02  # between two counts


def numbers_of_calls(machine: str) -> dict[str, int]:
    """Return call -> number, for the calls in REFUSED that the machine has."""
    column = list(MACHINES).index(machine)
    calls = re.findall(r"(\w+) ([\d-]+)/([\d-]+)", REFUSED)
    return {name: int(numbers[column]) for name, *numbers in calls if numbers[column] != "-"}


class Sandbox:
    """The child's side of `run_program`: two processes, of which `watch` keeps the first.

    The second gives up its rights, becomes the program, and ends with the first. In a namespace
    it is process 1: if it ends, so do all others, and it ignores signals that it sends itself."""

    def __init__(self, task: dict):
        self.task = task
        self.libc = ctypes.CDLL(None)
        self.layers = dict.fromkeys(task["layers"], False)  # which of them are there

    def protect(self) -> None:
        if "namespaces" in self.layers:
            spaces = CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC
            self.layers["namespaces"] = self.libc.unshare(spaces) == 0
        self.watch()
        self.libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        # of a trainer that runs as root, or of a namespace's owner
        self.libc.capset(struct.pack("Ii", CAPABILITY_VERSION_3, 0), bytes(24))
        if "landlock" in self.layers:
            self.restrict_files()
        if "seccomp" in self.layers:
            self.refuse_calls()

    def run(self) -> None:
        limits = {
            resource.RLIMIT_AS: CODE_BYTES << 10,  # bytes of memory
            resource.RLIMIT_CPU: int(self.task["seconds"]) + 1,
            resource.RLIMIT_FSIZE: CODE_BYTES,  # bytes of a file, and so of the output
            resource.RLIMIT_NOFILE: 64,
        }
        for limit, value in limits.items():
            resource.setrlimit(limit, (value, value))
        if not all(self.layers.get(name) for name in self.task["needed"]):
            sys.exit(1)
        sys.argv = ["program.py"]
        program = compile(self.task["source"], "program.py", "exec")
        exec(program, {"__name__": self.task["name"]})

    def watch(self) -> None:
        """Return in the second process only. The first ends with it, or when the time is over."""
        child_ends = {signal.SIGCHLD}
        signal.pthread_sigmask(signal.SIG_BLOCK, child_ends)  # it stays pending until sigtimedwait
        second = os.fork()
        if second == 0:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, child_ends)
            self.libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            return
        deadline = time.monotonic() + self.task["seconds"]
        while (left := deadline - time.monotonic()) > 0:
            ended, status = os.waitpid(second, os.WNOHANG)
            if ended:
                os._exit(status != 0)
            with contextlib.suppress(OSError):  # if /proc is there
                if len(os.listdir(f"/proc/{second}/task")) > MAX_THREADS:
                    break
            signal.sigtimedwait(child_ends, min(left, WATCH_SECONDS))
        os.kill(second, signal.SIGKILL)
        os.waitpid(second, 0)
        os._exit(1)

    def restrict_files(self) -> None:
        """Landlock: it may read Python's own folders, and nothing else."""
        create = LANDLOCK_CREATE_RULESET
        version = self.libc.syscall(create, None, 0, LANDLOCK_CREATE_RULESET_VERSION)
        every = (1 << LANDLOCK_RIGHTS.get(version, 16)) - 1
        ruleset = self.libc.syscall(create, struct.pack("Q", every), 8, 0)
        for path in filter(os.path.isdir, self.readable_folders()):
            folder = os.open(path, os.O_PATH)
            beneath = struct.pack("=Qi", READ, folder)
            self.libc.syscall(LANDLOCK_ADD_RULE, ruleset, LANDLOCK_RULE_PATH_BENEATH, beneath, 0)
            os.close(folder)
        restricted = self.libc.syscall(LANDLOCK_RESTRICT_SELF, ruleset, 0) == 0
        self.layers["landlock"] = restricted and version >= 3  # before, it could empty files

    def readable_folders(self) -> list[str]:
        """Return the folders of system libraries and Python's modules, without a user's."""
        own = tuple(os.path.realpath(root) + os.sep for root in (sys.prefix, sys.base_prefix))
        modules = [path for path in sys.path if os.path.realpath(path).startswith(own)]
        return [*modules, "/lib", "/lib64", "/usr/lib"]

    def refuse_calls(self) -> None:
        """seccomp: refuse the calls above and newer ones. One of another architecture kills."""
        machine = os.uname().machine
        if machine not in MACHINES:
            return
        harmless = {  # call -> an argument, and the test of it that one of the values must pass
            "clone": (0, HAS_BITS, [0x00010000]),  # CLONE_THREAD
            "prlimit64": (0, EQUAL, [0]),  # its own limits
            "prctl": (0, AT_LEAST, [PR_SET_PDEATHSIG + 1]),  # it dies with `watch`
            # copies of descriptors, their flags, locks of files, but no signals to processes
            "fcntl": (1, EQUAL, [*range(F_SETLKW + 1), F_DUPFD_CLOEXEC]),
            # is it a terminal, how much can be read, to wait or not, to close at exec or not
            "ioctl": (1, EQUAL, [TCGETS, FIONREAD, FIONBIO, FIOCLEX, FIONCLEX]),
            # of streams: a pair of datagrams could send to any service that has a path
            "socketpair": (1, EQUAL, [0x1, 0x801, 0x80001, 0x80801]),
        }
        lines = [
            (LOAD, 0, 0, ARCHITECTURE),  # a line: operation, jumps if true, false, value
            (EQUAL, 1, 0, MACHINES[machine]),
            (RETURN, 0, 0, KILL),
            (LOAD, 0, 0, CALL),
            (AT_LEAST, 0, 1, NEWER),
            (RETURN, 0, 0, NO_SUCH_CALL),
        ]
        for name, call in numbers_of_calls(machine).items():
            argument, test, values = harmless.get(name, (0, EQUAL, []))
            tests = [(LOAD, 0, 0, ARGUMENTS + 8 * argument)]
            for value in values:
                tests += [(test, 0, 1, value), (RETURN, 0, 0, ALLOW)]
            tests.append((RETURN, 0, 0, NOT_PERMITTED))
            lines += [(EQUAL, 0, len(tests), call), *tests]
        lines.append((RETURN, 0, 0, ALLOW))
        code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in lines))
        program = struct.pack("HP", len(lines), ctypes.addressof(code))
        self.layers["seccomp"] = self.libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, program) == 0


if __name__ == "__main__":
    with open(int(sys.argv[1]), "r+") as opened:  # closed before the program begins
        sandbox = Sandbox(json.load(opened))
        sandbox.protect()
        json.dump(sandbox.layers, opened)
    sandbox.run()
