"""Where the threads of a rank are: asked for by a rank that hangs, or by a person."""

import signal

from rlhf_mp.cluster.first_failure import wait_until


def test_stacks_of_every_rank_of_the_host_are_asked_for_once_and_stand_in_their_logs(new_job):
    job = new_job(num_ranks=2)
    both = "while not (run_dir / 'ready.1').exists(): time.sleep(0.05)"
    stuck = "def in_a_collective(): os.read(os.pipe()[0], 1)\nannounce(); in_a_collective()"
    asks = f"""
from rlhf_mp.cluster.stacks import request_stacks
def hangs_too():
    {both}
    request_stacks(guard.tmp)
    request_stacks(guard.tmp)
    guard.report("rank 0", "hangs")
    guard.farewell(1)
    os._exit(1)
announce()
threading.Thread(target=hangs_too).start()
time.sleep(300)"""
    job.start(asks)
    job.start(stuck)
    assert job.ends_within(15)
    assert [job.log(rank).count("most recent call first") for rank in (0, 1)] == [2, 1]  # for each thread
    assert "in hangs_too" in job.log(0) and "in in_a_collective" in job.log(1)
    assert job.terminal() == "\nrank 0: hangs\n"


def test_a_person_can_ask_a_rank_where_it_is(new_job):
    job = new_job()
    rank = job.start("announce(); time.sleep(300)")
    rank.send_signal(signal.SIGUSR1)
    assert wait_until(lambda: "most recent call first" in job.log(0), 10)
    assert rank.poll() is None
