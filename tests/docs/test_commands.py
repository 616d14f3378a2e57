"""Commands in the documentation, run or not: what they name exists."""

from __future__ import annotations

import re
import shlex

import pytest

from tests.docs.commands import find_faults, find_lost_files, split
from tests.docs.pages import ROOT, iterate_blocks, iterate_spans, list_pages, read_blocks

LANGUAGES = {"bash", "json", "python", "text", "toml", "yaml"}
COMMAND = re.compile(r"(?!cloister [a-z ]+ v1$)(cloister|python -m|make) [a-z]")
"""Code that is a command, and not the first line of a signed note (`cloister epoch v1`)."""
WITH_FILES_OF_OTHERS = {"docs/comparison.md"}


@pytest.mark.parametrize("page", list_pages())
def test_every_block_says_its_language(page: str) -> None:
    assert [str(block) for block in read_blocks(page) if block.language not in LANGUAGES] == []


def test_every_command_in_a_block_has_its_verb_options_modules_and_files() -> None:
    faults = [
        f"{block}: {fault}" for block in iterate_blocks("bash") for words in split(block.text) for fault in find_faults(words)
    ]
    assert faults == []


def test_every_command_in_a_sentence_has_its_verb_and_options() -> None:
    faults = []
    for page, code in iterate_spans():
        if COMMAND.match(code):
            words = shlex.split(code.replace("...", " "))
            faults += [f"{page}: `{code}`: {fault}" for fault in find_faults(words)]
        elif page not in WITH_FILES_OF_OTHERS:
            faults += [f"{page}: `{code}`: {fault}" for fault in find_lost_files(code)]
    assert faults == []


def test_every_link_of_the_readme_leads_to_a_file_and_a_heading() -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", (ROOT / "README.md").read_text(encoding="utf-8"))
    lost = [link for link in links if "://" not in link and not leads_somewhere(link)]
    assert lost == []


def leads_somewhere(link: str) -> bool:
    path, _, heading = link.partition("#")
    target = ROOT / (path or "README.md")
    if not heading:
        return target.exists()
    headings = re.findall(r"^#+ (.+)$", target.read_text(encoding="utf-8"), re.MULTILINE)
    return heading in {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in headings}


@pytest.mark.parametrize(
    ("command", "fault"),
    [
        ("cloister sreve", "has no verb sreve"),
        ("cloister serve --prot 80", "has no option --prot"),
        ("cloister keys add ann --rate 3", "has no option --rate"),
        ("cloister release make --number 1 -- --quantise int8", "has no option --quantise"),
        ("make srve", "no target srve"),
        ("python -m benchmarks.peeers", "no module benchmarks.peeers"),
        ("python -m benchmarks.peers --shape q05", "no option --shape"),
        ("X=1 cat y | examples/public_cloud.sh", "there is no examples/public_cloud.sh"),
    ],
)
def test_a_mistake_in_a_command_is_found(command: str, fault: str) -> None:
    assert fault in " ".join(fault for words in split(command) for fault in find_faults(words))
