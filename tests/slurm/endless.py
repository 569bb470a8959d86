"""A rank that waits to be told to stop, or with which exit code to end: the real launcher, guard and stop request."""

import argparse
import os
import signal
import sys
import time
from pathlib import Path

from rlhf_mp.cluster.guard import start_guard
from rlhf_mp.cluster.launcher import check_meeting_point, rank_environment
from rlhf_mp.cluster.stop_request import STOPPED, StopRequest
from rlhf_mp.config.load import load_config
from rlhf_mp.errors import ConfigError

parser = argparse.ArgumentParser()
parser.add_argument("--config", type=Path)
parser.add_argument("overrides", nargs="*")
args = parser.parse_intermixed_args(sys.argv[1:])
config, info = load_config(args.config, args.overrides), rank_environment()
try:
    check_meeting_point(info)
except ConfigError as error:
    print(error)
    sys.exit(2)
guard = start_guard(info.rank, Path(config.trainer.default_local_dir), several_hosts=info.several_hosts)
stop = StopRequest(guard.run_dir, info.rank == 0, lambda seen: seen)
restart = os.environ.get("SLURM_RESTART_COUNT", "0")
(guard.run_dir / f"ready.{info.rank}.{restart}").write_text(f"{os.uname().nodename} {info} {os.getpid()}")
order = guard.run_dir / f"exit.{info.rank}.{restart}"
die = guard.run_dir / f"die.{info.rank}"
while not (order.exists() or stop.made() or (guard.run_dir / STOPPED).exists()):
    if die.exists():
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.05)
code = int(order.read_text()) if order.exists() else 0
if not order.exists():
    stop.fulfil()
guard.farewell(code)
sys.exit(code)
