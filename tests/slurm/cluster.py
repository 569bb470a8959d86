"""A real Slurm of several machines on one Linux host: munged, slurmctld and slurmd, no systemd, no cgroups. Needs root.

Every machine is a set of namespaces (network, host name, processes, IPC, mounts): its own address, process table, /tmp
and /dev/shm. The network card of the login machine ``ctl`` is the bridge that joins them; the host's network is not
touched. Killing a machine's first process is pulling its plug: the kernel takes its processes, mounts and network card
with it.
"""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NAMESPACES = ["--mount", "--uts", "--ipc", "--net", "--pid"]
BASE, HOSTS_PER_CLUSTER = "10.42.0", 254
BRIDGE_MAC = "02:00:0a:2a:00:fe"  # one of its own: else it takes a node's, and loses it with that node
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "PREEMPTED"}
DAEMONS = ("init.sh", "slurmd -N", "sleep 3600", "ps axo")

# A round of pings lasts 3 TCPTimeouts once a node is dead, and others are asked every second round: SlurmdTimeout must
# be several rounds, or living nodes are given up with the dead one.
SLURM_CONF = """
ClusterName=test
SlurmctldHost=ctl
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/run/munge.sock,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/nodes/%n/spool
SlurmctldPidFile={folder}/run/slurmctld.pid
SlurmdPidFile={folder}/nodes/%n/slurmd.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
SlurmdParameters=config_overrides
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=2,sched_interval=2,sched_min_interval=0,batch_sched_delay=0
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
JobCompType=jobcomp/none
ReturnToService=2
SlurmctldTimeout=30
SlurmdTimeout=20
MessageTimeout=5
TCPTimeout=1
KillWait=5
UnkillableStepTimeout=20
CompleteWait=0
MinJobAge=600
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
NodeName={nodes} CPUs={cpus} RealMemory={memory} State=UNKNOWN
PartitionName=main Nodes={nodes} Default=YES MaxTime=INFINITE DefMemPerNode=500 PriorityTier=1 GraceTime=60
PartitionName=high Nodes={nodes} MaxTime=INFINITE DefMemPerNode=500 PriorityTier=10
"""
# The first process of a machine: waits for its network card, then runs its daemons and reaps orphans.
INIT = r"""
set -u
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin SLURM_CONF=$FOLDER/etc/slurm.conf
hostname "$MACHINE"
mount --make-rprivate /
if [ "$MACHINE" != ctl ]; then # a /tmp and a /dev/shm of its own; what is shared below /tmp stays visible
    own=$FOLDER/nodes/$MACHINE/tmp
    IFS=:
    for shared in $SHARED; do
        case $shared in /tmp/*) mkdir -p "$own/${shared#/tmp/}" && mount --bind "$shared" "$own/${shared#/tmp/}" ;; esac
    done
    unset IFS
    mount -t tmpfs -o size=2g shm /dev/shm
    mount --rbind "$own" /tmp
fi
mount --bind "$FOLDER/etc/hosts" /etc/hosts
ip link set lo up
until ip link show eth0 >/dev/null 2>&1; do sleep .02; done
ip link set eth0 up
ip addr add "$ADDRESS/24" dev eth0
trap 'exit 0' TERM
if [ "$MACHINE" = ctl ]; then
    run=$FOLDER/run
    munged --force --key-file="$FOLDER/etc/munge.key" --socket="$run/munge.sock" --pid-file="$run/munged.pid" \
        --log-file="$FOLDER/log/munged.log" --seed-file="$run/munge.seed"
    slurmctld -c
else
    slurmd -N "$MACHINE"
fi
while :; do sleep 3600 & wait $!; done
"""


