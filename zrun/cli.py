"""The `zrun` command: finds the module of a command, and turns an error into a message and a code.

Each command is one module of `zrun.commands` with one public name, that of the command, with a _
after a word of Python's (`import_`). It is
imported when it is called or listed, and imports what it works with inside its function, so that
`zrun --help` needs neither torch nor pydantic.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from importlib import import_module
from keyword import iskeyword
from typing import Annotated, Any, NoReturn

import typer

from zrun.flags import Command, Group
from zrun_core.errors import ExitCode, JobError, ZrunError, lack_of_threads
from zrun_core.spine.printable import printable
from zrun_core.spine.releases import check_release, own_release

_NEED_TORCH = ("train", "run", "check", "estimate", "verify")
COMMANDS = (
    "train",
    "run",
    "check",
    "estimate",
    "verify",
    "topo",
    "doctor",
    "ps",
    "top",
    "compare",
    "report",
    "logs",
    "stop",
    "save",
    "profile",
    "init",
    "import",
    "explain",
    "config",
    "ckpt",
)


class _LazyGroup(Group):
    """Commands by name, imported one at a time."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        names: dict[str, Any] = dict.fromkeys(COMMANDS)
        self.commands = names  # typer reads its suggestions from here

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        name = f"{cmd_name}_" if iskeyword(cmd_name) else cmd_name
        entry = getattr(import_module(f"zrun.commands.{name}"), name)
        group = entry
        if not isinstance(entry, typer.Typer):
            group = typer.Typer(add_completion=False)
            group.command(cmd_name, cls=Command)(entry)
        command = typer.main.get_command(group)
        command.name = cmd_name
        return command

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        """Read a command line.

        Raises:
            JobError: it begins with what other tools begin with.
        """
        own = {name for each in self.get_params(ctx) for name in each.opts}
        if args and args[0] not in COMMANDS and args[0] not in own:
            from zrun.job.other_words import command_called

            instead = command_called(args)
            if instead is not None:
                raise JobError(instead)
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command that is called, and refuse a torch with which it would not work.

        Raises:
            PreflightError: torch is too old.
        """
        from importlib.metadata import PackageNotFoundError, version

        found = super().resolve_command(ctx, args)
        if found[0] in _NEED_TORCH:
            with suppress(PackageNotFoundError):  # the check of hosts says so
                check_release("torch", version("torch"))
        return found


app = typer.Typer(
    cls=_LazyGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"zrun {own_release()}")
        raise typer.Exit


@app.callback()
def zrun(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Train PyTorch models that outgrow one plain loop.

    Start with: zrun init, then zrun check job.yaml, then zrun train job.yaml.
    """


def main() -> None:
    """Run the command line and exit: 0, or the code of the error that ended it."""
    try:
        app()
    except ZrunError as error:
        _fail(error)
    except RuntimeError as error:
        told = lack_of_threads(error)
        if told is None:
            raise
        _fail(told)
    except KeyboardInterrupt:
        sys.exit(ExitCode.INTERRUPTED)


def _fail(error: ZrunError) -> NoReturn:
    print(f"error: {printable(str(error))}", file=sys.stderr)
    sys.exit(error.exit_code)
