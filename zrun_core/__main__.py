"""`python -m zrun_core run_dir/spec.json` is one rank's process under torchrun: see `worker`."""

import gc

# Nothing that an import makes is garbage, and looking for some takes a quarter of the time that torch takes to load.
gc.disable()

from zrun_core.train.worker import main  # noqa: E402

gc.freeze()
gc.enable()
main()
