"""The notices that the licences of the sources ask for, taken from the documentation itself."""

import re
from collections.abc import Iterable
from pathlib import Path

from training.corpus import Source, plain_html, read_page

INTRODUCTION = """\
NOTICES

The models in this folder were trained on the documentation listed below. The weights are statistics drawn from that
text and can give back short passages of it. What was changed: the text was stripped of mark-up and navigation, cut into
tokens, and used to train a neural network; short facts were drawn from it by rule.
"""


def python_notice(root: Path) -> str:
    """The copyright lines and the PSF licence agreement."""
    agreement = re.search(
        r"^PSF LICENSE AGREEMENT FOR PYTHON.*?(?=^BEOPEN\.COM LICENSE)", read_page(root / "license.rst.txt"), re.M | re.S
    )
    lines = re.findall(r"Copyright © .*(?:\n(?!\n).+)*", read_page(root / "copyright.rst.txt"))
    text = agreement[0].replace("|release|", "3.11").replace(".. parsed-literal::\n", "") if agreement else ""
    return "\n".join(lines) + "\n\n" + re.sub(r"\n{3,}", "\n\n", text).strip()


def postgresql_notice(root: Path) -> str:
    """The legal notice page."""
    return plain_html(read_page(root / "legalnotice.html"))


def sqlite_notice(root: Path) -> str:
    """The dedication to the public domain."""
    text = plain_html(read_page(root / "copyright.html"))
    dedication = re.search(r"All of the code and documentation in SQLite.*?by any means\.", text, re.DOTALL)
    return dedication[0] if dedication else ""


NOTICES = {"python": python_notice, "postgresql": postgresql_notice, "sqlite": sqlite_notice}


def notices(sources: Iterable[Source]) -> str:
    """One text with the notice of every source that has one."""
    parts = [INTRODUCTION]
    for source in sources:
        notice = NOTICES[source.name](source.root) if source.name in NOTICES else source.licence
        parts.append(f"{'=' * 100}\n{source.package} ({source.licence})\n{'=' * 100}\n\n{notice}\n")
    return "\n".join(parts)
