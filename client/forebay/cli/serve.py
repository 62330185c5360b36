"""`serve`: run the gateway in this process.

Owns the command only; the gateway is a package of its own that a training image need not have.
"""

import os
from pathlib import Path
from typing import Annotated

import typer

from forebay.errors import Unsupported, how_to_install

_ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help="Configuration (TOML); without it an embedded default.", show_default=False),
]

_JsonLog = Annotated[
    bool, typer.Option("--json", help='Log one JSON object a line: time, level, logger, message (log.format = "json").')
]


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    app.command()(serve)


def serve(config: _ConfigFile = None, json: _JsonLog = False) -> int:
    """Run the gateway until SIGTERM or SIGINT.

    Without --config: data below the user's state home, a Unix socket, one POSIX tier beside the cache, no object tier.
    """
    try:
        from forebay_gateway.serve import main
    except ModuleNotFoundError as error:
        raise gateway_missing(error) from error
    if json:
        os.environ["FOREBAY_LOG_FORMAT"] = "json"
    return main(None if config is None else str(config))


def gateway_missing(error: ModuleNotFoundError) -> Unsupported:
    """What to say where the gateway's package, or something it needs, is not installed."""
    return Unsupported(f"the gateway is not installed here (no module {error.name}): {how_to_install('gateway')}")
