"""`config check`, `config show` and `config reload`: read a gateway's configuration the way the gateway would.

Owns the commands only; keys and rules are the gateway's.
"""

import os
import re
import socket
import tomllib
from pathlib import Path
from typing import Annotated, Any

import typer

from forebay.cli.app import Json, client
from forebay.cli.exits import UsageError
from forebay.cli.output import print_json, say
from forebay.cli.serve import gateway_missing
from forebay.errors import ForebayError, InvalidArgument
from forebay_wire.sockets import may_use_system_socket

_UNSET = re.compile(r"^# (\w+) = \(unset\)$", re.MULTILINE)
_File = Annotated[Path | None, typer.Argument(metavar="FILE", help="The TOML file; none: the default.", show_default=False)]
_Elsewhere = Annotated[bool, typer.Option("--elsewhere", help="The file is for another node: do not look at directories here.")]
_Running = Annotated[bool, typer.Option("--running", help="Ask the running gateway instead.")]


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    group = typer.Typer(help="Check and show a gateway's configuration.", no_args_is_help=True, rich_markup_mode=None)
    group.command("check")(check)
    group.command("show")(show)
    group.command("reload")(reload)
    app.add_typer(group, name="config")


def check(file: _File = None, elsewhere: _Elsewhere = False, json: Json = False) -> int:
    """Say whether a gateway would start with this file on this node; exit 1, with the key and the rule, where not.

    Keys and values are read, and the directories looked at: whether cache.path can be made and written, whether its disk has
    cache.capacity, whether a tier's path is a file. Nothing is made or tried: `forebay doctor` measures disks and tiers.

    JSON keys: source, good.
    """
    config = load(file)
    if not elsewhere:
        _look(config, file)
    if json:
        print_json({"source": label(file), "good": True})
        return 0
    say(f"{label(file)}: good")
    left = "its directories were not looked at" if elsewhere else "tiers and disks were not tried"
    say(f"{left}: 'forebay doctor{'' if file is None else f' --config {file}'}' on the node does that")
    return 0


def show(file: _File = None, running: _Running = False, json: Json = False) -> int:
    """Print the effective configuration as TOML: file, environment and defaults together. Keys without a value are comments.

    JSON keys: node, cache, tier, policy, retain (lists; the last two where there are any), metrics, log, each with the keys and
    values of the TOML; null is a key without a value.
    """
    if running and file is not None:
        raise UsageError("config show: give a FILE or --running, not both")
    text = _of_the_running_gateway() if running else _rendered(load(file))
    print_json(_values(text)) if json else print(text, end="")
    return 0


def reload(json: Json = False) -> int:
    """Have the running gateway read its file again and apply what may change: policies, retention, tiers' limits, log.level.

    What else differs takes a restart, and is named. An invalid file changes nothing; exit 1. JSON keys: changed, needs_restart.
    """
    with client() as gateway:
        try:
            done = gateway.reload_config()
        except InvalidArgument as error:  # the file is wrong, not this command's usage: as for `check` and `serve`
            raise ForebayError(error.message) from error
    if json:
        print_json(done)
        return 0
    say(f"changed: {', '.join(done.changed) or 'nothing'}")
    if done.needs_restart:
        say(f"takes a restart: {', '.join(done.needs_restart)}")
    return 0


def _values(text: str) -> Any:
    """What the TOML says, None where it says that there is no value."""
    return _plain(tomllib.loads(_UNSET.sub(r"\1 = {}", text)))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()} or None  # no value of a key is a table
    return [_plain(each) for each in value] if isinstance(value, list) else value


def _of_the_running_gateway() -> str:
    with client() as gateway:
        return gateway.config()


def _rendered(config: Any) -> str:
    from forebay_gateway.core.config import render_toml

    return render_toml(config)


def load(file: Path | None) -> Any:
    """The gateway's Config. Raises ForebayError saying what is wrong with it."""
    try:
        from forebay_gateway.core.config import ConfigError, default_config, load_config
    except ModuleNotFoundError as error:
        raise gateway_missing(error) from error
    hostname, may_use_system = socket.gethostname(), may_use_system_socket()
    try:
        if file is None:
            return default_config(os.environ, os.getuid(), str(Path.home()), hostname, may_use_system)
        text = file.read_text(encoding="utf-8")
        return load_config(text, os.environ, str(file), uid=os.getuid(), hostname=hostname, may_use_system=may_use_system)
    except ConfigError as error:
        raise ForebayError(str(error)) from error
    except OSError as error:
        raise ForebayError(f"cannot read the configuration {file}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ForebayError(f"{file}: not UTF-8: {error}") from error


def _look(config: Any, file: Path | None) -> None:
    """Raise ForebayError where a gateway would not start with these directories, or a tier could never be used."""
    from forebay_gateway.core.errors import StartupError
    from forebay_gateway.paths.preflight import check_places

    try:
        check_places(config)
    except StartupError as error:
        raise ForebayError(f"{error} source={label(file)}") from error


def label(file: Path | None) -> str:
    """What to call the configuration."""
    return "the embedded default" if file is None else str(file)
