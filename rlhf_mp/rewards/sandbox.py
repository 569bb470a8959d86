"""Runs Python programs that nobody has read: no network, no files but their own, limits on everything."""

import asyncio
import json
import math
import os
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO, Literal

from rlhf_mp.errors import RewardError
from rlhf_mp.rewards.worker import end_tree

CHILD = Path(__file__).with_name("sandbox_child.py")
TIMED_OUT, REFUSED = 124, 125  # exit codes: the deadline passed; the sandbox could not be made
START_S = 10.0  # making namespaces and starting an interpreter, on a busy machine; not counted as the program's time
MAX_OUTPUT = 1 << 20  # bytes read of what a program prints
SYSTEM = ("/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache", "/dev/null", "/dev/urandom")
PROBE = """
import os, socket, sys
problems = []
for path in sys.stdin.read().splitlines():
    if os.path.lexists(path):
        problems.append(f"sees {path}")
if any(name != "lo" for _, name in socket.if_nameindex()):
    problems.append("has a network")
try:
    open("/usr/sandbox_probe", "w")
    problems.append("can write to /usr")
except OSError:
    pass
print("; ".join(problems) or "confined")
"""


@dataclass(frozen=True)
class Limits:
    """What one program may use."""

    timeout_s: float  # wall clock and CPU
    memory_mb: int  # address space of each process
    file_mb: int  # largest file, output included
    max_processes: int  # threads included


@dataclass(frozen=True)
class Outcome:
    """How a program ended."""

    exit_code: int  # 128 + signal for a signal
    output: str
    errors: str
    timed_out: bool


class Sandbox:
    """Runs programs, each in a sandbox of its own."""

    def __init__(self, isolation: Literal["namespaces", "rlimits"], limits: Limits):
        self.isolation, self.limits = isolation, limits

    async def start(self) -> str:
        """Try it. Returns what protects.

        Raises:
            RewardError: this machine does not let us make one, or it does not hold.
        """
        own = f"{asdict(self.limits)}"
        if self.isolation == "rlimits":
            return f"NOT confined: programs see this machine's files and network; limits alone protect it: {own}"
        hidden = "\n".join((str(Path.home()), str(Path.cwd()), "/etc/passwd", "/proc/1"))
        visible = Path(sys.base_prefix)
        hidden = "\n".join(p for p in hidden.splitlines() if not visible.is_relative_to(p))
        outcome = await self.run(PROBE, hidden)
        if outcome.exit_code == 0 and outcome.output.strip() == "confined":
            return f"user, mount, network, process and IPC namespaces, an empty file system, and limits: {own}"
        reason = outcome.output.strip() or outcome.errors.strip()[-300:] or f"exit code {outcome.exit_code}"
        raise RewardError(
            f"the sandbox does not work here: {reason}; allow unprivileged user namespaces (on Debian and Ubuntu "
            "sysctl kernel.unprivileged_userns_clone=1 kernel.apparmor_restrict_unprivileged_userns=0, in a container "
            "a seccomp profile that allows unshare and mount), or accept isolation: rlimits"
        )

    async def run(self, program: str, stdin: str = "") -> Outcome:
        """Run a program to its end or its deadline; nothing of it is left then."""
        with tempfile.TemporaryDirectory(prefix="rlhf_mp_sandbox_") as folder, tempfile.TemporaryFile() as given, \
             tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:  # fmt: skip
            spec = Path(folder) / "spec.json"
            spec.write_text(json.dumps(self._spec(folder, program)))
            if self.isolation == "rlimits":
                (Path(folder) / "program.py").write_text(program)
            given.write(stdin.encode())
            given.seek(0)
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-I", "-S", str(CHILD), str(spec),
                stdin=given, stdout=output, stderr=errors, start_new_session=True, env={"PATH": os.defpath},
            )  # fmt: skip
            try:
                async with asyncio.timeout(self.limits.timeout_s + START_S):
                    code = await process.wait()
            except TimeoutError:
                code = TIMED_OUT
            finally:
                if process.returncode is None:
                    end_tree(process.pid)
                    await process.wait()
            return Outcome(code, read(output), read(errors), timed_out=code == TIMED_OUT)

    def _spec(self, folder: str, program: str) -> dict:
        interpreter = os.path.realpath(sys.executable)
        mega = 1 << 20
        seconds = math.ceil(self.limits.timeout_s) + 1  # for a deadline that comes late: it should be the one that ends
        return {
            "isolation": self.isolation,
            "folder": folder,
            "timeout_s": self.limits.timeout_s,
            "argv": [interpreter, "-I", "-B", "program.py"],
            "files": {"program.py": program},
            "visible": [*SYSTEM, *([] if sys.base_prefix.startswith("/usr") else [sys.base_prefix])],
            "total_bytes": 4 * self.limits.file_mb * mega,
            "max_processes": self.limits.max_processes,
            "limits": {
                "RLIMIT_AS": self.limits.memory_mb * mega,
                "RLIMIT_CPU": seconds,
                "RLIMIT_FSIZE": self.limits.file_mb * mega,
                "RLIMIT_CORE": 0,
                "RLIMIT_NOFILE": 128,
            },
        }


def read(file: BinaryIO) -> str:
    file.seek(0)
    return file.read(MAX_OUTPUT).decode(errors="replace")
