"""The typer application: global options, and the command groups it is put together from.

Owns assembly and how an argument error looks. Does not own exit codes (exits.py) or commands.
"""

import logging
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from forebay import address as addresses
from forebay.api import Client
from forebay.cli import exits
from forebay.cli.output import printable

app = typer.Typer(
    name="forebay",
    help="Save training checkpoints to this node's gateway, restore them from anywhere, and look after the gateway.",
    epilog=exits.HELP,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
Options = TypeVar("Options")
_chosen: dict[str, str | None] = {"address": None}

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document; the keys named above are stable.")]
RunName = Annotated[str, typer.Argument(metavar="RUN", help="The run's name, such as team-a/llama.", show_default=False)]
StepOrLatest = Annotated[
    str, typer.Argument(metavar="STEP|latest", help="The step, or the newest complete one.", show_default=False)
]
StepNumber = Annotated[int, typer.Argument(metavar="STEP", min=0, help="The step.", show_default=False)]


WAIT_FOR_GATEWAY_S = 5.0  # it may have been started on the line before


def client(patient: bool = False) -> Client:
    """A client for the chosen address. Where nobody listens, people want to know now and not after retries; `patient` gives a
    gateway that is still starting a few seconds."""
    _tell_what_is_waited_for()
    if patient:
        addresses.await_listener(_chosen["address"], WAIT_FOR_GATEWAY_S, exits.say_error)
    else:
        addresses.require_listener(_chosen["address"])
    return Client(_chosen["address"])


class _OnStandardError(logging.Handler):
    """What the library warns of, as the command's own words."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.name == self.name:  # not a gateway's, of a command that opens its cache: those have a form of their own
            exits.say_error(record.getMessage())


def _tell_what_is_waited_for() -> None:
    log = logging.getLogger("forebay")
    if not any(isinstance(handler, _OnStandardError) for handler in log.handlers):
        handler = _OnStandardError(logging.WARNING)
        handler.name = log.name
        log.addHandler(handler)


def step_or_latest(command: str, text: str) -> int | str:
    """A step as it was given. Raises UsageError for what is none."""
    if text != "latest" and not (text.isascii() and text.isdigit()):
        raise exits.UsageError(f"{command}: a step is a number or 'latest', not {text!r}")
    return text if text == "latest" else int(text)


def chosen_address() -> str | None:
    """What was given as --address."""
    return _chosen["address"]


def taking(options: type[Options], act: Callable[[Options], int]) -> Callable[..., int]:
    """`act` as a command of its name whose options are the fields of a dataclass."""

    def command(**given: Any) -> int:
        return act(options(**given))

    command.__name__, command.__doc__ = act.__name__, act.__doc__
    command.__annotations__ = get_type_hints(options, include_extras=True) | {"return": int}
    setattr(command, "__signature__", signature(options))  # noqa: B010  typer looks here; functions have no such attribute
    return command


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"forebay {version('forebay')}")
        raise typer.Exit


@app.callback()
def _options(
    address: Annotated[
        str | None,
        typer.Option(
            "--address", metavar="ADDRESS", help="unix:///path or host:port (default: FOREBAY_ADDRESS, else the usual socket)."
        ),
    ] = None,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    _chosen["address"] = address


_GLOBAL_OPTIONS = ("--address", "--version")
_GROUPS = ("serve", "config", "data", "show", "keep", "queue", "care", "move", "plan", "bench", "doctor", "demo")


# The base of typer's argument errors. It has no public name: it is click's own, or a copy inside typer, by version.
_ARGUMENT_ERROR: type[Exception] = next(cls for cls in typer.BadParameter.__mro__ if cls.__name__ == "ClickException")


def _tell_usage(error: Any) -> int:
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "forebay"
    message = error.format_message()
    if type(error).__name__ == "NoArgsIsHelpError":
        print(message, file=sys.stderr)
    else:
        said = printable(" ".join(message.split()))
        if (option := getattr(error, "option_name", "")) in _GLOBAL_OPTIONS:
            said = f"{said.rstrip('.')}: it goes before the command, forebay {option}{' ADDRESS' * (option == '--address')} ..."
        print(f"{path}: {said} ('{path} --help' shows usage)", file=sys.stderr)
    return exits.USAGE


def assemble() -> None:
    """Load every command group."""
    for group in _GROUPS:
        name = f"forebay.cli.{group}"
        if find_spec(name) is not None:  # demo comes with the source tree only
            import_module(name).register(app)


def run(arguments: Sequence[str]) -> int:
    """Run one command; its exit code."""
    if not app.registered_commands:
        assemble()

    def command() -> int | None:
        try:
            result = app(args=list(arguments), prog_name="forebay", standalone_mode=False)
        except typer.Exit as ended:
            result = int(ended.exit_code)
        except typer.Abort:
            raise KeyboardInterrupt from None
        except _ARGUMENT_ERROR as error:
            return _tell_usage(error)
        if result == exits.INTERRUPTED:  # no command gives it: typer makes it of a KeyboardInterrupt, and says nothing
            raise KeyboardInterrupt
        return result if isinstance(result, int) else exits.DONE

    return exits.guarded(command)
