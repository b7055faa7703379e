"""Writes down what reached it, as bytes.

Environment, argument, values of the spec; and makes files of given names.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_bytes())
    run_dir = Path(spec["run_dir"])
    names = run_dir / "names"
    names.mkdir()
    for name in spec["job"]["names"]:
        (names / name).touch()
    heard = {
        "env": {
            os.fsencode(key).hex(): os.fsencode(value).hex() for key, value in os.environ.items()
        },
        "argument": os.fsencode(sys.argv[1]).hex(),
        "values": [value.encode(errors="surrogatepass").hex() for value in spec["job"]["values"]],
        "host": os.uname().nodename,
    }
    (run_dir / "heard.json").write_text(json.dumps(heard))
