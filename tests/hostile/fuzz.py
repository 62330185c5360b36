"""Coverage-guided fuzzing with atheris: `python tests/hostile/fuzz.py TARGET [libFuzzer options]`, or `all SECONDS`.

Needs atheris, which is not among the development requirements: without it this says so and ends well.
"""

import subprocess
import sys
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
        codes = [subprocess.run([sys.executable, __file__, name, f"-max_total_time={share}"]).returncode for name in TARGETS]
        return max(codes)
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
