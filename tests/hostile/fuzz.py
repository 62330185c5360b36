"""Coverage-guided fuzzing with atheris: `python tests/hostile/fuzz.py TARGET [libFuzzer options]`, or `all SECONDS`.

Needs atheris, which has wheels for Linux only: without it this says so and ends well. An input that breaks a target is kept in
the temporary directory, and its path is printed. Figures: as soak/figures.py says.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def fuzz_all(seconds: int) -> int:
    """Each target in a process of its own, one after the other, beginning with what is well formed."""
    from hostile.fuzz_targets import SEEDS, TARGETS
    from soak.figures import report

    share = max(1, seconds // len(TARGETS))
    inputs, failed = {}, []
    for name in TARGETS:
        with tempfile.TemporaryDirectory(prefix="forebay-fuzz-corpus-") as corpus:
            for number, data in enumerate(SEEDS):
                (Path(corpus) / str(number)).write_bytes(data)
            artifacts = f"-artifact_prefix={tempfile.gettempdir()}/forebay-fuzz-"
            command = [sys.executable, __file__, name, corpus, f"-max_total_time={share}", artifacts, "-print_final_stats=1"]
            with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, errors="replace") as process:
                assert process.stderr is not None
                for line in process.stderr:
                    if found := re.match(r"stat::number_of_executed_units:\s+(\d+)", line):
                        inputs[name] = int(found[1])
                    print(line, end="", file=sys.stderr)
        if process.returncode:
            failed.append(name)
    print(f"{len(TARGETS)} targets, {share} s each, {len(failed)} failed {' '.join(failed)}".rstrip())
    report(
        "fuzz-guided", held=not failed, inputs=sum(inputs.values()), seconds_each=share, inputs_of=inputs, broken_targets=failed
    )
    return 1 if failed else 0


def main(arguments: list[str]) -> int:
    """One target until libFuzzer's options end it; `all` gives each target its share of the seconds."""
    try:
        import atheris
    except ImportError:
        print("atheris is not installed; nothing was fuzzed")
        return 0
    if arguments and arguments[0] == "all":
        return fuzz_all(int(arguments[1]))
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
