"""Pages as plain text."""

from pathlib import Path

import pytest

from training.corpus import Document, MissingCorpusError, folder_source, plain_html, plain_rst, read_documents


def test_navigation_scripts_and_styles_are_dropped() -> None:
    page = (
        "<html><head><title>T</title><style>p {}</style></head><body><div class='navheader'>Prev <div>Up</div> Next</div>"
        "<script>var x = '<p>no</p>';</script><p>Kept  text</p><div class='navfooter'>Home</div></body></html>"
    )
    assert plain_html(page) == "Kept text"


def test_preformatted_text_keeps_its_lines() -> None:
    assert plain_html("<p>See:</p><pre>SELECT 1\n     , 2;</pre>") == "See:\n\nSELECT 1\n     , 2;"


def test_entities_become_characters() -> None:
    assert plain_html("<p>a &lt; b &amp; c&nbsp;d</p>") == "a < b & c d"


def test_roles_become_what_a_reader_sees() -> None:
    text = plain_rst("Use :func:`~os.path.join` or :ref:`the guide <guide>`, see :mod:`re` and :pep:`8`.")
    assert text == "Use join or the guide, see re and 8."


def test_a_paragraph_is_kept_where_it_is_first_seen(tmp_path: Path) -> None:
    shared = "This notice stands on every page of the manual and should be learnt once only, not many times.\n\n"
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(shared + f"The page {name} says something of its own. " * 8)
    first, second = read_documents(folder_source(tmp_path))
    assert shared.strip() in first.text
    assert shared.strip() not in second.text


def test_an_empty_folder_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(MissingCorpusError, match=r"no \*\.txt"):
        list(read_documents(folder_source(tmp_path)))


def test_the_split_depends_on_the_name_alone() -> None:
    assert [Document("folder", f"page{i}.txt", text).held_out for i in (14, 15) for text in ("a", "b")] == [
        True, True, False, False,
    ]  # fmt: skip
