"""Coverage-guided fuzzing with atheris: `python tests/hostile/fuzz.py TARGET [libFuzzer options]`, or `all SECONDS`.

Needs atheris, which has wheels for Linux only: without it this says so and ends well. An input that breaks a target is kept in
the temporary directory, and its path is printed.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def main(arguments: list[str]) -> int:
    """One target until libFuzzer's options end it; `all` gives each target its share of the seconds."""
    try:
        import atheris
    except ImportError:
        print("atheris is not installed; nothing was fuzzed")
        return 0
    if arguments and arguments[0] == "all":
        from hostile.fuzz_targets import TARGETS

        share = max(1, int(arguments[1]) // len(TARGETS))
        options = [
            f"-max_total_time={share}",
            f"-artifact_prefix={tempfile.gettempdir()}/forebay-fuzz-",
            "-print_final_stats=0",
        ]
        codes = {name: subprocess.run([sys.executable, __file__, name, *options]).returncode for name in TARGETS}
        failed = [name for name, code in codes.items() if code]
        print(f"{len(codes)} targets, {share} s each, {len(failed)} failed {' '.join(failed)}".rstrip())
        return 1 if failed else 0
    with atheris.instrument_imports(include=["forebay_wire", "forebay_gateway", "forebay"]):
        from hostile.fuzz_targets import TARGETS
    if not arguments or arguments[0] not in TARGETS:
        print(f"targets: all, {', '.join(TARGETS)}", file=sys.stderr)
        return 2
    atheris.Setup([sys.argv[0], *arguments[1:]], TARGETS[arguments[0]])
    atheris.Fuzz()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
