"""Programs that tests need and Python's package index does not have."""

import os
import shutil
import subprocess

LIMIT_S = 180


def install(*packages: str) -> str:
    """Install Debian packages where root may. Why that could not be; empty once they are there."""
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        return "only root can install it, where there is apt-get"
    quiet = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    for words in (["update"], ["install", "-y", "--no-install-recommends", *packages]):
        try:
            done = subprocess.run(
                ["apt-get", "-qq", *words], env=quiet, capture_output=True, text=True, timeout=LIMIT_S
            )
        except subprocess.TimeoutExpired:
            return f"apt-get took longer than {LIMIT_S} s"
        if done.returncode:
            return f"apt-get {words[0]} failed: {done.stderr.strip()[-300:]}"
    return ""
