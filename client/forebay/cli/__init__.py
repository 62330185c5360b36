"""The command line. `main` is the entry point; each module holds one command group."""

import os
import sys
from collections.abc import Mapping


def for_grpc(environment: Mapping[str, str]) -> dict[str, str]:
    """`environment` as gRPC is to find it when it is loaded, in a process that runs commands."""
    return {
        # It writes its own notes to standard error ("Got goaway"); an operator should see ours alone.
        "GRPC_VERBOSITY": "ERROR",
        **environment,
        # A command forks only to start another program. gRPC would begin its threads anew in that child, and crashes there now
        # and then before the program is reached: a mover that dies before it was born.
        "GRPC_ENABLE_FORK_SUPPORT": "0",
    }


def main() -> None:
    """Run `forebay` with this process's arguments and exit."""
    os.environ.update(for_grpc(os.environ))
    try:
        from forebay.cli.app import run  # takes a while: Ctrl-C may come meanwhile
        from forebay.cli.signals import ended_once

        with ended_once():  # what a command has half done is cleared away, whoever ends it
            code = run(sys.argv[1:])
    except KeyboardInterrupt:
        print("forebay: interrupted: nothing was begun", file=sys.stderr)
        code = 130
    sys.exit(code)
