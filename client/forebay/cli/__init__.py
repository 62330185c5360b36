"""The command line. `main` is the entry point; each module holds one command group."""

import os
import sys


def main() -> None:
    """Run `forebay` with this process's arguments and exit."""
    # gRPC writes its own notes to standard error ("Got goaway"); an operator should see ours alone.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    # A command forks only to start another program. gRPC would begin its threads anew in that child, and crashes there now and
    # then before the program is reached: a mover that dies before it was born.
    os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
    try:
        from forebay.cli.app import run  # takes a while: Ctrl-C may come meanwhile
        from forebay.cli.signals import ended_once

        with ended_once():  # what a command has half done is cleared away, whoever ends it
            code = run(sys.argv[1:])
    except KeyboardInterrupt:
        print("forebay: interrupted: nothing was begun", file=sys.stderr)
        code = 130
    sys.exit(code)
