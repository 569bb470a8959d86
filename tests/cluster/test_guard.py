"""Real processes die here: a rank that starts a guard and a daemon of its own, then ends in every way there is."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from guarded import SHM, Job, with_argument

from rlhf_mp.cluster.first_failure import wait_until
from rlhf_mp.cluster.processes import belonging_to, start_time, stat
from rlhf_mp.cluster.watch import Ending

FOREVER = [sys.executable, "-S", "-c", "import time; time.sleep(300)"]


def first_failure(job: Job) -> dict:
    return json.loads((job.run_dir / "first_failure.json").read_text())


def test_a_rank_that_ends_well_leaves_nothing_and_nothing_is_said(new_job):
    job = new_job()
    rank = job.start("announce(); print('done'); guard.farewell(0)")
    assert rank.wait() == 0
    assert job.ends_within(10)
    assert job.left() == []
    assert job.terminal() == "done\n"
    assert not (job.run_dir / "first_failure.json").exists()


def test_a_killed_rank_is_named_with_the_end_of_its_log_and_leaves_nothing(new_job):
    foreign = [SHM / f"torch_{os.getpid()}_1_0", SHM / f"deepspeed_allreduce_buffer_{os.getuid()}_127.0.0.1_1_0"]
    for path in foreign:
        path.touch()
    job = new_job()
    rank = job.start("print(*range(100), sep='\\n'); announce(); time.sleep(300)")
    assert len(job.shared_memory()) == 2
    rank.kill()
    assert job.ends_within(10)
    assert job.left() == []
    assert [path.exists() for path in foreign] == [True, True]
    for path in foreign:
        path.unlink()
    _, _, report = job.terminal().partition(f"\nrank 0 (pid {rank.pid}): died without a word, killed by SIGKILL")
    assert report.splitlines()[1:] == [f"Last lines of {job.run_dir}/logs/rank_0.log:", *map(str, range(70, 100))]
    assert first_failure(job)["what"] == f"rank 0 (pid {rank.pid})"
    assert first_failure(job)["pid"] == rank.pid


def test_words_written_right_before_sigkill_are_kept(new_job):
    job = new_job()
    job.start("announce(); os.write(2, b'terminate called\\n'); os.kill(os.getpid(), signal.SIGKILL)")
    assert job.ends_within(10)
    assert job.log(0) == "terminate called\n"
    assert job.terminal().startswith("terminate called\n")


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), 9)", "guard.report('rank 0', 'it was killed'); sys.exit(1)"])
def test_a_failure_sends_the_alert(new_job, monkeypatch, end):
    monkeypatch.setenv("ALERT", 'cd "$RLHF_MP_RUN_DIR" && echo "$RLHF_MP_WHAT: $RLHF_MP_REASON" > a && mv a alerted')
    job = new_job()
    job.start(f"announce(); {end}")
    assert wait_until((job.run_dir / "alerted").exists, 10)
    assert re.match(r"rank 0.*: .*killed", (job.run_dir / "alerted").read_text())


def test_only_rank_0_speaks_on_the_terminal_and_each_has_its_log(new_job):
    job = new_job(num_ranks=2)
    both = "while not (run_dir / 'ready.1').exists(): time.sleep(0.05)"
    body = f"os.system(f'echo child of {{rank}}'); print('rank', rank); announce()\n{both}\nguard.farewell(0)"
    ranks = [job.start(body) for _ in range(2)]
    assert [rank.wait() for rank in ranks] == [0, 0]
    assert job.ends_within(10)
    assert [job.log(rank) for rank in range(2)] == [f"child of {rank}\nrank {rank}\n" for rank in range(2)]
    assert job.terminal() == "child of 0\nrank 0\n"


def test_when_one_rank_is_killed_the_others_are_ended_and_only_it_is_reported(new_job):
    job = new_job(num_ranks=2)
    stubborn = job.start("signal.signal(signal.SIGTERM, signal.SIG_IGN); announce(); time.sleep(300)")
    killed = job.start("announce(); time.sleep(300)")
    began = time.monotonic()
    killed.kill()
    assert job.ends_within(15)
    assert time.monotonic() - began < 10
    assert stubborn.wait() == -signal.SIGKILL
    assert job.left() == []
    assert re.findall(r"^(\S.*): (?:died|ended|rank)", job.terminal(), re.M) == [f"rank 1 (pid {killed.pid})"]


def test_a_crash_is_named_before_the_abort_that_follows_from_it(new_job):
    job = new_job(num_ranks=2)
    ranks = [job.start("announce(); time.sleep(300)") for _ in range(2)]
    ranks[0].send_signal(signal.SIGABRT)  # as a broken connection does, here even before its cause
    time.sleep(0.3)
    ranks[1].send_signal(signal.SIGSEGV)
    assert job.ends_within(15)
    assert first_failure(job)["what"] == f"rank 1 (pid {ranks[1].pid})"
    assert "SIGSEGV" in job.terminal() and "SIGABRT" not in job.terminal()


def test_an_exception_nobody_caught_is_reported_with_its_traceback(new_job):
    job = new_job()
    rank = job.start("announce(); raise ValueError('out of luck')")
    assert job.ends_within(10)
    _, _, report = job.terminal().partition(f"rank 0 (pid {rank.pid}): ended with exit code 1\n")
    assert report.rstrip().endswith("ValueError: out of luck")


def test_ctrl_c_is_an_interruption_said_once(new_job):
    job = new_job(num_ranks=2)
    for _ in range(2):
        job.start("signal.signal(signal.SIGINT, signal.SIG_DFL); announce(); time.sleep(300)")
    os.killpg(job.ranks[0].pid, signal.SIGINT)
    assert job.ends_within(10)
    assert job.left() == []
    assert [rank.wait() for rank in job.ranks] == [-signal.SIGINT] * 2
    assert re.fullmatch(r"\ninterrupted: rank [01] \(pid \d+\) was ended by SIGINT\n", job.terminal())


def test_what_a_rank_reports_itself_is_not_reported_again(new_job):
    job = new_job()
    rank = job.start("""