class Cluster:
    """``ctl`` and the nodes n1, n2, ...; started on construction."""

    def __init__(self, folder: Path, num_nodes: int, *, cpus: int, memory_mb: int, shared: list[Path]):
        """
        Args:
            shared: folders that all machines see; those outside /tmp are seen anyway.
        """
        self.folder, self.nodes = folder, [f"n{i + 1}" for i in range(num_nodes)]
        self.shared = [folder, *shared]
        self._machines: dict[str, tuple[int, int]] = {}  # pids of unshare, and of the machine's first process
        self._addresses = {"ctl": f"{BASE}.{HOSTS_PER_CLUSTER}"}
        self._addresses |= {node: f"{BASE}.{i + 1}" for i, node in enumerate(self.nodes)}
        self._configure(cpus, memory_mb)
        try:
            for machine in ("ctl", *self.nodes):
                self._boot(machine)
            self.wait_idle()
        except BaseException:
            self.stop()
            raise

    def _configure(self, cpus: int, memory_mb: int) -> None:
        for name in (
            "etc",
            "run",
            "log",
            "state",
            *(f"nodes/{n}/{sub}" for n in self.nodes for sub in ("spool", "tmp")),
        ):
            (self.folder / name).mkdir(parents=True)
        etc, nodes = self.folder / "etc", f"n[1-{len(self.nodes)}]"
        text = SLURM_CONF.format(folder=self.folder, nodes=nodes, cpus=cpus, memory=memory_mb)
        (etc / "slurm.conf").write_text(text)
        (etc / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        (etc / "init.sh").write_text(INIT)
        (etc / "hosts").write_text(
            "127.0.0.1 localhost\n" + "".join(f"{address} {name}\n" for name, address in self._addresses.items())
        )
        key = etc / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)

    def _boot(self, machine: str) -> None:
        own = {"FOLDER": str(self.folder), "MACHINE": machine, "ADDRESS": self._addresses[machine]}
        own["SHARED"] = ":".join(map(str, self.shared))
        command = [
            "unshare",
            *NAMESPACES,
            "--fork",
            "--kill-child",
            "--mount-proc",
            "bash",
            self.folder / "etc/init.sh",
        ]
        with open(self.folder / "log" / f"boot.{machine}.log", "ab") as log:
            unshare = subprocess.Popen(
                command, env=os.environ | own, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        first = first_process(unshare.pid)
        self._machines[machine] = unshare.pid, first
        if machine == "ctl":
            commands = [f"link add eth0 address {BRIDGE_MAC} type bridge"]
        else:
            commands = [f"link add v{machine} type veth peer name eth0 netns {first}",
                        f"link set v{machine} master eth0 up"]  # fmt: skip
        for words in commands:
            self._ip(words)

    def _ip(self, words: str) -> None:
        subprocess.run(["nsenter", "-t", str(self._machines["ctl"][1]), "-n", "ip", *words.split()], check=True)

    def run(self, *command: str, on: str = "ctl", cwd: Path = Path("/"), check: bool = True) -> str:
        """Standard output of a command on one of the machines."""
        done = subprocess.run(self.inside(on, *command, cwd=cwd), capture_output=True, text=True)
        if check and done.returncode:
            raise RuntimeError(f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout

    def inside(self, machine: str, *command: str, cwd: Path) -> list[str]:
        """The command that runs ``command`` on a machine."""
        enter = ["nsenter", "-t", str(self._machines[machine][1]), "-m", "-u", "-i", "-n", "-p", "--"]
        there = ["env", f"SLURM_CONF={self.folder}/etc/slurm.conf", "sh", "-c", 'cd "$0" && exec "$@"', str(cwd)]
        return [*enter, *there, *command]

    def wait_idle(self, timeout_s: float = 120) -> None:
        """Until every node takes jobs."""
        deadline = time.monotonic() + timeout_s
        while self.run("sinfo", "-h", "-p", "main", "-t", "idle", "-o", "%D", check=False).strip() != str(
            len(self.nodes)
        ):
            assert time.monotonic() < deadline, f"nodes are not idle; see {self.folder}/log"
            time.sleep(0.1)

    def job(self, number: str) -> dict[str, str]:
        words = self.run("scontrol", "-o", "show", "job", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_job(self, number: str, timeout_s: float = 120) -> dict[str, str]:
        """The job once it has ended. ``sbatch --wait`` would look ever more rarely."""
        deadline = time.monotonic() + timeout_s
        while (job := self.job(number))["JobState"] not in ENDED:
            assert time.monotonic() < deadline, f"job {number} still {job['JobState']} {job['Reason']}"
            time.sleep(0.3)
        return job

    def left(self, timeout_s: float = 30) -> list[str]:
        """What still runs or lies on the nodes: processes, files in /tmp, /dev/shm. Slurm's own go a moment later."""
        deadline = time.monotonic() + timeout_s
        while (found := list(self._left())) and time.monotonic() < deadline:
            time.sleep(0.2)
        return found

    def _left(self) -> Iterator[str]:
        for node in self.nodes:
            lines = self.run("ps", "axo", "pid=,args=", on=node).splitlines()
            yield from (f"{node}: {line.strip()}" for line in lines if not any(daemon in line for daemon in DAEMONS))
            yield from (f"{node}: {file}" for file in self.run("ls", "/dev/shm", on=node).split())
            yield from (
                f"{node}: {f}" for f in self.run("ls", "/tmp", on=node).split() if f.startswith(("rlhf_mp", "ray"))
            )

    @contextmanager
    def settings(self, line: str, other: str) -> Iterator[None]:
        """With another line in slurm.conf for a while."""
        file = self.folder / "etc" / "slurm.conf"
        usual = file.read_text()
        assert line in usual
        file.write_text(usual.replace(line, other))
        self.run("scontrol", "reconfigure")
        try:
            yield
        finally:
            file.write_text(usual)
            self.run("scontrol", "reconfigure")

    def power_off(self, node: str) -> None:
        os.kill(self._machines[node][1], signal.SIGKILL)

    def power_on(self, node: str) -> None:
        """With an empty /tmp, as most machines boot."""
        for folder in (self.folder / "nodes" / node / "tmp").glob("rlhf_mp_*"):
            shutil.rmtree(folder)
        self._boot(node)

    def cut(self, node: str) -> None:
        """Its network cable."""
        self._ip(f"link set v{node} down")

    def heal(self, node: str) -> None:
        self._ip(f"link set v{node} up")
        self.run("scontrol", "reconfigure")  # asks for every node now; by itself the controller takes over a minute

    def stop(self) -> None:
        for pids in reversed(self._machines.values()):  # nodes first
            for pid in reversed(pids):
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass


def first_process(unshare: int, timeout_s: float = 10) -> int:
    """The child of ``unshare``, once it is in its own network."""
    own, deadline = os.readlink("/proc/self/ns/net"), time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        children = Path(f"/proc/{unshare}/task/{unshare}/children").read_text().split()
        if children and os.readlink(f"/proc/{children[0]}/ns/net") != own:
            return int(children[0])
        time.sleep(0.01)
    raise TimeoutError("unshare has started nothing")
