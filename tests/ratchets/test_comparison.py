"""The table beside other servers stands in two places and says the same."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
FIRST = "| |Cloister|"


def read_table(page: Path) -> list[str]:
    lines = page.read_text(encoding="utf-8").splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith(FIRST))
    rows = lines[start:]
    return rows[: next(number for number, line in enumerate([*rows, ""]) if not line.startswith("|"))]


def test_the_readme_and_the_page_with_the_sources_have_one_table() -> None:
    assert read_table(ROOT / "README.md") == read_table(ROOT / "docs" / "comparison.md")


def test_every_system_of_the_table_has_its_source() -> None:
    page = ROOT / "docs" / "comparison.md"
    systems = [name.strip() for name in read_table(page)[0].strip("|").split("|")][2:]
    sources = page.read_text(encoding="utf-8").split("## Sources")[1]
    assert [name for name in systems if f"| {name} |" not in sources] == []
