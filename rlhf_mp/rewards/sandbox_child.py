"""The inside of the sandbox: confines this process, then runs a program. Executed by path; the standard library alone.

Processes: this one waits; its child is process 1 of a new process namespace and waits too; the program is process 2.
When any of the waiting ones dies, the kernel kills everything below.
"""

import ctypes
import json
import os
import resource
import signal
import sys

NEWNS, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET = 0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 4096, 16384, 1 << 18
MNT_DETACH, AT_FDCWD, AT_RECURSIVE, MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID = 2, -100, 0x8000, 1, 2
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 36, 38
TIMED_OUT = 124
PIVOT_ROOT, MOUNT_SETATTR = {"x86_64": (155, 442), "aarch64": (41, 442)}[os.uname().machine]
INSIDE, NOBODY = 1000, 65534  # the program's user, in the namespace and outside of it when we are root
ROOT, BOX = "/tmp", "/box"  # the new root is mounted over /tmp, in a mount namespace of its own
libc = ctypes.CDLL(None, use_errno=True)


def main(spec_path: str) -> None:
    with open(spec_path) as file:
        spec = json.load(file)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if spec["isolation"] == "namespaces":
        code = in_namespaces(spec)
    else:
        libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # whatever loses its parent becomes a child of this process
        os.chdir(spec["folder"])
        limit(spec)
        code = run(spec)
        end_children()
    os._exit(code)


def in_namespaces(spec: dict) -> int:
    """Exit code of the program, run where there is nothing but itself."""
    as_root = os.geteuid() == 0
    enter_namespaces(as_root)
    init = os.fork()
    if init:
        return wait(init)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    new_root(spec)
    limit(spec)
    os._exit(run(spec, INSIDE if as_root else None))


def enter_namespaces(as_root: bool) -> None:
    """New user, mount, network, process, IPC and host name namespaces.

    Root keeps its own number for mounting, and maps a second one for the program: limits on the number of processes
    don't hold for root. Such a map is written from outside the namespace.
    """
    flags = NEWUSER | NEWNS | NEWNET | NEWPID | NEWIPC | NEWUTS
    own, group = os.geteuid(), os.getegid()
    if not as_root:
        check(libc.unshare(flags))
        write_maps("self", f"{INSIDE} {own} 1", f"{INSIDE} {group} 1", deny=True)
        return
    me = os.getpid()
    unshared_read, unshared_write = os.pipe()
    helper = os.fork()
    if helper == 0:
        os.close(unshared_write)
        os.read(unshared_read, 1)
        write_maps(str(me), f"0 0 1\n{INSIDE} {NOBODY} 1", f"0 0 1\n{INSIDE} {NOBODY} 1", deny=False)
        os._exit(0)
    check(libc.unshare(flags))
    os.write(unshared_write, b"x")
    os.close(unshared_write)
    os.close(unshared_read)
    if os.waitstatus_to_exitcode(os.waitpid(helper, 0)[1]) != 0:
        raise OSError("the user map was refused")


def write_maps(who: str, users: str, groups: str, *, deny: bool) -> None:
    for name, text in (*([("setgroups", "deny")] if deny else []), ("uid_map", users), ("gid_map", groups)):
        with open(f"/proc/{who}/{name}", "w") as file:
            file.write(text)


def new_root(spec: dict) -> None:
    """A root of its own: an empty file system in memory, with the interpreter's folders bound into it read-only."""
    check(libc.mount(None, b"/", None, MS_REC | MS_PRIVATE, None))
    options = f"size={spec['total_bytes']},mode=755".encode()
    sources = [source for source in spec["visible"] if os.path.lexists(source)]
    links = {source: os.readlink(source) for source in sources if os.path.islink(source)}
    opened = {source: os.open(source, os.O_PATH) for source in sources if source not in links}
    check(libc.mount(b"tmpfs", ROOT.encode(), b"tmpfs", MS_NOSUID | MS_NODEV, options))
    for source, target in links.items():
        os.symlink(target, ROOT + source)
    for source, descriptor in opened.items():
        bind(f"/proc/self/fd/{descriptor}", ROOT + source, os.path.isdir(source))
        os.close(descriptor)
    for folder in (BOX, "/tmp"):
        os.mkdir(ROOT + folder)
        os.chmod(ROOT + folder, 0o777)
    for name, text in spec["files"].items():
        with open(ROOT + BOX + "/" + name, "w") as file:
            file.write(text)
    os.chdir(ROOT)
    check(libc.syscall(PIVOT_ROOT, b".", b"."))
    check(libc.umount2(b".", MNT_DETACH))
    os.chdir(BOX)


def bind(source: str, target: str, is_folder: bool) -> None:
    os.makedirs(target if is_folder else os.path.dirname(target), exist_ok=True)
    if not is_folder:
        open(target, "w").close()
    check(libc.mount(source.encode(), target.encode(), None, MS_BIND | MS_REC, None))
    if target == ROOT + "/dev/null":
        return  # a device is written to
    attributes = (ctypes.c_uint64 * 4)(MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID, 0, 0, 0)
    size = ctypes.sizeof(attributes)
    check(libc.syscall(MOUNT_SETATTR, AT_FDCWD, target.encode(), AT_RECURSIVE, ctypes.byref(attributes), size))


def limit(spec: dict) -> None:
    """Limits that hold for each process of the program, and can't be raised again."""
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    for name, value in spec["limits"].items():
        resource.setrlimit(getattr(resource, name), (value, value))


def run(spec: dict, user: int | None = None) -> int:
    """Start the program and wait for it, no longer than its time."""
    program = os.fork()
    if program:
        signal.signal(signal.SIGALRM, too_late)
        signal.setitimer(signal.ITIMER_REAL, spec["timeout_s"])
        try:
            return wait(program)
        except TimeoutError:
            return TIMED_OUT
    if user is not None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # after changing the user, which clears it
    resource.setrlimit(resource.RLIMIT_NPROC, (spec["max_processes"], spec["max_processes"]))
    os.closerange(3, 256)
    clean = {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"}
    os.execve(spec["argv"][0], spec["argv"], clean | {"OPENBLAS_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"})


def too_late(*_: object) -> None:
    raise TimeoutError


def end_children() -> None:
    """Kill and collect children until none is left: those of a killed one come here."""
    me = os.getpid()
    while True:
        with open(f"/proc/{me}/task/{me}/children") as file:
            children = [int(pid) for pid in file.read().split()]
        if not children:
            return
        for pid in children:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def wait(child: int) -> int:
    while True:
        pid, status = os.wait()
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def check(result: int) -> None:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except BaseException as error:
        os.write(2, f"sandbox: {type(error).__name__}: {error}\n".encode())
        os._exit(125)
