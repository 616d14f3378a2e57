"""The table beside other servers: the README shows some of its systems, and says of them what the page says."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
FIRST = "| |Cloister|"


def read_table(page: Path) -> dict[str, dict[str, str]]:
    """Returns feature -> system -> cell."""
    lines = page.read_text(encoding="utf-8").splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith(FIRST))
    rows = lines[
        start : next(number for number, line in enumerate([*lines, ""]) if number > start and not line.startswith("|"))
    ]
    systems, _, *features = ([cell.strip() for cell in row.strip("|").split("|")] for row in rows)
    return {feature: dict(zip(systems[1:], cells, strict=True)) for feature, *cells in features}


def test_the_readme_says_of_each_system_what_the_page_with_the_sources_says() -> None:
    page = read_table(ROOT / "docs" / "comparison.md")
    readme = read_table(ROOT / "README.md")
    assert list(readme) == list(page)
    assert {feature: {name: page[feature][name] for name in cells} for feature, cells in readme.items()} == readme


def test_every_system_of_the_table_has_its_source() -> None:
    page = ROOT / "docs" / "comparison.md"
    systems = next(iter(read_table(page).values()))
    sources = page.read_text(encoding="utf-8").split("## Sources")[1]
    assert [name for name in systems if name != "Cloister" and f"| {name} |" not in sources] == []


def test_the_figures_of_the_readme_are_those_of_the_page() -> None:
    figures = [
        line for line in (ROOT / "README.md").read_text(encoding="utf-8").splitlines() if line.count("|") == 6 and "," in line
    ]
    page = (ROOT / "docs" / "comparison.md").read_text(encoding="utf-8")
    assert figures
    assert [line for line in figures if line.replace("*", "").split("|")[3].strip() not in page] == []
