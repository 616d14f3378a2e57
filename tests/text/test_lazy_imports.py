"""`cloister.text` imports lazily: stop strings alone load neither the tokenizers library nor jinja2."""

import subprocess
import sys

import pytest

import cloister.text


def test_every_exported_name_is_there():
    for name in cloister.text.__all__:
        assert getattr(cloister.text, name).__name__ == name
    missing = "Grammar"
    with pytest.raises(AttributeError, match=missing):
        getattr(cloister.text, missing)


def test_stop_strings_load_no_heavy_library():
    code = "import sys; from cloister.text import StopStrings; sys.exit(bool({'tokenizers', 'jinja2'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], timeout=300, check=False).returncode == 0
