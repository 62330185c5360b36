"""The process: configuration in, signals, ordered end.

Owns the order of start and stop, and the exit code. `main` is what `forebay serve` calls.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from pathlib import Path

import uvloop

from forebay_gateway import __version__
from forebay_gateway.base.heap import keep_freed_memory, keep_loaded
from forebay_gateway.base.logs import setup_logging
from forebay_gateway.build import Gateway
from forebay_gateway.core.config import default_config, load_config, unknown_variables
from forebay_gateway.core.config_sections import Config
from forebay_gateway.core.errors import ForebayError, StartupError
from forebay_gateway.core.exposure import unguarded
from forebay_wire.sockets import may_use_system_socket

log = logging.getLogger("forebay.serve")


def read_config(path: str | None) -> tuple[Config, str]:
    """The configuration and where it is from; without a file the embedded default. Raises StartupError."""
    uid, hostname, may_use_system = os.getuid(), socket.gethostname(), may_use_system_socket()
    if path is None:
        try:
            home = str(Path.home())
        except RuntimeError as error:  # a container's user that is in no table
            raise StartupError("this user has no home: set HOME or XDG_STATE_HOME, or give --config") from error
        return default_config(os.environ, uid, home, hostname, may_use_system), "embedded default"
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise StartupError(f"cannot read the configuration {path}: {why}") from error
    return load_config(text, os.environ, path, uid=uid, hostname=hostname, may_use_system=may_use_system), path


def main(config_path: str | None) -> int:
    """Serve until SIGTERM or SIGINT; 0 for an ordered end, 1 otherwise."""
    try:
        config, source = read_config(config_path)
        setup_logging(config.log.level, config.log.format)
        for name, nearest in unknown_variables(config, os.environ):
            log.warning("environment variable %s is not known and has no effect; the nearest known one is %s", name, nearest)
        keep_freed_memory()
        return uvloop.run(_serve(config, source, config_path))
    except (ForebayError, OSError) as error:  # of the start: what fails later is told by its worker
        said = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else str(error)
        print(f"forebay serve: {said}", file=sys.stderr)  # noqa: T201
        return 1


async def _serve(config: Config, source: str, config_path: str | None) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    read_again = None if config_path is None else lambda: read_config(config_path)[0]
    gateway = await Gateway.start(config, source, read_again=read_again)
    loop.add_signal_handler(signal.SIGHUP, _reload, gateway)
    keep_loaded()
    log.info("serving node=%s version=%s listen=%s", config.node.id, __version__, ",".join(config.node.listen))
    if told := unguarded(config.node.listen):
        log.warning("%s", told)
    running = asyncio.create_task(gateway.run())
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
    failed = running.done() and running.exception() is not None
    left = gateway.open_streams
    log.info("stopping%s", f"; streams under way ({left}) have {config.node.drain_timeout:g} s to finish" if left else "")
    await gateway.stop(0.5 if failed else config.node.drain_timeout)
    stopping.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await stopping
    if failed:
        log.critical("ended by a failure", exc_info=running.exception())
        return 1
    await running
    log.info("stopped")
    return 0


def _reload(gateway: Gateway) -> None:
    """SIGHUP: as `forebay config reload`, with the log for an answer."""
    try:
        gateway.reloader.reload()
    except ForebayError as error:
        log.error("the configuration was not read again: %s", error)
