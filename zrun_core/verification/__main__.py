"""`python -m zrun_core.verification RUN [RUN ...]` prints the verdict as JSON, on one line.

The first run began anew, and others went on from its save, in another layout. What the user's code
prints goes to stderr. A `ZrunError` of the user's code is printed as {"error": ...}, with exit 2.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import NoReturn

from zrun_core.errors import ExitCode, ZrunError


def main() -> NoReturn:
    """Compare the runs that are named."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # also what native code prints
    with redirect_stdout(sys.stderr):
        from zrun_core.verification.comparison import compare

        try:
            answer = compare([Path(each) for each in sys.argv[1:]]).to_json()
            code = ExitCode.OK
        except ZrunError as error:
            answer = {"error": str(error)}
            code = error.exit_code
    print(json.dumps(answer), file=out, flush=True)
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
