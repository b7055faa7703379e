"""Never ends by itself, nor does its helper. Like every worker it ends with its agent."""

import signal
import subprocess
import sys
import time

from zrun.launch.processes import die_with_parent

if len(sys.argv) > 1:
    die_with_parent(signal.SIGKILL)
    subprocess.Popen([sys.executable, __file__])
time.sleep(600)
