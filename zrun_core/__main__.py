"""`python -m zrun_core run_dir/spec.json` is one rank's process under torchrun: see `worker`."""

import gc

# Imports make no garbage, and the search for it takes a quarter of the time of importing torch.
gc.disable()

from zrun_core.train.worker import main  # noqa: E402

gc.freeze()
gc.enable()
main()