announce()
engine_log = run_dir / "engine.log"
engine_log.write_text("CUDA out of memory")
claims = [guard.report("engine 0", "exit code -9", engine_log), guard.report("rank 0", "cannot go on")]
(run_dir / "claims").write_text(str(claims))
guard.farewell(1)
sys.exit(1)""")
    assert rank.wait() == 1
    assert job.ends_within(10)
    assert job.left() == []
    assert (job.run_dir / "claims").read_text() == "[True, False]"
    assert job.terminal() == f"\nengine 0: exit code -9\nLast lines of {job.run_dir}/engine.log:\nCUDA out of memory\n"


def test_a_witnessed_death_is_said_before_the_errors_that_follow_from_it(new_job):
    job = new_job()
    job.start("""
announce()
follows = threading.Thread(target=guard.report, args=("rank 0", "connection lost"))
follows.start()
time.sleep(0.3)
guard.report("engine 0", "exit code -9", witnessed=True)
follows.join()
guard.farewell(1)
sys.exit(1)""").wait()
    assert job.ends_within(10)
    assert job.terminal() == "\nengine 0: exit code -9\n"


def test_another_job_on_the_same_host_is_not_touched(new_job):
    first, second = new_job(), new_job()
    first.start("announce(); time.sleep(300)").kill()
    survivor = second.start("announce(); time.sleep(300)")
    assert first.ends_within(10)
    assert survivor.poll() is None
    assert second.daemon in second.processes()
    assert second.tmp.exists() and second.tmp != first.tmp
    assert len(second.shared_memory()) == 2


def test_a_forked_process_and_one_that_renamed_itself_are_ended_too(new_job):
    pytest.importorskip("setproctitle")
    job = new_job()
    rank = job.start("""
code = '''
import setproctitle, time
setproctitle.setproctitle("sglang::scheduler")
print("renamed", flush=True)
time.sleep(300)
'''
renamed = subprocess.Popen([sys.executable, "-c", code], **silent | {"stdout": subprocess.PIPE})
assert renamed.stdout.readline()
forked = os.fork()
if not forked:
    os.setsid()
    time.sleep(300)
