"""`python -m zrun` is `zrun`."""

from zrun.cli import main

main()
