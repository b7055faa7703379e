"""Never ends by itself, nor do its helpers, of which one leads a session.

Like every worker it ends with its agent.
"""

import signal
import subprocess
import sys
import time

from zrun.system.processes import die_with_parent

if len(sys.argv) > 1:
    die_with_parent(signal.SIGKILL)
    for is_daemon in (False, True):
        subprocess.Popen([sys.executable, __file__], start_new_session=is_daemon)
time.sleep(600)
