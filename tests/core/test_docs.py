"""What README shows of the code is what the code says. Run as a program (`make docs`) it writes it there."""

from pathlib import Path

from forebay_gateway.core.config import config_table

README = Path(__file__).parents[2] / "README.md"
BEGIN, END = "<!-- config:begin -->\n", "<!-- config:end -->"


def test_the_configuration_table_in_readme_is_current() -> None:
    text = README.read_text(encoding="utf-8")
    assert text.count(BEGIN) == 1, f"README.md needs {BEGIN.strip()}"
    assert text.count(END) == 1, f"README.md needs {END}"
    shown = text.split(BEGIN)[1].split(END)[0]
    assert shown == config_table(), "make docs"


def write_table() -> None:
    """Put the table of today between README's markers."""
    before, _, rest = README.read_text(encoding="utf-8").partition(BEGIN)
    README.write_text(before + BEGIN + config_table() + END + rest.partition(END)[2], encoding="utf-8")


if __name__ == "__main__":
    write_table()
