"""Mistakes on the command line, and what they are answered with."""

import io
import subprocess
import sys
from pathlib import Path

import pytest

from cloister.cli import main


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as caught:
        main(list(arguments))
    captured = capsys.readouterr()
    return caught.value.code or 0, captured.out, captured.err


@pytest.mark.parametrize(
    ("typed", "said", "see"),
    [
        ("serv", "there is no verb 'serv'; did you mean serve?", "cloister"),
        ("policy shw", "there is no verb 'shw'; did you mean show?", "cloister policy"),
        ("serve --prot 3", "there is no option --prot; did you mean --port?", "cloister serve"),
        ("serve --tls-cert c.pem", "there is no option --tls-cert", "cloister serve"),
        ("relay --port abc", "--port must be a whole number", "cloister relay"),
        ("relay --port 99999", "--port must be at most 65535", "cloister relay"),
        ("policy show --profile safe", "--profile must be one of open, team, private, paranoid", "cloister policy show"),
        ("policy compare open", "SECOND is missing: The profile to compare it with.", "cloister policy compare"),
        ("policy compare open open", "name two different profiles", "cloister policy compare"),
        ("run --temperature hot x", "--temperature must be a number", "cloister run"),
        ("run --json=3 x", "option '--json' does not take a value", "cloister run"),
        ("doctor here", "doctor takes no arguments, only options, which begin with --", "cloister doctor"),
        ("keys add a b", "keys add takes NAME and no more; put text of several words into quotes", "cloister keys add"),
        ("keys add", "NAME is missing: Name of the key.", "cloister keys add"),
        ("relay", "--gateway is missing: URL of the gateway, such as https://gateway.example.", "cloister relay"),
        ("serve a --model b", "MODEL and --model name different models; give one of them", "cloister serve"),
        ("bench kernels a --model b", "MODEL and --model name different models; give one of them", "cloister bench kernels"),
        (
            "bench serve a --api-model b",
            "MODEL and --api-model name different models; give one of them",
            "cloister bench serve",
        ),
        ("run what is this", "run takes [MODEL] PROMPT and no more; put a prompt of several words into quotes", "cloister run"),
        (
            "run cloister-5m",
            "what to say to cloister-5m is missing; give a prompt, or talk to it: cloister chat cloister-5m",
            "cloister run",
        ),
        (
            "run",
            "PROMPT is missing: The model, unless it is the default one, and the prompt; `-` reads standard input.",
            "cloister run",
        ),
        ("keys add --name a", "there is no option --name; give NAME without --name", "cloister keys add"),
        ("serve --json", "--json: it needs --explain", "cloister serve"),
    ],
)
def test_wrong_usage_is_answered_with_what_is_wrong_and_where_to_look(capsys, typed, said, see):
    status, out, err = run(capsys, *typed.split())
    assert status == 2
    assert out == ""
    assert err.splitlines() == [f"error: {said}", f"See `{see} --help`."]


def test_an_option_without_its_value_says_what_it_takes(capsys):
    status, _, err = run(capsys, "serve", "--port")
    assert status == 2
    assert err.startswith("error: --port needs a value: Port to listen on")


def test_two_words_that_are_no_model_and_prompt_are_told_about_quotes(capsys):
    status, _, err = run(capsys, "run", "hello", "world")
    assert status == 1
    assert "there is no model 'hello'" in err
    assert err.rstrip().endswith("put a prompt of several words into quotes")


def test_an_unknown_number_format_is_answered_with_all_that_there_are(capsys):
    assert "choose one of: none, int8, int4, nvfp4, qoq" in run(capsys, "serve", "--explain", "--quant", "int9")[2]


def test_a_config_file_that_is_not_text_says_so(capsys, tmp_path):
    path = tmp_path / "c.toml"
    path.write_bytes(b"port = 1 # \xff\n")
    status, _, err = run(capsys, "serve", "--explain", "--config", str(path))
    assert status == 1
    assert err == f"error: {path} is not valid UTF-8; save it as UTF-8 text\n"


@pytest.mark.parametrize(
    "typed",
    [
        "quantize cloister-draft out --text FILE",
        "datastore build --model cloister-draft --text FILE --out out",
        "bench serve --api-key-file FILE",
        "bench serve --trace FILE",
        "relay --gateway http://127.0.0.1:1 --secret-file FILE",
        "witness serve --key FILE --log x",
        "proxy --relay http://127.0.0.1:1 --trust FILE --api-key-file FILE",
    ],
)
def test_a_file_that_is_not_text_is_called_that(capsys, tmp_path, monkeypatch, typed):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "FILE").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "FILE").chmod(0o600)
    status, _, err = run(capsys, *typed.split())
    assert status == 1
    assert "FILE is not valid UTF-8" in err


def test_a_place_that_cannot_be_written_to_is_found_before_the_work(capsys, tmp_path):
    (tmp_path / "file").touch()
    figures = ("--output", str(tmp_path / "file"))
    assert run(capsys, "bench", "throughput", "no-model", *figures)[::2] == (
        1,
        f"error: {tmp_path}/file is a file; name a folder\n",
    )
    status, _, err = run(capsys, "roofline", "cloister-draft", "--plot", str(tmp_path / "file" / "x.png"))
    assert status == 1
    assert err.startswith(f"error: {tmp_path}/file is a file")


def test_a_system_that_refuses_is_an_error_and_no_traceback(capsys):
    status, _, err = run(capsys, "quantize", "cloister-draft", "/dev/null/out", "--method", "rtn", "--measure", "0")
    assert status == 1
    assert err.startswith("error: ")
    assert "/dev/null" in err


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_a_prompt_on_standard_input_that_is_not_text_is_called_that(capsys, monkeypatch, errors):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe"), encoding="utf-8", errors=errors))
    status, _, err = run(capsys, "run", "-")
    assert status == 1
    assert err == "error: standard input is not valid UTF-8; give the prompt as UTF-8 text\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_an_error_and_no_traceback():
    code = "from cloister.cli import main; main()"
    with open("/dev/full", "wb") as full:
        typed = [sys.executable, "-c", code, "run", "hi", "--raw", "--model", "cloister-draft", "--max-tokens", "1"]
        done = subprocess.run(typed, stdout=full, stderr=subprocess.PIPE, text=True, timeout=300, check=False)
    assert "error: there is no space left" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_address_without_a_scheme_is_refused_with_an_example(capsys):
    assert "such as http://127.0.0.1:8000" in run(capsys, "bench", "serve", "--url", "localhost:8000")[2]


def test_words_of_a_prompt_are_not_repeated(capsys):
    _, _, err = run(capsys, "quantize", "my", "secret", "plan")
    assert "secret" not in err
    assert "plan" not in err


def test_a_group_without_a_verb_is_answered_with_its_help(capsys):
    status, _, err = run(capsys, "keys")
    assert status == 2
    assert "remove" in err