(run_dir / "children").write_text(f"{renamed.pid} {forked}")
announce()
time.sleep(300)""")
    children = [int(pid) for pid in (job.run_dir / "children").read_text().split()]
    rank.kill()
    assert job.ends_within(10)
    assert [stat(pid)[:1] in ([], ["Z"]) for pid in children] == [True, True]


MAP_SHARED_MEMORY = """
code = '''
import mmap, sys, time
file = open(sys.argv[1], "r+b")
mapped = mmap.mmap(file.fileno(), 1)
print("mapped", flush=True)
time.sleep(300)
'''
Path(sys.argv[3]).write_bytes(bytes(1))
owner = subprocess.Popen([sys.executable, "-c", code, sys.argv[3]], **silent | {"stdout": subprocess.PIPE})
assert owner.stdout.readline()
announce()
while not (run_dir / "kill owner").exists():
    time.sleep(0.1)
owner.kill()
owner.wait()
(run_dir / "owner killed").touch()
time.sleep(300)
"""


@pytest.mark.parametrize("owner_dies_early", [False, True])
def test_shared_memory_with_a_random_name_is_removed_when_the_job_maps_it(new_job, owner_dies_early):
    ours, foreign = [SHM / f"sem.mp-{os.getpid()}_{name}" for name in ("ours", "foreign")]
    foreign.touch()
    job = new_job()
    rank = job.start(MAP_SHARED_MEMORY, str(ours))
    if owner_dies_early:
        assert wait_until((job.tmp / "shared_memory" / ours.name).exists, 10)
        (job.run_dir / "kill owner").touch()
        assert wait_until((job.run_dir / "owner killed").exists, 10)
    rank.kill()
    assert job.ends_within(10)
    assert (ours.exists(), foreign.exists()) == (False, True)
    foreign.unlink()


def test_signals_to_the_guard_do_not_end_it_and_it_is_no_child_of_the_rank(new_job):
    job = new_job()
    rank = job.start("announce(); time.sleep(300)")
    (guard,) = with_argument(str(job.run_dir)) - {rank.pid}
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(guard, number)
    children = subprocess.run(["pgrep", "-P", str(rank.pid)], capture_output=True, text=True).stdout.split()
    assert [int(pid) for pid in children] == [job.daemon]
    rank.kill()
    assert job.ends_within(10)
    assert "killed by SIGKILL" in job.terminal()


def test_ranks_end_with_their_launcher(new_job, tmp_path):
    launcher = tmp_path / "deepspeed"
    launcher.write_text("import subprocess, sys; subprocess.run([sys.executable, '-c', *sys.argv[1:]])")
    job = new_job()
    job.start("announce(); time.sleep(300)", command=(sys.executable, str(launcher))).terminate()
    assert job.ends_within(15)
    assert job.left() == []
    assert re.fullmatch(r"\ninterrupted: the launcher of rank 0 \(pid \d+\) was ended\n", job.terminal())


@pytest.mark.parametrize(
    "ending, failed, announced",
    [
        (Ending(status=0, farewell=0), False, True),
        (Ending(status=0, farewell=None), False, False),
        (Ending(status=None, farewell=0), False, True),  # the launcher collected it first
        (Ending(status=None, farewell=None), True, False),
        (Ending(status=-6, farewell=0), True, False),  # crashed on its way out
        (Ending(status=1, farewell=1), True, True),
        (Ending(status=-15, farewell=1), True, True),  # ended while leaving
        (Ending(status=0, farewell=None, orphaned=True), True, False),
    ],
)
def test_which_endings_are_failures_and_which_were_announced(ending, failed, announced):
    assert ending.failed == failed
    assert not failed or ending.announced == announced


def test_a_process_is_known_by_its_environment_or_by_a_pipe_it_holds():
    read, write = os.pipe()
    process = subprocess.Popen(FOREVER, env=os.environ | {"RLHF_MP_JOB": "1234"}, stdout=write)
    try:
        pipe = os.readlink(f"/proc/self/fd/{read}")
        assert belonging_to("RLHF_MP_JOB=1234", set()) == {process.pid}
        assert belonging_to("RLHF_MP_JOB=123", set()) == set()  # not by the beginning of a job's name
        assert belonging_to("RLHF_MP_JOB=123", {pipe}) == {process.pid, os.getpid()}
        assert int(start_time(process.pid)) >= int(start_time(os.getpid()))
    finally:
        process.kill()
        process.wait()
        os.close(read)
        os.close(write)
